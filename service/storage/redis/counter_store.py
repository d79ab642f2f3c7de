"""The counters that all gateways share, in Redis, for each namespace; the Lua scripts count, this module reads."""

from __future__ import annotations

import time

from redis.asyncio import Redis

from ...base.counters import GAUGES, Counters
from .keys import Keys

_SECONDS = ("seconds_saved", "seconds_spent")
_COUNTED = [
    name
    for name in Counters.__struct_fields__
    if name not in GAUGES and name not in _SECONDS and name != "fallbacks"
]
"""What Lua scripts count in `stats`."""


class CounterStore:
    """The counters of one namespace."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def read(self) -> Counters:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(self._keys.stats)
            pipe.hgetall(self._keys.fallbacks)
            pipe.hlen(self._keys.sizes)
            pipe.get(self._keys.total)
            pipe.zcount(self._keys.active, f"({time.time() * 1000:.0f}", "+inf")
            stats, fallbacks, entries, total, compiling = await pipe.execute()
        return Counters(
            **{name: int(stats.get(name.encode(), 0)) for name in _COUNTED},
            **{name: round(float(stats.get(name.encode(), 0)), 3) for name in _SECONDS},
            compiling=compiling,
            entries=int(entries),
            bytes_stored=int(total or 0),
            fallbacks={code.decode(): int(count) for code, count in fallbacks.items()},
        )

    async def count_miss(self) -> None:
        """A request that only looked, and found nothing."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hincrby(self._keys.stats, "requests", 1)
            pipe.hincrby(self._keys.stats, "misses", 1)
            await pipe.execute()

    async def count_fallbacks(self, code: str, count: int) -> None:
        await self._redis.hincrby(self._keys.fallbacks, code, count)
