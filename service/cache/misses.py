"""Why a request missed: the nearest entry that the cache had then, and what differs.

The components of a request are stored for a week after its miss, for the latest REQUESTS misses: at most 16 KiB each,
about 3 KiB for a transformer of 12 layers. They are compared with the latest entries of the same graph and the entries
used most recently, COMPARED_BYTES together, not with the whole cache. Entries younger than the miss do not explain it
and are left out.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from ...compiler.api.compiles import MissExplanation, NearestEntry
from ...compiler.errors import NotFound
from ...compiler.request.key_diff import compare
from ..admission.compile_request import CompileRequest
from ..base.budgets import FairWork
from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import Keys
from ..storage.redis.retry import redis_errors_logged
from ..storage.redis.scripts import Scripts
from .components import EntryComponents, IndexEntry, packed, unpacked

REQUESTS = 2000
GRAPHS = 10_000
SAME_GRAPH = 32
RECENT = 128
"""So many of the entries that may be evicted are compared, and so many of the pinned ones."""
COMPARED_BYTES = 8 << 20
"""What one explanation reads of entries' components."""
_TTL_SECONDS = 7 * 24 * 3600
_AGAIN_SECONDS = 1.0
COMPARED_SECONDS = 2.0
_AT_ONCE = 4
"""Entries compared between two looks at the time and at whether the client is there."""


class Misses:
    def __init__(
        self, redis: RedisClient, keys: Keys, scripts: Scripts, components: EntryComponents, work: FairWork
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._components = components
        self._scripts = scripts
        self._recorded: OrderedDict[str, float] = OrderedDict()
        """When this process recorded each key."""
        self._work = work

    async def record(self, request: CompileRequest) -> None:
        """Stores when a request missed, and its components; once for ranks that miss together. A failure of Redis is
        only logged."""
        graph, keys = request.components["graph"], self._keys
        now = time.monotonic()
        if now - self._recorded.get(request.key, 0.0) < _AGAIN_SECONDS:
            return
        with redis_errors_logged("miss_not_recorded", key=request.key):
            await self._scripts.record_miss(
                keys=[keys.miss(request.key), keys.misses, keys.graphs, keys.same_graph(graph)],
                args=[
                    request.key,
                    graph,
                    packed(request.components),
                    _TTL_SECONDS * 1000,
                    REQUESTS,
                    GRAPHS,
                    SAME_GRAPH,
                    keys.miss_prefix,
                    keys.same_graph_prefix,
                ],
            )
            self._recorded[request.key] = now
            if len(self._recorded) > REQUESTS:
                self._recorded.popitem(last=False)

    async def explain(self, key: str, *, gone: Callable[[], Awaitable[bool]]) -> MissExplanation:
        """The entry nearest to a request, of those that can be compared within COMPARED_SECONDS, the likeliest first.
        Ends early once `gone` says that nobody waits. Raises NotFound for a key that is neither offered nor missed
        lately."""
        keys = self._keys
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.get(keys.miss(key))
            pipe.zscore(keys.misses, key)
            pipe.hget(keys.index(key), "created")
            pipe.zrevrange(keys.lru, 0, RECENT - 1)
            pipe.zrevrange(keys.pinned, 0, RECENT - 1)
            record, asked_ms, created, used, pinned = await pipe.execute()
        components = unpacked(record) or await self._components.get(key)
        if not components:
            raise NotFound(
                f"nothing is known of request {key}",
                hint="Requests that missed are stored for a week, the latest of them",
            )
        same_graph = await self._redis.zrevrange(keys.same_graph(components["graph"]), 0, SAME_GRAPH - 1)
        near = [part.decode() for part in [*same_graph, *used, *pinned]]
        names = [name for name in dict.fromkeys(near) if name != key]
        until = asked_ms if asked_ms is not None else int(created) if created else None
        async with self._work.turn(keys.namespace):
            entries = await self._components.entries(names, until, COMPARED_BYTES)
            compared, best, end = 0, None, time.monotonic() + COMPARED_SECONDS
            while compared < len(entries) and time.monotonic() < end and not await gone():
                some = entries[compared : compared + _AT_ONCE]
                best = await asyncio.to_thread(_nearest, components, some, best)
                compared += len(some)
        return MissExplanation(
            key=key,
            published=created is not None,
            asked=None if asked_ms is None else asked_ms / 1000,
            compared=compared,
            nearest=best,
        )


def _nearest(
    components: dict[str, str], entries: list[IndexEntry], best: NearestEntry | None
) -> NearestEntry | None:
    """The nearest of `best` and `entries`; of those equally near, the youngest."""
    for entry in entries:
        if entry.components is None or ("levels" in entry.components) != ("levels" in components):
            continue
        compared = compare(components, entry.components)
        if best is None or (compared.distance, -entry.created) < (best.distance, -1000 * best.created):
            best = NearestEntry(
                key=entry.key,
                created=entry.created / 1000,
                seconds=entry.seconds,
                distance=compared.distance,
                differences=compared.differences,
                advice=compared.advice,
            )
    return best
