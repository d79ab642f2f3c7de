"""Gateways whose nodes train in this process, for tests of training jobs: what a driver tells comes from a script, at a
pace, and is written down in a folder, so that it goes on whatever becomes of the gateways, as a driver on a node does.

Run as a script it is one such gateway: `python training_parts.py <settings JSON> <pace> <folder>`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
from msgspec import Struct
from service_parts import ArtifactPool, GatewayProcess, graph, server_sent_events
from torchrelay.compiler import decoding
from torchrelay.compiler.api.training.events import (
    CheckpointEvent,
    FirstStep,
    LogLines,
    NumberedEvent,
    RankCompiles,
    RankEnded,
    RankStarted,
    StateChanged,
    StepMetrics,
    TrainEvent,
)
from torchrelay.compiler.api.training.jobs import TrainRequest, TrainSpec
from torchrelay.compiler.api.training.node_messages import CapturedGraphs, TrainOrder, node_job_id
from torchrelay.compiler.errors import CompileFailed, Unavailable
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.gateway.server import create_server
from torchrelay.workers.pool import WorkerLost
from waiting import wait_until

STEPS = 10
RANKS = 2
PACKAGE = b"a packed working directory"


def story(
    attempt: int, *, first: int = 0, ends: Any = "done", steps: int = STEPS, at: float = 1000.0
) -> list[TrainEvent]:
    """What a job's driver tells of `steps` steps of two ranks, which begins at `at`."""
    told: list[TrainEvent] = [StateChanged(state="starting", at=at)]
    told += [
        RankStarted(rank=n, world_size=RANKS, pid=n + 1, host="a", attempt=attempt, at=at + n)
        for n in range(2)
    ]
    told.append(StateChanged(state="running", at=at + 1, ranks=RANKS, restarts=attempt))
    told += [FirstStep(rank=n, at=at + 3 + n, attempt=attempt) for n in range(2)]
    told += [RankCompiles(rank=n, hits=3, misses=0, fallbacks=n, attempt=attempt) for n in range(2)]
    for step in range(first, first + steps):
        told.append(StepMetrics(rank=0, step=step, at=at, values={"loss": 1.0 / (step + 1)}))
        told.append(LogLines(rank=step % 2, stream="stdout", lines=[f"step {step}"]))
    told.append(
        CheckpointEvent(step=first + steps, name=f"step-{first + steps}", kept=True, seconds=0.5, bytes=10)
    )
    told.append(CheckpointEvent(step=first + steps, name="step-none", kept=False, detail="the disk is full"))
    told += [RankEnded(rank=n, code=0, at=at + 9, attempt=attempt) for n in range(2)]
    return [
        *told,
        StateChanged(state=ends, at=at + 9, detail="" if ends == "done" else "rank 0 ended with 1"),
    ]


class Turn(Struct):
    """One run of a job, until it ended: since when, and when it was stopped (0: it was not)."""

    resumes: int
    began: float
    pace: float
    ends: str
    steps: int
    stopped: float = 0.0


class Engine(Struct):
    """What a driver has on its disk."""

    turns: list[Turn] = []
    begun: int = 0
    tokens: list[str] = []
    forgotten: int = 0


