"""Numbers that a graph itself holds, and that its compile brings to the GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

PROGRAM = """
import torch, torchrelay

def table(x):
    return x * torch.tensor([0.5 * number for number in range(32)]).to(x.device)

last = f"cuda:{torch.cuda.device_count() - 1}"  # with two GPUs, not the one the worker compiled for
x = torch.randn(4, 32, device=last, requires_grad=True)
y = torchrelay.compile(table)(x)
y.sum().backward()
assert y.device == x.device
torch.testing.assert_close(y, table(x))
print(torchrelay.report().misses)
"""


def test_a_table_goes_into_the_artifact_and_from_there_to_the_clients_gpu(tmp_path: Path) -> None:
    with PrivateService(tmp_path / "service") as service:
        machine = FreshMachine(tmp_path / "client").environment(
            **service.environment, TORCHRELAY_MODE="require"
        )
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=machine,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert (done.returncode, done.stdout.split()) == (0, ["1"]), done.stderr
