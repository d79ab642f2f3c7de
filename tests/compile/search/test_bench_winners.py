"""The bench that measures two searches' winners by turns, as a search measures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from torchrelay.compiler.api.tuning.search_order import SearchJobSpec
from torchrelay.compiler.graph.toolchain import local_target, local_toolchain
from torchrelay.compiler.search import search_worker
from torchrelay.compiler.tuning import queries, records

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def test_winners_are_measured_by_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from measured.winners_once import ROUNDS, Pair, Work

    order = SearchJobSpec(local_toolchain(), local_target("cpu"), torch.get_num_threads())
    problem = records.parse_problem(
        "bmm(f32[8,32,64], f32[8,64,32]) -> f32[8,32,32]", (("precision", "highest"),)
    )
    described = queries.TuningTask(id="described", problem=problem, exact=False)
    with search_worker.open_task_executor(order, workdir=tmp_path) as bench:
        selection = bench.candidates(described)
        problem, candidates = selection.problem, selection.candidates
        selection.close()
    assert len(candidates) > 1
    aten, template = candidates[:2]
    pairs = [Pair(problem, aten, template), Pair(problem, template, "cpp nobody has")]
    (tmp_path / "pairs.json").write_bytes(msgspec.json.encode(Work(order, pairs)))
    command = [sys.executable, str(BENCHMARKS / "measured" / "winners_once.py"), str(tmp_path / "pairs.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    both, half = json.loads(done.stdout.splitlines()[-1])
    assert ROUNDS == 512 and all(milliseconds > 0 for milliseconds in both)
    assert half[0] > 0 and half[1] is None
