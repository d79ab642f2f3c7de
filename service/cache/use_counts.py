"""Uses of artifacts, and what clients compiled locally, counted in memory and written to Redis each second.

So a hit only reads, and is answered while Redis takes no writes: it is a replica, or its disk is full. What was counted
waits until it takes them again. A process that crashes loses what it has not written: a second's counts as a rule. A
write whose answer was lost may count twice.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import structlog
from redis.exceptions import RedisError

from ..storage.redis.keys import Keys
from ..storage.redis.scripts import Scripts

log = structlog.get_logger(__name__)

_SECONDS = 1.0
_MOST_KEYS = 1 << 16
"""Artifacts whose last use waits to be written; of more, those used last. The sums count all."""
_BATCH = 500
_Sums = defaultdict[str, float]


class _Batch(NamedTuple):
    """What one script call writes."""

    namespace: str
    sums: _Sums
    used: dict[str, float]


class UseCounts:
    def __init__(self, keys: Keys, scripts: Scripts) -> None:
        self._keys = keys
        self._scripts = scripts
        self._sums: dict[str, _Sums] = {}
        """Namespace to what was counted there."""
        self._used: OrderedDict[tuple[str, str], float] = OrderedDict()
        """Namespace and cache key to the time of the last use, on the monotonic clock."""
        self._writing = asyncio.Lock()

    def count(self, namespace: str, sums: Mapping[str, float]) -> None:
        """Adds to the counters that are named (Counters), or to `fallback:<code>`."""
        known = self._sums.setdefault(namespace, _Sums(float))
        for name, number in sums.items():
            known[name] += number

    def used(self, namespace: str, key: str) -> None:
        self._note(namespace, key, time.monotonic())

    async def write(self) -> None:
        """Writes what was counted. Raises RedisError, and what is left then waits for the next call."""
        async with self._writing:
            left = self._batches()
            try:
                while left:
                    await self._record(left[-1])
                    left.pop()
            finally:
                for batch in left:
                    self.count(batch.namespace, batch.sums)
                    for key, at in batch.used.items():
                        self._note(batch.namespace, key, at)

    async def run(self) -> None:
        """Writes each second until cancelled."""
        refused = False
        while True:
            await asyncio.sleep(_SECONDS)
            try:
                await self.write()
            except RedisError as error:
                if not refused:
                    log.warning("uses_not_written", error=str(error))
                refused = True
            else:
                if refused:
                    log.info("uses_written_again")
                refused = False

    def _note(self, namespace: str, key: str, at: float) -> None:
        self._used[namespace, key] = max(at, self._used.pop((namespace, key), at))
        if len(self._used) > _MOST_KEYS:
            self._used.popitem(last=False)

    def _batches(self) -> list[_Batch]:
        """All that was counted, which is not here any more."""
        batches = [_Batch(namespace, sums, {}) for namespace, sums in self._sums.items()]
        open_batches = {batch.namespace: batch for batch in batches}
        for (namespace, key), at in self._used.items():
            batch = open_batches.get(namespace)
            if batch is None or len(batch.used) >= _BATCH:
                batch = open_batches[namespace] = _Batch(namespace, _Sums(float), {})
                batches.append(batch)
            batch.used[key] = at
        self._sums, self._used = {}, OrderedDict()
        return batches

    async def _record(self, batch: _Batch) -> None:
        keys, now = self._keys.of(batch.namespace), time.monotonic()
        ages = [part for key, at in batch.used.items() for part in (key, int((now - at) * 1000))]
        await self._scripts.record_uses(
            keys=[keys.lru, keys.pinned, keys.stats, keys.fallbacks],
            args=[len(batch.sums), *(part for pair in batch.sums.items() for part in pair), *ages],
        )
