"""Requests that tuning jobs may name share one bound, whichever namespaces they are of. A real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from service_parts import RedisServer
from torchrelay.service.admission import saved_requests
from torchrelay.service.admission.saved_requests import SavedRequests
from torchrelay.service.storage.redis.keys import Keys
from torchrelay.service.storage.redis.scripts import Scripts

DEFAULT = Keys("torchrelay:")
RED = DEFAULT.of("red")
Of = Callable[[Keys], SavedRequests]


@pytest.fixture(autouse=True)
def room_for_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_requests, "BYTES", 3000)


def with_redis(server: RedisServer, scenario: Callable[[Of], Awaitable[None]]) -> None:
    async def run() -> None:
        client: Any = Redis(unix_socket_path=str(server.socket))
        async with client as redis:
            scripts = Scripts(redis)
            await scenario(lambda keys: SavedRequests(redis, keys, scripts))

    asyncio.run(run())


def check_sums(server: RedisServer, names: list[str]) -> None:
    with server.client() as redis:
        bodies = {name: redis.strlen(name) for name in names}
        assert {name.decode() for name in redis.zrange(DEFAULT.saved, 0, -1)} == set(names)
        assert {name.decode(): int(n) for name, n in redis.hgetall(DEFAULT.saved_sizes).items()} == bodies
        assert int(redis.get(DEFAULT.saved_total)) == sum(bodies.values())
        assert len(redis.keys("*:saved:*")) == len(names)


def test_the_oldest_of_all_namespaces_make_room(redis_server: RedisServer) -> None:
    async def scenario(of: Of) -> None:
        default, red = of(DEFAULT), of(RED)
        await default.save("a", b"a" * 1000)
        for key in ("a", "b", "c"):
            await red.save(key, key.encode() * 1000)
        assert await default.get("a") is None
        assert [await red.get(key) for key in ("a", "b", "c")] == [b"a" * 1000, b"b" * 1000, b"c" * 1000]
        await red.save("a", b"a" * 1200)  # it is the latest now
        assert await red.get("b") is None
        await default.save("d", b"d" * 5000)  # alone it may be larger

    with_redis(redis_server, scenario)
    check_sums(redis_server, [DEFAULT.saved_request("d")])
