"""A training job whose gateway or Redis dies goes on; what its driver told is told once, in order, and is all there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from fault_parts import RedisProxy
from service_parts import RedisServer, Running, client_of
from torchrelay.compiler import decoding
from torchrelay.compiler.api.training.events import StepMetrics, TrainEvent
from torchrelay.service.jobs.records import LeaseOutcome
from torchrelay.service.jobs.training.run import TrainingJobRun
from training_parts import (
    STEPS,
    TrainingGateway,
    TrainingPool,
    begun,
    ended,
    entries,
    events,
    shown,
    story,
    told,
)
from waiting import wait_until

PACE = 0.15

StartGateway = Callable[..., Running]
Start = Callable[..., TrainingGateway]
PERSISTENT = True
"""Redis' data outlive it."""


@pytest.fixture
def pool(tmp_path: Path) -> TrainingPool:
    (tmp_path / "driver").mkdir()
    return TrainingPool(tmp_path / "driver", PACE)


@pytest.fixture
def start(settings: dict[str, Any], pool: TrainingPool) -> Iterator[Start]:
    started: list[TrainingGateway] = []

    def begin(pace: float = PACE) -> TrainingGateway:
        started.append(TrainingGateway(settings, pace, pool.folder))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


def _late(
    renew: Callable[[TrainingJobRun], Awaitable[LeaseOutcome]],
) -> Callable[..., Awaitable[LeaseOutcome]]:
    async def renewed(run: TrainingJobRun) -> LeaseOutcome:
        await asyncio.sleep(1.5)
        return await renew(run)

    return renewed


def whole(http: httpx2.Client, job: str) -> None:
    """The job is done, and all that its driver told was told once."""
    assert ended(http, job)["state"] == "done"
    assert told(http, job) == story(0)
    metrics = entries(http, job, "metrics")
    assert [each.event for each in metrics] == [each for each in story(0) if isinstance(each, StepMetrics)]


def steps(http: httpx2.Client, job: str) -> int:
    return int(shown(http, job).get("step", 0))


def test_another_gateway_goes_on_when_one_is_killed(start: Start, pool: TrainingPool) -> None:
    one, two = start(), start()
    with one.http() as http:
        job = begun(http)
    with two.http() as http:
        wait_until(lambda: steps(http, job) >= 2, seconds=60)
        one.kill()  # whichever of the two drives it
        whole(http, job)
        assert shown(http, job)["compiles"]["captured"] == 2
    assert pool.engine(job).begun == 1


def test_a_gateway_that_comes_back_goes_on_by_itself(start: Start, pool: TrainingPool) -> None:
    one = start()
    with one.http() as http:
        job = begun(http)
        wait_until(lambda: steps(http, job) >= 2, seconds=60)
    one.kill()
    again = start()
    with again.http() as http:
        whole(http, job)
        records = [each for each in http.get("/v1/tokens").json() if each["name"].endswith(job)]
        assert records and all(each.get("revoked") for each in records)
    assert pool.engine(job).begun == 1


def test_a_gateway_that_is_killed_in_the_capture_has_it_made_again(
    start: Start, start_gateway: StartGateway, pool: TrainingPool
) -> None:
    pool.capture_seconds = 60
    slow = start_gateway(pool)
    with slow.http() as http:
        job = begun(http)
        wait_until(lambda: pool.captures == 1, seconds=20)
    slow.stop()
    with start().http() as http:
        whole(http, job)


def test_redis_is_killed_and_comes_back_with_what_it_had(
    start_gateway: StartGateway, redis_server: RedisServer, pool: TrainingPool
) -> None:
    gateway = start_gateway(pool)
    with gateway.http() as http:
        job = begun(http)
        wait_until(lambda: steps(http, job) >= 2, seconds=60)
        redis_server.stop()
        known = len(pool.job_events(job))
        wait_until(lambda: len(pool.job_events(job)) >= known + 4, seconds=60)
        redis_server.start()
        wait_until(lambda: _answers(http, job), seconds=60)
        whole(http, job)


