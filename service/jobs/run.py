"""One job under one lease: what the runs of both kinds share. They record how far the job is, and write it again where
Redis has lost it."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic

import msgspec
import structlog

from ...compiler.api.training.events import StateChanged
from ...compiler.api.training.jobs import TrainState
from ..storage.redis.retry import retry_while_down
from .records import DurableJobs, JobEvent, LeaseOutcome, Parts, R

log = structlog.get_logger(__name__)


class JobLost(Exception):
    """Another dispatcher runs the job, or it has ended."""


class JobRun(ABC, Generic[R]):
    """One job under one lease."""

    def __init__(self, jobs: DurableJobs[Any, R], loaded: R, lease: str) -> None:
        self.id: str = loaded.job.id
        self.lease = lease
        self.loaded = loaded
        self._jobs = jobs
        self._progress = loaded.progress
        self._state: TrainState = loaded.job.state
        self._detail: str = loaded.job.detail
        self._cancelled_by = loaded.cancelled_by
        self._events = loaded.events
        self._recording = asyncio.Lock()

    @abstractmethod
    async def run(self) -> None:
        """Run the job to its end. Raises JobLost."""

    def snapshot(self) -> R:
        """The job as far as it is."""
        job = msgspec.structs.replace(self.loaded.job, state=self._state, detail=self._detail)
        return msgspec.structs.replace(
            self.loaded,
            job=job,
            progress=self._progress,
            events=max(self._events, 1),
            cancelled_by=self._cancelled_by,
        )

    async def restore(self) -> None:
        """Write what else Redis has lost with the job. Raises RedisError."""

    def cancel(self, by: str) -> None:
        """The job is to end. by: who cancelled it, in words."""

    async def give_up(self, why: str) -> None:
        """It has failed again and again. why: in words, for the job's owner. Raises NotFound, RedisError."""
        await self._jobs.give_up(self.id, self.lease, why)

    def stop(self) -> None:
        """This dispatcher does not run the job any more."""

    @property
    def owner(self) -> str:
        return self.lease.partition(":")[0]

    async def renew(self) -> LeaseOutcome:
        """Renew the lease. A job that Redis has lost is written again. Raises RedisError."""
        resumes = self.loaded.resumes
        outcome, lease, cancelled_by = await self._jobs.take(self.id, self.owner, resumes)
        if outcome == "gone":
            log.warning(f"{self._jobs.kind}_written_again", job=self.id)
            await self.restore()
            await self._jobs.create(self.snapshot())
            outcome, lease, cancelled_by = await self._jobs.take(self.id, self.owner, resumes)
        if outcome == "held":
            self.lease = lease
            if cancelled_by:
                self.cancel(cancelled_by)
        return outcome

    async def _record_job(
        self, events: Sequence[JobEvent] = (), parts: Parts | None = None, *, state: TrainState | None = None
    ) -> None:
        """Record events, fields of the job's other hashes, and how far the job is. A new state adds an event. Waits
        while Redis is down. Raises JobLost."""
        async with self._recording:
            if state is not None and state != self._state:
                self._state = state
                change = StateChanged(state=state, at=time.time(), detail=self._detail)
                events = [self._jobs.state_event(change), *events]
            jobs = self._jobs
            while not await retry_while_down(
                lambda: jobs.record(self.id, self.lease, self._events, self._fields(parts or {}), events)
            ):
                # the lease had expired while Redis was down, or Redis had lost the job
                if await retry_while_down(self.renew) != "held":
                    raise JobLost
                if await retry_while_down(lambda: jobs.recorded(self.id)) != self._events:
                    raise JobLost
            self._events += len(events)

    def _fields(self, parts: Parts) -> Parts:
        own = {
            "progress": msgspec.json.encode(self._progress),
            "state": self._state,
            "detail": self._detail,
        }
        return {"": own, **parts}
