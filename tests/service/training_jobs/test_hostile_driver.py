"""A driver that training code speaks for tells what it likes: its own job shows it, and nothing else is harmed."""

from __future__ import annotations

import math

import httpx2
import msgspec
import pytest
from service_parts import RedisServer
from torchrelay.compiler import decoding
from torchrelay.compiler.api.training.events import (
    CheckpointEvent,
    FirstStep,
    JobNote,
    LogLines,
    RankCompiles,
    RankEnded,
    RankStarted,
    StateChanged,
    StepMetrics,
    TrainEvent,
    read_events,
)
from torchrelay.compiler.api.training.node_messages import CapturedGraphs
from torchrelay.service.jobs.training.bounds import bounded
from torchrelay.workers.messages import WorkerLost
from torchrelay.workers.training.drivers import ANSWER_BYTES, read_answer
from training_parts import TrainingPool, begun, story
from waiting import wait_until

MANY = "y" * (6 << 20)

SAYS: dict[str, TrainEvent] = {
    "a time that is no number": RankStarted(rank=0, world_size=2, pid=1, host="h", attempt=0, at=math.nan),
    "an endless time": FirstStep(rank=0, at=math.inf),
    "a metric that is no number": StepMetrics(rank=0, step=1, at=1.0, values={"loss": math.nan}),
    "metrics without an end": StepMetrics(
        rank=0, step=1, at=1.0, values={f"{n:0500}": 1.0 for n in range(10_000)}
    ),
    "a rank that the job has not": RankStarted(
        rank=1 << 40, world_size=2, pid=1, host="h", attempt=0, at=1.0
    ),
    "a number past all others": RankCompiles(rank=0, hits=1 << 63, misses=0, fallbacks=0),
    "a long note": JobNote(level="info", text=MANY),
    "a long host": RankStarted(rank=0, world_size=2, pid=1, host=MANY, attempt=0, at=1.0),
    "a long name": CheckpointEvent(step=1, name=MANY, kept=True),
    "a long error": RankEnded(rank=0, code=1, at=1.0, attempt=0, detail=MANY),
    "reasons without an end": RankCompiles(
        rank=0, hits=0, misses=0, fallbacks=1, reasons=["z" * 60] * 100_000
    ),
    "a long state": StateChanged(state="running", at=1.0, detail=MANY, ranks=2),
    "a line without an end": LogLines(rank=0, stream="stdout", lines=[MANY]),
    "lines without an end": LogLines(rank=0, stream="stdout", lines=["w" * 60] * 100_000),
}


@pytest.mark.parametrize("what", SAYS)
def test_what_a_driver_says_fills_no_memory_and_spoils_no_job(
    what: str, http: httpx2.Client, pool: TrainingPool, redis_server: RedisServer
) -> None:
    pool.inserted = [SAYS[what]] * 4
    job = begun(http, capture=False)
    wait_until(lambda: _state(http, job) == "done", seconds=60)
    assert [each["state"] for each in http.get("/v1/trains").json()["jobs"]] == ["done"]
    for part in ("metrics", "events", "logs"):
        answer = http.get(f"/v1/trains/{job}/{part}")
        assert answer.status_code == 200 and b"another release" not in answer.content
    redis = redis_server.client()
    assert sum(redis.memory_usage(key) or 0 for key in redis.scan_iter()) < 2 << 20
    assert http.post(f"/v1/trains/{job}/cancel").status_code < 500


def test_what_an_honest_driver_says_is_as_it_was() -> None:
    for event in (
        *story(0),
        StepMetrics(rank=1, step=-1, at=2.5, values={f"m{n}": n / 3 for n in range(500)}),
    ):
        assert bounded(event, 2) == event


NONE = {
    "text": "[]",
    "a list": [],
    "no MessagePack": b"\xc1",
    "no events": msgspec.msgpack.encode([1, 2]),
    "too much at once": b"\xc4" * (ANSWER_BYTES + 1),
}


@pytest.mark.parametrize("what", NONE)
def test_what_is_no_answer_ends_that_driver_alone(what: str) -> None:
    with pytest.raises(WorkerLost, match="the driver of job j"):
        read_answer(NONE[what], "the driver of job j", lambda data: read_events(data, decoding.from_msgpack))


def test_a_capture_has_a_largest_number_of_graphs() -> None:
    many = msgspec.msgpack.encode(CapturedGraphs(bodies=[b""] * 100_000))
    with pytest.raises(WorkerLost, match="length"):
        read_answer(many, "the worker", lambda data: decoding.from_msgpack(data, type=CapturedGraphs))


def _state(http: httpx2.Client, job: str) -> str:
    answer = http.get(f"/v1/trains/{job}")
    assert answer.status_code == 200, answer.text
    return str(answer.json()["state"])
