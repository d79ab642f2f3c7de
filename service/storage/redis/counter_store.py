"""The counters that all gateways share, in Redis, for each namespace; the Lua scripts count, this module reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any

import msgspec

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
"""How old the sum may be before a gateway makes it again for all; or, with many namespaces, so long for each."""
_FRESH_MS_EACH = 300
_BATCH = 100


async def read_counters(redis: RedisClient, keys: Keys, namespaces: list[str]) -> dict[str, Counters]:
    """Counters by namespace, in one round trip. Raises RedisError."""
    async with redis.pipeline(transaction=False) as pipe:
        for own in map(keys.of, namespaces):
            pipe.hgetall(own.stats)
            pipe.hgetall(own.fallbacks)
            pipe.hlen(own.sizes)
            pipe.zscore(own.namespace_bytes, own.lru)
            pipe.zcount(own.active, f"({time.time() * 1000:.0f}", "+inf")
        answers = iter(await pipe.execute())
    return {name: _counters(*islice(answers, 5)) for name in namespaces}


def _counters(
    stats: dict[bytes, bytes],
    fallbacks: dict[bytes, bytes],
    entries: int,
    bytes_stored: float | None,
    compiling: int,
) -> Counters:
    counted = {name: int(stats.get(name.encode(), 0)) for name in _COUNTED}
    seconds: dict[str, Any] = {name: round(float(stats.get(name.encode(), 0)), 3) for name in _SECONDS}
    return Counters(
        **counted,
        **seconds,
        compiling=compiling,
        entries=entries,
        bytes_stored=int(bytes_stored or 0),
        fallbacks={code.decode(): int(count) for code, count in fallbacks.items()},
    )


async def read_sum(
    redis: RedisClient, keys: Keys, namespaces: Callable[[], Awaitable[list[str]]]
) -> Counters:
    """The sum of all namespaces' counters, as old as `_FRESH_MS` and `_FRESH_MS_EACH` say. namespaces: lists all of
    them. Raises RedisError."""
    if (fresh := await redis.get(keys.summed)) is not None:
        return decoding.from_msgpack(fresh, type=Counters)
    # a caller that gives up meanwhile leaves the sum to the next one
    return await asyncio.shield(_add_up(redis, keys, namespaces))


async def _add_up(redis: RedisClient, keys: Keys, namespaces: Callable[[], Awaitable[list[str]]]) -> Counters:
    names = await namespaces()
    parts: list[Counters] = []
    for first in range(0, len(names), _BATCH):
        parts += (await read_counters(redis, keys, names[first : first + _BATCH])).values()
    summed = sum_counters(parts)
    fresh_ms = max(_FRESH_MS, _FRESH_MS_EACH * len(names))
    await redis.set(keys.summed, msgspec.msgpack.encode(summed), px=fresh_ms)
    return summed
