"""kill -9 of one part of a whole service under a training job: its last loss is that of a training that nothing
disturbed, to the last bit."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from test_killed import Family, gateway_of
from torchrelay.clients.gateway.jobs import TrainingJobsClient
from torchrelay.clients.jobfiles.working_directory import pack_directory
from torchrelay.clients.settings import load_settings
from torchrelay.compiler.api.training.jobs import TRAIN_ENDED, TrainJob, TrainRequest, TrainSpec
from torchrelay.compiler.errors import RelayError
from torchrelay.examples.harness.private_service import PrivateService
from torchrelay.service.local.redis_server import find_server
from waiting import wait_until

SCRIPT = """
import os, sys, time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchrelay import train

pause = float(sys.argv[1])
dist.init_process_group("gloo")
print("pid", os.getpid(), flush=True)
torch.manual_seed(1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
torch.manual_seed(100 + dist.get_rank())
data = torch.randn(64, 8, generator=torch.Generator().manual_seed(5))
checkpoints = train.Checkpoints()
begin = checkpoints.restore(model, optimizer) or 0
for step in range(begin, 30):
    loss = model(data[(step + dist.get_rank()) % 64]).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    train.report(step, loss=loss)
    if (step + 1) % 5 == 0:
        checkpoints.save(step + 1, model, optimizer)
    time.sleep(pause)
checkpoints.wait()
total = loss.detach().clone()
dist.all_reduce(total)
if dist.get_rank() == 0:
    print("last", total.item().hex(), "begun at", begin, flush=True)
dist.destroy_process_group()
"""


def _rank(family: Family, rank: int) -> psutil.Process:
    """Rank 1's process."""
    return psutil.Process(rank)


def _keeper(family: Family, rank: int) -> psutil.Process:
    """The process above rank 1's."""
    parent = psutil.Process(rank).parent()
    assert parent is not None
    return parent


def _worker(family: Family, rank: int) -> psutil.Process:
    """A rank's worker of Ray."""
    return family.named("RayTrainWorker")[0]


def _warm(family: Family, rank: int) -> psutil.Process:
    """The process of which ranks were forked; they go on."""
    (server,) = family.named("workers.training.prefork.server")
    return server


def _stopped_gateway(family: Family, rank: int) -> psutil.Process:
    return gateway_of(family)


def _redis(family: Family, rank: int) -> psutil.Process:
    (server,) = family.named(Path(find_server()).name)
    return server


def _pid(trains: TrainingJobsClient, name: str) -> int:
    """Of rank 1's process."""
    lines = [line for _, log in trains.logs(name, rank=1) for line in log.lines if line.startswith("pid ")]
    return int(lines[-1].split()[1])


def trains_of(service: PrivateService) -> TrainingJobsClient:
    folder = Path(service.environment["XDG_CONFIG_HOME"]) / "torchrelay"
    credentials = json.loads((folder / "credentials.json").read_text())
    return TrainingJobsClient(load_settings(url=credentials["url"], token=credentials["token"]))


def begun(trains: TrainingJobsClient, folder: Path, pause: float) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "steady.py").write_text(SCRIPT)
    package = trains.store_package(pack_directory(folder).data)
    spec = TrainSpec(
        name="steady",
        script="steady.py",
        arguments=[str(pause)],
        package=package,
        workers=2,
        capture=False,
        cpus=0.5,
    )
    return trains.begin(TrainRequest(spec=spec)).id


def until(
    trains: TrainingJobsClient, name: str, enough: Callable[[TrainJob], bool], *, seconds: float = 200
) -> TrainJob:
    job: TrainJob | None = None

    def reached() -> TrainJob | None:
        nonlocal job
        with contextlib.suppress(RelayError):  # a part is away
            job = trains.job(name)
            if enough(job):
                return job
            assert job.state not in TRAIN_ENDED, job
        return None

    found = wait_until(reached, seconds, pause=0.1, told=lambda: job)
    assert found is not None
    return found


def last(trains: TrainingJobsClient, name: str) -> tuple[str, int]:
    """The last loss, and the step that its ranks began at."""
    until(trains, name, lambda job: job.state == "done")
    lines = [line for _, log in trains.logs(name, rank=0) for line in log.lines if line.startswith("last ")]
    (line,) = lines
    _, loss, _, _, step = line.split()
    return loss, int(step)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("u")
    with PrivateService(root) as service, trains_of(service) as trains:
        loss, step = last(trains, begun(trains, root / "script", 0.0))
        assert step == 0
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("victim", [_rank, _keeper, _worker, _warm, _redis, _stopped_gateway])
def test_a_job_goes_on(
    victim: Callable[[Family, int], psutil.Process], undisturbed: str, tmp_path: Path
) -> None:
    with PrivateService(tmp_path) as service:
        family = Family(psutil.Process(service.pid))
        try:
            with trains_of(service) as trains:
                name = begun(trains, tmp_path / "script", 0.3)
                until(trains, name, lambda job: job.checkpoint_step >= 10)
                target = victim(family, _pid(trains, name))
                print("killed:", " ".join(target.cmdline())[:100])
                target.kill()
                if victim not in (_stopped_gateway, _redis):
                    _goes_on(trains, name, undisturbed, restarts=0 if victim is _warm else 1)
        finally:
            family.close()
    if victim in (_stopped_gateway, _redis):
        with PrivateService(tmp_path) as service, trains_of(service) as trains:
            _goes_on(trains, name, undisturbed, restarts=1)


def _goes_on(trains: TrainingJobsClient, name: str, undisturbed: str, *, restarts: int) -> None:
    loss, step = last(trains, name)
    assert loss == undisturbed
    if restarts:
        assert 10 <= step < 30
    assert trains.job(name).restarts >= restarts
    assert restarts or trains.job(name).restarts == 0
