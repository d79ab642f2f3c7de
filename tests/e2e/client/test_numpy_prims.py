"""A back end of one's own, which gets prims from a whole service and interprets them in NumPy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_models import MODELS
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService

CLIENT = Path(__file__).parents[1] / "parts" / "numpy_models.py"
ROUNDING = 1e-5
"""Relative; a float32 has 24 bits, and NumPy adds in another order."""


def differences(service: PrivateService, folder: Path, names: list[str]) -> dict[str, float]:
    environment = FreshMachine(folder).environment(**service.environment)
    command = [sys.executable, str(CLIENT), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_model_on_numpy_computes_what_eager_does(service: PrivateService, tmp_path: Path) -> None:
    [difference] = differences(service, tmp_path, ["convolutions"]).values()
    assert difference < ROUNDING


@pytest.mark.slow
def test_twenty_models_on_numpy_compute_what_eager_does(service: PrivateService, tmp_path: Path) -> None:
    assert len(MODELS) == 20
    found = differences(service, tmp_path, list(MODELS))
    assert {name: value for name, value in found.items() if not value < ROUNDING} == {}  # NaN is not less
