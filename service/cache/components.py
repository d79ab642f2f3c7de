"""What the keys of published artifacts were made of, for explanations: compressed, in Redis, the latest of them.

All namespaces share `explain_bytes`. Of an artifact whose components had to make room, everything else is still known.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from ...compiler import decoding
from ...compiler.errors import RequestError
from ...compiler.request import codec
from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import Keys
from ..storage.redis.scripts import Scripts

_RECORD_BYTES = 16 << 10
_DECODED_BYTES = 1 << 20
_SHORT = 64
_RATIO = 8
"""What is compressed counts as so many times its size when it is read."""


class IndexEntry(Struct, frozen=True):
    """A published artifact with its components. `created`: ms since 1970."""

    key: str
    created: int
    seconds: float
    components: dict[str, str] | None


class EntryComponents:
    """Those of one namespace's artifacts. Every method raises RedisError."""

    def __init__(self, redis: RedisClient, keys: Keys, scripts: Scripts, *, limit: int) -> None:
        """limit: bytes in Redis, of all namespaces together."""
        self._redis = redis
        self._keys = keys
        self._scripts = scripts
        self._limit = limit

    async def put(self, key: str, components: dict[str, str]) -> None:
        keys = self._keys
        await self._scripts.describe(
            keys=[keys.components(key), keys.described, keys.described_bytes],
            args=[packed(components), self._limit],
        )

    async def get(self, key: str) -> dict[str, str]:
        """Empty if they are not known."""
        (entry,) = await self._read([key])
        return (entry.components if entry else None) or {}

    async def entries(self, names: list[str], until: float | None, limit: int) -> list[IndexEntry]:
        """Those of `names` that are older than `until`, ms, and have components: the first that fit into `limit`
        bytes together."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hget(self._keys.index(name), "created")
                pipe.strlen(self._keys.components(name))
            found = await pipe.execute()
        chosen, left = [], limit
        for name, created, compressed in zip(names, found[::2], found[1::2], strict=True):
            size = _RATIO * compressed
            if created is not None and size and (until is None or int(created) < until) and size <= left:
                chosen.append(name)
                left -= size
        return [entry for entry in await self._read(chosen) if entry is not None]

    async def _read(self, names: list[str]) -> list[IndexEntry | None]:
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hmget(self._keys.index(name), "created", "seconds")
                pipe.get(self._keys.components(name))
            found = await pipe.execute()
        return [
            _entry(name, fields, record)
            for name, fields, record in zip(names, found[::2], found[1::2], strict=True)
        ]


def _entry(key: str, fields: list[bytes | None], record: bytes | None) -> IndexEntry | None:
    created, seconds = fields
    if created is None or seconds is None:
        return None
    return IndexEntry(key, int(created), float(seconds), unpacked(record))


def packed(components: dict[str, str]) -> bytes:
    """The components in _RECORD_BYTES, or little more: of a larger request, the digests and the short parts."""
    data = codec.compress(msgspec.json.encode(components))
    if len(data) <= _RECORD_BYTES:
        return data
    short = {name: text for name, text in components.items() if len(text) <= _SHORT}
    return codec.compress(msgspec.json.encode(short))


def unpacked(record: bytes | None) -> dict[str, str] | None:
    """None for what is missing or damaged, or names no graph, as for an imported artifact."""
    if not record:
        return None
    try:
        found = decoding.from_json(codec.decompress(record, _DECODED_BYTES), type=dict[str, str])
    except (RequestError, msgspec.MsgspecError):
        return None
    return found if "graph" in found else None
