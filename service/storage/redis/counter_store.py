"""The counters that all gateways share, in Redis, for each namespace; the Lua scripts count, this module reads."""

from __future__ import annotations

import time

from redis.asyncio import Redis

from ...base.counters import Counters
from .keys import Keys

_SCRIPTS_COUNT = (
    "requests",
    "hits",
    "misses",
    "compiles",
    "coalesced",
    "failures",
    "refused",
    "overloaded",
    "over_quota",
    "rate_limited",
    "fetches",
    "damaged",
    "evictions",
    "bytes_served",
    "problems_searched",
    "problems_recalled",
)
_SCRIPTS_SUM = ("seconds_saved", "seconds_spent")


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
        counted = {name: int(stats.get(name.encode(), 0)) for name in _SCRIPTS_COUNT}
        summed = {name: round(float(stats.get(name.encode(), 0)), 3) for name in _SCRIPTS_SUM}
        told = {code.decode(): int(count) for code, count in fallbacks.items()}
        return Counters(
            **counted,
            **summed,
            compiling=compiling,
            entries=int(entries),
            bytes_stored=int(total or 0),
            fallbacks=told,
        )

    async def count_miss(self) -> None:
        """A request that only looked, and found nothing."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hincrby(self._keys.stats, "requests", 1)
            pipe.hincrby(self._keys.stats, "misses", 1)
            await pipe.execute()

    async def count_fallbacks(self, code: str, count: int) -> None:
        await self._redis.hincrby(self._keys.fallbacks, code, count)
