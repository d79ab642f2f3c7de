"""The bench's arithmetic: ratios are paired within a round, and bars know which side is better."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[3] / "benchmarks")


@pytest.fixture
def summary(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from support import summary

    assert Path(BENCHMARKS) in Path(summary.__file__ or "").parents
    return summary


def record(variant: str, first_step: float, number: int = 0) -> dict[str, Any]:
    return {"model": "m", "variant": variant, "round": number, "first_step": first_step}


def test_a_ratio_compares_runs_of_one_round(summary: ModuleType) -> None:
    records = [
        record("local-cold", 10.0, 0),
        record("relay-hit", 1.0, 0),
        record("local-cold", 30.0, 1),
        record("relay-hit", 5.0, 1),
        record("local-cold", 100.0, 2),  # its hit failed
    ]
    assert summary.ratio(records, "m", "local-cold", "relay-hit") == pytest.approx(8.0)
    assert summary.ratio(records, "m", "mega-cache", "relay-hit") is None


def test_bars_on_a_cpu(summary: ModuleType) -> None:
    records = [
        record("eager", 1.0),
        record("local-cold", 20.0),
        record("mega-cache", 12.0),
        record("relay-cold", 22.0),
        record("relay-hit", 2.5),
        record("relay-background", 1.6),
    ]
    steady = [{"model": "m", "ratio": 1.03, "steps": 200}]
    passed = {bar.limit: bar.passed for bar in summary.bars(records, steady, ["m"], "cpu")}
    assert passed == {6: False, 1.15: True, 1.5: False, 1.02: False}


def test_on_a_gpu_the_hit_is_held_against_the_fastest_of_the_warm_ways(summary: ModuleType) -> None:
    records = [record("local-warm", 9.0), record("mega-cache", 4.0), record("relay-hit", 5.0)]
    (bar,) = summary.bars(records, [], ["m"], "cuda")
    assert (bar.ratio, bar.passed) == (pytest.approx(1.25), False)
    assert "mega-cache" in bar.text


def test_a_chosen_variant_brings_what_must_run_before_it(summary: ModuleType) -> None:
    variants = sys.modules["support.variants"]
    assert variants.with_prerequisites(["relay-disk", "eager"]) == [
        "eager",
        "relay-cold",
        "relay-hit",
        "relay-disk",
    ]


@pytest.mark.usefixtures("summary")
def test_a_bar_that_is_not_met_is_said_and_fails_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    from support import verdicts

    met, missed = (True, "1.0 (<= 2)  fast"), (False, "3.0 (<= 2)  slow")
    assert [verdicts.conclude([met, missed], check=check) for check in (False, True)] == [0, 1]
    assert capsys.readouterr().out.splitlines()[:2] == ["pass  1.0 (<= 2)  fast", "FAIL  3.0 (<= 2)  slow"]
    assert verdicts.conclude([met], check=True) == 0
    assert [verdicts.conclude([], check=check) for check in (False, True)] == [0, 1]


def test_an_architecture_that_goes_another_way_or_computes_something_else_misses_its_bars(
    summary: ModuleType,
) -> None:
    import architectures

    good = {"model": "m", "graphs": 2, "remote": 2, "fallbacks": {}, "equal": False, "noise": 0.0}

    def met(**changes: Any) -> list[bool]:
        return [passed for passed, _ in architectures.judge({**good, "difference": 1e-7, **changes})]

    assert met() == [True, True]
    assert met(remote=1, fallbacks={"unsupported": 1}) == [False, True]
    assert met(graphs=0, remote=0) == [False, True]
    assert met(difference=1e-3) == [True, False]
    assert met(difference=1e-3, noise=2e-4) == met(difference=1e-3, equal=True) == [True, True]
    assert architectures.judge({"model": "m", "error": "died"}) == [(False, "m: did not finish")]
