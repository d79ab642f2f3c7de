"""The job file of examples/tune that needs no GPU runs through a whole service. tests/gpu/search has the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torchrelay.examples.harness.private_service import PrivateService

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "tune"


@pytest.mark.slow
def test_the_example_for_a_cpu_is_searched(service: PrivateService) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torchrelay.clients.cli", "tune", "cpu.yaml", "--json"],
        env={**os.environ, **service.environment},
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    states = [item["state"] for item in json.loads(done.stdout)["progress"]]
    assert len(states) >= 8 and set(states) <= {"done", "known"}, states
