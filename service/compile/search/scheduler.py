"""Decides which device searches for which namespace, and starts as many search sessions as there is work for.

Each gateway has one scheduler. Tasks of compiles come first, from all namespaces; tuning jobs get devices whose workers
compile nothing, while no compile waits for a slot. Among equals the queue with fewer sessions comes first, and a queue
that has had a device for a while gives it to one that has none.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import structlog
from msgspec import Struct

from ....compiler.errors import NoWorker
from ....compiler.tuning.records import DeviceEnvironment
from ....workers.pool import SearchDevice, WorkerPool
from ...base.async_tasks import TaskSupervisor, end, is_set_within
from ...base.metrics import GatewayMetrics
from .queue import SearchQueue
from .session import SearchSession
from .task import SearchTarget, SearchTask

log = structlog.get_logger(__name__)


_POLL_SECONDS = 0.5
"""Time between two schedules, while there is anything to do and nothing changes."""
_BACKOFF_SECONDS = (1.0, 60.0)
"""First and longest pause of a device whose sessions do not start."""
_FAILED_STARTS = 3
"""After so many in a row, with no session alive, compiles do not wait for one."""
_TURN_SECONDS = 30.0
"""A session has its device at least so long, unless a task of a compile needs it."""
_MOST_PRESTARTED = 8
"""Sessions that are started before there is work for them."""
_MOST_CONSIDERED = 64
"""Tasks of one kind in one schedule: more devices are not free at once."""

_MOST_WORKERS = 4096
"""So many are remembered; clusters that grow and shrink name each new one anew."""


class _Backoff(Struct):
    """A device whose sessions do not start."""

    until: float
    seconds: float


class _Demand(Struct):
    """What a queue has waiting for one target."""

    queue: SearchQueue
    target: SearchTarget
    urgent: bool
    searches: list[SearchTask]


class SearchScheduler:
    """The search sessions of all namespaces."""

    def __init__(self, pool: WorkerPool, metrics: GatewayMetrics, supervisor: TaskSupervisor) -> None:
        self.pool = pool
        self._metrics = metrics
        self._supervisor = supervisor
        self._queues: list[SearchQueue] = []
        self._sessions: list[SearchSession] = []
        self._places: dict[tuple[str, bytes], DeviceEnvironment] = {}
        """Where a worker measures for a target."""
        self._backoffs: dict[str, _Backoff] = {}
        self._failed: dict[bytes, int] = {}
        """Failed starts in a row, by target."""
        self._served: dict[str, float] = {}
        """When each namespace was last given a device."""
        self._changed = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    def join(self, queue: SearchQueue) -> None:
        self._queues.append(queue)

    async def leave(self, queue: SearchQueue) -> None:
        """Ends the queue's sessions."""
        if queue in self._queues:
            self._queues.remove(queue)
        await end(*(session.task for session in self._sessions if session.queue is queue))

    async def close(self) -> None:
        if self._runner is not None:
            await end(self._runner)
        await end(*(session.task for session in self._sessions))

    def search_devices(self, target: SearchTarget) -> list[SearchDevice]:
        """Raises NoWorker if there is none for `target` and none will come."""
        return self.pool.search_devices(target.toolchain, target.target)

    def notify(self) -> None:
        """Something has changed: schedule at once."""
        self._changed.set()
        self._changed = asyncio.Event()
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run(), name="schedule searches")

    async def wait_for_change(self, seconds: float) -> None:
        """Returns when something changes, after `seconds` at the latest."""
        await is_set_within(self._changed, seconds)

    # --- for sessions ----------------------------------------------------------------------------------

    def started(self, session: SearchSession) -> None:
        """It has said where it measures."""
        seconds = round(time.monotonic() - session.since, 1)
        log.info("searcher_ready", worker=session.worker, seconds=seconds)
        self._failed.pop(session.target_name, None)
        self._backoffs.pop(session.worker, None)
        if session.place is not None:
            self._places[session.worker, session.target_name] = session.place
            _forget_oldest(self._places)

    def ended(self, session: SearchSession, why: str) -> None:
        """why: what it failed of, or ''."""
        self._sessions.remove(session)
        if why and session.place is None:
            self._back_off(session.worker)
            self._failed[session.target_name] = self._failed.get(session.target_name, 0) + 1
            alive = any(s.target_name == session.target_name and s.place is not None for s in self._sessions)
            if self._failed[session.target_name] >= _FAILED_STARTS and not alive:
                for queue in self._queues:
                    queue.no_worker(session.target_name, f"no search session starts: {why}")
        if self._queues:
            self.notify()

    def _back_off(self, worker: str) -> None:
        seconds, longest = _BACKOFF_SECONDS
        if worker in self._backoffs:
            seconds = min(2 * self._backoffs[worker].seconds, longest)
        self._backoffs[worker] = _Backoff(time.monotonic() + seconds, seconds)
        _forget_oldest(self._backoffs)

    def next_for(self, session: SearchSession) -> SearchTask | None:
        """What it may take now: a compile's task, or a tuning job's where compiles leave room."""
        if session.draining or any(search.alone for search in session.held.values()):
            return None
        left_to_others = 0
        if session.held:
            # a session with tasks leaves the rest to those without, and takes no more than its share
            peers = [each for each in self._sessions if self._are_peers(each, session)]
            if len(session.held) >= self._share(session, peers):
                return None
            left_to_others = sum(other.idle() for other in peers)
        for search in self._queued_for(session):
            if not search.urgent and not self._room_for_batch(session):
                return None
            if search.alone and session.held:
                continue
            if not left_to_others:
                return search
            left_to_others -= 1
        return None

    def steal_for(self, session: SearchSession) -> SearchTask | None:
        """A task for a session that has none and finds none queued. It comes from the session with the most tasks that
        it has not begun. The last such task stays there, for that session will begin it sooner."""
        if session.held or session.draining:
            return None
        others = [each for each in self._sessions if each is not session and self._are_peers(each, session)]
        other = max(others, key=lambda each: len(each.waiting()), default=session)
        suits = [search for search in other.waiting() if self._suits(search, session)]
        if len(suits) < 2 or not (suits[-1].urgent or self._room_for_batch(session)):
            return None
        return other.held.pop(suits[-1].task.id)

    def may_get_work(self, session: SearchSession) -> bool:
        """Whether a task that it could take is queued or expected, now or when compiles leave room."""
        return self._expected(session) or any(True for _ in self._queued_for(session))

    def _queued_for(self, session: SearchSession) -> Iterator[SearchTask]:
        """What it could take, tasks of compiles first."""
        for urgent in (True, False):
            for search in session.queue.queued(urgent=urgent):
                if self._suits(search, session):
                    yield search

    @staticmethod
    def _expected(session: SearchSession) -> bool:
        return any(target.name() == session.target_name for target in session.queue.expects())

    @staticmethod
    def _suits(search: SearchTask, session: SearchSession) -> bool:
        return search.target_name == session.target_name and search.place in (None, session.place)

    @staticmethod
    def _are_peers(one: SearchSession, other: SearchSession) -> bool:
        return (
            one.queue is other.queue
            and one.target_name == other.target_name
            and one.place in (None, other.place)
        )

    def _share(self, session: SearchSession, peers: list[SearchSession]) -> int:
        """How many tasks each session may hold, of those that are held and those that wait; exact only for few."""
        count = sum(1 for _ in itertools.islice(self._queued_for(session), _MOST_CONSIDERED))
        return math.ceil((count + sum(len(each.held) for each in peers)) / len(peers))

    def _room_for_batch(self, session: SearchSession) -> bool:
        if self.pool.waiting():
            return False
        try:
            devices = self.search_devices(session.target)
        except NoWorker:
            return False
        return any(device.worker == session.worker and not device.compiling for device in devices)

    # --- schedules -------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Schedules until there is nothing to do."""
        while True:
            changed = self._changed
            with self._supervisor.guard("searches"):
                await self._schedule()
            self._count()
            if not self._sessions and not any(queue.busy() for queue in self._queues):
                if changed is self._changed:
                    return
                continue
            await self.wait_for_change(_POLL_SECONDS)

    def _count(self) -> None:
        self._metrics.searchers.set(len(self._sessions))
        for wanted_by, urgent in (("compiles", True), ("jobs", False)):
            queued = sum(queue.count(urgent=urgent) for queue in self._queues)
            self._metrics.searches_queued.labels(wanted_by).set(queued)

    async def _schedule(self) -> None:
        for session in self._sessions:
            if session.silent():
                session.task.cancel()
        for queue in self._queues:
            queue.expire()
        for demand in sorted(self._demands(), key=self._priority):
            await self._serve(demand)
        for queue in self._queues:
            for target in queue.expects():
                await self._prestart(queue, target)

    async def _prestart(self, queue: SearchQueue, target: SearchTarget) -> None:
        """Starts sessions on idle devices, though nothing is queued yet; no other session ends for that."""
        name = target.name()
        try:
            devices = self.search_devices(target)
        except NoWorker:
            return
        started = sum(session.queue is queue and session.target_name == name for session in self._sessions)
        for device in devices:
            if started < _MOST_PRESTARTED and self._free(device, urgent=True):
                self._start(queue, target, device.worker)
                started += 1
        await asyncio.sleep(0)

    def _start(self, queue: SearchQueue, target: SearchTarget, worker: str) -> None:
        self._served[queue.namespace] = time.monotonic()
        self._sessions.append(SearchSession(self, queue, target, worker))

    def _priority(self, demand: _Demand) -> tuple[bool, int, float]:
        queue = demand.queue
        return (not demand.urgent, self._sessions_of(queue), self._served.get(queue.namespace, 0))

    def _demands(self) -> list[_Demand]:
        demands: dict[tuple[int, bytes, bool], _Demand] = {}
        for number, queue in enumerate(self._queues):
            for urgent in (True, False):
                for search in queue.queued(urgent=urgent):
                    key = (number, search.target_name, urgent)
                    demand = demands.setdefault(key, _Demand(queue, search.target, urgent, []))
                    if len(demand.searches) < _MOST_CONSIDERED:
                        demand.searches.append(search)
        return list(demands.values())

    def _sessions_of(self, queue: SearchQueue) -> int:
        return sum(session.queue is queue for session in self._sessions)

    async def _serve(self, demand: _Demand) -> None:
        """Starts sessions while there are devices: one for each queued task that no idle session will take."""
        target_name = demand.target.name()
        try:
            devices = self.search_devices(demand.target)
        except NoWorker as error:
            demand.queue.no_worker(target_name, error.message)
            return
        busy = set() if demand.urgent else {device.worker for device in devices if device.compiling}
        idle = [
            session
            for session in self._sessions
            if session.queue is demand.queue and session.target_name == target_name
            if session.idle() and session.worker not in busy
        ]
        for search in demand.searches:
            taker = next((s for s in idle if search.place is None or s.place in (None, search.place)), None)
            if taker is not None:
                idle.remove(taker)
                continue
            able = [device for device in devices if self._can(device, search)]
            if devices and not able and search.urgent:
                demand.queue.fail(
                    search, "no worker measures where this compile's kernels run", "no_searcher"
                )
                continue
            device = next((device for device in able if self._free(device, urgent=demand.urgent)), None)
            if device is None:
                self._ask_to_yield(demand, able)
                return
            self._start(demand.queue, demand.target, device.worker)
            await asyncio.sleep(0)  # its device is taken from here on
            devices = self.search_devices(demand.target)

    def _can(self, device: SearchDevice, search: SearchTask) -> bool:
        place = self._places.get((device.worker, search.target_name))
        return search.place is None or place is None or place == search.place

    def _free(self, device: SearchDevice, *, urgent: bool) -> bool:
        backoff = self._backoffs.get(device.worker)
        if device.searching or (backoff is not None and time.monotonic() < backoff.until):
            return False
        if any(session.worker == device.worker for session in self._sessions):
            return False
        return urgent or not (device.compiling or self.pool.waiting())

    def _ask_to_yield(self, demand: _Demand, able: list[SearchDevice]) -> None:
        """Frees one of these devices for a demand that has none. A session without a compile's task yields to a
        compile; otherwise a session yields whose queue has more devices, after _TURN_SECONDS."""
        workers = {device.worker for device in able}
        rivals = [s for s in self._sessions if s.worker in workers and s.place is not None]
        target_name = demand.target.name()
        if any(s.draining for s in rivals):
            return
        own = self._sessions_of(demand.queue)
        for rival in rivals:
            if rival.queue is demand.queue and rival.target_name == target_name:
                continue
            next_task = next(self._queued_for(rival), None)
            queued = next_task is not None and next_task.urgent
            serves_compiles = queued or any(search.urgent for search in rival.held.values())
            wanted_soon = self._expected(rival) and not demand.urgent
            idle = not rival.held and next_task is None and not wanted_soon
            fair = time.monotonic() - rival.since > _TURN_SECONDS and (
                self._sessions_of(rival.queue) > own + 1 or own == 0 or rival.queue is demand.queue
            )
            better = demand.urgent and not serves_compiles
            if idle or better or (fair and demand.urgent == serves_compiles):
                rival.draining = True
                return


def _forget_oldest(of_workers: dict[Any, Any]) -> None:
    if len(of_workers) > _MOST_WORKERS:
        del of_workers[next(iter(of_workers))]
