"""Parts of different releases: what is refused says which part to upgrade (docs/decisions/0038)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from redis.asyncio import Redis
from service_parts import (
    TARGET,
    TOOLCHAIN,
    RedisServer,
    StartGateway,
    compiled,
    follow,
    free_port,
    graph,
    post,
)
from torchrelay.compiler import decoding
from torchrelay.compiler.api.compiles import WorkerInfo
from torchrelay.compiler.api.protocols import PROTOCOL_HEADER, Protocol
from torchrelay.compiler.errors import ProtocolMismatch
from torchrelay.service.compile.registry import DispatcherInfo
from torchrelay.service.storage.redis import protocol
from torchrelay.service.storage.redis.keys import Keys
from torchrelay.service.storage.redis.scripts import Scripts
from training_parts import TrainingPool, begun, ended
from waiting import wait_until

KEYS = Keys("torchrelay:")


@pytest.mark.parametrize(("header", "status"), [("0", 426), ("1", 404), ("2", 404), ("x", 422), ("-1", 422)])
def test_a_gateway_refuses_clients_that_are_too_old(http: httpx2.Client, header: str, status: int) -> None:
    answer = http.get(f"/v1/artifacts/{'ab' * 32}", headers={PROTOCOL_HEADER: header})
    assert (answer.status_code, answer.headers[PROTOCOL_HEADER]) == (status, "1")
    if status == 426:
        told = answer.json()["error"]
        assert (told["code"], told["hint"]) == ("protocol_mismatch", "Upgrade the client")


@pytest.fixture
def service_command(settings: dict[str, Any]) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a process of the service; what is left of them is killed after the test."""
    given = {f"TORCHRELAY_SERVICE_{name.upper()}": str(value) for name, value in settings.items()}
    with contextlib.ExitStack() as started:

        def start(*arguments: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "torchrelay.service", *arguments, "--port", str(free_port())]
            process = subprocess.Popen(command, env={**os.environ, **given}, stderr=subprocess.PIPE)
            started.callback(process.wait)
            started.callback(process.kill)
            return process

        yield start


ROLES = [("gateway",), ("dispatcher", "--ray", "127.0.0.1:1")]


@pytest.mark.parametrize("role", ROLES)
def test_a_process_that_is_too_old_for_redis_does_not_start(
    redis_server: RedisServer, service_command: Callable[..., subprocess.Popen[bytes]], role: tuple[str, ...]
) -> None:
    stated = {b"protocol": b"3", b"oldest": b"2"}
    redis_server.client().hset(KEYS.identity, mapping=stated)
    _, errors = (process := service_command(*role)).communicate(timeout=60)
    assert (process.returncode, b"Upgrade this process" in errors) == (3, True)  # uvicorn.Server.serve
    assert redis_server.client().hgetall(KEYS.identity) == stated


@pytest.mark.parametrize("away", [False, True], ids=["while it runs", "while redis is away"])
def test_a_process_that_is_too_old_ends_once_redis_says_so(
    redis_server: RedisServer,
    service_command: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    away: bool,
) -> None:
    if away:
        redis_server.stop()
    process = service_command("gateway", "--credentials", str(tmp_path / "credentials.json"))
    wait_until((tmp_path / "credentials.json").exists, seconds=60)  # it answers
    if away:
        redis_server.start()
    wait_until(lambda: redis_server.client().hexists(KEYS.identity, "protocol"), seconds=60)
    for newer in (Protocol(2, 1), Protocol(3, 2)):
        assert process.poll() is None
        monkeypatch.setattr(protocol, "REDIS", newer)
        join(redis_server)
    _, errors = process.communicate(timeout=60)
    assert b"Upgrade this process" in errors


def join(server: RedisServer) -> None:
    async def run() -> None:
        async with Redis(unix_socket_path=str(server.socket)) as redis:
            await protocol.join(KEYS, Scripts(redis))

    asyncio.run(run())


def test_redis_holds_the_newest_protocol_and_the_oldest_that_may_join(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = [(b"1", b"1"), (b"2", b"1"), (b"2", b"1"), (b"3", b"2")]
    for joins, found in zip([(1, 1), (2, 1), (1, 1), (3, 2)], stated, strict=True):
        monkeypatch.setattr(protocol, "REDIS", Protocol(*joins))
        join(redis_server)
        assert tuple(redis_server.client().hmget(KEYS.identity, "protocol", "oldest")) == found
    for joins, which in {(1, 1): "Upgrade this process", (5, 4): "Start a release between"}.items():
        monkeypatch.setattr(protocol, "REDIS", Protocol(*joins))
        with pytest.raises(ProtocolMismatch, match=which):
            join(redis_server)
    assert tuple(redis_server.client().hmget(KEYS.identity, "protocol", "oldest")) == (b"3", b"2")


def test_a_compile_of_another_revision_is_left_to_the_dispatchers_of_that(
    start_gateway: StartGateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrelay.compiler.request.schema.REVISION", "1.2")
    redis, name = redis_server.client(), KEYS.dispatcher("other")
    worker = WorkerInfo("w", TOOLCHAIN, TARGET, "idle", 0)
    redis.set(name, msgspec.msgpack.encode(DispatcherInfo("other", "", [worker], [], "1.2")))
    redis.zadd(KEYS.dispatchers, {"other": 1e15})
    running = start_gateway()
    with running.http() as http:
        stream = follow(http, post(http, graph()).json()["key"])
        next(stream)
        time.sleep(0.7)  # this dispatcher sees it several times
        assert running.pool.calls == []
        redis.delete(name)
        *_, (_, stage, told) = stream
    assert (stage, told["error"]["code"]) == ("failed", "schema_mismatch")
    assert running.pool.calls == []


def test_a_compile_that_another_release_queued_stays_for_its_dispatchers(
    start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    redis, running = redis_server.client(), start_gateway()
    lease = KEYS.lease("ab" * 32)
    toolchain = {**msgspec.to_builtins(TOOLCHAIN), "of_the_next_release": 1}
    needs = {"toolchain": toolchain, "target": TARGET}
    redis.hset(KEYS.run("ab" * 32), "needs", msgspec.msgpack.encode(needs))
    now = time.time() * 1000
    redis.zadd(KEYS.pending, {lease: now})
    with running.http() as http:
        compiled(http, graph())  # it goes on with what it can read
    assert redis.zscore(KEYS.pending, lease) == now


def test_a_job_that_asks_for_what_this_release_does_not_know_hides_no_other(
    start_gateway: StartGateway, redis_server: RedisServer, tmp_path: Path
) -> None:
    redis, running = redis_server.client(), start_gateway(TrainingPool(tmp_path))
    with running.http() as http:
        names = [begun(http), begun(http)]
        for name in names:
            ended(http, name)
        stored = KEYS.jobs["train"].job(names[0])
        job = decoding.from_json(redis.hget(stored, "job"))
        job["spec"]["of_the_next_release"] = 1
        redis.hset(stored, "job", msgspec.json.encode(job))
        assert [each["id"] for each in http.get("/v1/trains").json()["jobs"]] == names[1:]
