"""Training jobs on two GPUs, over nccl: compiled before the ranks start, with the losses of torchrun alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrelay.clients.gateway.jobs import TrainingJobsClient
from torchrelay.clients.settings import load_settings
from torchrelay.compiler.api.training.events import RankStarted
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "measured" / "train_ranks.py"
STEPS = 5

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateService]:
    with PrivateService(tmp_path_factory.mktemp("s")) as running:
        yield running


def flags(strategy: str, record: Path) -> list[str]:
    record.mkdir(parents=True)
    flags = ["--strategy", strategy, "--model", "tiny", "--device", "cuda"]
    return [*flags, "--steps", str(STEPS), "--record", str(record)]


def run(command: list[str], environment: dict[str, str], folder: Path) -> str:
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


def losses(record: Path) -> list[float]:
    ranks = [json.loads(path.read_text())["losses"] for path in sorted(record.glob("rank-*.json"))]
    assert len(ranks) == 2 and ranks[0] == ranks[1] and len(ranks[0]) == STEPS
    return list(ranks[0])


def job(service: PrivateService, folder: Path, *arguments: str) -> dict[str, Any]:
    """As the service tells of it at its end."""
    environment = {**os.environ, **service.environment}
    command = [sys.executable, "-m", "torchrelay.clients.cli", "train", *arguments]
    try:
        told: dict[str, Any] = json.loads(run(command, environment, folder))
    except AssertionError:
        print(service.log_tail())
        raise
    return told


def warm(service: PrivateService, name: str) -> dict[int, bool]:
    """Of each rank, whether it was forked."""
    folder = Path(service.environment["XDG_CONFIG_HOME"]) / "torchrelay"
    credentials = json.loads((folder / "credentials.json").read_text())
    with TrainingJobsClient(load_settings(url=credentials["url"], token=credentials["token"])) as trains:
        return {event.rank: event.warm for event in trains.history(name) if isinstance(event, RankStarted)}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "2d"])
def test_a_job_trains_as_torchrun_does_and_compiles_nothing_after_its_start(
    service: PrivateService, tmp_path: Path, strategy: str
) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    local = FreshMachine(tmp_path / "local").environment(OMP_NUM_THREADS="1")
    run([*launcher, str(SCRIPT), *flags(strategy, tmp_path / "torchrun")], local, tmp_path)
    (work := tmp_path / "work").mkdir()
    shutil.copy(SCRIPT, work)
    arguments = ["--gpus", "2", "--retries", "0", "--json", "--name", strategy, "--"]
    told = job(service, work, SCRIPT.name, *arguments, *flags(strategy, tmp_path / "job"))
    assert told["state"] == "done", told
    assert losses(tmp_path / "job") == pytest.approx(losses(tmp_path / "torchrun"), rel=5e-3)
    compiles = told["compiles"]
    print(strategy, compiles, told.get("skipped"), told.get("first_step_seconds"))
    assert compiles.get("misses", 0) == 0
    assert warm(service, told["id"]) == {0: True, 1: True}
    if not told.get("skipped"):
        assert compiles["captured"] > 0 and compiles["hits"] >= 2 and compiles.get("fallbacks", 0) == 0


def test_a_profile_of_both_ranks_tells_their_communication(service: PrivateService, tmp_path: Path) -> None:
    (work := tmp_path / "work").mkdir()
    shutil.copy(SCRIPT, work)
    arguments = ["--gpus", "2", "--profile", "steps=2:4", "--profile-ranks", "0,1", "--json", "--"]
    told = job(service, work, SCRIPT.name, *arguments, *flags("ddp", tmp_path / "job"))
    assert told["state"] == "done", told
    environment = {**os.environ, **service.environment}
    command = [sys.executable, "-m", "torchrelay.clients.cli", "train"]
    found = json.loads(run([*command, "files", told["id"], "--json"], environment, work))
    names = {file["name"] for file in found}
    assert {"profile/rank-0.trace.json.gz", "profile/rank-1.trace.json.gz"} <= names
    run([*command, "report", told["id"], "--output", str(tmp_path / "report")], environment, work)
    pages = list((tmp_path / "report").rglob("*.html"))
    assert len(pages) == 1 and "nccl" in pages[0].read_text()