class TrainingPool(ArtifactPool):
    """Compiles, and trains `pace` seconds an event. captured: bodies that a capture finds; errors as ArtifactPool's."""

    def __init__(self, folder: Path, pace: float = 0.0) -> None:
        super().__init__()
        self.folder = folder
        self.pace = pace
        self.ends = "done"
        self.steps = STEPS
        self.at = 1000.0
        self.says: list[str] = []
        """Its last log."""
        self.inserted: list[TrainEvent] = []
        """What it tells before that, whatever it is."""
        self.captured: list[bytes] = [graph(24), graph(32)]
        self.capture_error = ""
        self.capture_seconds = 0.0
        self.captures = 0
        self.worlds: list[int] = []
        """World sizes of its captures."""
        self.sick_worlds: list[int] = []
        """World sizes with which the script fails."""
        self.room_seconds = 0.0
        """Until a worker has room for a capture."""
        self.begin_seconds = 0.0
        self.orders: list[TrainOrder] = []
        self.warmed: list[TrainOrder] = []
        self.nodes = [{"torchrelay_worker": 1.0, "CPU": 64.0, "GPU": 8.0, "memory": float(1 << 40)}]
        self.free: list[dict[str, float]] | None = None
        """What its nodes have free; None: all."""
        self.asked_for_room = 0
        self.cancels = 0
        self.stubborn = False
        """It tells nothing of a cancel."""
        self.silent = False
        """Its drivers do not answer."""

    async def free_resources(self) -> list[dict[str, float]]:
        self.asked_for_room += 1
        return self.nodes if self.free is None else self.free

    async def capture(
        self, order: TrainOrder, *, world: int, seconds: float, placed: Callable[[], Awaitable[None]]
    ) -> CapturedGraphs:
        self.captures += 1
        self.worlds.append(world)
        self.orders.append(order)
        await asyncio.sleep(self.room_seconds)
        await placed()
        await asyncio.sleep(self.capture_seconds)
        if self.capture_error:
            raise CompileFailed(self.capture_error)
        if world in self.sick_worlds:
            return CapturedGraphs(bodies=[], ended=f"failed: ValueError: 8 is no multiple of {world}")
        bodies = [*self.captured, *([graph(24 + world)] if order.spec.min_workers else [])]
        return CapturedGraphs(bodies=bodies, skipped=["graph 3: a tensor subclass"])

    async def warm(self, order: TrainOrder) -> None:
        self.warmed.append(order)

    async def begin(self, order: TrainOrder) -> None:
        job = node_job_id(order.namespace, order.job)
        self.orders.append(order)
        await asyncio.sleep(self.begin_seconds)
        engine = self.engine(job)
        self._write(job, up=True)
        if engine.turns and engine.turns[-1].resumes == order.resumes:
            return
        engine.turns.append(Turn(order.resumes, time.time(), self.pace, self.ends, self.steps))
        engine.begun += 1
        engine.tokens.append(order.environment["TORCHRELAY_TOKEN"])
        self._keep(job, engine)

    async def events(self, job: str, after: int, seconds: float) -> list[NumberedEvent]:
        if self.silent:
            await asyncio.sleep(30)
            raise Unavailable("the job's driver does not answer")
        if not self._up(job).exists():
            raise WorkerLost("there is no driver")
        until = time.monotonic() + min(seconds, 0.2)
        while not (found := self.job_events(job)[after:]) and time.monotonic() < until:
            await asyncio.sleep(0.01)
        return [NumberedEvent(after + n, event) for n, event in enumerate(found, 1)]

    def job_events(self, job: str) -> list[TrainEvent]:
        told: list[TrainEvent] = []
        for attempt, turn in enumerate(self.engine(job).turns):
            events = story(attempt, first=attempt * STEPS, ends=turn.ends, steps=turn.steps, at=self.at)
            events[-1:-1] = self.inserted
            if self.says:
                events.insert(-1, LogLines(rank=0, stream="stdout", lines=self.says))
            end = turn.stopped or time.time()
            count = len(events) if not turn.pace else int((end - turn.began) / turn.pace)
            if turn.stopped and count < len(events) and not self.stubborn:
                events = [*events[:count], StateChanged(state="cancelled", at=turn.stopped)]
                count += 1
            told += events[:count]
        return told

    async def cancel(self, job: str) -> None:
        self.cancels += 1
        if self.silent:
            await asyncio.sleep(30)
            raise Unavailable("the job's driver does not answer")
        engine = self.engine(job)
        if engine.turns:
            engine.turns[-1].stopped = engine.turns[-1].stopped or time.time()
            self._keep(job, engine)

    async def forget(self, job: str) -> None:
        engine = self.engine(job)
        engine.forgotten += 1
        self._keep(job, engine)
        self._up(job).unlink(missing_ok=True)

    def lose(self, job: str) -> None:
        """Its driver is gone; what it had on disk is not."""
        self._up(job).unlink()

    def engine(self, job: str) -> Engine:
        file = self.folder / f"{job}.json"
        return decoding.from_json(file.read_bytes(), type=Engine) if file.exists() else Engine()

    def _keep(self, job: str, engine: Engine) -> None:
        (self.folder / f"{job}.part").write_bytes(msgspec.json.encode(engine))
        (self.folder / f"{job}.part").rename(self.folder / f"{job}.json")

    def _up(self, job: str) -> Path:
        return self.folder / f"{job}.up"

    def _write(self, job: str, *, up: bool) -> None:
        self._up(job).touch() if up else self._up(job).unlink()


