"""The queued compiles that a dispatcher reads: all that may be queued, and none that is over."""

from __future__ import annotations

import asyncio

import msgspec
from service_parts import NEEDS, RedisServer, StartGateway, busy_pool, follow, graph, post
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.compile.pending import PendingCompiles
from torchrelay.service.storage.redis.connections import connect
from torchrelay.service.storage.redis.keys import Keys

MANY = 6000


def test_however_many_are_queued_all_are_seen_and_those_that_are_over_forgotten(
    redis_server: RedisServer,
) -> None:
    async def scenario() -> None:
        redis, keys = connect(ServiceSettings(redis_url=redis_server.url)), Keys("torchrelay:")
        names = [f"{number:064x}" for number in range(MANY)]
        async with redis.pipeline(transaction=False) as pipe:
            for waits, name in enumerate(names):
                pipe.hset(keys.run(name), "needs", msgspec.msgpack.encode(NEEDS))
                pipe.zadd(keys.pending, {keys.lease(name): waits})
            await pipe.execute()
        pending = PendingCompiles(redis, keys, most=2 * MANY)
        for _ in range(2):
            assert [each.key for each in await pending.due()] == names
        await redis.zrem(keys.pending, *map(keys.lease, names[1:]))
        assert [each.key for each in await pending.due()] == names[:1]
        assert len(pending._known) == 1
        await redis.aclose()

    asyncio.run(scenario())


def test_whoever_waits_learns_how_many_are_ahead_and_jobs_come_later(
    start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    pool = busy_pool()
    gateway = start_gateway(pool)
    with gateway.http() as http:
        names = [post(http, graph(size)).json()["key"] for size in (8, 16, 24, 32)]

        async def by_a_job(name: str) -> None:
            keys, redis = Keys("torchrelay:"), connect(ServiceSettings(redis_url=redis_server.url))
            await redis.hset(keys.pending_priorities, mapping={keys.lease(name): "1"})
            await redis.aclose()

        asyncio.run(by_a_job(names[0]))
        waits = {name: follow(http, name) for name in names[2:]}
        told = {name: [next(events)[1:] for _ in range(2)] for name, events in waits.items()}
        for name, text in zip(
            names[2:], ("1 ahead of it in the queue", "2 ahead of it in the queue"), strict=True
        ):
            assert [(stage, data["detail"]) for stage, data in told[name]] == [
                ("queued", ""),
                ("queued", text),
            ]
        pool.idle = 4
        for events in waits.values():
            assert [stage for _, stage, _ in events][-1] == "done"
