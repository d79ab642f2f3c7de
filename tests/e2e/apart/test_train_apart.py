"""A training job whose gateway and dispatcher are killed while Ray runs elsewhere: its ranks go on, and all that they
told is told.

Like test_up_apart.py, whose parts it uses, this file is the test and the program in the network namespace.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_up_apart import Apart, listens, loopback_up, run_alone

STEPS = 40
SCRIPT = f"""
import sys, time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({STEPS}):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    print("step", step, flush=True)
    if dist.get_rank() == 0:
        with open(sys.argv[1], "a") as file:
            file.write("step\\n")
    time.sleep(0.5)
dist.destroy_process_group()
"""


def train(apart, *arguments, python_path=""):
    done = subprocess.run(
        [sys.executable, "-m", "torchrelay.clients.cli", "train", *arguments],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("TORCHRELAY_")},
            "XDG_CONFIG_HOME": str(apart.home / "config"),
            "XDG_CACHE_HOME": str(apart.home / "cache"),
            "PYTHONPATH": python_path,
        },
        cwd=apart.home / "script",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr + apart.logs()
    return done.stdout


def prepare_training(apart):
    """The script, and the file to which it writes a line for each step."""
    environment = apart.compose["dispatcher"]["environment"]
    environment["TORCHRELAY_SERVICE_TRAIN_DIR"] = str(apart.home / "trains")
    environment["TORCHRELAY_SERVICE_TRAIN_URL"] = "http://127.0.0.1:8642"
    (apart.home / "script").mkdir()
    (apart.home / "script" / "slow.py").write_text(SCRIPT)
    steps = apart.home / "steps"
    steps.touch()
    return steps


def goes_on(apart):
    steps = prepare_training(apart)
    apart.serve_redis_on_loopback()
    apart.start("redis", [])
    apart.start("ray-head", [], f"--temp-dir={apart.temp_dir}")
    apart.wait(lambda: listens(apart.ray_port) and listens(apart.redis_port), "redis and Ray listening")
    service = apart.start_service()
    apart.start("worker-cpu", service)
    apart.start("worker-train", service)
    apart.wait(lambda: apart.get("/readyz")[0] == 200, "a warm worker")

    options = ["--workers", "2", "--cpus", "0.5", "--no-capture", "--detach"]
    name = train(apart, "slow.py", *options, "--", str(steps)).strip()
    apart.wait(lambda: steps_of(steps) >= 5, "five steps", 180)
    for role in ("gateway", "dispatcher"):
        killed = apart.processes.pop(role)
        killed.kill()
        killed.wait(20)
    at_death = steps_of(steps)
    apart.wait(lambda: steps_of(steps) >= at_death + 5, "five steps without a service", 60)
    assert steps_of(steps) < STEPS
    apart.start("gateway", service)
    apart.start("dispatcher", service)
    apart.wait(lambda: apart.get("/livez")[0] == 200, "a live gateway")
    apart.wait(lambda: json.loads(train(apart, "show", name, "--json"))["state"] == "done", "the end", 180)
    job = json.loads(train(apart, "show", name, "--json"))
    assert job.get("restarts", 0) == 0
    assert steps_of(steps) == STEPS
    for rank in ("0", "1"):
        told = [line for line in train(apart, "logs", name, "--rank", rank).splitlines() if "step " in line]
        assert len(told) == STEPS, told


def steps_of(file):
    return len(file.read_text().splitlines())


@pytest.mark.slow
def test_ranks_go_on_without_a_gateway_and_nothing_they_told_is_lost(tmp_path):
    run_alone(__file__, tmp_path)


def main(home, network):
    if network == "alone":
        loopback_up()
    parts = Apart(home)
    try:
        goes_on(parts)
    finally:
        parts.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
