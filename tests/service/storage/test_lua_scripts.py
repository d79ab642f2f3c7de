"""Lua scripts do not roll back, so none may write and then meet a number that Redis cannot add."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError
from service_parts import RedisServer
from torchrelay.service.storage.redis.keys import Keys
from torchrelay.service.storage.redis.scripts import Scripts

KEYS = Keys("torchrelay:")
KEY, DIGEST = "ab" * 32, "cd" * 32
BAD = ["nan", "-nan", "inf", "-inf", "1e400", "many", ""]


def everything(server: RedisServer) -> dict[bytes, bytes | None]:
    with server.client() as client:
        return {name: client.dump(name) for name in client.scan_iter()}


def call(server: RedisServer, script: str, keys: list[str], args: list[object]) -> Any:
    async def run() -> Any:
        async with Redis(unix_socket_path=str(server.socket)) as redis:
            return await getattr(Scripts(redis), script)(keys=keys, args=args)

    return asyncio.run(run())


def publish(server: RedisServer, **changes: object) -> object:
    """Under the lease `me:1`, of an artifact in the store."""
    numbers = {"size": 100, "seconds": "1.5", "searched": 0, "recalled": 0, "unverified": 0} | changes
    artifact = [DIGEST, numbers["size"], "store", "default", numbers["seconds"]]
    counts = [numbers[name] for name in ("searched", "recalled", "unverified")]
    return call(
        server,
        "publish",
        [*KEYS.entry_keys(KEY), *KEYS.compile_keys(KEY)],
        [KEY, 100, KEYS.blob(DIGEST), "me:1", *artifact, 60_000, KEYS.wake, *counts, "action", "x"],
    )


@pytest.fixture
def leased(redis_server: RedisServer) -> Iterator[RedisServer]:
    with redis_server.client() as client:
        client.set(KEYS.lease(KEY), "me:1")
        client.hset(KEYS.run(KEY), mapping={"started": 1, "joins": 2})
    yield redis_server


@pytest.mark.parametrize("field", ["size", "seconds", "searched", "recalled", "unverified"])
@pytest.mark.parametrize("value", BAD)
def test_a_number_that_cannot_be_added_publishes_nothing(leased: RedisServer, field: str, value: str) -> None:
    before = everything(leased)
    with pytest.raises(ResponseError, match="no number"):
        publish(leased, **{field: value})
    assert everything(leased) == before
    assert publish(leased) == [b"published", DIGEST.encode()]


@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", ""])
def test_an_entry_whose_seconds_are_damaged_is_served_and_removed(leased: RedisServer, seconds: str) -> None:
    publish(leased)
    with leased.client() as client:
        client.hset(KEYS.index(KEY), "seconds", seconds)
        found = call(leased, "lookup", [KEYS.index(KEY)], [KEYS.blob_prefix])
        assert found == [DIGEST.encode(), b"100", b"store", b"0.000000", None]
        args = [KEY, 100, KEYS.blob_prefix, DIGEST, 1000, "action", "x"]
        assert call(leased, "quarantine", KEYS.entry_keys(KEY), args) == 1
        assert client.get(KEYS.bytes) == b"0"


def test_a_limit_may_be_larger_than_any_number_that_is_added(redis_server: RedisServer) -> None:
    large = 10**18
    limits = [large, "default", "default", large, float(large), "", large, 0]
    args = [KEY, "me", 1000, 60_000, KEYS.wake, 1000, "body", "needs", "queue", "compiles", *limits]
    assert call(redis_server, "acquire", KEYS.compile_keys(KEY), args)[0] == b"queued"


@pytest.mark.parametrize("value", BAD)
def test_seconds_that_cannot_be_added_are_not_charged(redis_server: RedisServer, value: str) -> None:
    before = everything(redis_server)
    with pytest.raises(ResponseError, match="no number"):
        call(redis_server, "charge", [KEYS.spent, KEYS.stats], [value, 60_000])
    assert everything(redis_server) == before
