"""A kernel under Triton's own autotuner on a GPU: what one machine measured, another takes from a real service."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = Path(__file__).parents[1] / "parts" / "autotuned_kernel.py"

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def launch(folder: Path, service: PrivateService) -> dict[str, Any]:
    manager = {"TRITON_CACHE_MANAGER": "torchrelay.integrations:TritonCacheManager"}
    environment = FreshMachine(folder).environment(**service.environment, **manager)
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr + service.log_tail()
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def test_a_second_machine_launches_the_first_ones_winner_without_measuring(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with PrivateService(tmp_path_factory.mktemp("s")) as service:
        first = launch(tmp_path / "first", service)
        second = launch(tmp_path / "second", service)
    assert first == {"right": True, "measured": True, "block": first["block"], "hits": 0, "failures": {}}
    assert second == {**first, "measured": False, "hits": 1}
