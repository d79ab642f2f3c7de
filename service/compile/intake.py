"""Stage 6: a dispatcher takes queued compiles for its idle workers: people's before jobs'. Namespaces take turns.

Any number of dispatchers take from one queue. One that has no such worker leaves a compile to those that have; one that
nobody has a worker for is taken too, so that it fails with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import structlog
from redis.exceptions import RedisError

from ...compiler.errors import NotFound, Unavailable
from ...compiler.request import schema
from ..base.async_tasks import is_set_within
from ..storage.redis.keys import COMPILES_WAIT
from ..storage.redis.notifications import Notifications
from .flights import Flight, Flights
from .pending import PendingCompile, PendingCompiles
from .registry import DispatcherRegistry
from .single_flight import CompileNeeds, Priority

log = structlog.get_logger(__name__)

OVERDUE_SECONDS = 2.0
"""A compile that waits longer is one for which there are too few workers."""
_WITHDRAW_SECONDS = 5.0
"""What a job has queued is withdrawn if the job has not waited for it for so long; after an outage of Redis it may take
a moment until the job says so again."""
HANDOVER_SECONDS = 15.0
"""A dead dispatcher's slots are another's after this time (slot_claims.py)."""


class IdleWorkers(Protocol):
    queued: int
    """Compiles that wait for a worker of these, without those of tuning jobs: searches of such jobs wait for them."""
    overdue: Mapping[str, int]
    """How many compiles have waited for a while, by the kind of device."""

    @property
    def elsewhere(self) -> int:
        """How many slots of the cluster other dispatchers have."""

    def room(self, toolchain: schema.Toolchain, target: schema.Target) -> int | None:
        """How many compiles could begin at once; None: there is no such worker, and none to come."""


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
        """Takes what can begin now, and what nobody waits for any more. Raises RedisError."""
        left = list(due)
        waiting = 0
        overdue: Counter[str] = Counter()
        self._begun = [(needs, flight) for needs, flight in self._begun if flight.waits]
        while left:
            compile = min(left, key=lambda each: (each.priority, self._served.get(each.namespace, 0)))
            left.remove(compile)
            try:
                flights = await self._flights_of(compile.namespace)
            except NotFound:
                continue
            if compile.unwanted:
                if compile.unwanted > _WITHDRAW_SECONDS:
                    await flights.take(compile.key, compile.needs)  # it ends at once
                continue
            free = self._room(compile.needs)
            if await self._is_left_to_others(compile, free):
                continue
            if free is not None and free <= 0:
                waiting += compile.priority is not Priority.BATCH
                overdue[compile.needs.target.kind] += compile.waited >= OVERDUE_SECONDS
                continue
            flight = await flights.take(compile.key, compile.needs, nowhere=free is None)
            if flight is not None:
                self._served[compile.namespace] = max(self._served.values(), default=0) + 1
                self._begun.append((compile.needs, flight))
        self._workers.queued, self._workers.overdue = waiting, overdue

    def _room(self, needs: CompileNeeds) -> int | None:
        """How many more could begin, beside those that have begun and may take the same workers."""
        if needs.revision != schema.REVISION:
            return None
        idle = self._workers.room(needs.toolchain, needs.target)
        shared = needs.toolchain, needs.target.kind
        alike = (each for each, _ in self._begun if (each.toolchain, each.target.kind) == shared)
        return None if idle is None else idle - sum(1 for _ in alike)

    async def _is_left_to_others(self, compile: PendingCompile, free: int | None) -> bool:
        """Whether another dispatcher may have a worker for it, or this one in a moment: slots may be on their way from
        one to the other. A tuning job's waits for such a worker, if need be for ever; it is the job's own dispatcher's
        while that has one."""
        own, batch = compile.needs.dispatcher, compile.priority is Priority.BATCH
        if free is None and (batch or (self._workers.elsewhere and compile.waited < HANDOVER_SECONDS)):
            return True
        if free is not None and (not batch or own in ("", self._own)):
            return False
        others = [each for each in await self._registry.dispatchers() if each.id != self._own]
        return any(each.may_compile(compile.needs) for each in others if not batch or each.id == own)
