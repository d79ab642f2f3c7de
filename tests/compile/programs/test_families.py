"""Models of the zoo start without tracing in a new process, and compute the same; a third process traces them again,
and makes the same programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "zoo.py"


@pytest.mark.parametrize("name", ["hiera", pytest.param("falcon_mamba", marks=pytest.mark.slow)])
def test_a_model_starts_without_tracing_and_computes_the_same(name: str, tmp_path: Path) -> None:
    """A mamba looks classes up in PyTorch's own dicts, and lets PyTorch add kernels while it is traced."""
    command = [sys.executable, str(BENCHMARK), "--only", f"newer/{name}", "--phase", "programs", "--check"]
    folders = ["--state", str(tmp_path / "state"), "--recorded", str(tmp_path / "recorded")]
    done = subprocess.run(
        [*command, *folders, "--device", "cpu"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = map(json.loads, (tmp_path / "recorded" / "cpu-small.jsonl").read_text().splitlines())
    assert record["status"] == "pass"
    assert record["started"] == record["functions"] > 0
    assert record["stale"] == []
