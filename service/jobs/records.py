"""Jobs of one kind, as Redis stores them: created, listed, leased, ended, cancelled and resumed.

No dispatcher owns a job. One at a time holds its lease and runs it (controller.py). Every script that writes
checks the lease. All gateways answer for all jobs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

import msgspec
import structlog

from ...compiler.api.training.jobs import TrainJob
from ...compiler.api.tuning.jobs import TuneJob
from ...compiler.errors import NotFound, Overloaded
from ..access.audit import AuditLog
from ..storage.redis.connections import RedisClient
from ..storage.redis.fair_pool import reserved_for_leases
from ..storage.redis.keys import JOBS_WAIT, JobKeys, Keys
from ..storage.redis.scripts import Scripts

log = structlog.get_logger(__name__)

ENDED_STATES = frozenset({"done", "failed", "cancelled"})
JobTransition = Literal["end", "cancel", "resume"]
MOST_BYTES = 256 << 20
"""What the jobs of one kind and namespace hold in Redis, besides their events. Past it the oldest that have ended are
forgotten, and then new ones are refused."""
LeaseOutcome = Literal["held", "taken", "ended", "gone"]
FieldValue = bytes | str | int | float
Fields = Mapping[bytes, bytes]


J = TypeVar("J", TuneJob, TrainJob)
R = TypeVar("R")
"""A job with all that its run needs."""


class JobEvent(NamedTuple):
    """An entry of a job's stream. `data`: JSON."""

    id: str
    name: str
    data: bytes


class DurableJobs(ABC, Generic[J, R]):
    """The jobs of one kind in one namespace. Every method raises RedisError."""

    noun: str
    """What messages call a job."""

    def __init__(
        self,
        redis: RedisClient,
        keys: Keys,
        job_keys: JobKeys,
        scripts: Scripts,
        audit: AuditLog,
        *,
        lease_seconds: float,
        most: int,
    ) -> None:
        """most: jobs of the namespace. Past it, or past MOST_BYTES, the oldest that have ended are forgotten, which
        the audit log says."""
        self.kind = job_keys.kind
        self._redis = redis
        self._namespace = keys.namespace
        self._channel = keys.wake
        self._open_jobs = keys.open_jobs
        self._fence = keys.fence
        self._keys = job_keys
        self._scripts = scripts
        self._audit = audit
        self._most = most
        self._lease_ms = int(lease_seconds * 1000)

    @abstractmethod
    async def create(self, record: R) -> None:
        """Write a new job, or one that Redis has lost. A job that exists stays as it is. Raises Overloaded."""

    @abstractmethod
    async def load(self, job: str) -> R:
        """All of a job. Raises NotFound."""

    @abstractmethod
    async def give_up(self, job: str, lease: str, why: str) -> None:
        """End a job that cannot be run, if its lease is still this one. Raises NotFound."""

    @abstractmethod
    def _shown(self, fields: Fields) -> J:
        """The job that a hash holds, as people see it."""

    async def jobs(self) -> list[J]:
        """The newest first. Raises msgspec.DecodeError if one is of a release that knows more: who deletes what no job
        needs must not pass over it."""
        return [self._shown(fields) for fields in await self._all_fields()]

    async def readable_jobs(self) -> list[J]:
        """As `jobs`, without those of a release that knows more."""
        found = []
        for fields in await self._all_fields():
            try:
                found.append(self._shown(fields))
            except msgspec.DecodeError as error:
                log.warning("job_not_readable", kind=self.kind, error=str(error))
        return found

    async def _all_fields(self) -> list[Fields]:
        names = await self._redis.zrevrange(self._keys.all, 0, self._most - 1)
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hgetall(self._keys.job(name.decode()))
            found = await pipe.execute()
        return [fields for fields in found if b"job" in fields]

    async def events(self, job: str, after: str) -> list[JobEvent]:
        """At most 1000 events after the one with the id `after`."""
        found = await self._redis.xrange(self._keys.part(job, "events"), min=f"({after}", count=1000)
        return [
            JobEvent(self._event_id(entry.decode()), fields[b"event"].decode(), fields[b"data"])
            for entry, fields in found
        ]

    def _event_id(self, entry: str) -> str:
        """The id of an event, from that of its entry in the stream."""
        return entry

    async def job(self, job: str) -> J:
        """Raises NotFound."""
        return self._shown(await self._fields(job))

    async def take(self, job: str, owner: str, turn: int | None = None) -> tuple[LeaseOutcome, str, str]:
        """Take or renew the lease of a job, unless it has ended, or was resumed since `turn`. Also returns the lease,
        `owner:fence`, and who cancelled the job, in words, or ''."""
        answer: list[bytes] = await self._lease(job, owner, self._lease_ms, turn)
        outcome, fence, cancelled_by = [*answer, b"", b""][:3]
        return cast(LeaseOutcome, outcome.decode()), f"{owner}:{fence.decode()}", cancelled_by.decode()

    async def announce(self) -> None:
        """Tells dispatchers that a job waits for one of them."""
        await self._redis.publish(self._channel, JOBS_WAIT)

    async def release(self, job: str, owner: str) -> None:
        """Give the lease back, so that another dispatcher can take it at once."""
        await self._lease(job, owner, 0, None)

    def notification(self, job: str) -> str:
        """What the wake channel calls a job."""
        return self._keys.notification(job)

    async def _lease(self, job: str, owner: str, ms: int, turn: int | None) -> list[bytes]:
        with reserved_for_leases():
            answer: list[bytes] = await self._scripts.hold_job(
                keys=[self._keys.job(job), self._keys.part(job, "lease"), self._fence, self._open_jobs],
                args=[job, self.kind, self._channel, owner, ms, "" if turn is None else turn],
            )
        return answer

    async def _create(
        self,
        job: J,
        hashes: Mapping[str, Mapping[Any, FieldValue]],
        *,
        event: tuple[str, bytes],
        most_open: int | None,
    ) -> None:
        """hashes: fields by the suffix of the hash's key. event: name and data. most_open: None for a job that was
        there, which no limit refuses. Raises Overloaded."""
        answer = await self._scripts.create_job(
            keys=[
                self._keys.all,
                self._keys.open,
                self._keys.job(job.id),
                self._audit.key,
                self._open_jobs,
            ],
            args=[
                *(job.id, self.kind, self._channel, f"{job.created * 1000:.0f}", self._most),
                *((1 << 31, 1 << 53) if most_open is None else (most_open, MOST_BYTES)),
                *(*event, self._audit.entries),
                *(
                    part
                    for suffix, fields in hashes.items()
                    for name, value in fields.items()
                    for part in (suffix, name, value)
                ),
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

    async def _change(
        self,
        job: str,
        transition: JobTransition,
        fields: Mapping[str, FieldValue],
        *,
        lease: str = "",
        state: str = "",
        event: tuple[str, bytes] = ("", b""),
        most_open: int = 1 << 31,
        most_events: int = 1 << 31,
    ) -> None:
        """Nothing happens where the job's state does not allow it. Raises NotFound, Overloaded."""
        answer = await self._scripts.change_job(
            keys=[self._keys.all, self._keys.open, self._keys.job(job), self._open_jobs],
            args=[
                *(job, self.kind, self._channel, transition, lease, state, *event, most_open, most_events),
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
