"""A namespace's batch jobs, as Redis has them: what each is to search, how far it is, what came of it; who drives it.

A job belongs to no gateway. One at a time holds its lease and drives it (controller.py); every step is a script that
refuses who does not hold it. All gateways answer for all jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal, cast

import msgspec
from msgspec import Struct
from redis.asyncio import Redis

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
from ....compiler.errors import NotFound, Overloaded, Unavailable
from ....compiler.request import codec
from ...storage.redis.connections import reserved_for_leases
from ...storage.redis.keys import Keys
from ...storage.redis.scripts import Scripts
from ...storage.redis.streams import STREAM_START

MOST = 200
"""Jobs of a namespace; past it the oldest that have ended are forgotten."""
MOST_OPEN = 32
EVENTS = 20_000
"""Of one job that are kept."""
_RESULT_BYTES = 64 << 20
_PAGE_ITEMS = 32

JobTransition = Literal["end", "cancel", "resume"]
LeaseOutcome = Literal["held", "taken", "ended", "gone"]


class TuningJobEvent(Struct, frozen=True):
    """An entry of a job's stream. `data`: JSON."""

    id: str
    name: str
    data: bytes

    @property
    def last(self) -> bool:
        return self.name == "job" and decoding.from_json(self.data).get("state") in ("done", "cancelled")


class TuningJobRecord(Struct, frozen=True, kw_only=True):
    """A job with all that it consists of. bodies, progress, results: by the number of the item. base: what was spent
    before it was resumed for the last time, seconds and trials."""

    job: TuneJob
    items: list[TuneItem]
    bodies: dict[int, bytes]
    progress: dict[int, TuneProgress]
    results: dict[int, bytes] = {}
    base: tuple[float, int] = (0.0, 0)
    turn: int = 0
    """How often it has ended or was resumed."""


