"""One service serves clients of two Python or PyTorch versions at once, on one machine and under one URL.

`make test-versions` gives the second environment; it is not worth its installation where it is not there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService

ROOT = Path(__file__).parents[3]
OTHER = os.environ.get("TORCHRELAY_TEST_TOOLCHAIN", "")
"""The Python of an environment that has another torch, or is another Python, and what torchrelay needs."""
SCRIPT = """
import json
import torch, torchrelay
from torchrelay.compiler.graph.toolchain import local_toolchain

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(24, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8))
rows = torch.randn(16, 24)

def gradients(module):
    model.zero_grad()
    module(rows).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]

for ours, eager in zip(gradients(torch.compile(model, backend="torchrelay")), gradients(model), strict=True):
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-6)
run, own = torchrelay.report(), local_toolchain()
print(json.dumps({"hits": run.hits, "misses": run.misses, "toolchain": [own.python, own.torch]}))
"""


def start(python: str, service: PrivateService, machine: FreshMachine) -> dict[str, Any]:
    """What the script reports when this Python runs it; without the service it raises."""
    packages = machine.root / "package"
    packages.mkdir()
    (packages / "torchrelay").symlink_to(ROOT)
    environment = machine.environment(
        **service.environment, TORCHRELAY_MODE="require", PYTHONPATH=str(packages)
    )
    done = subprocess.run(
        [python, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr + service.log_tail()
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.skipif(not OTHER, reason="TORCHRELAY_TEST_TOOLCHAIN names no second environment")
def test_clients_of_two_toolchains_are_served_at_once(tmp_path: Path) -> None:
    settings = {"TORCHRELAY_SERVICE_TOOLCHAINS": OTHER}
    pythons = (sys.executable, OTHER)
    (tmp_path / "service").mkdir()
    with PrivateService(
        tmp_path / "service", arguments=("--cpu-slots", "1"), environment=settings
    ) as service:
        with ThreadPoolExecutor(len(pythons)) as threads:
            machines = [FreshMachine(tmp_path / f"first-{n}") for n in range(len(pythons))]
            first = list(threads.map(start, pythons, [service] * len(pythons), machines))
        assert [(run["hits"], run["misses"]) for run in first] == [(0, 1), (0, 1)]
        toolchains = [run["toolchain"] for run in first]
        assert toolchains[0] != toolchains[1], "the two environments have one toolchain"
        for n, python in enumerate(pythons):
            again = start(python, service, FreshMachine(tmp_path / f"again-{n}", compiler=False))
            assert (again["hits"], again["misses"], again["toolchain"]) == (1, 0, toolchains[n])
        credentials = json.loads(
            Path(service.environment["XDG_CONFIG_HOME"], "torchrelay", "credentials.json").read_text()
        )
        asked = urllib.request.Request(
            service.url + "/v1/workers", headers={"Authorization": f"Bearer {credentials['token']}"}
        )
        with urllib.request.urlopen(asked, timeout=10) as answer:
            workers = json.load(answer)
        offered = [[worker["toolchain"]["python"], worker["toolchain"]["torch"]] for worker in workers]
        assert sorted(offered) == sorted(toolchains)
        assert [worker["jobs_done"] for worker in workers] == [1, 1]
