"""Counts again what the cache holds. Evictions and quotas go by sums that scripts keep: bytes of each namespace, and
bytes in Redis. A sum that a lost key or a hand made wrong would stay so, and evict what fits, or
nothing.

The index says what there is. Entries that the lists have and it has not are dropped from them, and the lists get what
they lack of it. Redis answers others meanwhile, since each call counts a few hundred entries.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import structlog

from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import Keys
from ..storage.redis.scripts import Scripts

log = structlog.get_logger(__name__)

_PAGE = 200
_LIFETIME_MS = 3_600_000
"""After which a count that was not finished ends."""


class Recount:
    """All namespaces of an installation. Raises RedisError."""

    def __init__(self, redis: RedisClient, keys: Keys, scripts: Scripts) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = scripts

    async def run(self, namespaces: list[str]) -> None:
        """Puts right, and logs, what was wrong. namespaces: all of them. A count that begins later ends this one."""
        recount, count = self._keys.recount, secrets.token_hex(8)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(recount)
            pipe.hset(recount, mapping={"id": count, self._keys.inline: 0})
            pipe.pexpire(recount, _LIFETIME_MS)
            await pipe.execute()
        for namespace in namespaces:
            keys, mended = self._keys.of(namespace), 0
            async for page in self._pages(keys):
                answer = await self._scripts.count_entries(
                    keys=[keys.lru, keys.pinned, keys.sizes, keys.total, keys.inline, recount],
                    args=[count, keys.index_prefix, *page],
                )
                if answer is None:
                    return
                mended += answer
            if mended:
                log.warning("cache_entries_mended", namespace=namespace, count=mended)
        wrong = await self._scripts.finish_count(keys=[recount, self._keys.inline], args=[count]) or []
        for name, was, found in zip(wrong[::3], wrong[1::3], wrong[2::3], strict=True):
            log.warning("cache_sum_mended", sum=name.decode(), was=was.decode(), now=found.decode())

    async def _pages(self, keys: Keys) -> AsyncIterator[list[bytes]]:
        """Every entry that is in one of the lists, some more than once. At least one page."""
        cursor: int | None = None
        while cursor != 0:
            cursor, found = await self._redis.hscan(keys.sizes, cursor or 0, count=_PAGE)
            yield list(found)
        for used in (keys.lru, keys.pinned):
            first = 0
            # the newest first: those that are evicted meanwhile do not move the others
            while listed := await self._redis.zrevrange(used, first, first + _PAGE - 1):
                yield listed
                first += _PAGE
