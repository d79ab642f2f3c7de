"""The counters of all namespaces together, for whoever asks any gateway.

Scripts note the namespaces whose counters change; only these are read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from redis.typing import EncodableT, FieldT

from ....compiler import decoding
from ...base.counters import Counters, sum_counters
from .connections import RedisClient
from .counter_store import read_counters
from .keys import Keys

_FRESH_MS = 2_000
"""How old a sum may be before it is made again, for all gateways."""
_ALL_MS = 600_000
"""After this long all namespaces are read: an older version notes no changes."""
_BATCH = 100
_MAKING_MS = 10_000
"""After this long without a sum another gateway makes it."""
_PAUSE_SECONDS = 0.1


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