class TuningJobs:
    """The batch jobs of one namespace. Every method raises RedisError."""

    def __init__(self, redis: Redis, keys: Keys, scripts: Scripts, *, lease_seconds: float) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = scripts
        self._lease_ms = int(lease_seconds * 1000)

    async def create(self, loaded: TuningJobRecord) -> None:
        """Write a job down, from its beginning or as far as it is. What stands is left. Raises Overloaded."""
        keys, job = self._keys, loaded.job
        items = {n: msgspec.json.encode(item) for n, item in enumerate(loaded.items)}
        progress = {n: msgspec.json.encode(each) for n, each in loaded.progress.items()}
        parts: list[Mapping[int, bytes]] = [items, loaded.bodies, progress, loaded.results]
        answer = await self._scripts.create_tuning_job(
            keys=[
                keys.tunes,
                keys.tunes_open,
                keys.tune(job.id),
                keys.tune_items(job.id),
                keys.tune_bodies(job.id),
                keys.tune_progress(job.id),
                keys.tune_results(job.id),
                keys.tune_events(job.id),
            ],
            args=[
                job.id,
                MOST,
                MOST_OPEN,
                keys.tune_prefix,
                msgspec.json.encode(job),
                f"{job.created * 1000:.0f}",
                b'{"state":"waiting"}',
                "waiting",
                job.spent,
                job.trials,
                keys.wake,
                *map(len, parts),
                loaded.turn,
                *(value for part in parts for pair in part.items() for value in pair),
            ],
        )
        if answer[0] == b"many":
            raise Overloaded(
                f"{int(answer[1])} batch jobs of namespace {keys.namespace} are open, the most that may",
                hint="Wait for one, or `torchrelay tune cancel` one",
            )

    async def jobs(self) -> list[TuneJob]:
        """The newest first."""
        names = await self._redis.zrevrange(self._keys.tunes, 0, MOST - 1)
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hgetall(self._keys.tune(name.decode()))
            found = await pipe.execute()
        return [job for fields in found if (job := _job(fields)) is not None]

    async def open(self) -> list[str]:
        """Ids of those that have not ended, the oldest first."""
        found = await self._redis.zrange(self._keys.tunes_open, 0, -1)
        return [name.decode() for name in found]

    async def job(self, job: str) -> TuneJob:
        """Raises NotFound."""
        found = _job(await self._redis.hgetall(self._keys.tune(job)))
        if found is None:
            raise NotFound(f"there is no batch job {job}", hint="`torchrelay tune ls` lists them")
        return found

    async def progress(self, job: str) -> list[TuneProgress]:
        """Of every item, in order."""
        items, told = await self._items(job), await self._redis.hgetall(self._keys.tune_progress(job))
        found = {int(n): decoding.from_json(data, type=TuneProgress) for n, data in told.items()}
        return [found.get(n) or waiting(n, item) for n, item in enumerate(items)]

    async def load(self, job: str) -> TuningJobRecord:
        """All of it. Raises NotFound."""
        found, keys = await self.job(job), self._keys
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hmget(keys.tune(job), "base_spent", "base_trials", "turn")
            pipe.hgetall(keys.tune_progress(job))
            pipe.hgetall(keys.tune_bodies(job))
            pipe.hgetall(keys.tune_results(job))
            (spent, trials, turn), progress, bodies, results = await pipe.execute()
        return TuningJobRecord(
            job=found,
            items=await self._items(job),
            bodies={int(n): body for n, body in bodies.items()},
            progress={int(n): decoding.from_json(data, type=TuneProgress) for n, data in progress.items()},
            results={int(n): data for n, data in results.items()},
            base=(float(spent or 0), int(trials or 0)),
            turn=int(turn or 0),
        )

    async def results(self, job: str, cursor: int) -> tuple[list[TuneResult], int]:
        """Those of some items from number `cursor` on, and where to go on; 0 ends. Raises NotFound."""
        await self.job(job)
        key, count = self._keys.tune_results(job), await self._redis.hlen(self._keys.tune_items(job))
        numbers = range(cursor, min(cursor + _PAGE_ITEMS, count))
        packed = await self._redis.hmget(key, [str(n) for n in numbers]) if numbers else []
        found = await asyncio.to_thread(lambda: [r for data in packed if data for r in unpack(data)])
        return found, numbers.stop if numbers.stop < count else 0

    async def _items(self, job: str) -> list[TuneItem]:
        found = await self._redis.hgetall(self._keys.tune_items(job))
        return [decoding.from_json(found[n], type=TuneItem) for n in sorted(found, key=int)]

    # --- driving -------------------------------------------------------------------------------------------

    async def take(self, job: str, owner: str, turn: int | None = None) -> LeaseOutcome:
        """Drive `job` from now on; or go on doing so, unless it has ended or was resumed since `turn`."""
        answer = await self._lease(job, owner, "take", turn)
        return cast(LeaseOutcome, answer)

    async def release(self, job: str, owner: str) -> None:
        """Let another gateway have it at once."""
        await self._lease(job, owner, "release")

    async def _lease(self, job: str, owner: str, what: str, turn: int | None = None) -> str:
        keys = self._keys
        with reserved_for_leases():
            (answer,) = await self._scripts.lease_tuning_job(
                keys=[keys.tune(job), keys.tune_lease(job), keys.tune_events(job)],
                args=[job, owner, self._lease_ms, what, keys.wake, "" if turn is None else turn],
            )
        return bytes(answer).decode()

    async def tell(
        self,
        job: str,
        owner: str,
        progress: TuneProgress,
        results: bytes = b"",
        *,
        spent: float = 0.0,
        trials: int = 0,
    ) -> bool:
        """How far an item is, and what came of it, `pack`ed; false if the job is not `owner`'s to drive."""
        keys = self._keys
        answer = await self._scripts.record_tuning_item(
            keys=[
                keys.tune(job),
                keys.tune_lease(job),
                keys.tune_progress(job),
                keys.tune_results(job),
                keys.tune_events(job),
            ],
            args=[
                job,
                owner,
                progress.item,
                msgspec.json.encode(progress),
                progress.state,
                results,
                f"{spent:.3f}",
                trials,
                keys.wake,
                EVENTS,
            ],
        )
        return bool(answer != b"lost")

    async def turn(
        self, job: str, what: JobTransition, *, owner: str = "", detail: str = ""
    ) -> tuple[TuneState, bool]:
        """End, cancel or resume it: the state that it has now, and whether this changed it. Raises NotFound."""
        keys = self._keys
        answer = await self._scripts.change_tuning_job(
            keys=[
                keys.tune(job),
                keys.tune_lease(job),
                keys.tune_progress(job),
                keys.tune_events(job),
                keys.tunes_open,
                keys.tunes,
            ],
            args=[job, what, owner, keys.wake, detail],
        )
        if not answer:
            raise NotFound(f"there is no batch job {job}", hint="`torchrelay tune ls` lists them")
        return cast(TuneState, answer[0].decode()), answer[1] == b"1"

    # --- following -----------------------------------------------------------------------------------------

    async def events(self, job: str, after: str = STREAM_START) -> list[TuningJobEvent]:
        found = await self._redis.xrange(self._keys.tune_events(job), min=f"({after}", count=1000)
        return [
            TuningJobEvent(name.decode(), fields[b"event"].decode(), fields[b"data"])
            for name, fields in found
        ]


def notification_name(job: str) -> str:
    """What the wake channel calls a job."""
    return f"tune:{job}"


def waiting(number: int, item: TuneItem) -> TuneProgress:
    """How far an item is of which nothing was told yet."""
    return TuneProgress(item=number, line=item.line, kind=kind_of(item), state="waiting", text=text_of(item))


def kind_of(item: TuneItem) -> str:
    match item:
        case OperatorTuneItem():
            return "ceiling" if item.ceiling else "operator"
        case GraphTuneItem():
            return "graph"
    return "kernel"


def text_of(item: TuneItem) -> str:
    """What people call it."""
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


def _job(fields: Mapping[bytes, bytes]) -> TuneJob | None:
    if b"job" not in fields:
        return None
    job = decoding.from_json(fields[b"job"], type=TuneJob)
    ended = {
        cast(ItemState, name[2:].decode()): int(count)
        for name, count in fields.items()
        if name.startswith(b"n:")
    }
    total = sum(job.items.values())
    assert ended.keys() <= ENDED
    left = total - sum(ended.values())
    return msgspec.structs.replace(
        job,
        state=cast(TuneState, fields[b"state"].decode()),
        ended=int(fields[b"ended"]) / 1000,
        spent=round(float(fields[b"spent"]), 3),
        trials=int(fields[b"trials"]),
        detail=fields[b"detail"].decode(),
        items={**({"waiting": left} if left else {}), **ended},
    )
