"""The counters that all gateways share, in Redis, for each namespace; the Lua scripts count, this module reads.

Scripts note the namespaces whose counters change; only these are read again for the sum of all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any

import msgspec
from redis.typing import EncodableT, FieldT

from ....compiler import decoding
from ...base.counters import GAUGES, Counters, sum_counters
from .connections import RedisClient
from .keys import Keys

_SECONDS = ("seconds_saved", "seconds_spent")
_COUNTED = [
    name
    for name in Counters.__struct_fields__
    if name not in GAUGES and name not in _SECONDS and name != "fallbacks"
]
"""What Lua scripts count in `stats`."""
_FRESH_MS = 2_000
"""How old a sum may be before it is made again, for all gateways."""
_ALL_MS = 600_000
"""After this long all namespaces are read again: a process may have ended while it added up."""
_BATCH = 100
_MAKING_MS = 10_000
"""After this long without a sum another gateway makes it."""
_PAUSE_SECONDS = 0.1


async def read_counters(redis: RedisClient, keys: Keys, namespaces: list[str]) -> dict[str, Counters]:
    """Counters by namespace, in one round trip. Raises RedisError."""
    async with redis.pipeline(transaction=False) as pipe:
        for each in map(keys.of, namespaces):
            pipe.hgetall(each.stats)
            pipe.hgetall(each.fallbacks)
            pipe.hlen(each.sizes)
            pipe.get(each.total)
            pipe.zcount(each.active, f"({time.time() * 1000:.0f}", "+inf")
        found = iter(await pipe.execute())
    return {name: _counters(*islice(found, 5)) for name in namespaces}


def _counters(
    stats: dict[bytes, bytes],
    fallbacks: dict[bytes, bytes],
    entries: int,
    total: bytes | None,
    compiling: int,
) -> Counters:
    counted = {name: int(stats.get(name.encode(), 0)) for name in _COUNTED}
    seconds: dict[str, Any] = {name: round(float(stats.get(name.encode(), 0)), 3) for name in _SECONDS}
    return Counters(
        **counted,
        **seconds,
        compiling=compiling,
        entries=entries,
        bytes_stored=int(total or 0),
        fallbacks={code.decode(): int(count) for code, count in fallbacks.items()},
    )


async def read_sum(
    redis: RedisClient, keys: Keys, namespaces: Callable[[], Awaitable[list[str]]]
) -> Counters:
    """namespaces: lists all of them. Raises RedisError."""
    while True:
        if (fresh := await redis.get(keys.summed)) is not None:
            return decoding.from_msgpack(fresh, type=Counters)
        if await redis.set(keys.summing, 1, nx=True, px=_MAKING_MS):
            # whoever asked may give up meanwhile, and others wait for it
            return await asyncio.shield(_add_up(redis, keys, namespaces))
        await asyncio.sleep(_PAUSE_SECONDS)


async def _add_up(redis: RedisClient, keys: Keys, namespaces: Callable[[], Awaitable[list[str]]]) -> Counters:
    async with redis.pipeline(transaction=True) as pipe:
        pipe.exists(keys.sums)
        pipe.smembers(keys.changed)
        pipe.delete(keys.changed)  # what changes from now on is read the next time
        known, changed, _ = await pipe.execute()
    names = [keys.counted(stats.decode()) for stats in changed] if known else await namespaces()
    found: dict[str, Counters] = {}
    for first in range(0, len(names), _BATCH):
        found |= await read_counters(redis, keys, names[first : first + _BATCH])
    async with redis.pipeline(transaction=True) as pipe:
        if found:
            packed: dict[FieldT, EncodableT] = {
                name: msgspec.msgpack.encode(counters) for name, counters in found.items()
            }
            pipe.hset(keys.sums, mapping=packed)
        if not known:
            pipe.pexpire(keys.sums, _ALL_MS)
        pipe.hvals(keys.sums)
        pipe.zcard(keys.pending)
        *_, each, compiling = await pipe.execute()
    summed = sum_counters(decoding.from_msgpack(counters, type=Counters) for counters in each)
    summed = msgspec.structs.replace(summed, compiling=compiling)  # compiles can end without a script
    async with redis.pipeline(transaction=True) as pipe:
        pipe.set(keys.summed, msgspec.msgpack.encode(summed), px=_FRESH_MS)
        pipe.delete(keys.summing)
        await pipe.execute()
    return summed


class CounterStore:
    """Counts for one namespace what no script counts."""

    def __init__(self, redis: RedisClient, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def count_fallbacks(self, code: str, count: int) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hincrby(self._keys.fallbacks, code, count)
            pipe.sadd(self._keys.changed, self._keys.stats)
            await pipe.execute()
