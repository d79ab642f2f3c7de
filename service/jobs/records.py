"""Jobs of one kind, as Redis stores them: created, listed, leased, recorded, ended, cancelled and resumed.

No dispatcher owns a job. One at a time holds its lease and runs it (controller.py). Every script that writes
checks the lease. All gateways answer for all jobs.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

import msgspec
import structlog
from msgspec import Struct

from ...compiler import decoding
from ...compiler.api.training.events import StateChanged
from ...compiler.api.training.jobs import TrainJob, TrainState
from ...compiler.api.tuning.jobs import TuneJob
from ...compiler.errors import NotFound, Overloaded
from ..access.audit import AuditLog
from ..storage.redis.connections import RedisClient
from ..storage.redis.fair_pool import reserved_for_leases
from ..storage.redis.keys import JOBS_WAIT, JobKind, Keys
from ..storage.redis.scripts import Scripts

log = structlog.get_logger(__name__)

ENDED_STATES = frozenset({"done", "failed", "cancelled"})
JobTransition = Literal["end", "cancel", "resume"]
MOST_BYTES = 256 << 20
"""What the jobs of one kind and namespace hold in Redis, besides their events. Past it the oldest that have ended are
forgotten, and then new ones are refused."""
_UNLIMITED = 1 << 53
LeaseOutcome = Literal["held", "taken", "ended", "gone"]
FieldValue = bytes | str | int | float
Fields = Mapping[bytes, bytes]
Parts = Mapping[str, Mapping[Any, FieldValue]]
"""Fields of a job's hashes, by the suffix of the hash's key."""
J = TypeVar("J", bound=TuneJob | TrainJob)
P = TypeVar("P")
"""How far a job is, as JSON in its hash."""


class JobRecord(Struct, Generic[J, P], frozen=True, kw_only=True):
    """A job with all that its run needs. events: how many were recorded. resumes: how often it was resumed."""

    job: J
    progress: P
    source: bool = False
    """Whether its graphs may hold source."""
    events: int = 0
    resumes: int = 0
    cancelled_by: str = ""
    """Who cancelled the job, in words, while it has not ended."""


R = TypeVar("R", bound=JobRecord[Any, Any])


class JobEvent(NamedTuple):
    """An entry of a job's stream, and of its `series` if it has one, as `whole` there. Data are JSON."""

    name: str
    data: bytes
    series: str = ""
    whole: bytes = b""
    id: str = ""


