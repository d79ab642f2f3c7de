"""Tuning jobs, as Redis stores them: their items, progress and results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import cast

import msgspec
from msgspec import Struct

from ....compiler import decoding
from ....compiler.api.training.events import StateChanged
from ....compiler.api.tuning.jobs import (
    GraphTuneItem,
    ItemState,
    OperatorTuneItem,
    TuneItem,
    TuneJob,
    TuneProgress,
    TuneResult,
    TuneState,
)
from ....compiler.errors import Unavailable
from ....compiler.request import codec
from ..records import DurableJobs, Fields, JobEvent, JobRecord, Parts

MOST = 200
MOST_OPEN = 32
_RESULT_BYTES = 64 << 20
_PAGE_ITEMS = 32


class TuningJobProgress(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What changes of a job while it runs: seconds and trials that it has spent, in all and before the last resume, and
    how many items have ended in which state. resumes: for how many of its resumes the failed items were put back."""

    resumes: int = 0
    spent: float = 0.0
    trials: int = 0
    spent_before: float = 0.0
    trials_before: int = 0
    ended: dict[ItemState, int] = {}

    def shown(self, job: TuneJob, state: str, ended: float, detail: str) -> TuneJob:
        left = sum(job.items.values()) - sum(self.ended.values())
        return msgspec.structs.replace(
            job,
            state=cast(TuneState, state),
            ended=ended,
            spent=round(self.spent, 3),
            trials=self.trials,
            detail=detail,
            items={**({"waiting": left} if left else {}), **self.ended},
        )


class TuningJobRecord(JobRecord[TuneJob, TuningJobProgress], frozen=True, kw_only=True):
    """A job and its items. bodies, item_progress, results: by the number of the item."""

    items: list[TuneItem] = msgspec.field(default_factory=list)
    bodies: dict[int, bytes] = msgspec.field(default_factory=dict)
    item_progress: dict[int, TuneProgress] = msgspec.field(default_factory=dict)
    results: dict[int, bytes] = msgspec.field(default_factory=dict)


class TuningJobs(DurableJobs[TuneJob, TuningJobRecord]):
    """The tuning jobs of one namespace. Every method raises RedisError."""

    kind = "tune"
    job_type = TuneJob
    progress_type = TuningJobProgress
    record_type = TuningJobRecord
    noun = "batch job"
    given_up = "cancelled"
    most_events = events_of_ended = 20_000
    most_event_bytes = 32 << 20

    def state_event(self, change: StateChanged) -> JobEvent:
        return JobEvent("job", msgspec.json.encode({"state": change.state}))

    def _parts(self, record: TuningJobRecord) -> Parts:
        return {
            ":items": {n: msgspec.json.encode(item) for n, item in enumerate(record.items)},
            ":bodies": record.bodies,
            ":progress": {n: msgspec.json.encode(each) for n, each in record.item_progress.items()},
            ":results": record.results,
        }

    async def progress(self, job: str) -> list[TuneProgress]:
        items = await self._items(job)
        known = _decoded_progress(await self._redis.hgetall(self._keys.part(job, "progress")))
        return [known.get(n) or waiting(n, item) for n, item in enumerate(items)]

    async def load(self, job: str) -> TuningJobRecord:
        record = await super().load(job)
        async with self._redis.pipeline(transaction=False) as pipe:
            for part in ("progress", "bodies", "results"):
                pipe.hgetall(self._keys.part(job, part))
            progress, bodies, results = await pipe.execute()
        return msgspec.structs.replace(
            record,
            items=await self._items(job),
            bodies={int(n): body for n, body in bodies.items()},
            item_progress=_decoded_progress(progress),
            results={int(n): data for n, data in results.items()},
        )

    async def cancel(self, job: str, by: str) -> None:
        """End the job at once: nothing of it has to be ended first on the nodes."""
        await self.end(job, "", StateChanged(state="cancelled", detail=by, at=time.time()))

    async def results(self, job: str, cursor: int) -> tuple[list[TuneResult], int]:
        """Results of a page of items from number `cursor` on, and the next cursor; 0 at the end. Raises NotFound."""
        await self.job(job)
        key, count = self._keys.part(job, "results"), await self._redis.hlen(self._keys.part(job, "items"))
        numbers = range(cursor, min(cursor + _PAGE_ITEMS, count))
        packed = await self._redis.hmget(key, [str(n) for n in numbers]) if numbers else []
        found = await asyncio.to_thread(lambda: [r for data in packed if data for r in unpack(data)])
        return found, numbers.stop if numbers.stop < count else 0

    async def _items(self, job: str) -> list[TuneItem]:
        found = await self._redis.hgetall(self._keys.part(job, "items"))
        return [decoding.from_json(found[n], type=TuneItem) for n in sorted(found, key=int)]


def waiting(number: int, item: TuneItem) -> TuneProgress:
    """The progress of an item that is not recorded yet."""
    return TuneProgress(item=number, line=item.line, kind=_kind(item), state="waiting", text=_text(item))


def _kind(item: TuneItem) -> str:
    match item:
        case OperatorTuneItem():
            return "ceiling" if item.ceiling else "operator"
        case GraphTuneItem():
            return "graph"
    return "kernel"


def _text(item: TuneItem) -> str:
    """The item's name in reports."""
    match item:
        case OperatorTuneItem():
            return item.problem.brief()
        case GraphTuneItem():
            return f"graph {item.key[:12]}{item.name and f' ({item.name})'}"
    return item.name


def pack(results: Sequence[TuneResult]) -> bytes:
    return codec.compress(msgspec.msgpack.encode(results))


def unpack(data: bytes) -> list[TuneResult]:
    """Raises Unavailable for what another version has written."""
    try:
        return decoding.from_msgpack(codec.decompress(data, _RESULT_BYTES), type=list[TuneResult])
    except msgspec.MsgspecError as error:
        raise Unavailable(f"a job's results cannot be read: {error}") from None


def _decoded_progress(fields: Fields) -> dict[int, TuneProgress]:
    return {int(n): decoding.from_json(data, type=TuneProgress) for n, data in fields.items()}
