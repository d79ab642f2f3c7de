"""The bench of searches: winners of two searches are compared within the tie band, calls are timed by turns."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torchrelay.compiler.tuning.records import DeviceEnvironment, Timing, TuningEntry, parse_problem

BENCHMARKS = str(Path(__file__).resolve().parents[3] / "benchmarks")
PLACE = DeviceEnvironment("GPU", "9.0", "1", "2.13", "3.7", "13.0")


@pytest.fixture
def autotune(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(BENCHMARKS)
    import autotune

    assert Path(autotune.__file__ or "").parent == Path(BENCHMARKS)
    yield autotune
    for name in set(sys.modules) - before:
        if Path(BENCHMARKS) in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]


def timing(candidate: str, milliseconds: float) -> Timing:
    return Timing(candidate, milliseconds, milliseconds, milliseconds, 10)


def entry(size: int, winner: Timing) -> TuningEntry:
    problem = parse_problem(f"mm(f32[{size},4], f32[4,4]) -> f32[{size},4]")
    return TuningEntry(problem=problem, place=PLACE, winner=winner, candidates=2)


def test_winners_of_two_searches_are_equal_alike_or_apart(autotune: ModuleType) -> None:
    """Their own times say nothing: the clock fell between the two."""
    first = [entry(number, timing("a", 1.0)) for number in (1, 2, 3, 4, 5)]
    second = [
        entry(1, timing("a", 9.0)),
        entry(2, timing("b", 2.0)),
        entry(3, timing("b", 1.0)),
        entry(4, timing("b", 1.0)),
        entry(6, timing("a", 1.0)),
    ]
    held: list[tuple[str, str, str]] = []

    def by_turns(pairs: Sequence[Any]) -> list[list[float | None]]:
        held.extend((pair.problem.text()[:8], pair.one, pair.other) for pair in pairs)
        return [[1.0, 1.015], [1.03, 1.0], [1.0, None]]

    told = autotune.agreement(first, second, by_turns)
    assert held == [(f"mm(f32[{number}", "a", "b") for number in (2, 3, 4)]
    assert (told["problems"], told["equal"], told["apart"], len(told["others"])) == (4, 1, 2, 3)
    assert autotune.agreement(first[:1], second[:1], by_turns)["equal"] == 1
    assert len(held) == 3, "where all are equal nothing is measured"


def test_calls_are_timed_by_turns(autotune: ModuleType) -> None:
    from measured import interleaved

    order: list[str] = []

    def call(name: str, seconds: float) -> None:
        order.append(name)
        time.sleep(seconds)

    calls = {"short": lambda: call("short", 0.001), "long": lambda: call("long", 0.004)}
    times = interleaved.interleaved(calls, "cpu", rounds=12, seconds=60.0)
    assert {name: len(taken) for name, taken in times.items()} == {"short": 12, "long": 12}
    assert all(taken >= 4.0 for taken in times["long"])
    rounds = [order[i : i + 2] for i in range(len(order) - 24, len(order), 2)]
    assert all(sorted(each) == ["long", "short"] for each in rounds)
    assert len({tuple(each) for each in rounds}) == 2, "the order changes from round to round"
