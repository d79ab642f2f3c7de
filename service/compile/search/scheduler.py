"""Decides which device searches for which namespace, and starts as many search sessions as there is work for.

Each dispatcher has one scheduler. Tasks go by the priority of who waits for them, as compiles do; among equals the
namespace that was served longest ago comes first. Tuning jobs get devices whose workers compile nothing, while no
compile waits for a slot. A device whose session has less urgent tasks is freed for more urgent ones; among equals, a
namespace that has had it for a while gives it to one that has fewer.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import structlog
from msgspec import Struct

from ....compiler.errors import NoWorker
from ....compiler.tuning.records import DeviceEnvironment
from ....workers.pool import SearchDevice, WorkerPool
from ...base.async_tasks import TaskSupervisor, end, is_set_within
from ...base.metrics import GatewayMetrics
from ..single_flight import Priority
from .database import TuningDatabase
from .queue import SearchQueue
from .session import SearchSession
from .task import SearchTarget, SearchTask

log = structlog.get_logger(__name__)


_POLL_SECONDS = 0.5
"""Time between two schedules, while there is anything to do and nothing changes."""
BACKOFF_SECONDS = (1.0, 60.0)
"""First and longest pause of a device whose sessions do not start."""
_FAILED_STARTS = 3
"""After so many in a row, with no session alive, compiles do not wait for one."""
TURN_SECONDS = 30.0
"""A session has its device at least so long, unless a more urgent task needs it."""
_MOST_PRESTARTED = 8
"""Sessions that are started before there is work for them."""
_MOST_CONSIDERED = 64
"""Tasks of one kind in one schedule: more devices are not free at once."""
MOST_WORKERS = 4096
"""So many are remembered; clusters that grow and shrink name each new one anew."""
_NO_WORK = len(Priority)
"""The rank of a session without tasks: behind all priorities."""


class _Backoff(Struct):
    """A device whose sessions do not start."""

    until: float
    seconds: float


class _Demand(Struct):
    """What a queue has waiting for one target at one priority, in order."""

    queue: SearchQueue
    target: SearchTarget
    priority: Priority
    tasks: list[SearchTask]


class SearchScheduler:
    """The search sessions of all namespaces."""

    def __init__(self, pool: WorkerPool, metrics: GatewayMetrics, supervisor: TaskSupervisor) -> None:
        self.pool = pool
        self._metrics = metrics
        self._supervisor = supervisor
        self._queues: list[SearchQueue] = []
        self._sessions: list[SearchSession] = []
        self._environments: dict[tuple[str, bytes], DeviceEnvironment] = {}
        """Where a worker measures for a target."""
        self._backoffs: dict[str, _Backoff] = {}
        self._failed: dict[bytes, int] = {}
        """Failed starts in a row, by target."""
        self._changed = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    def open(self, namespace: str, tunings: TuningDatabase) -> SearchQueue:
        """A new queue for a namespace."""
        queue = SearchQueue(namespace, tunings, self._metrics, self.notify)
        self._queues.append(queue)
        return queue

    async def close(self) -> None:
        """Ends all sessions; open tasks then fail."""
        queues, self._queues = self._queues, []
        if self._runner is not None:
            await end(self._runner)
        await end(*(session.runner for session in self._sessions))
        for queue in queues:
            await queue.close()

    def notify(self) -> None:
        """Something has changed: schedule at once."""
        self._changed.set()
        self._changed = asyncio.Event()
        if self._queues and (self._runner is None or self._runner.done()):
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
        if session.environment is not None:
            self._environments[session.worker, session.target_name] = session.environment
            _forget_oldest(self._environments)

    def ended(self, session: SearchSession, why: str) -> None:
        """why: what it failed of, or ''."""
        self._sessions.remove(session)
        if why and session.environment is None:
            self._back_off(session.worker)
            name = session.target_name
            self._failed[name] = self._failed.get(name, 0) + 1
            alive = any(s.target_name == name and s.environment is not None for s in self._sessions)
            if self._failed[name] >= _FAILED_STARTS and not alive:
                for queue in self._queues:
                    queue.no_worker(name, f"no search session starts: {why}")
        self.notify()

    def _back_off(self, worker: str) -> None:
        seconds, longest = BACKOFF_SECONDS
        if worker in self._backoffs:
            seconds = min(2 * self._backoffs[worker].seconds, longest)
        self._backoffs[worker] = _Backoff(time.monotonic() + seconds, seconds)
        _forget_oldest(self._backoffs)

    def assign_next(self, session: SearchSession) -> SearchTask | None:
        """The next task of `session`, which has it then; None if it may have none now."""
        if session.draining or any(task.alone for task in session.tasks.values()):
            return None
        peers = [peer for peer in self._sessions if session.is_peer(peer)]
        tasks = self._allowed(session, itertools.islice(self._suitable(session), _MOST_CONSIDERED))
        if session.tasks:
            # what it is to build ahead is no more than its share, and nothing that an idle session could take
            share = math.ceil((len(tasks) + sum(len(peer.tasks) for peer in peers)) / len(peers))
            idle = sum(peer.idle() for peer in peers)
            tasks = [task for task in tasks[idle:] if not task.alone] if len(session.tasks) < share else []
        elif not tasks:
            # the last of what another has not begun; that one will begin the first of these sooner
            fullest = max(peers, key=lambda peer: len(peer.unbegun()))
            tasks = self._allowed(session, fullest.unbegun()[:0:-1])
        if not tasks:
            return None
        for peer in peers:
            peer.tasks.pop(tasks[0].task.id, None)
        session.tasks[tasks[0].task.id] = tasks[0]
        session.queue.assign(tasks[0], session.worker)
        return tasks[0]

    def may_get_work(self, session: SearchSession) -> bool:
        """Whether a task that it could take is queued or expected, now or when compiles leave room."""
        return self._expected(session) or any(True for _ in self._suitable(session))

    @staticmethod
    def _suitable(session: SearchSession) -> Iterator[SearchTask]:
        """What it could take, in order."""
        return filter(session.suits, session.queue.queued())

    @staticmethod
    def _expected(session: SearchSession) -> bool:
        return any(target.name() == session.target_name for target in session.queue.expects())

    def _allowed(self, session: SearchSession, tasks: Iterable[SearchTask]) -> list[SearchTask]:
        """Those of `tasks` that may be searched now: tuning jobs' only where compiles leave room."""
        tasks = list(tasks)
        if all(task.urgent for task in tasks) or self._room_for_batch(session):
            return tasks
        return [task for task in tasks if task.urgent]

    def _room_for_batch(self, session: SearchSession) -> bool:
        try:
            devices = [] if self.pool.queued else self._devices(session.target)
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
        queued = Counter(task.urgent for queue in self._queues for task in queue.queued())
        for wanted_by, urgent in (("compiles", True), ("jobs", False)):
            self._metrics.searches_queued.labels(wanted_by).set(queued[urgent])

    async def _schedule(self) -> None:
        for session in self._sessions:
            if session.silent():
                session.runner.cancel()
        for queue in self._queues:
            queue.expire()
        for demand in sorted(self._demands(), key=lambda demand: (demand.priority, demand.queue.served)):
            await self._serve(demand)
        for queue in self._queues:
            for target in queue.expects():
                await self._prestart(queue, target)

    def _demands(self) -> list[_Demand]:
        demands: dict[tuple[int, bytes, Priority], _Demand] = {}
        for number, queue in enumerate(self._queues):  # a namespace that was made anew has another queue
            for task in queue.queued():
                key = (number, task.target_name, task.priority)
                demand = demands.setdefault(key, _Demand(queue, task.target, task.priority, []))
                if len(demand.tasks) < _MOST_CONSIDERED:
                    demand.tasks.append(task)
        return list(demands.values())

    def _devices(self, target: SearchTarget) -> list[SearchDevice]:
        """Raises NoWorker if there is none for `target` and none will come."""
        return self.pool.search_devices(target.toolchain, target.target)

    async def _serve(self, demand: _Demand) -> None:
        """Starts sessions while there are devices: one for each queued task that no idle session will take."""
        target_name = demand.target.name()
        urgent = demand.priority is not Priority.BATCH
        try:
            devices = self._devices(demand.target)
        except NoWorker as error:
            demand.queue.no_worker(target_name, error.message)
            return
        busy = set() if urgent else {device.worker for device in devices if device.compiling}
        idle = [
            session
            for session in self._sessions_of(demand.queue, target_name)
            if session.idle() and session.worker not in busy
        ]
        for task in demand.tasks:
            taker = next((s for s in idle if s.environment is None or s.suits(task)), None)
            if taker is not None:
                idle.remove(taker)
                continue
            able = [device for device in devices if self._can(device, task)]
            if devices and not able and urgent:
                demand.queue.fail(task, "no worker measures where this compile's kernels run", "no_searcher")
                continue
            device = next((device for device in able if self._free(device, urgent=urgent)), None)
            if device is None:
                self._ask_to_yield(demand, {device.worker for device in able})
                return
            await self._start(demand.queue, demand.target, device.worker)
            devices = self._devices(demand.target)

    async def _prestart(self, queue: SearchQueue, target: SearchTarget) -> None:
        """Starts sessions on idle devices, though nothing is queued yet; no other session ends for that."""
        try:
            devices = self._devices(target)
        except NoWorker:
            return
        started = len(self._sessions_of(queue, target.name()))
        for device in devices:
            if started < _MOST_PRESTARTED and self._free(device, urgent=True):
                await self._start(queue, target, device.worker)
                started += 1

    async def _start(self, queue: SearchQueue, target: SearchTarget, worker: str) -> None:
        queue.served = time.monotonic()
        self._sessions.append(SearchSession(self, queue, target, worker))
        await asyncio.sleep(0)  # its device is taken from here on

    def _sessions_of(self, queue: SearchQueue, target_name: bytes | None = None) -> list[SearchSession]:
        return [s for s in self._sessions if s.queue is queue and target_name in (None, s.target_name)]

    def _can(self, device: SearchDevice, task: SearchTask) -> bool:
        known = self._environments.get((device.worker, task.target_name))
        return task.environment is None or known in (None, task.environment)

    def _free(self, device: SearchDevice, *, urgent: bool) -> bool:
        backoff = self._backoffs.get(device.worker)
        if device.searching or (backoff is not None and time.monotonic() < backoff.until):
            return False
        if any(session.worker == device.worker for session in self._sessions):
            return False
        return urgent or not (device.compiling or self.pool.queued)

    def _ask_to_yield(self, demand: _Demand, workers: set[str]) -> None:
        """Frees the device of one of these workers for a demand that has none."""
        rivals = [s for s in self._sessions if s.worker in workers and s.environment is not None]
        if any(rival.draining for rival in rivals):
            return
        own = len(self._sessions_of(demand.queue))
        served = self._sessions_of(demand.queue, demand.target.name())
        for rival in rivals:
            if rival in served:
                continue
            rank = self._rank(rival)
            fair = rival.queue is demand.queue or own == 0 or len(self._sessions_of(rival.queue)) > own + 1
            had_turn = time.monotonic() - rival.since > TURN_SECONDS
            if rank > demand.priority or (rank == demand.priority and fair and had_turn):
                rival.draining = True
                return

    def _rank(self, session: SearchSession) -> int:
        """The priority of the most urgent task that it has or could take next. One that expects tasks keeps its device
        as if it had a tuning job's."""
        tasks = [*session.tasks.values(), *itertools.islice(self._suitable(session), 1)]
        without = Priority.BATCH if self._expected(session) else _NO_WORK
        return min((task.priority for task in tasks), default=without)


def _forget_oldest(of_workers: dict[Any, Any]) -> None:
    if len(of_workers) > MOST_WORKERS:
        del of_workers[next(iter(of_workers))]
