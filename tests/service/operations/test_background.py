"""Background tasks: an error of one is logged, counted and shown, and the task goes on."""

from __future__ import annotations

import asyncio
import os
import time

import httpx2
import pytest
from service_parts import ArtifactPool, RedisServer, StartGateway, compiled, follow, graph, post
from torchrelay.service.base import async_tasks
from torchrelay.service.base.async_tasks import TaskSupervisor
from waiting import wait_until

BROKEN = "torchrelay:train:broken"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrelay.service.parts.background.SWEEP_SECONDS", 0.1)


def failures(http: httpx2.Client, task: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    found = [
        line for line in lines if line.startswith(f'torchrelay_background_failures_total{{task="{task}"}}')
    ]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


def test_a_job_that_cannot_be_read_ends_no_sweep_and_is_shown(
    start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    with redis_server.client() as redis:
        redis.hset(BROKEN, mapping={"job": "{}", "state": "done"})
        redis.zadd("torchrelay:trains", {"broken": 1})
        redis.hset("torchrelay:namespaces", "vision", "{}")
        gateway = start_gateway(blob_inline_bytes=0)
        with gateway.http() as http:
            wait_until(lambda: failures(http, "sweep") >= 2, seconds=20)
            answer = http.get("/readyz")
            assert (answer.status_code, answer.json()["failing"]) == (200, {"sweep": "ExceptionGroup"})
            orphan = (
                gateway.settings.state_dir / "blobs" / "namespaces" / "vision" / "aa" / ("aa" * 32) / "00"
            )
            orphan.parent.mkdir(parents=True)
            orphan.write_bytes(b"of a namespace whose jobs can be read")
            os.utime(orphan, (time.time() - 7200,) * 2)
            redis.hset("torchrelay:installation", "since", 0)
            wait_until(lambda: redis.zcard("torchrelay:ns:vision:orphans") == 1, seconds=20)
            redis.delete(BROKEN)
            redis.zrem("torchrelay:trains", "broken")
            wait_until(lambda: http.get("/readyz").json()["failing"] == {}, seconds=20)


def test_what_fails_in_the_workers_pool_is_counted_and_shown(start_gateway: StartGateway) -> None:
    pool = ArtifactPool()
    gateway = start_gateway(pool)
    with gateway.http() as http:
        assert failures(http, "nodes") == 0
        pool.note("nodes", KeyError("a node"))
        assert http.get("/readyz").json()["failing"] == {"nodes": "KeyError"}
        assert failures(http, "nodes") == 1
        pool.note("nodes", None)
        wait_until(lambda: http.get("/readyz").json()["failing"] == {}, seconds=20)


def test_who_waits_for_a_compile_with_an_event_that_cannot_be_read_is_told(
    start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    gateway = start_gateway()
    gateway.pool.seconds = 60
    with gateway.http() as http, redis_server.client() as redis:
        name = post(http, graph()).json()["key"]
        events = follow(http, name)
        assert next(events)[1] == "queued"
        redis.xadd(f"torchrelay:events:{name}", {"stage": "no stage", "seconds": "many"})
        redis.publish("torchrelay:wake", name)
        *_, (_, stage, _) = events
        assert stage == "failed"
        gateway.pool.seconds = 0
        compiled(http, graph(2))


def test_a_task_that_fails_runs_again_until_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_tasks, "RESTART_SECONDS", 0.0)
    told: list[str] = []
    supervisor = TaskSupervisor(told.append)
    seen = []

    async def work() -> None:
        seen.append(supervisor.failing())
        if len(seen) < 3:
            raise ZeroDivisionError("a secret")

    asyncio.run(supervisor.run("work", work))
    assert seen == [{}, {"work": "ZeroDivisionError"}, {"work": "ZeroDivisionError"}]
    assert (told, supervisor.failing()) == (["work", "work"], {})
