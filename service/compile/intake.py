"""Stage 6: a dispatcher takes queued compiles for its idle workers. Namespaces take turns, and people go before jobs.

Any number of dispatchers take from one queue. One that has no such worker leaves a compile to those that have; one that
nobody has a worker for is taken too, so that it fails with the reason.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, Protocol

import structlog
from redis.exceptions import RedisError

from ...compiler.errors import NotFound, Unavailable
from ...compiler.request import schema
from ..admission.compile_request import CompileRequest
from ..base.async_tasks import is_set_within
from ..storage.redis.keys import COMPILES_WAIT
from ..storage.redis.notifications import Notifications
from .flights import Flight, Flights
from .pending import PendingCompile, PendingCompiles
from .registry import DispatcherRegistry
from .single_flight import CompileNeeds

log = structlog.get_logger(__name__)

_OVERDUE_SECONDS = 2.0
"""A compile that waits longer is one for which there are too few workers."""
_HANDOVER_SECONDS = 15.0
"""A dead dispatcher's slots are another's after this time (slot_claims.py)."""


class BeginCompile(Protocol):
    """CompileIntake.begin, of one namespace."""

    def __call__(
        self, request: CompileRequest, body: bytes
    ) -> Awaitable[Literal["hit", "wait", "start"]]: ...


class IdleWorkers(Protocol):
    queued: int
    """Compiles that wait for a worker of these."""
    overdue: Mapping[str, int]
    """How many of them have waited for a while, by the kind of device."""

    @property
    def elsewhere(self) -> int:
        """How many slots of the cluster other dispatchers have."""

    def room(self, toolchain: schema.Toolchain, target: schema.Target) -> int | None:
        """How many compiles could begin at once; None: there is no such worker, and none to come."""


class _JobsCompile:
    """A graph of a training or tuning job, which waits here until no person's compile wants the worker."""

    def __init__(self, namespace: str, request: CompileRequest, body: bytes, *, patient: bool) -> None:
        self.namespace = namespace
        self.request = request
        self.body = body
        self.patient = patient
        self.needs = CompileNeeds(request.toolchain, request.target, schema.REVISION)
        self.since = time.monotonic()
        self.begun: asyncio.Future[Literal["hit", "wait", "start"]] = (
            asyncio.get_running_loop().create_future()
        )


class CompileIntake:
    """The dispatcher with id `own`."""

    def __init__(
        self,
        own: str,
        pending: PendingCompiles,
        registry: DispatcherRegistry,
        workers: IdleWorkers,
        flights_of: Callable[[str], Awaitable[Flights]],
        notifications: Notifications,
        store_problem: Callable[[], Awaitable[str]],
        *,
        poll_seconds: float,
    ) -> None:
        """store_problem: why this dispatcher could publish nothing, or ''."""
        self._own = own
        self._pending = pending
        self._registry = registry
        self._workers = workers
        self._flights_of = flights_of
        self._notifications = notifications
        self._store_problem = store_problem
        self._poll_seconds = poll_seconds
        self._served: dict[str, int] = {}
        """When each namespace was served last, as a number that grows."""
        self._begun: list[tuple[CompileNeeds, Flight]] = []
        """What was taken and has no worker yet."""
        self._jobs: list[_JobsCompile] = []
        self._jobs_served: dict[str, int] = {}
        """As `_served`, of jobs' graphs."""

    async def begin(
        self, namespace: str, request: CompileRequest, body: bytes, *, patient: bool
    ) -> Literal["hit", "wait", "start"]:
        """Has a job's graph compiled, once a worker is idle that no person's compile wants. Returns when that has
        begun, as Flights.ask does, and raises what that raises.

        patient: where there is no such worker, it waits for one; else it begins and fails with the reason.
        """
        compile = _JobsCompile(namespace, request, body, patient=patient)
        self._jobs.append(compile)
        self._notifications.wake(COMPILES_WAIT)
        return await compile.begun

    async def run(self) -> None:
        """Takes compiles until cancelled. A lost notification costs `poll_seconds`."""
        async with self._notifications.woken(COMPILES_WAIT) as wake:
            while True:
                wake.clear()
                try:
                    due = await self._pending.due()
                    if due and (problem := await self._store_problem()):
                        log.error("compiles_left_to_others", problem=problem)
                    else:
                        await self._take(due)
                except (RedisError, Unavailable) as error:
                    log.warning("compiles_not_taken", error=str(error))
                await is_set_within(wake, self._poll_seconds)

    async def _take(self, due: Sequence[PendingCompile]) -> None:
        """Takes what can begin now: people's compiles, and with the workers that these leave, jobs'. Raises
        RedisError."""
        left = list(due)
        waiting = 0
        overdue: Counter[str] = Counter()
        self._begun = [(needs, flight) for needs, flight in self._begun if flight.waits]
        while left:
            compile = min(left, key=lambda each: self._served.get(each.namespace, 0))
            left.remove(compile)
            try:
                flights = await self._flights_of(compile.namespace)
            except NotFound:
                continue
            free = self._room(compile.needs)
            if free is None and await self._may_get_workers(compile):
                continue
            if free is not None and free <= 0:
                waiting += 1
                overdue[compile.needs.target.kind] += compile.waited >= _OVERDUE_SECONDS
                continue
            flight = await flights.take(compile.key, compile.needs, nowhere=free is None)
            if flight is not None:
                self._served[compile.namespace] = max(self._served.values(), default=0) + 1
                self._begun.append((compile.needs, flight))
        await self._take_jobs()
        for job in self._jobs:
            overdue[job.needs.target.kind] += time.monotonic() - job.since >= _OVERDUE_SECONDS
        waiting += len(self._jobs)
        self._workers.queued, self._workers.overdue = waiting, overdue

    async def _take_jobs(self) -> None:
        left = list(self._jobs)
        while left:
            job = min(left, key=lambda each: self._jobs_served.get(each.namespace, 0))
            left.remove(job)
            free = self._room(job.needs)
            if job.begun.done() or (job.patient if free is None else free <= 0):
                continue
            try:
                flights = await self._flights_of(job.namespace)
                answer, flight = await flights.ask(job.request, job.body)
            except Exception as error:  # the job's, whatever it is: compiles are taken all the same
                if not job.begun.done():
                    job.begun.set_exception(error)
                continue
            if flight is not None:
                self._begun.append((job.needs, flight))
                self._jobs_served[job.namespace] = max(self._jobs_served.values(), default=0) + 1
            if not job.begun.done():
                job.begun.set_result(answer)
        self._jobs = [job for job in self._jobs if not job.begun.done()]

    def _room(self, needs: CompileNeeds) -> int | None:
        """How many more could begin, beside those that have begun and may take the same workers."""
        if needs.revision != schema.REVISION:
            return None
        idle = self._workers.room(needs.toolchain, needs.target)
        shared = needs.toolchain, needs.target.kind
        alike = (each for each, _ in self._begun if (each.toolchain, each.target.kind) == shared)
        return None if idle is None else idle - sum(1 for _ in alike)

    async def _may_get_workers(self, compile: PendingCompile) -> bool:
        """Whether another dispatcher may have a worker for it, or this one in a moment: slots may be on their way from
        one to the other."""
        if self._workers.elsewhere and compile.waited < _HANDOVER_SECONDS:
            return True
        dispatchers = await self._registry.dispatchers()
        return any(each.may_compile(compile.needs) for each in dispatchers if each.id != self._own)
