"""Training jobs, as Redis stores them: their description, progress and events.

Long metrics and logs move to the blob store, the oldest first. Redis holds the newest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import Literal, cast, get_args

import msgspec
from msgspec import Struct

from ....compiler import decoding
from ....compiler.api.training.events import (
    LogLines,
    NumberedEvent,
    StateChanged,
    StepMetrics,
    TrainEvent,
    read_event,
    read_events,
)
from ....compiler.api.training.jobs import TRAIN_ENDED, TrainFile, TrainJob, TrainState
from ....compiler.errors import LimitExceeded, NotFound
from ....compiler.request import codec
from ...access.audit import AuditLog
from ...base.http_bodies import UploadedFile
from ...storage.redis.connections import RedisClient
from ...storage.redis.keys import Keys
from ...storage.redis.scripts import Scripts
from ..records import DurableJobs, Fields, FieldValue
from .files import TrainingFiles
from .progress import TrainingJobProgress

EVENTS = 10_000
"""Events of one job that stay in its stream for followers. Metrics, logs and history have all of them."""
_EVENT_BYTES = 4 << 20
"""Of these events, at most."""
EVENTS_OF_ENDED = 1_000
_LOG_BYTES = 8 << 10
"""Lines of one log event are cut to this in the stream. The logs have all of them."""
_CUT = "... (`torchrelay train logs` shows all lines)"
ARCHIVE_ENTRIES = 2_000
"""Metrics or logs that move to the blob store together."""
_SEGMENTS = 8
"""Of these, how many one request looks at."""
MOST_FILES = 1_000
_ARCHIVE_BYTES = 256 << 20
_HIDDEN = "(hidden)"

Series = Literal["metrics", "logs", "history"]
"""history: events that are neither."""
SERIES: tuple[Series, ...] = get_args(Series)


class TrainingJobRecord(Struct, frozen=True, kw_only=True):
    """A job as its run needs it. last_number: of the driver's last event that is recorded. writes: how often events
    were recorded. turn: how often the job has ended or was resumed. source: whether its graphs may hold source."""

    job: TrainJob
    progress: TrainingJobProgress
    source: bool = False
    last_number: int = 0
    writes: int = 0
    events: int = 0
    turn: int = 0
    resumes: int = 0
    cancelled_by: str = ""
    """Who cancelled the job, in words, while it has not ended."""


class TrainingJobs(DurableJobs[TrainJob, TrainingJobRecord]):
    """The training jobs of one namespace. Every method raises RedisError."""

    noun = "training job"

    def __init__(
        self,
        redis: RedisClient,
        keys: Keys,
        scripts: Scripts,
        audit: AuditLog,
        store: TrainingFiles,
        *,
        lease_seconds: float,
        most: int,
        most_open: int,
        files_bytes: int,
    ) -> None:
        super().__init__(
            redis, keys, keys.training_jobs, scripts, audit, lease_seconds=lease_seconds, most=most
        )
        self._store = store
        self._orphans = keys.train_orphans
        self._most_open = most_open
        self._files_bytes = files_bytes

    async def create(self, record: TrainingJobRecord) -> None:
        """A job that Redis has lost is written however many are open."""
        job = record.job
        fields: dict[str, FieldValue] = {
            "job": msgspec.json.encode(job),
            "state": job.state,
            "ended": 0,
            "detail": job.detail,
            "progress": msgspec.json.encode(record.progress),
            "told": record.last_number,
            "tellings": record.writes,
            "turn": record.turn,
            "resumes": record.resumes,
            "wish": record.cancelled_by,
            "source": "1" if record.source else "",
            "events": record.events,
        }
        waiting = b"" if record.events else encoded(StateChanged(state="waiting", at=job.created))
        await self._create(
            job,
            {"": fields},
            event=("state", waiting),
            most_open=None if record.events else self._most_open,
        )

    async def load(self, job: str) -> TrainingJobRecord:
        return _loaded(await self._fields(job))

    def _shown(self, fields: Fields) -> TrainJob:
        """Without the values of its environment: many are secrets, and more people may read jobs than start them."""
        job = _loaded(fields).job
        names = dict.fromkeys(job.spec.environment, _HIDDEN)
        spec = msgspec.structs.replace(job.spec, environment=names)
        return msgspec.structs.replace(job, spec=spec)

    # --- running -------------------------------------------------------------------------------------------

    async def record_events(
        self, record: TrainingJobRecord, lease: str, events: Sequence[TrainEvent]
    ) -> bool:
        """Record events, and how far the job is with them: `record`, whose `writes` do not count this call. False if
        the job's lease is another."""
        keys, job = self._keys, record.job.id
        fields = {
            "told": record.last_number,
            "progress": msgspec.json.encode(record.progress),
            "state": record.job.state,
            "detail": record.job.detail,
        }
        answer = await self._scripts.record_training_events(
            keys=[
                keys.job(job),
                keys.part(job, "lease"),
                keys.part(job, "events"),
                *(keys.part(job, what) for what in SERIES),
            ],
            args=[
                job,
                lease,
                record.writes,
                self._channel,
                EVENTS,
                _EVENT_BYTES,
                len(fields),
                *(part for field in fields.items() for part in field),
                *(
                    part
                    for event in events
                    for part in (_tag(event), encoded(_shortened(event)), _series_of(event), encoded(event))
                ),
            ],
        )
        return bool(answer == b"recorded")

    async def end(self, job: str, lease: str, ended: StateChanged, *, last_number: int) -> None:
        """End a job as `ended` says, if its lease is still this one. last_number: that of the driver's last event."""
        await self._change(
            job,
            "end",
            {"detail": ended.detail, "wish": "", "told": last_number},
            lease=lease,
            state=ended.state,
            event=("state", encoded(ended)),
            most_events=EVENTS_OF_ENDED,
        )

    async def give_up(self, job: str, lease: str, why: str) -> None:
        ended = StateChanged(state="failed", detail=why, at=time.time())
        await self._change(
            job,
            "end",
            {"detail": why, "wish": ""},
            lease=lease,
            state=ended.state,
            event=("state", encoded(ended)),
            most_events=EVENTS_OF_ENDED,
        )

    async def cancel(self, job: str, by: str) -> None:
        """Have the gateway that runs the job end it. by: who cancels it, in words. Raises NotFound."""
        await self._change(job, "cancel", {"wish": by})

    async def resume(self, job: str, waiting: StateChanged, *, source: bool) -> None:
        """Run a job again that has failed or was cancelled. source: whether its graphs may hold source. Raises
        NotFound, Overloaded."""
        await self._change(
            job,
            "resume",
            {"detail": waiting.detail, "wish": "", "source": "1" if source else ""},
            state="waiting",
            event=("state", encoded(waiting)),
            most_open=self._most_open,
        )

    # --- following -----------------------------------------------------------------------------------------

    def _event_id(self, entry: str) -> str:
        return str(_number(entry.encode()))

    async def entries(
        self,
        job: str,
        what: Series,
        after: int,
        limit: int,
        *,
        rank: int,
        gone: Callable[[], Awaitable[bool]],
    ) -> tuple[list[NumberedEvent], int | None]:
        """At most `limit` entries past number `after`, of logs those of `rank` alone unless it is -1; and the number
        from which to go on, None where nothing follows for now. One call looks at _SEGMENTS segments, however few
        entries are that rank's, and at none once `gone` says so. Raises NotFound, Unavailable."""
        await self.job(job)
        # Redis first: entries that move meanwhile are found in a segment
        recent = await self._recent_data(job, what, after, max(limit, ARCHIVE_ENTRIES))
        found: list[NumberedEvent] = []
        segments = [each for each in sorted(await self._segments(job, what)) if each[1] > after]
        for first, last in segments[:_SEGMENTS]:
            if await gone():
                return [], None
            data = await self._store.segment(job, what, first, last)
            if data is not None:
                found += await asyncio.to_thread(_of_segment, data, after, rank)
            if len(found) >= limit:
                return found[:limit], found[limit - 1].number
            after = last
        if len(segments) > _SEGMENTS:
            return found, after
        found += await asyncio.to_thread(_of_stream, recent, after, rank)
        if len(found) > limit:
            return found[:limit], found[limit - 1].number
        newest = _number(recent[-1][0]) if recent else after
        return found, (newest if newest > after else None)

    async def archive(self, job: str, lease: str, *, everything: bool = False) -> None:
        """Move series that have grown long, or all entries, to the blob store. Nothing happens where the job's lease is
        another. Raises Unavailable."""
        keys = self._keys
        for what in SERIES:
            while True:
                part = await self._recent(job, what, 0, ARCHIVE_ENTRIES)
                if not part or (len(part) < ARCHIVE_ENTRIES and not everything):
                    break
                first, last = part[0].number, part[-1].number
                packed = codec.compress(msgspec.json.encode(part))
                await self._store.put_segment(job, what, first, last, packed)
                archived = await self._scripts.archive_training_events(
                    keys=[keys.part(job, what), keys.part(job, "shelves"), keys.part(job, "lease")],
                    args=[what, last, first, lease],
                )
                if not archived:
                    return

    async def _recent(self, job: str, what: Series, after: int, count: int) -> list[NumberedEvent]:
        return _of_stream(await self._recent_data(job, what, after, count), after, -1)

    async def _recent_data(
        self, job: str, what: Series, after: int, count: int
    ) -> list[tuple[bytes, dict[bytes, bytes]]]:
        found: list[tuple[bytes, dict[bytes, bytes]]] = await self._redis.xrange(
            self._keys.part(job, what), min=f"({after}-0" if after else "-", count=count
        )
        return found

    async def _segments(self, job: str, what: Series) -> list[tuple[int, int]]:
        found = await self._redis.hgetall(self._keys.part(job, "shelves"))
        names = [(name.decode().partition(":"), int(last)) for name, last in found.items()]
        return [(int(first), last) for (kind, _, first), last in names if kind == what]

    # --- files ---------------------------------------------------------------------------------------------

    async def files(self, job: str) -> list[TrainFile]:
        """By name. Raises NotFound."""
        await self.job(job)
        found = await self._redis.hgetall(self._keys.part(job, "files"))
        return sorted(
            (decoding.from_json(data, type=TrainFile) for data in found.values()), key=lambda file: file.name
        )

    async def file(self, job: str, name: str) -> tuple[TrainFile, AsyncGenerator[bytes]]:
        """A file and its bytes, in pieces (TrainingFiles.file). Raises NotFound, Unavailable."""
        record = await self._redis.hget(self._keys.part(job, "files"), name)
        if record is not None:
            file = decoding.from_json(record, type=TrainFile)
            pieces = await self._store.file(job, file.digest)
            if pieces is not None:
                return file, pieces
        raise NotFound(
            f"training job {job} has no file {name}", hint="`torchrelay train files` lists what it has"
        )

    async def put_file(self, job: str, name: str, upload: UploadedFile) -> TrainFile:
        """Store a file of a job, in place of one of that name. Raises NotFound, LimitExceeded, Unavailable."""
        await self._record_file(job, name, b"", upload.size)
        await self._store.put_file(job, upload)
        file = TrainFile(name, upload.size, upload.digest)
        await self._record_file(job, name, msgspec.json.encode(file), upload.size)
        return file

    async def _record_file(self, job: str, name: str, record: bytes, size: int) -> None:
        """record: b'' only checks whether the file may be stored. Raises NotFound, LimitExceeded."""
        keys = self._keys
        answer = await self._scripts.add_training_file(
            keys=[keys.job(job), keys.part(job, "files")],
            args=[name, record, size, MOST_FILES, self._files_bytes],
        )
        match answer:
            case b"gone":
                raise self._missing(job)
            case b"many":
                raise LimitExceeded(f"training job {job} has {MOST_FILES} files, the most that it may")
            case b"large":
                raise LimitExceeded(
                    f"the files of training job {job} have more than {self._files_bytes} bytes"
                )

    async def sweep(self) -> int:
        """Delete from the blob store what forgotten jobs and replaced files have left. Raises Unavailable."""
        jobs = await self.jobs()
        names = [name.decode() for name in await self._redis.zrange(self._keys.all, 0, -1)]
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hgetall(self._keys.part(name, "files"))
            found = await pipe.execute()
        files = {
            name: {decoding.from_json(record, type=TrainFile).digest for record in records.values()}
            for name, records in zip(names, found, strict=True)
        }
        return await self._store.sweep(files, {job.spec.package for job in jobs}, marks=self._orphans)


