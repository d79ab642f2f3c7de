"""The queued compiles that a dispatcher reads: all that may be queued, and none that is over."""

from __future__ import annotations

import asyncio

import msgspec
from service_parts import NEEDS, RedisServer
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
