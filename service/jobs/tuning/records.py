"""Tuning jobs, as Redis stores them: their items, progress and results."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import cast

import msgspec
from msgspec import Struct

from ....compiler import decoding
from ....compiler.api.tuning.jobs import (
    ENDED,
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
from ...access.audit import AuditLog
from ...storage.redis.connections import RedisClient
from ...storage.redis.keys import Keys
from ...storage.redis.scripts import Scripts
from ..records import DurableJobs, Fields, JobTransition

MOST = 200
MOST_OPEN = 32
EVENTS = 20_000
"""Events of one job that stay in Redis."""
_RESULT_BYTES = 64 << 20
_PAGE_ITEMS = 32


class TuningJobRecord(Struct, frozen=True, kw_only=True):
    """A job and its items. bodies, progress, results: by the number of the item. base: seconds and trials that were
    spent before the last resume."""

    job: TuneJob
    items: list[TuneItem]
    bodies: dict[int, bytes]
    progress: dict[int, TuneProgress]
    results: dict[int, bytes] = {}
    base: tuple[float, int] = (0.0, 0)
    turn: int = 0
    """How often it has ended or was resumed."""


class TuningJobs(DurableJobs[TuneJob, TuningJobRecord]):
    """The tuning jobs of one namespace. Every method raises RedisError."""

    noun = "batch job"

    def __init__(
        self, redis: RedisClient, keys: Keys, scripts: Scripts, audit: AuditLog, *, lease_seconds: float
    ) -> None:
        super().__init__(
            redis, keys, keys.tuning_jobs, scripts, audit, lease_seconds=lease_seconds, most=MOST
        )

    async def create(self, record: TuningJobRecord) -> None:
        job = record.job
        ended = Counter(each.state for each in record.progress.values() if each.state in ENDED)
        await self._create(
            job,
            {
                "": {
                    "job": msgspec.json.encode(job),
                    "state": "waiting",
                    "ended": 0,
                    "spent": job.spent,
                    "trials": job.trials,
                    "base_spent": job.spent,
                    "base_trials": job.trials,
                    "detail": "",
                    "turn": record.turn,
                    **{f"n:{state}": count for state, count in ended.items()},
                },
                ":items": {n: msgspec.json.encode(item) for n, item in enumerate(record.items)},
                ":bodies": record.bodies,
                ":progress": {n: msgspec.json.encode(each) for n, each in record.progress.items()},
                ":results": record.results,
            },
            event=_state_event("waiting"),
            most_open=MOST_OPEN,
        )

    async def progress(self, job: str) -> list[TuneProgress]:
        """The progress of all items, in order."""
        items = await self._items(job)
        found = _decoded_progress(await self._redis.hgetall(self._keys.part(job, "progress")))
        return [found.get(n) or waiting(n, item) for n, item in enumerate(items)]

    async def load(self, job: str) -> TuningJobRecord:
        fields, keys = await self._fields(job), self._keys
        async with self._redis.pipeline(transaction=False) as pipe:
            for part in ("progress", "bodies", "results"):
                pipe.hgetall(keys.part(job, part))
            progress, bodies, results = await pipe.execute()
        return TuningJobRecord(
            job=self._shown(fields),
            items=await self._items(job),
            bodies={int(n): body for n, body in bodies.items()},
            progress=_decoded_progress(progress),
            results={int(n): data for n, data in results.items()},
            base=(float(fields.get(b"base_spent", 0)), int(fields.get(b"base_trials", 0))),
            turn=int(fields.get(b"turn", 0)),
        )

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

    # --- running -------------------------------------------------------------------------------------------

    async def record_item(
        self,
        job: str,
        lease: str,
        progress: TuneProgress,
        results: bytes = b"",
        *,
        spent: float = 0.0,
        trials: int = 0,
    ) -> bool:
        """Write how far an item is, and its results, `pack`ed; false if the job's lease is another."""
        keys = self._keys
        answer = await self._scripts.record_tuning_item(
            keys=[
                keys.job(job),
                *(keys.part(job, part) for part in ("lease", "progress", "results", "events")),
            ],
            args=[
                job,
                lease,
                progress.item,
                msgspec.json.encode(progress),
                progress.state,
                results,
                f"{spent:.3f}",
                trials,
                self._channel,
                EVENTS,
            ],
        )
        return bool(answer != b"lost")

    async def change(self, job: str, transition: JobTransition, *, lease: str = "", detail: str = "") -> None:
        """End (under `lease`), cancel or resume a job, where its state allows it. Raises NotFound."""
        states: dict[JobTransition, TuneState] = {"end": "done", "cancel": "cancelled", "resume": "waiting"}
        state = states[transition]
        await self._change(
            job,
            "resume" if transition == "resume" else "end",
            {"detail": detail},
            lease=lease,
            state=state,
            event=_state_event(state),
        )

    async def give_up(self, job: str, lease: str, why: str) -> None:
        event = _state_event("cancelled")
        await self._change(job, "end", {"detail": why}, lease=lease, state="cancelled", event=event)

    def _shown(self, fields: Fields) -> TuneJob:
        job = decoding.from_json(fields[b"job"], type=TuneJob)
        ended = {
            cast(ItemState, name[2:].decode()): int(count)
            for name, count in fields.items()
            if name.startswith(b"n:")
        }
        assert ended.keys() <= ENDED
        left = sum(job.items.values()) - sum(ended.values())
        return msgspec.structs.replace(
            job,
            state=cast(TuneState, fields[b"state"].decode()),
            ended=int(fields[b"ended"]) / 1000,
            spent=round(float(fields[b"spent"]), 3),
            trials=int(fields[b"trials"]),
            detail=fields[b"detail"].decode(),
            items={**({"waiting": left} if left else {}), **ended},
        )


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


def _decoded_progress(found: Fields) -> dict[int, TuneProgress]:
    return {int(n): decoding.from_json(data, type=TuneProgress) for n, data in found.items()}


def _state_event(state: TuneState) -> tuple[str, bytes]:
    return "job", msgspec.json.encode({"state": state})
