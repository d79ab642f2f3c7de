"""The bench of searches: winners of two searches are compared within the tie band, calls are timed by turns."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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


def test_a_log_tells_when_each_problem_was_wanted_and_found(autotune: ModuleType) -> None:
    from support import searches

    def line(at: float, event: str, **named: object) -> str:
        return json.dumps({"event": event, "timestamp": f"2026-01-01T00:00:{at:09.6f}Z", **named})

    log = [
        "INFO: another program's",
        line(1.0, "searcher_ready", seconds=1.5, worker="w"),
        line(2.0, "search_wanted", task="1", problem="mm"),
        line(2.25, "search_wanted", task="2", problem="addmm"),
        line(2.5, "search_given_out", task="1", worker="w"),
        line(4.0, "search_begun", task="1", worker="w"),
        line(5.5, "search_found", task="1"),
        line(6.0, "compiled", key="k"),
    ]
    told = searches.timeline(log)
    assert (told["searchers"], told["span"]) == ([1.5], 3.5)
    assert told["timeline"] == [
        {"problem": "mm", "worker": "w", "wanted": 0.0, "given": 0.5, "begun": 2.0, "found": 3.5},
        {"problem": "addmm", "wanted": 0.25},
    ]


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


def test_products_are_as_many_and_as_different_as_promised(autotune: ModuleType) -> None:
    from measured import products

    every = products._products()
    assert len({product.name for product in every}) == len(every) >= 40
    assert {str(product.dtype) for product in every} == {
        "torch.bfloat16",
        "torch.float16",
        "torch.float32",
        "torch.float8_e4m3fn",
    }
    assert {product.source.split(" ")[0] for product in every} >= {"GPT-2", "Llama-7B", "ViT-L", "BERT-large"}
    assert {product.op for product in every} == {"mm", "addmm", "bmm", "scaled"}


def test_a_product_multiplies_what_its_name_says(autotune: ModuleType) -> None:
    from measured import products

    for layout in ("nn", "nt", "tn", "tt"):
        product = products.Product("a", "bmm", 3, 5, 7, products.torch.float32, layout, 2)
        a, b = product.inputs("cpu")
        assert (tuple(a.shape), tuple(b.shape)) == ((2, 3, 5), (2, 5, 7))
        assert [a.is_contiguous(), b.is_contiguous()] == [kept == "n" for kept in layout]
        products.torch.testing.assert_close(product.call()(a, b), a @ b)


def test_searches_run_side_by_side_on_gpus_of_their_own(
    autotune: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support import searches

    monkeypatch.setattr(searches.torch.cuda, "device_count", lambda: 8)
    barrier = threading.Barrier(4)
    seen: list[list[int]] = []

    def beside(gpus: Sequence[int]) -> None:
        seen.append(list(gpus))
        barrier.wait(30)

    def last(gpus: Sequence[int]) -> None:
        assert len(seen) == 4, "it needs all"
        seen.append(list(gpus))

    with ThreadPoolExecutor(5) as pool:
        searches._side_by_side([(1, beside), (2, beside), (8, last), (4, beside), (1, beside)], pool)
    assert sorted(seen[:4]) == [[0], [1, 2], [3, 4, 5, 6], [7]]
    assert seen[4:] == [list(range(8))]


def test_what_fails_beside_others_is_told_when_all_have_ended(
    autotune: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support import searches

    monkeypatch.setattr(searches.torch.cuda, "device_count", lambda: 0)
    ran: list[int] = []

    def fails(gpus: Sequence[int]) -> None:
        raise ValueError("no")

    with ThreadPoolExecutor(2) as pool, pytest.raises(ValueError, match="no"):
        searches._side_by_side([(0, fails), (0, lambda gpus: ran.append(len(gpus)))], pool)
    assert ran == [0]
