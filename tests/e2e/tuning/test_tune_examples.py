"""The job file of examples/tune that needs no GPU runs through a whole service. tests/gpu/search has the others."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from command_line import torchrelay
from torchrelay.examples.harness.private_service import PrivateService

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "tune"


@pytest.mark.slow
def test_the_example_for_a_cpu_is_searched(service: PrivateService) -> None:
    environment = {**os.environ, **service.environment}
    done = torchrelay(
        "tune", "cpu.yaml", "--json", environment=environment, folder=EXAMPLES, status=0, seconds=500
    )
    states = [item["state"] for item in json.loads(done.stdout)["progress"]]
    assert len(states) >= 8 and set(states) <= {"done", "known"}, states