def encoded(event: TrainEvent) -> bytes:
    return msgspec.json.encode(event)


def _tag(event: TrainEvent) -> str:
    return str(type(event).__struct_config__.tag)


def _series_of(event: TrainEvent) -> Series:
    match event:
        case StepMetrics():
            return "metrics"
        case LogLines():
            return "logs"
    return "history"


def _of_segment(data: bytes, after: int, rank: int) -> list[NumberedEvent]:
    """What is past number `after`, of logs those of `rank` alone unless it is -1."""
    return _selected(read_events(codec.decompress(data, _ARCHIVE_BYTES), decoding.from_json), after, rank)


def _of_stream(entries: list[tuple[bytes, dict[bytes, bytes]]], after: int, rank: int) -> list[NumberedEvent]:
    """As `_of_segment`, of a stream's entries."""
    events = (
        NumberedEvent(_number(name), read_event(fields[b"data"], decoding.from_json))
        for name, fields in entries
    )
    return _selected(events, after, rank)


def _selected(events: Iterable[NumberedEvent], after: int, rank: int) -> list[NumberedEvent]:
    return [
        each
        for each in events
        if each.number > after
        and (rank < 0 or not isinstance(each.event, LogLines) or each.event.rank == rank)
    ]


def _shortened(event: TrainEvent) -> TrainEvent:
    """The event, its log cut to what an event may hold."""
    if not isinstance(event, LogLines) or sum(map(len, event.lines)) <= _LOG_BYTES:
        return event
    lines: list[str] = []
    left = _LOG_BYTES
    for line in event.lines:
        if left <= 0:
            break
        lines.append(line[:left])
        left -= len(line)
    return msgspec.structs.replace(event, lines=[*lines, _CUT])


def _number(name: bytes) -> int:
    return int(name.partition(b"-")[0])


def _loaded(fields: Fields) -> TrainingJobRecord:
    job = decoding.from_json(fields[b"job"], type=TrainJob)
    progress = decoding.from_json(fields[b"progress"], type=TrainingJobProgress)
    state = cast(TrainState, fields[b"state"].decode())
    ended = int(fields[b"ended"]) / 1000 if state in TRAIN_ENDED else 0.0
    return TrainingJobRecord(
        job=progress.shown(job, state, ended, (fields[b"wish"] or fields[b"detail"]).decode()),
        progress=progress,
        source=fields[b"source"] == b"1",
        last_number=int(fields[b"told"]),
        writes=int(fields[b"tellings"]),
        events=int(fields[b"events"]),
        turn=int(fields[b"turn"]),
        resumes=int(fields[b"resumes"]),
        cancelled_by=fields[b"wish"].decode(),
    )
