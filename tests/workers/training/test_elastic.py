"""An elastic job through a whole service, on nodes that are lost and come: its ranks hit, in whatever number."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pool_parts import RAY_TOKEN
from pydantic import SecretStr
from ray_nodes import Nodes
from service_parts import TOKEN, RedisServer, Running, free_port
from torchrelay.compiler.api.training import working_directory
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.parts.worker_pool import worker_pool
from training_parts import begun, ended, entries, events, sent_package, shown
from waiting import wait_until

SCRIPT = """
    import sys, time
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel


    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.only = torch.nn.Linear(8, 1)

        def forward(self, x):
            return self.only(x).relu()


    dist.init_process_group("gloo")
    world = dist.get_world_size()
    model = DistributedDataParallel(Net())
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    while not Path(sys.argv[1]).exists() or step < 3:
        compiled(torch.ones(8 // world, 8)).square().mean().backward()  # a global batch: its graph is of this world
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == 3 and dist.get_rank() == 0:
            print("steps of", world, flush=True)
        time.sleep(0.2)
    dist.destroy_process_group()
"""


def worlds(http: httpx2.Client, job: str) -> list[int]:
    """Numbers of ranks that have stepped, one after the other."""
    lines = [line for each in entries(http, job, "logs") for line in each.event.lines]
    return [int(line.rpartition(" ")[2]) for line in lines if line.startswith("steps of")]


@pytest.mark.slow
def test_ranks_of_an_elastic_job_wait_for_no_compile_in_whatever_number(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add(cpu_slots=1)
    second = nodes.add()
    redis = RedisServer()
    redis.start()
    port = free_port()
    settings = ServiceSettings(
        redis_url=redis.url,
        state_dir=tmp_path / "state",
        token=SecretStr(TOKEN),
        token_allow_source=False,
        training=True,
        ray_address=nodes.address,
        ray_token=SecretStr(RAY_TOKEN),
        train_url=f"http://127.0.0.1:{port}",
        log_level="warning",
    )
    gateway = Running(settings, worker_pool(settings))
    gateway.port = gateway.server.config.port = port
    gateway.url = f"http://127.0.0.1:{port}"
    finish = tmp_path / "finish"
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text(textwrap.dedent(SCRIPT))
    try:
        gateway.start()
        with gateway.http() as http:
            wait_until(lambda: http.get("/readyz").status_code == 200, seconds=180)
            package = sent_package(http, working_directory.pack(tmp_path / "work", ["train.py"]))
            spec = {"package": package, "workers": 2, "min_workers": 1, "arguments": [str(finish)]}
            wait_until(lambda: _begins(http, spec), seconds=120)
            (job,) = (each["id"] for each in http.get("/v1/trains").json()["jobs"])
            wait_until(lambda: worlds(http, job) == [2], seconds=240)
            (raylet,) = [p for p in second.children(recursive=True) if p.name() == "raylet"]
            raylet.kill()
            wait_until(lambda: worlds(http, job) == [2, 1], seconds=240)
            nodes.add()
            wait_until(lambda: worlds(http, job) == [2, 1, 2], seconds=240)
            finish.touch()
            told = ended(http, job, seconds=120)
            assert told["state"] == "done", told
            counts = [data for _, kind, data in events(http, job) if kind == "compiles"]
            assert {each["attempt"] for each in counts} >= {0, 1, 2}
            assert all(each["hits"] >= 1 for each in counts), counts
            assert [each for each in counts if each["misses"] or each["fallbacks"]] == []
            assert shown(http, job)["compiles"]["captured"] == 2
    finally:
        gateway.stop()
        redis.close()


def _begins(http: httpx2.Client, spec: dict[str, Any]) -> bool:
    """Both nodes are known."""
    try:
        begun(http, **spec)
    except AssertionError:
        return False
    return True
