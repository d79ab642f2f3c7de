"""The bench's arithmetic: ratios are paired within a round, and bars know which side is better."""

from __future__ import annotations

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


def test_a_ratio_is_of_medians_where_a_round_repeats(summary: ModuleType) -> None:
    repeated = [record("relay-programs", seconds) for seconds in (8.0, 1.0, 2.0)]
    records = [*repeated, record("eager", 0.5), record("eager", 1.0), record("eager", 4.0)]
    assert summary.ratio(records, "m", "relay-programs", "eager") == pytest.approx(2.0)


def test_bars_on_a_cpu(summary: ModuleType) -> None:
    records = [
        record("eager", 1.0),
        record("local-cold", 20.0),
        record("mega-cache", 12.0),
        record("relay-cold", 22.0),
        record("relay-hit", 2.5),
        record("relay-background", 1.6),
    ]
    steady = [{"model": "m", "start": "traced", "ratio": 1.03, "guard_ratio": 1.0, "steps": 200}]
    passed = {bar.limit: bar.passed for bar in summary.bars(records, steady, ["m"], "cpu")}
    assert passed == {6: False, 1.15: True, 1.5: False, 1.02: False, 1.05: True}


def test_on_a_gpu_the_hit_is_held_against_the_fastest_of_the_warm_ways(summary: ModuleType) -> None:
    records = [record("local-warm", 9.0), record("mega-cache", 4.0), record("relay-hit", 5.0)]
    (bar,) = summary.bars(records, [], ["m"], "cuda")
    assert (bar.ratio, bar.passed) == (pytest.approx(1.25), False)
    assert "mega-cache" in bar.text


def test_bars_of_starts_without_tracing(summary: ModuleType) -> None:
    records = [
        {**record("eager", 0.5), "from_process_start": 8.0},
        {**record("mega-cache", 18.0), "from_process_start": 25.0},
        {**record("local-warm", 4.0), "from_process_start": 11.0},
        {**record("relay-programs", 0.8), "from_process_start": 9.0},
    ]

    def met(model: str, device: str) -> dict[float, bool]:
        named = [{**each, "model": model} for each in records]
        return {bar.limit: bar.passed for bar in summary.bars(named, [], [model], device)}

    assert met("gpt2-12x256", "cpu") == {4: True, 1.3: True}
    assert met("resnet50", "cuda") == {4: True, 2: True, 1.3: True}
    records[2]["first_step"], records[3]["first_step"] = 3.0, 1.25
    records[3]["from_process_start"] = 10.5
    assert met("gpt2-12x256", "cpu") == {4: False, 1.3: False}
    assert met("resnet50", "cuda") == {4: False, 2: False, 1.3: False}


def test_a_start_without_tracing_may_not_grow_with_the_layers(summary: ModuleType) -> None:
    def growth(deep: float) -> list[bool]:
        models = ["gpt2-4x256", "gpt2-24x256"]
        records = [
            {**record("relay-programs", seconds), "model": model, "from_process_start": 9.0}
            for model, seconds in zip(models, (1.0, deep), strict=True)
        ]
        return [bar.passed for bar in summary.bars(records, [], models, "cpu") if bar.limit == 1.15]

    assert [growth(1.1), growth(1.2)] == [[True], [False]]


@pytest.mark.usefixtures("summary")
def test_a_bar_that_is_not_met_is_said_and_fails_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    from support import verdicts

    met, missed = (True, "1.0 (<= 2)  fast"), (False, "3.0 (<= 2)  slow")
    assert [verdicts.conclude([met, missed], check=check) for check in (False, True)] == [0, 1]
    assert capsys.readouterr().out.splitlines()[:2] == ["pass  1.0 (<= 2)  fast", "FAIL  3.0 (<= 2)  slow"]
    assert verdicts.conclude([met], check=True) == 0
    assert [verdicts.conclude([], check=check) for check in (False, True)] == [0, 1]
