"""compiler/search/compare_candidates.py, compiler/graph/device_environment.py: who wins among equals, what
counts as wrong, and where this is."""

import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
from torchrelay.compiler.graph import device_environment
from torchrelay.compiler.search import compare_candidates, device_lock
from torchrelay.compiler.tuning.records import (
    CandidateFailure,
    DeviceEnvironment,
    Operand,
    Problem,
    Timing,
    TuningEntry,
)
from torchrelay.compiler.tuning.tile_config import parse_tile_config


def selection(dtype="float32", aten=(1,)):
    candidates = ["triton_mm BLOCK_K=64", "aten mm", "triton_mm BLOCK_K=32", "aten mm_plus"]
    problem = Problem("mm", (), Operand(dtype, (2, 2), (2, 1)))
    return SimpleNamespace(candidates=candidates, aten=list(aten), problem=problem)


def test_among_equals_pytorchs_own_kernel_wins_and_then_the_first_by_text():
    assert compare_candidates.preferred(selection(aten=[1, 3])) == [1, 3, 2, 0]
    assert compare_candidates.preferred(selection(aten=[])) == [1, 3, 2, 0]


def test_among_equals_what_was_there_in_an_earlier_round_comes_before_what_is_new():
    found = compare_candidates.preferred(selection(aten=[1]), first=["triton_mm BLOCK_K=64"])
    assert found == [1, 0, 3, 2]


@pytest.mark.parametrize(
    "dtype, own, error, wrong",
    [
        ("float32", 1e-6, 4e-6, False),  # another order of summation
        ("float32", 1e-6, 6e-6, True),
        ("float32", 0.0, 4e-7, False),  # PyTorch's own happened to be exact: units in the last place are left
        ("float32", 0.0, 1e-6, True),
        ("float32", 3e-4, 1e-3, False),  # both with TF32
        ("bfloat16", 2e-3, 3e-2, False),
        ("bfloat16", 2e-3, 5e-2, True),
        ("float32", 1e-6, float("inf"), True),
        ("float32", float("inf"), float("inf"), False),  # PyTorch's own is no measure
        ("int32", 0.0, 0.0, False),
        ("int32", 0.0, 1e-9, True),
    ],
)
def test_a_candidate_is_wrong_when_it_is_much_further_off_than_pytorchs_own(dtype, own, error, wrong):
    found = compare_candidates.inaccurate_candidates(selection(dtype), {1: own, 2: error})
    assert set(found) == ({2} if wrong else set())


def test_without_a_reference_or_a_kernel_of_pytorchs_nothing_is_wrong():
    assert compare_candidates.inaccurate_candidates(selection(), {1: None, 2: None}) == {}
    assert compare_candidates.inaccurate_candidates(selection(aten=[]), {0: 0.5, 2: 0.5}) == {}


def test_the_processors_model_is_linuxs_own_name_for_it(tmp_path):
    listed = tmp_path / "cpuinfo"
    listed.write_text(
        "processor\t: 0\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R) Platinum 8488C\nflags\t: fpu\n"
    )
    assert device_environment._cpu_model(listed) == "Intel(R) Xeon(R) Platinum 8488C"
    listed.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert device_environment._cpu_model(listed)
    assert device_environment._cpu_model(tmp_path / "none")


@pytest.mark.parametrize(
    "text, version",
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\nGCC 12", "580.95.05"),
        ("NVRM version: something else\n", ""),
    ],
)  # fmt: skip
def test_the_drivers_version_is_the_kernel_modules(tmp_path, text, version):
    (tmp_path / "version").write_text(text)
    assert device_environment._gpu_driver(tmp_path / "version") == version
    assert device_environment._gpu_driver(tmp_path / "none") == ""


def test_searches_that_share_a_folder_follow_one_another(tmp_path):
    inside = []
    most = []

    def one():
        with device_lock.exclusive(
            tmp_path
        ):  # a lock of an opened file: threads are to each other as processes are
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.05)
            inside.pop()

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]


def test_nobody_waits_for_ever_and_nobody_needs_the_folder(tmp_path):
    with device_lock.exclusive(tmp_path), device_lock.exclusive(tmp_path, seconds=0.1):
        pass
    with device_lock.exclusive(tmp_path / "none"), device_lock.exclusive(None):
        pass
    with device_lock.exclusive(tmp_path, seconds=5):  # it was let go of
        pass
    assert list(tmp_path.iterdir()) == []


# --- rounds -------------------------------------------------------------------------------------------------

PLACE = DeviceEnvironment("a GPU", "9.0", "580", "2.13.0", "3.7", "13.0")
BAND = 0.02


def triton(**changes):
    given = {
        "BLOCK_K": 32,
        "BLOCK_M": 64,
        "BLOCK_N": 64,
        "GROUP_M": 8,
        "num_stages": 3,
        "num_warps": 4,
        **changes,
    }
    return "triton_mm " + ", ".join(f"{name}={value}" for name, value in sorted(given.items()))


