"""A problem's winners by version, and whether PyTorch's baseline moved or what is used."""

from __future__ import annotations

from msgspec.structs import replace
from torchrelay.compiler.tuning.history import TunedProblem, WinnerChange, by_version
from torchrelay.compiler.tuning.records import DeviceEnvironment, Operand, Problem, Timing, TuningEntry

SIDE = Operand("bfloat16", (64, 64), (64, 1))
PLACE = DeviceEnvironment("A GPU", "9.0", "580.1", "2.11.0", "3.6", "13.0")


def timing(milliseconds: float, candidate: str = "triton_mm") -> Timing:
    return Timing(candidate, milliseconds, milliseconds * 0.98, milliseconds * 1.02, 40)


def entry(torch: str, winner: float, aten: float | None, **place: object) -> TuningEntry:
    return TuningEntry(
        problem=Problem("mm", (SIDE, SIDE), SIDE),
        place=replace(PLACE, torch=torch, **place),
        winner=timing(winner),
        aten=None if aten is None else timing(aten, "aten"),
        candidates=3,
    )


def one(*entries: TuningEntry) -> TunedProblem:
    (problem,) = by_version(entries)
    return problem


def test_the_newest_version_comes_first_by_number() -> None:
    problem = one(entry("2.9.1", 1.0, 2.0), entry("2.13.0", 1.0, 2.0), entry("2.11.0", 1.0, 2.0))
    assert [each.place.torch for each in problem.winners] == ["2.13.0", "2.11.0", "2.9.1"]
    assert problem.changes == [WinnerChange(None, None)] * 2


def test_a_baseline_that_moved_is_told_apart_from_what_is_used() -> None:
    (change,) = one(entry("2.11.0", 1.0, 2.0), entry("2.13.0", 1.0, 1.5)).changes
    assert (change.winner, change.aten) == (None, -0.25)
    (change,) = one(entry("2.11.0", 1.0, 2.0), entry("2.13.0", 1.5, 2.0)).changes
    assert (change.winner, change.aten) == (0.5, None)


def test_intervals_that_overlap_and_what_was_not_measured_are_no_change() -> None:
    (change,) = one(entry("2.11.0", 1.0, None), entry("2.13.0", 1.03, 2.0)).changes
    assert change == WinnerChange(None, None)


def test_other_devices_and_threads_are_other_problems() -> None:
    entries = [entry("2.13.0", 1.0, None), entry("2.13.0", 1.0, None, device="Another")]
    entries.append(entry("2.13.0", 1.0, None, threads=2))
    assert len(by_version(entries)) == 3
    assert by_version([]) == []
