"""Redis fails over: the primary becomes a replica, and its name leads to another one."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from failover_parts import FailoverRedis
from service_parts import ArtifactPool, RedisServer, StartGateway, compiled, graph, post
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.storage.redis import notifications
from torchrelay.service.storage.redis.connections import connect
from torchrelay.service.storage.redis.keys import Keys
from waiting import until, wait_until


@pytest.fixture
def successor() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.close()


def test_a_gateway_finds_the_new_primary_without_a_restart(
    start_gateway: StartGateway, redis_server: RedisServer, successor: RedisServer, tmp_path: Path
) -> None:
    name = tmp_path / "redis.sock"
    name.symlink_to(redis_server.socket)
    gateway = start_gateway(ArtifactPool(), redis_url=f"unix://{name}")
    with gateway.http() as http, redis_server.client() as old, successor.client() as new:
        data = compiled(http, graph(1))
        for key in old.scan_iter():
            new.restore(key, 0, old.dump(key))
        old.replicaof("127.0.0.1", "1")  # it is read-only, and follows nobody
        name.unlink()
        name.symlink_to(successor.socket)
        answers: list[httpx2.Response] = [post(http, graph(1)) for _ in range(3)]
        assert [answer.content for answer in answers] == [data] * 3
        http.post("/v1/tokens", json={"name": "ada", "roles": ["read"]}).raise_for_status()
        compiled(http, graph(2))
        assert new.hget("torchrelay:stats", "compiles") == b"2"


def test_notifications_come_from_the_successor_of_a_primary_that_falls_silent(
    redis_server: RedisServer, successor: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = tmp_path / "redis.sock"
    name.symlink_to(redis_server.socket)
    monkeypatch.setattr(notifications, "QUIET_SECONDS", 0.2)
    keys = Keys("torchrelay:")

    async def main() -> None:
        redis = connect(ServiceSettings(redis_url=f"unix://{name}"))
        channel = notifications.Notifications(redis, keys)
        listening = asyncio.create_task(channel.listen())

        async def reached(server: RedisServer, event: asyncio.Event) -> None:
            with server.client() as client:
                await until(lambda: client.publish(keys.wake, "a key"))
            await event.wait()

        async with (
            channel.woken("a key") as event,
            channel.woken("another") as reconnected,
            asyncio.timeout(30),
        ):
            await reached(redis_server, event)
            for each in (event, reconnected):
                each.clear()
            await asyncio.sleep(1)  # quiet, and alive
            assert not reconnected.is_set()
            name.unlink()
            name.symlink_to(successor.socket)
            redis_server.signal(signal.SIGSTOP)
            await reached(successor, event)
        redis_server.signal(signal.SIGCONT)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await redis.aclose()

    asyncio.run(main())


def test_a_load_balancer_keeps_a_gateway_that_answers_hits_from_a_replica(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    with contextlib.closing(FailoverRedis(tmp_path, down_after_ms=600_000)) as redis:
        redis.start()
        gateway = start_gateway(ArtifactPool(), redis_url=redis.url, redis_timeout_seconds=1.0)
        with gateway.http() as http:
            compiled(http, graph(1))
            assert http.get("/readyz?workers=false").status_code == 200
            redis.kill_primary()
            wait_until(lambda: http.get("/readyz").status_code == 503, seconds=30)
            assert post(http, graph(1)).status_code == 200
            assert http.get("/readyz?workers=false").status_code == 200
