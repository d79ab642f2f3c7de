"""Programs whose graphs run as CUDA graphs, started without tracing."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TRAIN = """
    import json, sys, torch, torchrelay
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 129), torch.nn.GELU(), torch.nn.Linear(129, 8)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="torchrelay", mode="reduce-overhead")
    data = torch.randn(6, 16, 64, device="cuda")
    losses = []
    for batch in data:
        torch.compiler.cudagraph_mark_step_begin()
        loss = compiled(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        for batch in data:
            torch.compiler.cudagraph_mark_step_begin()
            losses.append(compiled(batch).sum().item())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        with torch.no_grad():
            compiled(data[0])
        torch.cuda.synchronize()
    run = torchrelay.report()
    print(json.dumps({
        "losses": losses,
        "programs": run.programs,
        "traced": [each.reason for each in run.traced],
        "skips": counters["inductor"]["cudagraph_skips"],
        "replayed": any("cudaGraphLaunch" in event.key for event in profile.key_averages()),
    }))
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateService]:
    with PrivateService(tmp_path_factory.mktemp("s")) as running:
        yield running


def _train(machine: FreshMachine, service: PrivateService) -> dict[str, Any]:
    environment = machine.environment(
        **service.environment, TORCHRELAY_MODE="require", TORCHRELAY_PROGRAMS="1"
    )
    command = [sys.executable, "-c", textwrap.dedent(TRAIN)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def test_the_next_start_runs_cuda_graphs_without_tracing(service: PrivateService, tmp_path: Path) -> None:
    machine = FreshMachine(tmp_path)

    first, second = _train(machine, service), _train(machine, service)

    assert not first["programs"] and first["replayed"] and not first["skips"]
    assert second["programs"] and not second["traced"], second
    assert second["replayed"] and not second["skips"]
    assert first["losses"] == second["losses"]
