"""The training benchmark's arithmetic: which rank counts, what differs, and which bars a row meets."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.append(str(BENCHMARKS))


def _benchmark() -> Any:
    """benchmarks/train.py; the package's root has a train.py too."""
    spec = importlib.util.spec_from_file_location("bench_train", BENCHMARKS / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train = _benchmark()


def record(began: float, first: float, losses: list[float]) -> dict[str, Any]:
    return {"began": began, "first_step_at": first, "losses": losses, "step_seconds": [0.5, 0.1, 0.2]}


def test_the_first_step_is_the_last_ranks_from_when_the_last_one_was_there() -> None:
    assert train._first([record(10, 15, []), record(12, 14, [])]) == 3


def test_losses_are_compared_step_by_step() -> None:
    one, other = [record(0, 1, [4.0, 2.0])], [record(0, 1, [4.0, 2.02])]
    assert train._apart(one, other) == pytest.approx(0.01)
    with pytest.raises(ValueError, match="shorter"):
        train._apart(one, [record(0, 1, [4.0])])


@pytest.mark.parametrize(
    ("changed", "met"),
    [
        ({}, [True, True, True]),
        ({"loss_torchrun": 0.1}, [False, True, True]),
        ({"relay_first": 6.0}, [True, False, True]),
        ({"compiles": {"captured": 2, "misses": 1}}, [True, True, False]),
        ({"compiles": {}}, [True, True, False]),
    ],
)
def test_a_row_is_held_against_all_three_bars(
    changed: dict[str, Any], met: list[bool], tmp_path: Path
) -> None:
    args = argparse.Namespace(device="cuda")
    row = {
        "name": "ddp x2",
        "loss_alone": 1e-3,
        "loss_torchrun": 1e-3,
        "cold_first": 10.0,
        "relay_first": 4.0,
        "compiles": {"captured": 2},
    }
    with contextlib.ExitStack() as stack:
        benchmark = train.Benchmark(args, tmp_path, stack)
        benchmark._judge({**row, **changed})
    assert [each for each, _ in benchmark.verdicts] == met
