"""The counters that all gateways share, in Redis, for each namespace; the Lua scripts count, this file reads."""

from __future__ import annotations

import time
from collections.abc import Iterable

from msgspec import Struct
from redis.asyncio import Redis

from ..compiler import decoding
from .scripts import Keys

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


NOW = frozenset({"compiling", "entries", "bytes_stored"})
"""Of Counters: what goes up and down."""


class Counters(Struct, frozen=True, kw_only=True):
    """What happened since the first day; `compiling` (running or waiting), `entries` and `bytes_stored` are now.

    requests = hits + misses + coalesced + refused + overloaded + over_quota. A miss starts a compile (or ends there,
    with `wait=cache`); a coalesced request joined one; a refused one met a failure remembered from a moment ago; a
    rate-limited one does not count. seconds_saved: compile seconds that hits and coalesced requests did not spend;
    seconds_spent: what workers did, failures included. problems_searched, problems_recalled: tuning problems of
    published compiles that were measured there, and those whose winner was known. fallbacks: graphs that clients
    compiled locally, by error code.
    """

    requests: int
    hits: int
    misses: int
    compiles: int
    coalesced: int
    failures: int
    seconds_saved: float
    seconds_spent: float
    refused: int
    overloaded: int
    over_quota: int
    rate_limited: int
    fetches: int
    damaged: int
    evictions: int
    bytes_served: int
    problems_searched: int
    problems_recalled: int
    compiling: int
    entries: int
    bytes_stored: int
    fallbacks: dict[str, int]


class StatsReply(Counters, frozen=True, kw_only=True):
    """Answer of `GET /v1/stats`: of all namespaces that were asked for together, and of each."""

    namespaces: dict[str, Counters]


class Stats:
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


def together(parts: Iterable[Counters]) -> Counters:
    """The sum of several namespaces' counters."""
    every = list(parts)
    sums: dict[str, int | float] = {
        name: sum(getattr(part, name) for part in every)
        for name in Counters.__struct_fields__
        if name != "fallbacks"
    }
    fallbacks: dict[str, int] = {}
    for part in every:
        for code, count in part.fallbacks.items():
            fallbacks[code] = fallbacks.get(code, 0) + count
    return decoding.convert({**sums, "fallbacks": fallbacks}, type=Counters)