class DurableJobs(ABC, Generic[J, R]):
    """The jobs of one kind in one namespace. Every method raises RedisError."""

    kind: JobKind
    job_type: type[J]
    progress_type: type[Any]
    record_type: type[R]
    noun: str
    """What messages call a job."""
    given_up: TrainState
    """The state of a job that could not be run."""
    most_events: int
    most_event_bytes: int
    events_of_ended: int
    """How many events of a job stay in its stream for followers, and how many once it has ended."""

    def __init__(
        self,
        redis: RedisClient,
        keys: Keys,
        scripts: Scripts,
        audit: AuditLog,
        *,
        lease_seconds: float,
        most: int,
        most_open: int,
    ) -> None:
        """most: jobs of the namespace. Past it, or past MOST_BYTES, the oldest that have ended are forgotten, which
        the audit log says."""
        self._redis = redis
        self._namespace = keys.namespace
        self._channel = keys.wake
        self._open_jobs = keys.open_jobs
        self._fence = keys.fence
        self._keys = keys.jobs[self.kind]
        self._scripts = scripts
        self._audit = audit
        self._most = most
        self._most_open = most_open
        self._lease_ms = int(lease_seconds * 1000)

    @abstractmethod
    def state_event(self, change: StateChanged) -> JobEvent:
        """What followers read when the job's state changes."""

    def _read(self, fields: Fields) -> R:
        """The job that a hash holds."""
        progress = decoding.from_json(fields[b"progress"], type=self.progress_type)
        cancelled_by = fields[b"cancelled_by"].decode()
        job = progress.shown(
            decoding.from_json(fields[b"job"], type=self.job_type),
            fields[b"state"].decode(),
            int(fields[b"ended"]) / 1000,
            cancelled_by or fields[b"detail"].decode(),
        )
        return self.record_type(
            job=job,
            progress=progress,
            source=fields[b"source"] == b"1",
            events=int(fields[b"events"]),
            resumes=int(fields[b"resumes"]),
            cancelled_by=cancelled_by,
        )

    def _shown(self, job: J) -> J:
        """The job, without what nobody may read."""
        return job

    def _parts(self, record: R) -> Parts:
        """What other hashes than the job's own hold of it."""
        return {}

    async def load(self, job: str) -> R:
        """All of a job. Raises NotFound."""
        return self._read(await self._fields(job))

    async def jobs(self) -> list[J]:
        """The newest first. Raises msgspec.DecodeError if one is of a release that knows more: who deletes what no job
        needs must not pass over it."""
        return [self._shown(self._read(fields).job) for fields in await self._all_fields(self._keys.all)]

    async def readable_jobs(self, *, open_only: bool = False) -> list[J]:
        """The newest first, without those of a release that knows more. open_only: those that have not ended."""
        found = []
        for fields in await self._all_fields(self._keys.open if open_only else self._keys.all):
            try:
                found.append(self._shown(self._read(fields).job))
            except msgspec.DecodeError as error:
                log.warning("job_not_readable", kind=self.kind, error=str(error))
        return found

    async def _all_fields(self, jobs: str) -> list[Fields]:
        names = await self._redis.zrevrange(jobs, 0, self._most - 1)
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hgetall(self._keys.job(name.decode()))
            found = await pipe.execute()
        return [fields for fields in found if b"job" in fields]

    async def events(self, job: str, after: str) -> list[JobEvent]:
        """At most 1000 events after the one with the id `after`; '' begins."""
        found = await self._redis.xrange(
            self._keys.part(job, "events"), min=f"({after}" if after else "-", count=1000
        )
        return [
            JobEvent(fields[b"event"].decode(), fields[b"data"], id=str(event_number(entry)))
            for entry, fields in found
        ]

    async def job(self, job: str) -> J:
        """Raises NotFound."""
        return self._shown(self._read(await self._fields(job)).job)

    async def take(self, job: str, owner: str, resumes: int | None = None) -> tuple[LeaseOutcome, str, str]:
        """Take or renew the lease of a job, unless it has ended, or was resumed since it was resumed so often. Also
        returns the lease, `owner:fence`, and who cancelled the job, in words, or ''."""
        answer: list[bytes] = await self._lease(job, owner, self._lease_ms, resumes)
        outcome, fence, cancelled_by = [*answer, b"", b""][:3]
        return cast(LeaseOutcome, outcome.decode()), f"{owner}:{fence.decode()}", cancelled_by.decode()

    async def release(self, job: str, owner: str) -> None:
        """Give the lease back, so that another dispatcher can take it at once."""
        await self._lease(job, owner, 0, None)

    def notification(self, job: str) -> str:
        """What the wake channel calls a job."""
        return self._keys.notification(job)

    async def _lease(self, job: str, owner: str, ms: int, resumes: int | None) -> list[bytes]:
        with reserved_for_leases():
            answer: list[bytes] = await self._scripts.hold_job(
                keys=[self._keys.job(job), self._keys.part(job, "lease"), self._fence, self._open_jobs],
                args=[job, self.kind, self._channel, owner, ms, "" if resumes is None else resumes],
            )
        return answer

    async def create(self, record: R) -> None:
        """Write a new job, or one that Redis has lost, which no limit refuses. A job that exists stays as it is. Raises
        Overloaded."""
        job, lost = record.job, bool(record.events)
        own: dict[str, FieldValue] = {
            "job": msgspec.json.encode(job),
            "progress": msgspec.json.encode(record.progress),
            "state": job.state,
            "ended": 0,
            "detail": job.detail,
            "cancelled_by": record.cancelled_by,
            "source": "1" if record.source else "",
            "resumes": record.resumes,
        }
        waiting = self.state_event(StateChanged(state="waiting", at=job.created))
        fields = _flat({"": own, **self._parts(record)})
        answer = await self._scripts.create_job(
            keys=[self._keys.all, self._keys.open, self._keys.job(job.id), self._audit.key, self._open_jobs],
            args=[
                *(job.id, self.kind, self._channel, f"{job.created * 1000:.0f}", self._most),
                *((_UNLIMITED, _UNLIMITED) if lost else (self._most_open, MOST_BYTES)),
                *(self._audit.entries, record.events),
                *(("",) * 4 if lost else waiting[:4]),
                *fields,
            ],
        )
        if answer[0] == b"many":
            raise self._too_many(answer[1])
        if answer[0] == b"large":
            raise Overloaded(
                f"the open {self.noun}s of namespace {self._namespace} hold {int(answer[1])} bytes, and with this one "
                f"more than {MOST_BYTES}",
                hint=f"Wait for one, or `torchrelay {self.kind} cancel` one; or split this one",
            )
        for forgotten in answer[1:]:
            log.warning(
                "job_forgotten",
                kind=self.kind,
                job=forgotten.decode(),
                namespace=self._namespace,
                most=self._most,
            )
        await self._announce()

    async def record(
        self, job: str, lease: str, before: int, fields: Parts, events: Sequence[JobEvent]
    ) -> bool:
        """Record events, and how far the job is with them; once, however often the call is repeated. before: how many
        events there were. False if the job's lease is another, or events were recorded that the caller does not
        know."""
        flat = _flat(fields)
        answer = await self._scripts.record_job(
            keys=[self._keys.job(job), self._keys.part(job, "lease")],
            args=[
                *(job, self.kind, lease, before, self._channel, self.most_events, self.most_event_bytes),
                *(len(flat) // 3, *flat),
                *(part for event in events for part in event[:4]),
            ],
        )
        return bool(answer == b"recorded")

    async def recorded(self, job: str) -> int:
        """How many events of a job were recorded. Raises NotFound."""
        return int((await self._fields(job))[b"events"])

    async def end(self, job: str, lease: str, change: StateChanged, progress: Any = None) -> None:
        """End a job as `change` says, if its lease is still this one; '' needs none. Raises NotFound."""
        fields: dict[str, FieldValue] = {"detail": change.detail, "cancelled_by": ""}
        if progress is not None:
            fields["progress"] = msgspec.json.encode(progress)
        await self._change(job, "end", fields, lease=lease, change=change)

    async def give_up(self, job: str, lease: str, why: str) -> None:
        """End a job that cannot be run, if its lease is still this one. Raises NotFound."""
        await self.end(job, lease, StateChanged(state=self.given_up, detail=why, at=time.time()))

    async def cancel(self, job: str, by: str) -> None:
        """Have the dispatcher that runs the job end it. by: who cancels it, in words. Raises NotFound."""
        await self._change(job, "cancel", {"cancelled_by": by})
        await self._announce()

    async def resume(self, job: str, detail: str, *, source: bool) -> None:
        """Run a job again that has ended. source: whether its graphs may hold source. Raises NotFound, Overloaded."""
        fields = {"detail": detail, "cancelled_by": "", "source": "1" if source else ""}
        waiting = StateChanged(state="waiting", at=time.time(), detail=detail)
        await self._change(job, "resume", fields, change=waiting)
        await self._announce()

    async def _announce(self) -> None:
        """Tell dispatchers that a job waits for one of them."""
        await self._redis.publish(self._channel, JOBS_WAIT)

    async def _change(
        self,
        job: str,
        transition: JobTransition,
        fields: Mapping[str, FieldValue],
        *,
        lease: str = "",
        change: StateChanged | None = None,
    ) -> None:
        """Nothing happens where the job's state does not allow it. Raises NotFound, Overloaded."""
        event = JobEvent("", b"") if change is None else self.state_event(change)
        answer = await self._scripts.change_job(
            keys=[self._keys.all, self._keys.open, self._keys.job(job), self._open_jobs],
            args=[
                *(job, self.kind, self._channel, transition, lease, change.state if change else ""),
                *(self._most_open, self.events_of_ended, *event[:4]),
                *(part for field in fields.items() for part in field),
            ],
        )
        if answer[0] == b"gone":
            raise self._missing(job)
        if answer[0] == b"many":
            raise self._too_many(answer[1])

    async def _fields(self, job: str) -> Fields:
        """Raises NotFound."""
        fields: Fields = await self._redis.hgetall(self._keys.job(job))
        if b"job" not in fields:
            raise self._missing(job)
        return fields

    def _missing(self, job: str) -> NotFound:
        return NotFound(f"there is no {self.noun} {job}", hint=f"`torchrelay {self.kind} ls` lists them")

    def _too_many(self, count: int) -> Overloaded:
        return Overloaded(
            f"{int(count)} {self.noun}s of namespace {self._namespace} are open, the most that may",
            hint=f"Wait for one, or `torchrelay {self.kind} cancel` one",
        )


def _flat(parts: Parts) -> list[FieldValue]:
    """Suffix, name and value of each field."""
    return [part for suffix, fields in parts.items() for field in fields.items() for part in (suffix, *field)]


def event_number(entry: bytes) -> int:
    """From the id of a stream's entry, `<number>-0`."""
    return int(entry.partition(b"-")[0])
