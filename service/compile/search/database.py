"""The tuning database of a namespace, in Redis: the winner of each problem in each device environment (`place`).

The first entry for a problem and place stands until it is replaced explicitly; so every compile gets the same kernel.
Past `limit` entries the least recently used go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import msgspec
import structlog
from msgspec import Struct

from ....compiler import decoding
from ....compiler.errors import LimitExceeded
from ....compiler.tuning import queries, records
from ....compiler.tuning.records import DeviceEnvironment, Problem, TuningEntry
from ...storage.redis.connections import RedisClient
from ...storage.redis.keys import Keys
from ...storage.redis.scripts import Scripts

log = structlog.get_logger(__name__)

_BATCH = 100
"""Entries of one call, during which Redis does nothing else."""


Outcome = Literal["new", "exists", "replaced"]


class StoredEntry(Struct, frozen=True):
    """`entry`: the one that stands now. `exists`: there was one already, and it stays."""

    entry: TuningEntry
    outcome: Outcome


class TuningDatabase:
    """The entries of one namespace. Every method raises RedisError."""

    def __init__(self, redis: RedisClient, keys: Keys, scripts: Scripts, *, limit: int) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = scripts
        self._limit = limit

    async def known(self, place: DeviceEnvironment, problems: Sequence[Problem]) -> list[TuningEntry]:
        """The entries for those of `problems` that are known in `place`, in their order; they count as used now."""
        if not problems:
            return []
        found = await self._scripts.find_tunings(
            keys=[self._keys.tunings, self._keys.tuned], args=[_field(place, problem) for problem in problems]
        )
        entries = (_of(data, place, problem) for problem, data in zip(problems, found, strict=True))
        return [entry for entry in entries if entry is not None]

    async def store(self, entries: Sequence[TuningEntry], *, replace: bool = False) -> list[StoredEntry]:
        """Stores `entries`, in order. An entry that is there stays unless `replace`, or unless it cannot be read.

        Raises LimitExceeded for an entry of more than queries.ENTRY_LIMIT bytes, before any is stored.
        """
        encoded = [_encoded(entry) for entry in entries]
        stored: list[StoredEntry] = []
        for start in range(0, len(entries), _BATCH):
            batch = entries[start : start + _BATCH]
            outcomes = await self._store(batch, encoded[start : start + _BATCH], replace=replace)
            for entry, (outcome, standing) in zip(batch, outcomes, strict=True):
                stands = _of(standing, entry.place, entry.problem) if outcome == b"exists" else entry
                if stands is None:
                    await self._store([entry], [_encoded(entry)], replace=True)
                    stands, outcome = entry, b"replaced"
                stored.append(StoredEntry(stands, cast(Outcome, outcome.decode())))
        return stored

    async def _store(
        self, entries: Sequence[TuningEntry], encoded: Sequence[bytes], *, replace: bool
    ) -> list[tuple[bytes, bytes]]:
        args: list[str | bytes | int] = [self._limit, "replace" if replace else ""]
        for entry, data in zip(entries, encoded, strict=True):
            args += [_field(entry.place, entry.problem), data]
        outcomes: list[tuple[bytes, bytes]] = await self._scripts.store_tunings(
            keys=[self._keys.tunings, self._keys.tuned], args=args
        )
        return outcomes

    async def page(self, cursor: int, count: int) -> tuple[list[TuningEntry], int]:
        """About `count` entries, and the cursor of the next page. Begin with 0; 0 ends.

        What is there from the first page to the last is on one of them, perhaps twice (HSCAN's guarantee).
        """
        following, found = await self._redis.hscan(self._keys.tunings, cursor, count=count)
        return [entry for data in found.values() if (entry := _decoded(data)) is not None], int(following)


def _field(place: DeviceEnvironment, problem: Problem) -> str:
    return f"{place.digest()}:{records.problem_digest(problem)}"


def _encoded(entry: TuningEntry) -> bytes:
    data = msgspec.msgpack.encode(entry)
    if len(data) > queries.ENTRY_LIMIT:
        raise LimitExceeded(
            f"the entry for {entry.problem.op} has {len(data)} bytes, limit {queries.ENTRY_LIMIT}",
            hint="No operator needs so much; the problem or a candidate's text is not what a search writes",
        )
    return data


def _of(data: bytes | None, place: DeviceEnvironment, problem: Problem) -> TuningEntry | None:
    """The stored entry, if it is of this problem and place."""
    entry = _decoded(data)
    return entry if entry is not None and (entry.place, entry.problem) == (place, problem) else None


def _decoded(data: bytes | None) -> TuningEntry | None:
    if data is None:
        return None
    try:
        return decoding.from_msgpack(data, type=TuningEntry)
    except msgspec.MsgspecError as error:
        # another version's, or damaged: it will be measured again
        log.warning("tuning_unreadable", error=str(error))
        return None
