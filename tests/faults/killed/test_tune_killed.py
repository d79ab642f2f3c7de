"""kill -9 of one part of a whole service under a batch job: the job ends with all its problems found."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from test_killed import Family, gateway_of
from torchrelay.clients.gateway.jobs import TuningJobsClient
from torchrelay.clients.settings import load_settings
from torchrelay.compiler.api.tuning.jobs import OperatorTuneItem, TuneReply, TuneRequest, TuneResult
from torchrelay.compiler.errors import RelayError
from torchrelay.compiler.tuning.records import parse_problem
from torchrelay.examples.harness.private_service import PrivateService
from torchrelay.service.local.redis_server import find_server
from waiting import wait_until

SIZES = range(24, 72, 8)


def _searcher(family: Family) -> psutil.Process:
    """The process that searches: at the end of a line of forks."""
    forks = {process.pid: process for process in family.named("workers.fork_server")}
    parents = {process.ppid() for process in forks.values()}
    ends = [p for pid, p in forks.items() if pid not in parents and p.ppid() in forks]
    return max(ends, key=lambda process: process.create_time())


def _worker(family: Family) -> psutil.Process:
    """The actor above the process that searches."""
    (actor,) = (p for p in _searcher(family).parents() if "ray::CompileSlot" in " ".join(p.cmdline()))
    return actor


def _redis(family: Family) -> psutil.Process:
    (server,) = family.named(Path(find_server()).name)
    return server


def job() -> TuneRequest:
    items = [
        OperatorTuneItem(
            n,
            parse_problem(
                f"bmm(f32[4,{n},32], f32[4,32,{n}]) -> f32[4,{n},{n}]", (("precision", "highest"),)
            ),
        )
        for n in SIZES
    ]
    return TuneRequest(name="killed", items=list(items), threads=1)


def tunes_of(service: PrivateService) -> TuningJobsClient:
    folder = Path(service.environment["XDG_CONFIG_HOME"]) / "torchrelay"
    credentials = json.loads((folder / "credentials.json").read_text())
    return TuningJobsClient(load_settings(url=credentials["url"], token=credentials["token"]))


def until(
    tunes: TuningJobsClient, name: str, enough: Callable[[TuneReply], bool], *, seconds: float
) -> TuneReply:
    def reached() -> TuneReply | None:
        with contextlib.suppress(RelayError):  # a part is away
            reply = tunes.job(name)
            return reply if enough(reply) else None
        return None

    found = wait_until(reached, seconds, pause=0.1)
    assert found is not None
    return found


def found(reply: TuneReply) -> int:
    return reply.job.items.get("done", 0) + reply.job.items.get("known", 0)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [_searcher, _worker, _redis, gateway_of])
def test_a_job_goes_on(victim: Callable[[Family], psutil.Process], tmp_path: Path) -> None:
    before: list[TuneResult] = []
    with PrivateService(tmp_path, arguments=("--cpu-slots", "2")) as service:
        family = Family(psutil.Process(service.pid))
        try:
            with tunes_of(service) as tunes:
                name = tunes.begin(job()).id
                until(tunes, name, lambda reply: found(reply) >= 3, seconds=600)
                before = list(tunes.results(name))
                target = victim(family)
                print("killed:", " ".join(target.cmdline())[:100])
                target.kill()
                if victim not in (gateway_of, _redis):
                    _ended(tunes, name, before)
        finally:
            family.close()
    if victim in (gateway_of, _redis):
        with PrivateService(tmp_path, arguments=("--cpu-slots", "2")) as service, tunes_of(service) as tunes:
            _ended(tunes, name, before)


def _ended(tunes: TuningJobsClient, name: str, before: list[TuneResult]) -> None:
    reply = until(tunes, name, lambda reply: reply.job.state == "done", seconds=600)
    assert found(reply) == len(reply.progress), reply.progress
    after = list(tunes.results(name))
    assert all(result in after for result in before)
    assert len(after) == len(reply.progress)