class TrainingGateway(GatewayProcess):
    """A gateway in a process of its own, to be killed; its nodes' drivers live in `folder`."""

    script = __file__

    def __init__(self, settings: dict[str, Any], pace: float, folder: Path, *, port: int = 0) -> None:
        super().__init__(settings, pace, str(folder), port=port)


def sent_package(http: httpx2.Client, data: bytes = PACKAGE) -> str:
    answer = http.post("/v1/trains/packages", content=data)
    assert answer.status_code == 200, answer.text
    assert answer.json()["bytes"] == len(data)
    return str(answer.json()["package"])


def request(
    package: str, *, id: str = "", lines: dict[str, int] | None = None, **fields: Any
) -> TrainRequest:
    spec = TrainSpec(
        **{"name": "a job", "script": "train.py", "package": package, "workers": RANKS, **fields}
    )
    return TrainRequest(spec=spec, file="job.yaml", lines=lines or {}, id=id)


def begin(http: httpx2.Client, asked: TrainRequest) -> httpx2.Response:
    return http.post("/v1/trains", content=msgspec.json.encode(asked))


def begun(http: httpx2.Client, **fields: Any) -> str:
    """The id of a job that was taken."""
    answer = begin(http, request(fields.pop("package", None) or sent_package(http), **fields))
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def shown(http: httpx2.Client, job: str) -> dict[str, Any]:
    answer = http.get(f"/v1/trains/{job}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def ended(http: httpx2.Client, job: str, *, seconds: float = 60) -> dict[str, Any]:
    """The job, once it has ended."""
    wait_until(lambda: shown(http, job)["state"] in ("done", "failed", "cancelled"), seconds=seconds)
    return shown(http, job)


def events(http: httpx2.Client, job: str, after: int = 0) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(number, name, data) of each server-sent event."""
    for number, name, data in server_sent_events(http, f"/v1/trains/{job}/events", str(after or "")):
        yield int(number), name, data


def told(http: httpx2.Client, job: str) -> list[TrainEvent]:
    """What the driver told: all events but the service's own changes of state, which come first."""
    found = [
        decoding.from_json(msgspec.json.encode(data), type=TrainEvent) for _, _, data in events(http, job)
    ]
    own = ("waiting", "capturing", "compiling")
    found = [each for each in found if not isinstance(each, StateChanged) or each.state not in own]
    assert isinstance(found[0], StateChanged) and found[0].state == "starting"
    return found[1:]  # the first `starting` is the service's


def entries(http: httpx2.Client, job: str, what: str, **query: Any) -> list[NumberedEvent]:
    """All pages."""
    found: list[NumberedEvent] = []
    while True:
        after = found[-1].number if found else 0
        answer = http.get(f"/v1/trains/{job}/{what}", params={**query, "after": after})
        assert answer.status_code == 200, answer.text
        page = [decoding.from_json(line, type=NumberedEvent) for line in answer.content.splitlines()]
        if not page:
            return found
        found += page


if __name__ == "__main__":
    create_server(
        ServiceSettings(**decoding.from_json(sys.argv[1])),
        TrainingPool(Path(sys.argv[3]), float(sys.argv[2])),
    ).run()
