"""Counts again what the cache holds. Evictions and quotas go by sums that scripts keep: bytes of each namespace, of
all, and of those in Redis. A sum that a lost key or a hand made wrong would stay so, and evict what fits, or nothing.

The index says what there is. Entries that the lists have and it has not are dropped from them, and the lists get what
they lack of it. Redis answers others meanwhile, since each call counts a few hundred entries. A sum that changes while
it is counted is counted again, a few times; then it is left to the next sweep.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import structlog

from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import Keys
from ..storage.redis.scripts import Scripts

log = structlog.get_logger(__name__)

PAGE = 200
_TRIES = 5


class Recount:
    """All namespaces of an installation. Raises RedisError."""

    def __init__(self, redis: RedisClient, keys: Keys, scripts: Scripts) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = scripts

    async def run(self, namespaces: list[str]) -> None:
        """Puts right, and logs, what was wrong. namespaces: all of them."""
        for _ in range(_TRIES):
            if await self._mend([self._keys.of(namespace) for namespace in namespaces]):
                return

    async def _mend(self, namespaces: list[Keys]) -> bool:
        """Whether no sum changed meanwhile."""
        names = [keys.lru for keys in namespaces]
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.get(self._keys.bytes)
            pipe.get(self._keys.inline)
            for name in names:
                pipe.zscore(self._keys.namespace_bytes, name)
            before = await pipe.execute()
        counted = [await self.count(keys) for keys in namespaces]
        stored, inline = (sum(column) for column in zip(*counted, strict=True))
        now = [stored, inline, *(size for size, _ in counted)]
        sums = zip((self._keys.bytes, self._keys.inline, *names), before, now, strict=True)
        changed, *wrong = await self._scripts.mend_sums(
            keys=self._keys.sum_keys,
            args=[part for name, was, is_now in sums for part in (name, was or 0, is_now)],
        )
        for name, was, is_now in zip(wrong[::3], wrong[1::3], wrong[2::3], strict=True):
            log.warning("cache_sum_mended", sum=name.decode(), was=was.decode(), now=is_now.decode())
        return not changed

    async def count(self, keys: Keys) -> tuple[int, int]:
        """Bytes of a namespace's artifacts, and how many of them are in Redis."""
        counted: set[bytes] = set()
        mended = stored = inline = 0
        async for page in self._pages(keys):
            new = [key for key in page if key not in counted]
            counted.update(new)
            some, size, in_redis = await self._scripts.count_entries(
                keys=[keys.lru, keys.pinned, keys.sizes], args=[keys.index_prefix, *new]
            )
            mended, stored, inline = mended + some, stored + int(size), inline + int(in_redis)
        if mended:
            log.warning("cache_entries_mended", namespace=keys.namespace, count=mended)
        return stored, inline

    async def _pages(self, keys: Keys) -> AsyncIterator[list[bytes]]:
        """Every entry that is in one of the lists, some more than once."""
        cursor: int | None = None
        while cursor != 0:
            cursor, found = await self._redis.hscan(keys.sizes, cursor or 0, count=PAGE)
            yield list(found)
        for used in (keys.lru, keys.pinned):
            first = 0
            # the newest first: those that are evicted meanwhile do not move the others
            while listed := await self._redis.zrevrange(used, first, first + PAGE - 1):
                yield listed
                first += PAGE
