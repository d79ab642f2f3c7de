"""Why a request missed: the nearest entry that the cache had then, and what differs.

The components of a request are stored for a week after its miss, for the latest REQUESTS misses: at most 16 KiB each,
about 3 KiB for a transformer of 12 layers. They are compared with the latest entries of the same graph and the entries
used most recently, COMPARED_BYTES together, not with the whole cache. Entries younger than the miss do not explain it
and are left out.
"""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import Struct
from redis.asyncio import Redis

from ...compiler import decoding
from ...compiler.api.compiles import MissExplanation, NearestEntry
from ...compiler.errors import NotFound, RequestError
from ...compiler.request import codec
from ...compiler.request.key_diff import compare
from ..admission.compile_request import CompileRequest
from ..storage.redis.keys import Keys
from ..storage.redis.retry import redis_errors_logged
from ..storage.redis.scripts import Scripts

REQUESTS = 2000
GRAPHS = 10_000
SAME_GRAPH = 32
RECENT = 128
"""Of the entries that may be evicted and of the pinned ones each."""
COMPARED_BYTES = 8 << 20
"""What one explanation reads of entries' components; an entry has about 10 KB of them, and 200 KB at most."""
_TTL_SECONDS = 7 * 24 * 3600
_RECORD_BYTES = 16 << 10
_DECODED_BYTES = 1 << 20
_SHORT = 64
_THREADS = 2


class _IndexEntry(Struct, frozen=True):
    """A published artifact in the index. `created`: ms since 1970; `components`: JSON."""

    key: str
    created: int
    seconds: float
    components: bytes


class Misses:
    """Requests that missed, and the entries nearest to them."""

    def __init__(self, redis: Redis, keys: Keys, scripts: Scripts) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = scripts
        self._comparing = asyncio.Semaphore(_THREADS)

    async def record(self, request: CompileRequest) -> None:
        """Stores when a request missed, and its components. A failure of Redis is only logged."""
        graph, keys = request.components["graph"], self._keys
        with redis_errors_logged("miss_not_recorded", key=request.key):
            await self._scripts.record_miss(
                keys=[keys.miss(request.key), keys.misses, keys.graphs, keys.same_graph(graph)],
                args=[
                    request.key,
                    graph,
                    _packed(request.components),
                    _TTL_SECONDS * 1000,
                    REQUESTS,
                    GRAPHS,
                    SAME_GRAPH,
                    keys.miss_prefix,
                    keys.same_graph_prefix,
                ],
            )

    async def explain(self, key: str) -> MissExplanation:
        """The entry nearest to a request. Raises NotFound for a key that is neither offered nor missed lately."""
        keys = self._keys
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.get(keys.miss(key))
            pipe.zscore(keys.misses, key)
            pipe.hmget(keys.index(key), "created", "seconds", "components")
            pipe.zrevrange(keys.lru, 0, RECENT - 1)
            pipe.zrevrange(keys.pinned, 0, RECENT - 1)
            record, asked_ms, entry, used, pinned = await pipe.execute()
        own = _entry(key, entry)
        components = _unpacked(record) or (_components(own.components) if own else None)
        if components is None:
            raise NotFound(
                f"nothing is known of request {key}",
                hint="Requests that missed are stored for a week, the latest of them",
            )
        same_graph = await self._redis.zrevrange(keys.same_graph(components["graph"]), 0, SAME_GRAPH - 1)
        near = [part.decode() for part in [*same_graph, *used, *pinned]]
        names = [name for name in dict.fromkeys(near) if name != key]
        until = asked_ms if asked_ms is not None else own.created if own else None
        async with self._comparing:
            entries = await self._entries(names, until)
            nearest = await asyncio.to_thread(_nearest, components, entries)
        return MissExplanation(
            key=key,
            published=own is not None,
            asked=None if asked_ms is None else asked_ms / 1000,
            compared=len(entries),
            nearest=nearest,
        )

    async def _entries(self, names: list[str], until: float | None) -> list[_IndexEntry]:
        """Those of `names` that are older than `until`, ms: the first that fit into COMPARED_BYTES together."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hget(self._keys.index(name), "created")
                pipe.hstrlen(self._keys.index(name), "components")
            found = await pipe.execute()
        chosen, left = [], COMPARED_BYTES
        for name, created, size in zip(names, found[::2], found[1::2], strict=True):
            if created is not None and (until is None or int(created) < until) and size <= left:
                chosen.append(name)
                left -= size
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in chosen:
                pipe.hmget(self._keys.index(name), "created", "seconds", "components")
            found = await pipe.execute()
        entries = [_entry(name, fields) for name, fields in zip(chosen, found, strict=True)]
        return [entry for entry in entries if entry is not None]


def _nearest(components: dict[str, str], entries: list[_IndexEntry]) -> NearestEntry | None:
    """Of entries equally near, the youngest."""
    best: NearestEntry | None = None
    for entry in sorted(entries, key=lambda entry: -entry.created):
        theirs = _components(entry.components)
        if theirs is None:
            continue
        compared = compare(components, theirs)
        if best is None or compared.distance < best.distance:
            best = NearestEntry(
                key=entry.key,
                created=entry.created / 1000,
                seconds=entry.seconds,
                distance=compared.distance,
                differences=compared.differences,
            )
    return best


def _entry(key: str, fields: list[bytes | None]) -> _IndexEntry | None:
    created, seconds, components = fields
    if created is None or seconds is None or components is None:
        return None
    return _IndexEntry(key, int(created), float(seconds), components)


def _components(data: bytes) -> dict[str, str] | None:
    """None if it is damaged or names no graph, as for an imported artifact."""
    try:
        found = decoding.from_json(data, type=dict[str, str])
    except msgspec.MsgspecError:
        return None
    return found if "graph" in found else None


def _packed(components: dict[str, str]) -> bytes:
    """At most _RECORD_BYTES, or nearly: of a request that is larger, the digests and the short parts."""
    packed = codec.compress(msgspec.json.encode(components))
    if len(packed) <= _RECORD_BYTES:
        return packed
    short = {name: text for name, text in components.items() if len(text) <= _SHORT}
    return codec.compress(msgspec.json.encode(short))


def _unpacked(record: bytes | None) -> dict[str, str] | None:
    try:
        return _components(codec.decompress(record, _DECODED_BYTES)) if record else None
    except RequestError:
        return None
