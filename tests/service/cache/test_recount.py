"""What evictions and quotas go by, bytes of a namespace and bytes in Redis, is counted again, also while it changes."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx2
import pytest
from redis.asyncio import Redis
from service_parts import RedisServer, Running, client_of, compiled, graph, post
from torchrelay.service.cache.recount import Recount
from torchrelay.service.storage.redis.keys import Keys
from torchrelay.service.storage.redis.scripts import Scripts
from waiting import wait_until

KEYS = Keys("torchrelay:")
RED = KEYS.of("red")


def books(server: RedisServer) -> dict[str, Any]:
    """All that scripts keep beside the index."""
    with server.client() as redis:
        sums: dict[str, Any] = {name: int(redis.get(name) or 0) for name in (KEYS.bytes, KEYS.inline)}
        sums |= {keys.lru: redis.zscore(KEYS.namespace_bytes, keys.lru) for keys in (KEYS, RED)}
        lists = {
            keys.namespace: (
                redis.hgetall(keys.sizes),
                set(redis.zrange(keys.lru, 0, -1)),
                set(redis.zrange(keys.pinned, 0, -1)),
            )
            for keys in (KEYS, RED)
        }
    return {**sums, **lists}


@pytest.fixture
def filled(gateway: Running, http: httpx2.Client) -> httpx2.Client:
    """Two namespaces with artifacts, one of them pinned."""
    body = {"name": "x", "roles": ["compile"], "namespace": "red"}
    with client_of(gateway.url, http.post("/v1/tokens", json=body).json()["token"]) as red:
        for size in (1, 2, 3):
            compiled(http, graph(size))
            compiled(red, graph(size))
    http.put(f"/v1/cache/{gateway.pool.calls[0]}/pin")
    return http


@pytest.mark.parametrize("wrong", [10**12, -5, 0, None])
def test_sums_that_are_wrong_are_counted_again(
    filled: httpx2.Client, redis_server: RedisServer, wrong: int | None
) -> None:
    right = books(redis_server)
    with redis_server.client() as redis:
        redis.delete(KEYS.bytes, KEYS.inline, KEYS.namespace_bytes)
        if wrong is not None:
            redis.mset({KEYS.bytes: wrong, KEYS.inline: wrong})
            redis.zadd(KEYS.namespace_bytes, {KEYS.lru: wrong, RED.lru: wrong})
    assert filled.post("/v1/cache/gc").json()["evicted"] == 0
    assert books(redis_server) == right
    assert all(post(filled, graph(size), wait="cache").status_code == 200 for size in (1, 2, 3))


def test_lists_follow_the_index(filled: httpx2.Client, redis_server: RedisServer) -> None:
    right = books(redis_server)
    with redis_server.client() as redis:
        lost, unlisted, resized = redis.hkeys(RED.sizes)
        redis.delete(RED.index(lost.decode()))
        redis.zrem(RED.lru, unlisted)
        redis.hset(RED.sizes, resized, 7)
        redis.hset(KEYS.sizes, "ab" * 32, 100)
        redis.zadd(KEYS.pinned, {"cd" * 32: 1})
    filled.post("/v1/cache/gc")
    sizes, lru, pinned = right["red"]
    size = int(sizes.pop(lost))
    for name in (RED.lru, KEYS.bytes, KEYS.inline):
        right[name] -= size
    right["red"] = sizes, lru - {lost}, pinned
    assert books(redis_server) == right


def test_a_key_of_one_namespace_may_not_count_again(
    gateway: Running, filled: httpx2.Client, redis_server: RedisServer
) -> None:
    body = {"name": "x", "roles": ["admin"], "namespace": "red"}
    token = filled.post("/v1/tokens", json=body).json()["token"]
    with redis_server.client() as redis, client_of(gateway.url, token) as red:
        redis.set(KEYS.bytes, 7)
        assert red.post("/v1/cache/gc").status_code == 200
        assert redis.get(KEYS.bytes) == b"7"


def test_a_gateway_counts_when_it_starts_and_another_does_not_so_soon(
    filled: httpx2.Client, redis_server: RedisServer, start_gateway
) -> None:
    right = books(redis_server)
    with redis_server.client() as redis:
        redis.set(KEYS.bytes, 7)
        with start_gateway().http() as second:
            wait_until(lambda: second.get("/livez").status_code == 200, seconds=20)
            assert redis.get(KEYS.bytes) == b"7" and redis.ttl(KEYS.swept) > 3600
        redis.delete(KEYS.swept)
        start_gateway()
        wait_until(lambda: books(redis_server) == right, seconds=20)


async def churn(redis: Redis, dice: random.Random, scripts: Scripts, counting: asyncio.Task[None]) -> int:
    """Publish and remove until the count is over; how often."""
    steps = 0
    while not counting.done():
        keys, key = dice.choice((KEYS, RED)), f"{dice.randrange(400):064x}"
        if dice.random() < 0.5:
            await scripts.remove(keys=keys.entry_keys(key), args=[key, 10, keys.blob_prefix, "action", "x"])
        else:
            await put(redis, scripts, keys, key, dice)
        steps += 1
    return steps


async def put(redis: Redis, scripts: Scripts, keys: Keys, key: str, dice: random.Random) -> None:
    digest, place = f"{dice.randrange(1 << 60):064x}", dice.choice(("redis", "store"))
    await redis.set(keys.blob(digest), b"x", px=60_000)
    entry = [digest, dice.randrange(1, 1000), place, keys.namespace, "1.0"]
    await scripts.publish(
        keys=[*keys.entry_keys(key), *keys.compile_keys(key)],
        args=[key, 10, keys.blob(digest), "import", *entry, 60_000, keys.wake, 0, 0, 0, "action", "x"],
    )


async def counted_while_it_changes(server: RedisServer, seed: int) -> int:
    dice = random.Random(seed)
    client: Any = Redis(unix_socket_path=str(server.socket))
    async with client as redis:
        scripts = Scripts(redis)
        for number in range(400):
            await put(redis, scripts, dice.choice((KEYS, RED)), f"{number:064x}", dice)
        counting = asyncio.create_task(Recount(redis, KEYS, scripts).run(["default", "red"]))
        return await churn(redis, dice, scripts, counting)


def check_sums(server: RedisServer) -> None:
    """They are those of the index."""
    inline, stored = 0, {}
    with server.client() as redis:
        for keys in (KEYS, RED):
            entries = [
                redis.hmget(name, "size", "place") for name in redis.keys(keys.index_prefix + "[0-9a-f]*")
            ]
            stored[keys.lru.encode()] = sum(int(size) for size, _ in entries)
            inline += sum(int(size) for size, place in entries if place == b"redis")
        assert {name: redis.zscore(KEYS.namespace_bytes, name) or 0 for name in stored} == stored
        assert int(redis.get(KEYS.bytes)) == sum(stored.values())
        assert int(redis.get(KEYS.inline)) == inline


@pytest.mark.parametrize("seed", range(4))
def test_what_comes_and_goes_meanwhile_leaves_the_sums_right(
    redis_server: RedisServer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrelay.service.cache.recount.PAGE", 5)
    assert asyncio.run(counted_while_it_changes(redis_server, seed)) > 50
    check_sums(redis_server)


def test_a_sum_that_changes_while_it_is_counted_is_counted_again(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        client: Any = Redis(unix_socket_path=str(redis_server.socket))
        async with client as redis:
            scripts, dice = Scripts(redis), random.Random(0)
            for number in range(50):
                await put(redis, scripts, KEYS, f"{number:064x}", dice)
            await redis.zincrby(KEYS.namespace_bytes, 10**12, KEYS.lru)
            await redis.incrby(KEYS.bytes, 10**12)
            recount, left = Recount(redis, KEYS, scripts), [2]
            count = recount.count

            async def count_and_publish(keys: Keys) -> tuple[int, int]:
                counted = await count(keys)
                if left[0]:
                    left[0] -= 1
                    await put(redis, scripts, KEYS, f"{100 + left[0]:064x}", dice)
                return counted

            monkeypatch.setattr(recount, "count", count_and_publish)
            await recount.run(["default", "red"])
            assert left == [0]

    asyncio.run(scenario())
    check_sums(redis_server)
