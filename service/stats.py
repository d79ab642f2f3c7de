"""The counters that all gateways share, in Redis; the Lua scripts count, this file reads."""

from __future__ import annotations

from msgspec import Struct
from redis.asyncio import Redis

from .scripts import Keys

COUNTERS = (
    "requests",
    "hits",
    "misses",
    "compiles",
    "coalesced",
    "failures",
    "refused",
    "overloaded",
    "fetches",
    "damaged",
    "evictions",
    "bytes_served",
)


class Snapshot(Struct, frozen=True):
    """Counters since the first day; `entries` and `bytes_stored` are the cache as it is now."""

    counters: dict[str, int | float]
    fallbacks: dict[str, int]


class StatsReply(Struct, frozen=True):
    """Answer of `GET /v1/stats`.

    requests = hits + misses + coalesced + refused + overloaded. A miss starts a compile (or ends there, with
    `wait=cache`); a coalesced request joined one; a refused one met a failure remembered from a moment ago.
    seconds_saved: compile seconds that hits and coalesced requests did not spend.
    """

    requests: int
    hits: int
    misses: int
    compiles: int
    coalesced: int
    failures: int
    seconds_saved: float
    refused: int
    overloaded: int
    fetches: int
    damaged: int
    evictions: int
    bytes_served: int
    entries: int
    bytes_stored: int
    fallbacks: dict[str, int]


class Stats:
    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def snapshot(self) -> Snapshot:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(self._keys.stats)
            pipe.hgetall(self._keys.fallbacks)
            pipe.hlen(self._keys.sizes)
            pipe.get(self._keys.total)
            stats, fallbacks, entries, total = await pipe.execute()
        counters: dict[str, int | float] = {name: int(stats.get(name.encode(), 0)) for name in COUNTERS}
        counters["seconds_saved"] = round(float(stats.get(b"seconds_saved", 0)), 3)
        counters["entries"] = int(entries)
        counters["bytes_stored"] = int(total or 0)
        return Snapshot(counters, {code.decode(): int(count) for code, count in fallbacks.items()})

    async def count_miss(self) -> None:
        """A request that only looked, and found nothing."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hincrby(self._keys.stats, "requests", 1)
            pipe.hincrby(self._keys.stats, "misses", 1)
            await pipe.execute()

    async def count_fallbacks(self, code: str, count: int) -> None:
        await self._redis.hincrby(self._keys.fallbacks, code, count)
