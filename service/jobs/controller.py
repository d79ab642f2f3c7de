"""Runs the jobs of one kind in one namespace: takes the lease of each job that no dispatcher runs, and renews it.

If this dispatcher dies, its leases expire and another one takes the jobs over. Runs wait while Redis is down. A
Redis that comes back without a job gets the job again.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import structlog
from redis.exceptions import RedisError

from ...compiler.errors import NotFound, RelayError, Unavailable
from ..base.async_tasks import end, is_set_within
from ..storage.redis.notifications import Notifications
from ..storage.redis.retry import redis_errors_logged
from .records import DurableJobs
from .run import JobLost, JobRun

log = structlog.get_logger(__name__)

_MOST_PAUSE_SECONDS = 1.0
"""The longest pause between two renewals of a lease that notifications cause."""
_MOST_BROKEN = 3
"""A job whose run has broken so often in a dispatcher is ended."""


class JobController:
    """Runs the jobs whose leases this dispatcher holds."""

    def __init__(
        self,
        jobs: DurableJobs[Any, Any],
        start: Callable[[Any, str], JobRun[Any]],
        notifications: Notifications,
        *,
        lease_seconds: float,
        may_take: Callable[[Any], Awaitable[bool]] | None = None,
    ) -> None:
        """start: makes the run of a loaded job under a lease. may_take: whether a loaded job is for this dispatcher;
        None: each is."""
        self._jobs = jobs
        self._start = start
        self._notifications = notifications
        self._lease_seconds = lease_seconds
        self._may_take = may_take
        self._runs: dict[str, JobRun[Any]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._taking_over: set[asyncio.Task[None]] = set()
        self._broken = Counter[tuple[str, int]]()
        """How often the run of a job has broken, by the job and how often it was resumed."""
        self._closed = False

    async def take_over(self, job: str) -> None:
        """Take over a job that no dispatcher runs, if it has not ended and is for this one; while Redis is down, it is
        left."""
        if job in self._running:
            return
        owner = uuid.uuid4().hex
        try:
            if self._may_take is not None and not await self._may_take(await self._jobs.load(job)):
                return
            outcome, lease, _ = await self._jobs.take(job, owner)
            if outcome != "held" or self._closed:
                return
            run = self._runs[job] = self._start(await self._jobs.load(job), lease)
        except NotFound:
            return
        except (RedisError, Unavailable) as error:
            log.warning(f"{self._jobs.kind}_job_not_taken_over", job=job, error=str(error))
            return
        except msgspec.MsgspecError as error:  # of another version: a dispatcher of that one may take it
            log.error(f"{self._jobs.kind}_not_readable", job=job, error=str(error))
            return
        task = asyncio.create_task(self._run(run), name=f"{self._jobs.kind} {job}")
        self._running[job] = task
        task.add_done_callback(lambda done: self._done(job, done))

    def runs(self) -> list[JobRun[Any]]:
        """The runs of all jobs that this dispatcher has taken."""
        return list(self._runs.values())

    def running(self) -> int:
        """How many jobs this dispatcher runs."""
        return len(self._running)

    async def close(self) -> None:
        """Leave all jobs to other dispatchers. Ranks of training jobs go on."""
        self._closed = True
        await end(*self._taking_over)
        await end(*self._running.values())

    def _done(self, job: str, task: asyncio.Task[None]) -> None:
        if self._running.get(job) is task:
            del self._running[job], self._runs[job]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(f"{self._jobs.kind}_broke", job=job, exc_info=error)
        elif not self._closed:  # the job may have been resumed meanwhile
            again = asyncio.create_task(self.take_over(job), name=f"take over {self._jobs.kind} {job}")
            self._taking_over.add(again)
            again.add_done_callback(self._taking_over.discard)

    async def _run(self, run: JobRun[Any]) -> None:
        kind, job = self._jobs.kind, run.id
        log.info(f"{kind}_driven", job=job)
        try:
            renewal = asyncio.create_task(self._renew(run))
            work = asyncio.create_task(run.run())
            try:
                await asyncio.wait({renewal, work}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end(renewal)
                await end(work)
            if work.done() and not work.cancelled() and (error := work.exception()) is not None:
                raise error
        except (JobLost, NotFound):
            log.info(f"{kind}_left", job=job)
        except Exception as error:
            await self._note_broken(run, error)
            raise
        finally:
            run.stop()
            try:
                await self._jobs.release(job, run.owner)
            except RedisError as error:
                log.warning(f"{kind}_not_released", job=job, error=str(error))  # it expires by itself

    async def _note_broken(self, run: JobRun[Any], error: Exception) -> None:
        """A job that breaks whoever runs it must not be run for ever."""
        turn = run.id, run.loaded.resumes
        self._broken[turn] += 1
        if self._broken[turn] < _MOST_BROKEN:
            return
        del self._broken[turn]
        said = error.message if isinstance(error, RelayError) else type(error).__name__
        log.error(f"{self._jobs.kind}_given_up", job=run.id, error=said)
        with contextlib.suppress(NotFound), redis_errors_logged("job_not_given_up", job=run.id):
            await run.give_up(f"the service could not run it, {_MOST_BROKEN} times: {said}"[:500])

    async def _renew(self, run: JobRun[Any]) -> None:
        """Renew the lease until the job is another dispatcher's or has ended."""
        async with self._notifications.woken(self._jobs.notification(run.id)) as notified:
            while True:
                try:
                    if await run.renew() != "held":
                        return
                except RedisError as error:
                    log.warning(f"{self._jobs.kind}_lease_not_renewed", job=run.id, error=str(error))
                notified.clear()
                if await is_set_within(notified, self._lease_seconds / 3):
                    # the job's own events cause notifications too
                    await asyncio.sleep(min(_MOST_PAUSE_SECONDS, self._lease_seconds / 30))
