"""Real architectures start without tracing in a new process, and compute the same; a third process traces them again,
and makes the same programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "programs_families.py"


@pytest.mark.parametrize("name", ["vit", pytest.param("mamba", marks=pytest.mark.slow)])
def test_an_architecture_starts_without_tracing_and_computes_the_same(name: str, tmp_path: Path) -> None:
    """mamba looks classes up in PyTorch's own dicts, and lets PyTorch add kernels while it is traced."""
    command = [sys.executable, str(BENCHMARK), "--models", name, "--check", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = json.loads((tmp_path / "programs_families.json").read_text())
    assert record["traced"]["started"] == 0
    assert record["started"]["started"] == record["started"]["functions"] > 0
    assert record["checked"]["checked"] == record["started"]["started"]
    assert record["checked"]["stale"] == []
