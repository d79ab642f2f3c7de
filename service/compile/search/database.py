"""A namespace's winners, in Redis: of each problem in each device environment (the tuning database), and what Triton's
and Helion's own autotuners measured.

The first entry for a field stands until it is replaced explicitly; so every compile and every machine gets the same
kernel. Past a limit the least recently used go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic, Literal, NamedTuple, TypeVar, cast

import msgspec
import structlog

from ....compiler import decoding
from ....compiler.api.tuning.database import AutotunedLibrary, AutotuneEntry
from ....compiler.errors import LimitExceeded
from ....compiler.tuning import queries, records
from ....compiler.tuning.records import DeviceEnvironment, Problem, TuningEntry
from ...storage.redis.connections import RedisClient
from ...storage.redis.keys import Keys
from ...storage.redis.scripts import Scripts

log = structlog.get_logger(__name__)

T = TypeVar("T")

_BATCH = 100
"""Entries of one call, during which Redis does nothing else."""


Outcome = Literal["new", "exists", "replaced"]


class StoredEntry(NamedTuple, Generic[T]):
    """`entry`: the one that stands now. `exists`: there was one already, and it stays."""

    entry: T
    outcome: Outcome


class _FirstEntries(Generic[T]):
    """Entries in a hash of Redis. Every method raises RedisError."""

    def __init__(self, entry_type: type[T], keys: Sequence[str], scripts: Scripts, *, limit: int) -> None:
        """keys: of the hash, and of the times at which its fields were used."""
        self._type = entry_type
        self._keys = keys
        self._scripts = scripts
        self._limit = limit

    async def _find(self, fields: Sequence[str]) -> list[T | None]:
        """The entry of each field; they count as used now."""
        if not fields:
            return []
        return [
            self._decoded(data) for data in await self._scripts.find_tunings(keys=self._keys, args=fields)
        ]

    async def _store(
        self, entries: Sequence[tuple[str, T]], *, replace: bool = False
    ) -> list[StoredEntry[T]]:
        """Stores entries by their fields, in order. One that is there stays unless `replace`, or unless it cannot be
        read."""
        stored: list[StoredEntry[T]] = []
        for start in range(0, len(entries), _BATCH):
            batch = entries[start : start + _BATCH]
            answers = await self._send(batch, replace=replace)
            for (field, entry), (outcome, standing) in zip(batch, answers, strict=True):
                stands = self._decoded(standing) if outcome == b"exists" else entry
                if stands is None or not self._are_of_one(stands, entry):
                    await self._send([(field, entry)], replace=True)
                    stands, outcome = entry, b"replaced"
                stored.append(StoredEntry(stands, cast(Outcome, outcome.decode())))
        return stored

    async def _send(self, entries: Sequence[tuple[str, T]], *, replace: bool) -> list[tuple[bytes, bytes]]:
        args: list[str | bytes | int] = [self._limit, "replace" if replace else ""]
        for field, entry in entries:
            args += [field, msgspec.msgpack.encode(entry)]
        answers: list[tuple[bytes, bytes]] = await self._scripts.store_tunings(keys=self._keys, args=args)
        return answers

    def _decoded(self, data: bytes | None) -> T | None:
        if data is None:
            return None
        try:
            entry: T = decoding.from_msgpack(data, type=self._type)
        except msgspec.MsgspecError as error:
            # another version's, or damaged: it will be measured again
            log.warning("tuning_unreadable", type=self._type.__name__, error=str(error))
            return None
        return entry

    def _are_of_one(self, entry: T, other: T) -> bool:
        """Whether two entries with the same field are of the same problem."""
        return True


class AutotuneEntries(_FirstEntries[AutotuneEntry]):
    """What the libraries' own autotuners measured. A key is a digest that the client makes of the library, its version,
    its own key and the device environment."""

    def __init__(self, keys: Keys, scripts: Scripts, *, limit: int) -> None:
        super().__init__(AutotuneEntry, [keys.autotunes, keys.autotuned], scripts, limit=limit)

    async def find(self, library: AutotunedLibrary, key: str) -> AutotuneEntry | None:
        """The entry, which counts as used now."""
        (entry,) = await self._find([f"{library}:{key}"])
        return entry

    async def store(self, library: AutotunedLibrary, key: str, entry: AutotuneEntry) -> AutotuneEntry:
        """Stores `entry`, unless there is one that can be read. Returns the entry that stands."""
        (stored,) = await self._store([(f"{library}:{key}", entry)])
        return stored.entry


class TuningDatabase(_FirstEntries[TuningEntry]):
    """The winner of each problem in each device environment."""

    def __init__(self, redis: RedisClient, keys: Keys, scripts: Scripts, *, limit: int) -> None:
        super().__init__(TuningEntry, [keys.tunings, keys.tuned], scripts, limit=limit)
        self._redis = redis

    async def known(self, environment: DeviceEnvironment, problems: Sequence[Problem]) -> list[TuningEntry]:
        """The entries for those of `problems` that are known there, in their order; they count as used now."""
        entries = await self._find([_field(environment, problem) for problem in problems])
        return [
            entry
            for problem, entry in zip(problems, entries, strict=True)
            if entry is not None and (entry.place, entry.problem) == (environment, problem)
        ]

    async def store(
        self, entries: Sequence[TuningEntry], *, replace: bool = False
    ) -> list[StoredEntry[TuningEntry]]:
        """Stores `entries`, in order. An entry that is there stays unless `replace`, or unless it cannot be read.

        Raises LimitExceeded for an entry of more than queries.ENTRY_LIMIT bytes, before any is stored.
        """
        for entry in entries:
            if (size := len(msgspec.msgpack.encode(entry))) > queries.ENTRY_LIMIT:
                raise LimitExceeded(
                    f"the entry for {entry.problem.op} has {size} bytes, limit {queries.ENTRY_LIMIT}",
                    hint="No operator needs so much; the problem or a candidate's text is not what a search writes",
                )
        fields = [_field(entry.place, entry.problem) for entry in entries]
        return await self._store(list(zip(fields, entries, strict=True)), replace=replace)

    async def page(self, cursor: int, count: int) -> tuple[list[TuningEntry], int]:
        """About `count` entries, and the cursor of the next page. Begin with 0; 0 ends.

        What is there from the first page to the last is on one of them, perhaps twice (HSCAN's guarantee).
        """
        following, fields = await self._redis.hscan(self._keys[0], cursor, count=count)
        entries = [self._decoded(data) for data in fields.values()]
        return [entry for entry in entries if entry is not None], int(following)

    async def last_used(self, count: int) -> tuple[list[TuningEntry], int]:
        """At most `count` entries, the last used first, and how many there are. They do not count as used."""
        entries, used = self._keys
        fields = [field.decode() for field in await self._redis.zrevrange(used, 0, count - 1)]
        stored: list[bytes | None] = []
        for start in range(0, len(fields), _BATCH):
            stored += await self._redis.hmget(entries, fields[start : start + _BATCH])
        decoded = await asyncio.to_thread(lambda: [self._decoded(data) for data in stored])
        return [each for each in decoded if each is not None], await self._redis.hlen(entries)

    def _are_of_one(self, entry: TuningEntry, other: TuningEntry) -> bool:
        return (entry.place, entry.problem) == (other.place, other.problem)


def _field(environment: DeviceEnvironment, problem: Problem) -> str:
    return f"{environment.digest()}:{records.problem_digest(problem)}"