def outcome(times, failed=(), winner=None):
    """Of a contest with these medians, by candidate."""
    timings = [Timing(name, ms, ms, ms, 40) for name, ms in sorted(times.items(), key=lambda pair: pair[1])]
    named = {timing.candidate: timing for timing in timings}
    entry = TuningEntry(
        problem=Problem("mm", (), Operand("bfloat16", (2, 2), (2, 1))),
        place=PLACE,
        winner=named[winner] if winner else timings[0],
        aten=named.get("aten mm"),
        candidates=len(times) + len(failed),
        failed=len(failed),
    )
    failures = [CandidateFailure(name, "does not build") for name in failed]
    return compare_candidates.SearchOutcome(entry, timings, failures, frozenset())


def test_the_best_configuration_is_looked_around_where_it_is_near_pytorchs_own():
    best, second, other = triton(), triton(BLOCK_M=128), triton(BLOCK_K=64, BLOCK_M=16)
    found = outcome({"aten mm": 1.0, best: 1.04, second: 1.1, other: 1.5})
    around = compare_candidates.neighbours_to_try(found, [best, second, other, triton(num_warps=8)], BAND)
    kept, others = around[:3], around[3:]
    assert kept == [parse_tile_config(text) for text in (best, second, other)]
    assert 0 < len(others) <= 12
    assert parse_tile_config(triton(num_warps=8)) not in others
    assert parse_tile_config(triton(num_warps=2)) in others
    assert not set(kept) & set(others)


def test_among_equals_near_another_winner_the_same_one_is_looked_around_whatever_the_noise():
    three = [triton(BLOCK_M=block) for block in (16, 64, 256)]
    orders = [(1.0, 1.001, 1.002), (1.002, 1.001, 1.0), (1.001, 1.0, 1.002)]
    looked = [
        compare_candidates.neighbours_to_try(
            outcome({"aten mm": 1.0, **dict(zip(three, times, strict=True))}, winner="aten mm"), three, BAND
        )
        for times in orders
    ]
    assert looked[0] == looked[1] == looked[2]


def test_the_winner_is_looked_around_and_takes_part_again_however_many_are_faster():
    fast = [triton(BLOCK_M=block, num_warps=8) for block in (32, 64, 128, 256)]
    winner = triton(num_stages=2)
    times = dict(zip([*fast, winner], (1.0, 1.001, 1.002, 1.003, 1.019), strict=True))
    around = compare_candidates.neighbours_to_try(outcome(times, winner=winner), list(times), BAND)
    assert around[0] == parse_tile_config(winner)
    kept = [configuration for configuration in around if configuration in map(parse_tile_config, times)]
    assert len(kept) in (3, 4) and len(set(kept)) == len(kept)
    alone = compare_candidates.neighbours_to_try(outcome({winner: 1.0}), list(times), BAND)
    assert around[len(kept) :] == alone[1:]


def test_nothing_is_looked_around_where_pytorchs_own_is_far_ahead_or_alone():
    assert (
        compare_candidates.neighbours_to_try(outcome({"aten mm": 1.0, triton(): 1.4}), [triton()], BAND) == []
    )
    assert compare_candidates.neighbours_to_try(outcome({"aten mm": 1.0}), [], BAND) == []


def test_of_two_rounds_the_later_one_decides_and_all_that_ran_is_told():
    first = outcome({"aten mm": 1.0, triton(): 1.05, "triton_mm other": 1.2}, failed=["a", "b"])
    later = outcome({"aten mm": 1.01, triton(): 1.04, triton(num_warps=8): 0.9}, failed=["b", "c"])
    found = compare_candidates.merge_outcomes(first, later, BAND)
    assert found.entry.winner.candidate == triton(num_warps=8)
    assert [timing.candidate for timing in found.timings] == [
        triton(num_warps=8), "aten mm", triton(), "triton_mm other"
    ]  # fmt: skip
    assert [failure.candidate for failure in found.failures] == ["a", "b", "c"]
    assert (found.entry.candidates, found.entry.failed) == (7, 3)


def test_a_winner_that_the_later_round_did_not_have_stays_unless_it_is_beaten():
    first = outcome({"subgraph": 1.0, "aten mm": 1.2, triton(): 1.1})
    assert compare_candidates.merge_outcomes(
        first, outcome({"aten mm": 1.2, triton(num_warps=8): 1.0}), BAND
    ).entry == (msgspec.structs.replace(first.entry, candidates=4))
    beaten = compare_candidates.merge_outcomes(
        first, outcome({"aten mm": 1.2, triton(num_warps=8): 0.9}), BAND
    )
    assert beaten.entry.winner.candidate == triton(num_warps=8)
