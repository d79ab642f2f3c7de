"""Architectures from transformers take a training step on code that the service compiled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "measured" / "compare_gradients.py"
ROUNDING = 1e-5
"""Relative; float32 rounds at 6e-8, and sums of a gradient may be added in another order."""


@pytest.mark.parametrize(
    ("architecture", "layers"),
    [("bert", 1), *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("bert", "llama", "vit"))],
)
def test_gradients_are_those_of_local_compilation(
    architecture: str, layers: int, service: PrivateService, tmp_path: Path
) -> None:
    environment = FreshMachine(tmp_path).environment(**service.environment, TORCHRELAY_MODE="require")
    command = [sys.executable, str(SCRIPT), "--model", architecture, "--layers", str(layers)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["remote"] == record["graphs"] >= 1
    assert record["fallbacks"] == {}
    assert record["equal"] or record["difference"] <= max(10 * record["noise"], ROUNDING)
