"""The counters that all gateways share, in Redis, for each namespace; the Lua scripts count, this module reads."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

from ...base.counters import GAUGES, Counters
from .connections import RedisClient
from .keys import Keys

_SECONDS = ("seconds_saved", "seconds_spent")
_COUNTED = [
    name
    for name in Counters.__struct_fields__
    if name not in GAUGES and name not in _SECONDS and name != "fallbacks"
]
"""What Lua scripts count in `stats`."""


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
