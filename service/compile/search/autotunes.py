"""What Triton's and Helion's own autotuners measured for a namespace, in Redis: one winner for each key.

A key is a digest that the client makes of the library, its version, its own key and the device environment. The first
entry for a key stands, so every machine gets the same winner. Past `limit` entries the least recently used go.
"""

from __future__ import annotations

import msgspec
import structlog

from ....compiler import decoding
from ....compiler.api.tuning.autotunes import AutotunedLibrary, AutotuneEntry
from ...storage.redis.keys import Keys
from ...storage.redis.scripts import Scripts

log = structlog.get_logger(__name__)


class AutotuneEntries:
    """The entries of one namespace. Every method raises RedisError."""

    def __init__(self, keys: Keys, scripts: Scripts, *, limit: int) -> None:
        self._keys = [keys.autotunes, keys.autotuned]
        self._scripts = scripts
        self._limit = limit

    async def find(self, library: AutotunedLibrary, key: str) -> AutotuneEntry | None:
        """The entry, which counts as used now."""
        (data,) = await self._scripts.find_tunings(keys=self._keys, args=[_field(library, key)])
        return _decoded(data)

    async def store(self, library: AutotunedLibrary, key: str, entry: AutotuneEntry) -> AutotuneEntry:
        """Store `entry`, unless there is one that can be read. Returns the entry that stands."""
        stands = _decoded(await self._store(library, key, entry, ""))
        if stands is None:
            await self._store(library, key, entry, "replace")
        return stands or entry

    async def _store(self, library: AutotunedLibrary, key: str, entry: AutotuneEntry, mode: str) -> bytes:
        """The encoded entry that stands."""
        data = msgspec.msgpack.encode(entry)
        ((outcome, standing),) = await self._scripts.store_tunings(
            keys=self._keys, args=[self._limit, mode, _field(library, key), data]
        )
        return standing if outcome == b"exists" else data


def _field(library: AutotunedLibrary, key: str) -> str:
    return f"{library}:{key}"


def _decoded(data: bytes | None) -> AutotuneEntry | None:
    if data is None:
        return None
    try:
        return decoding.from_msgpack(data, type=AutotuneEntry)
    except msgspec.MsgspecError as error:
        # another version's, or damaged: it will be measured again
        log.warning("autotune_unreadable", error=str(error))
        return None
