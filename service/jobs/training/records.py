"""Training jobs, as Redis stores them: their description, progress and events.

Long metrics and logs move to the blob store, the oldest first. Redis holds the newest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Literal, get_args

import msgspec

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
from ....compiler.api.training.jobs import TrainFile, TrainJob
from ....compiler.errors import LimitExceeded, NotFound
from ....compiler.request import codec
from ...access.audit import AuditLog
from ...base.http_bodies import UploadedFile
from ...storage.redis.connections import RedisClient
from ...storage.redis.keys import Keys
from ...storage.redis.scripts import Scripts
from ..records import DurableJobs, JobEvent, JobRecord, event_number
from .bounds import cut_lines
from .files import TrainingFiles
from .progress import TrainingJobProgress

_LOG_BYTES = 8 << 10
"""Lines of one log event are cut to this in the stream. The logs have all of them."""
_CUT = "... (`torchrelay train logs` shows all lines)"
ARCHIVE_ENTRIES = 2_000
"""Metrics or logs that move to the blob store together."""
_SEGMENTS = 8
"""How many packs of metrics or logs one request reads."""
MOST_FILES = 1_000
_ARCHIVE_BYTES = 256 << 20
_HIDDEN = "(hidden)"

Series = Literal["metrics", "logs", "history"]
"""history: events that are neither."""
SERIES: tuple[Series, ...] = get_args(Series)


class TrainingJobRecord(JobRecord[TrainJob, TrainingJobProgress], frozen=True, kw_only=True):
    """A job as its run needs it."""


class TrainingJobs(DurableJobs[TrainJob, TrainingJobRecord]):
    """The training jobs of one namespace. Every method raises RedisError."""

    kind = "train"
    job_type = TrainJob
    progress_type = TrainingJobProgress
    record_type = TrainingJobRecord
    noun = "training job"
    given_up = "failed"
    most_events = 10_000
    most_event_bytes = 4 << 20
    events_of_ended = 1_000

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
            redis,
            keys,
            scripts,
            audit,
            lease_seconds=lease_seconds,
            most=most,
            most_open=most_open,
        )
        self._store = store
        self._orphans = keys.train_orphans
        self._files_bytes = files_bytes

    def state_event(self, change: StateChanged) -> JobEvent:
        return job_event(change)

    def _shown(self, job: TrainJob) -> TrainJob:
        """Without the values of its environment: many are secrets, and more people may read jobs than start them."""
        names = dict.fromkeys(job.spec.environment, _HIDDEN)
        return msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, environment=names))

    # --- following -----------------------------------------------------------------------------------------

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
        newest = event_number(recent[-1][0]) if recent else after
        return found, (newest if newest > after else None)

    async def latest(self, job: str, what: Series, count: int) -> list[NumberedEvent]:
        """The newest `count` entries, in their order; of those in the blob store at most _SEGMENTS segments. Raises
        NotFound, Unavailable."""
        await self.job(job)
        # Redis first: entries that move meanwhile are found in a segment, and again
        recent = await self._redis.xrevrange(self._keys.part(job, what), "+", "-", count=count)
        entries = {each.number: each for each in await asyncio.to_thread(_of_stream, recent, 0, -1)}
        for first, last in sorted(await self._segments(job, what), reverse=True)[:_SEGMENTS]:
            if len(entries) >= count:
                break
            data = await self._store.segment(job, what, first, last)
            if data is not None:
                older = await asyncio.to_thread(_of_segment, data, 0, -1)
                entries |= {each.number: each for each in older}
        return [each for _, each in sorted(entries.items())[-count:]]

    async def archive(self, job: str, lease: str, *, everything: bool = False) -> None:
        """Move series that have grown long, or all entries, to the blob store. Nothing happens where the job's lease is
        another. Raises Unavailable."""
        keys = self._keys
        for what in SERIES:
            while True:
                part = _of_stream(await self._recent_data(job, what, 0, ARCHIVE_ENTRIES), 0, -1)
                if not part or (len(part) < ARCHIVE_ENTRIES and not everything):
                    break
                first, last = part[0].number, part[-1].number
                packed = codec.compress(msgspec.json.encode(part))
                await self._store.put_segment(job, what, first, last, packed)
                archived = await self._scripts.archive_training_events(
                    keys=[keys.part(job, what), keys.part(job, "segments"), keys.part(job, "lease")],
                    args=[what, last, first, lease],
                )
                if not archived:
                    return

    async def _recent_data(
        self, job: str, what: Series, after: int, count: int
    ) -> list[tuple[bytes, dict[bytes, bytes]]]:
        found: list[tuple[bytes, dict[bytes, bytes]]] = await self._redis.xrange(
            self._keys.part(job, what), min=f"({after}-0" if after else "-", count=count
        )
        return found

    async def _segments(self, job: str, what: Series) -> list[tuple[int, int]]:
        found = await self._redis.hgetall(self._keys.part(job, "segments"))
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


def job_event(event: TrainEvent) -> JobEvent:
    """The event as followers read it, and whole for its series."""
    tag = str(type(event).__struct_config__.tag)
    return JobEvent(
        tag, msgspec.json.encode(_shortened(event)), _series_of(event), msgspec.json.encode(event)
    )


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
    """What a stream's entries hold past number `after`, chosen as in `_of_segment`."""
    events = (
        NumberedEvent(event_number(name), read_event(fields[b"data"], decoding.from_json))
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
    return msgspec.structs.replace(event, lines=[*cut_lines(event.lines, _LOG_BYTES), _CUT])
