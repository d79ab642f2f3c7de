"""compiler/search/compare_candidates.py, compiler/graph/device_environment.py: who wins among equals, what
counts as wrong, and where this is."""

import threading
import time
from types import SimpleNamespace

import pytest
from torchrelay.compiler.graph import device_environment, toolchain
from torchrelay.compiler.search import compare_candidates, device_lock
from torchrelay.compiler.tuning.records import Operand, Problem


def selection(dtype="float32", aten=(1,)):
    candidates = ["triton_mm BLOCK_K=64", "aten mm", "triton_mm BLOCK_K=32", "aten mm_plus"]
    problem = Problem("mm", (), Operand(dtype, (2, 2), (2, 1)))
    return SimpleNamespace(candidates=candidates, aten=list(aten), problem=problem)


def test_among_equals_pytorchs_own_kernel_wins_and_then_the_first_by_text():
    assert compare_candidates.preferred(selection(aten=[1, 3])) == [1, 3, 2, 0]
    assert compare_candidates.preferred(selection(aten=[])) == [1, 3, 2, 0]


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
    assert toolchain.cpuinfo("model name", listed) == "Intel(R) Xeon(R) Platinum 8488C"
    assert toolchain.cpuinfo("flags", listed) == "fpu"
    listed.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert toolchain.cpuinfo("model name", listed) == ""
    assert toolchain.cpuinfo("model name", tmp_path / "none") == ""


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
