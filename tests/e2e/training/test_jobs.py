"""A training job through a whole service: its graphs are compiled before its ranks start, and every rank hits."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import torchrelay
from torchrelay.clients.gateway.jobs import TrainingJobsClient
from torchrelay.clients.settings import load_settings
from torchrelay.compiler.api.training.events import RankStarted
from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchrelay import train

WIDTH, LENGTH = 16, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(64, WIDTH), Block(), nn.Linear(WIDTH, 64)

    def forward(self, x):
        return self.head(self.block(self.embed(x)))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
model = DistributedDataParallel(GPT())
compiled = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = int(sys.argv[1])
data = torch.randint(64, (steps, 8, LENGTH))
for step in range(steps):
    tokens = data[step, rank::world].contiguous()
    logits = compiled(tokens)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach())
    train.report(step, loss=loss / world)
    print(f"rank {rank} of {world}: step {step}", flush=True)
dist.destroy_process_group()
"""

STEPS = 4

TINY = """
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
rank, world = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(Net())
compiled = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    compiled(torch.ones(8 // world, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {rank} of {world} is done", flush=True)
dist.destroy_process_group()
"""


def command(service: PrivateService, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **service.environment, "COLUMNS": "250"}
    return torchrelay(*arguments, environment=environment, folder=folder, seconds=500)


def shown(service: PrivateService, folder: Path, name: str) -> dict[str, Any]:
    done = command(service, folder, "train", "show", name, "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def compiles(job: dict[str, Any]) -> dict[str, int]:
    """Without those that are 0."""
    return dict(job["compiles"])


def test_a_job_is_captured_and_compiled_and_then_its_ranks_compile_nothing(
    service: PrivateService, tmp_path: Path
) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    done = command(service, tmp_path, "train", "tiny.py", "--workers", "2", "--cpus", "0.5")
    assert done.returncode == 0, done.stdout + done.stderr + service.log_tail()
    assert "rank 0 of 2 is done" in done.stdout
    job = shown(service, tmp_path, "tiny")
    assert job["state"] == "done" and job["first_step_seconds"] > 0
    assert compiles(job) == {"captured": 1, "compiled": 1, "hits": 2}, job
    credentials = json.loads(
        (Path(service.environment["XDG_CONFIG_HOME"]) / "torchrelay" / "credentials.json").read_text()
    )
    with TrainingJobsClient(load_settings(url=credentials["url"], token=credentials["token"])) as trains:
        started = [event for event in trains.history(job["id"]) if isinstance(event, RankStarted)]
    assert {event.rank: event.warm for event in started} == {0: True, 1: True}


@pytest.mark.slow
def test_ranks_of_an_unchanged_script_compile_nothing_after_they_have_started(
    service: PrivateService, tmp_path: Path
) -> None:
    (tmp_path / "gpt.py").write_text(SCRIPT)
    done = command(service, tmp_path, "train", "gpt.py", "--workers", "2", "--", str(STEPS))
    assert done.returncode == 0, done.stdout + done.stderr
    job = shown(service, tmp_path, "gpt")
    assert job["state"] == "done", job
    compiles = job["compiles"]
    assert compiles.pop("captured") == compiles.pop("compiled") > 0
    assert compiles.pop("hits") >= 2
    assert compiles == {}  # no misses, no fallbacks
    assert job["first_step_seconds"] > 0
    told = command(service, tmp_path, "train", "metrics", "gpt", "--json")
    losses = [
        line["values"]["loss"]
        for line in map(json.loads, told.stdout.splitlines())
        if "loss" in line["values"]
    ]
    assert len(losses) == 2 * STEPS and all(2 < loss < 6 for loss in losses)
    for rank in range(2):
        logs = command(service, tmp_path, "train", "logs", "gpt", "--rank", str(rank)).stdout
        assert f"rank {rank} of 2: step {STEPS - 1}" in logs
        assert f"rank {1 - rank} of 2" not in logs
