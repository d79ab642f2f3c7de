"""Runs the programs of tests/e2e/trainers as clients of a service."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService

PROGRAMS = Path(__file__).parents[1] / "trainers" / "programs"
RUN = ("-m", "torchrelay.clients.cli", "run")
ROUNDING = 1e-5
"""Relative; of float32, over three steps."""


def run(service: PrivateService, folder: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    """What a program prints as its last line. Mode `require`: a graph that the service does not serve is an error."""
    client = {**service.environment, "TORCHRELAY_MODE": "require", "HF_HUB_OFFLINE": "1", **variables}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=FreshMachine(folder).environment(**client),
        cwd=folder,  # what a trainer writes where it is started
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def report(path: Path) -> dict[str, Any]:
    """What TORCHRELAY_REPORT=path left."""
    return dict(json.loads(path.read_text()))