def test_redis_that_comes_back_empty_is_given_the_job_again(
    start_gateway: StartGateway, pool: TrainingPool
) -> None:
    forgetful = RedisServer()
    forgetful.start()
    gateway = start_gateway(pool, redis_url=forgetful.url)
    try:
        with gateway.http() as http:
            job = begun(http)
            wait_until(lambda: steps(http, job) >= 2, seconds=60)
            forgetful.stop()
            forgetful.start()
            wait_until(lambda: _answers(http, job), seconds=60)
            with client_of(gateway.url, pool.orders[-1].environment["TORCHRELAY_TOKEN"]) as rank:
                wait_until(lambda: rank.get("/v1/info").status_code == 200, seconds=20)
            done = ended(http, job)
            assert (done["state"], done["step"]) == ("done", STEPS - 1)
            rest = told_after(http, job)
            assert rest == story(0)[-len(rest) :]
            numbers = [number for number, _, _ in events(http, job)]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) and numbers[0] > 5
    finally:
        gateway.stop()
        forgetful.close()


def told_after(http: httpx2.Client, job: str) -> list[TrainEvent]:
    return [
        decoding.from_json(msgspec.json.encode(data), type=TrainEvent) for _, _, data in events(http, job)
    ]


def test_a_gateway_that_is_cut_off_and_comes_back_does_not_tell_what_another_has_told(
    start_gateway: StartGateway, redis_server: RedisServer, pool: TrainingPool
) -> None:
    proxy = RedisProxy(redis_server.socket)
    proxy.start()
    sound = TrainingPool(pool.folder, PACE)
    try:
        gateway = start_gateway(pool, redis_url=proxy.url, redis_timeout_seconds=1.0)
        with gateway.http() as http:
            job = begun(http, capture=False)
            wait_until(lambda: steps(http, job) >= 1, seconds=60)
        proxy.hold()
        other = start_gateway(sound)
        with other.http() as http:
            before = steps(http, job)
            wait_until(lambda: steps(http, job) >= min(before + 2, STEPS - 1), seconds=60)
            proxy.let_go()
            whole(http, job)
    finally:
        proxy.let_go()
        proxy.stop()


def test_a_job_is_cancelled_though_the_gateway_that_drove_it_is_dead(
    start: Start, pool: TrainingPool
) -> None:
    slow = 1.0  # half a minute in all: it has not ended when the second gateway is there
    one = start(slow)
    with one.http() as http:
        job = begun(http, capture=False)
        wait_until(lambda: shown(http, job)["state"] == "running", seconds=60)
    one.kill()
    with start(slow).http() as http:
        http.post(f"/v1/trains/{job}/cancel")
        assert ended(http, job)["state"] == "cancelled"
    assert pool.engine(job).turns[0].stopped > 0


def test_a_cancel_goes_on_when_the_gateway_that_heard_it_stops(
    start_gateway: StartGateway, pool: TrainingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.stubborn = True
    one = start_gateway(pool)
    with one.http() as http:
        job = begun(http, capture=False)
        wait_until(lambda: steps(http, job) >= 1, seconds=60)
        with ThreadPoolExecutor(1) as other:
            other.submit(http.post, f"/v1/trains/{job}/cancel")
            wait_until(lambda: pool.cancels > 0, seconds=20)
            one.stop()
    monkeypatch.setattr(TrainingJobRun, "renew", _late(TrainingJobRun.renew))
    heeding = TrainingPool(pool.folder)
    with start_gateway(heeding).http() as http:
        assert ended(http, job)["state"] == "cancelled"
        assert shown(http, job)["detail"] == "cancelled by owner"
    assert pool.engine(job).begun == 1


def test_a_jobs_time_goes_on_when_its_gateway_is_another(
    start_gateway: StartGateway, pool: TrainingPool
) -> None:
    pool.pace, pool.at = 1.0, time.time()
    one = start_gateway(pool)
    with one.http() as http:
        job = begun(http, capture=False, timeout_seconds=9)
        wait_until(lambda: time.time() > pool.at + 7 and shown(http, job)["state"] == "running", seconds=60)
    one.stop()
    again = time.time()
    with start_gateway(pool).http() as http:
        told = ended(http, job)
        assert (told["state"], told["detail"]) == ("failed", "it ran for longer than its timeout of 9 s")
    (turn,) = pool.engine(job).turns
    assert pool.at + 1 + 9 <= turn.stopped < again + 9


def _answers(http: httpx2.Client, job: str) -> bool:
    return http.get(f"/v1/trains/{job}").status_code == 200
