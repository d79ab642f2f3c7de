"""The search queue of a namespace: problems to search, from compiles that wait and from tuning jobs.

A search session is a job on a worker's device. It takes whole problems one by one: only samples that were interleaved
on one device can be compared, so one problem's candidates never go to two sessions. The queue is in memory: after a
gateway's death compiles ask again, and tuning jobs and results are in Redis.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import structlog
from msgspec import Struct
from redis.exceptions import RedisError

from ....compiler.api.tuning.search_order import MOST_THREADS
from ....compiler.errors import LimitExceeded
from ....compiler.tuning.queries import KnownEntries, SearchResult, TuningTask
from ....compiler.tuning.records import DeviceEnvironment, Problem, TuningEntry
from ...admission.compile_request import CompileRequest
from ...base.async_tasks import end
from ...base.metrics import GatewayMetrics
from ...storage.redis.retry import retry_while_down
from .database import TuningDatabase
from .query_checks import is_measurable
from .task import OnChange, SearchTarget, SearchTask

log = structlog.get_logger(__name__)

T = TypeVar("T")

MOST_WANTED = 4096
"""Problems that a namespace's compiles may have searched at once; past it they search themselves."""
FORGET_SECONDS = 300.0
"""A problem that no compile has asked for in this time is dropped, with its result: the compile has ended. A compile
asks every few seconds while it waits, and not at all while it traces a large graph again."""
STALL_SECONDS = 180.0
"""The longest wait of a compile for any message of a session. To import torch on a busy machine takes a minute."""
EXPECT_SECONDS = 60.0
"""The most from a compile's beginning to its first problem: a large graph is lowered once before."""
UNUSED_STARTS = 2
"""After this many compiles in a row without a problem, no session is started ahead for the next one."""
_MOST_EXPECTED = 64
_REDIS_SECONDS = 5.0
_STORE_SECONDS = 900.0
_LONGEST_PAUSE_SECONDS = 30.0
"""For how long to try again while Redis does not store an entry, and the longest pause between two tries."""
_MOST_UNSTORED = 1000


class _Expected(Struct):
    """Compiles for a target that may soon have problems. unused: how many in a row had none so far."""

    target: SearchTarget
    until: float = 0.0
    unused: int = 0


class QueueScheduler(Protocol):
    """What a queue needs of the scheduler (scheduler.py)."""

    def join(self, queue: SearchQueue, /) -> None: ...
    async def leave(self, queue: SearchQueue, /) -> None: ...
    def notify(self) -> None:
        """Something has changed: schedule at once."""


class SearchQueue:
    """The tasks of one namespace."""

    def __init__(
        self, namespace: str, tunings: TuningDatabase, scheduler: QueueScheduler, metrics: GatewayMetrics
    ) -> None:
        self.namespace = namespace
        self._tunings = tunings
        self._scheduler = scheduler
        self._metrics = metrics
        self._numbers = itertools.count(1)
        self._wants: dict[tuple[DeviceEnvironment, Problem], SearchTask] = {}
        self._open: dict[str, SearchTask] = {}
        """Tasks of tuning jobs, by id."""
        self._urgent: dict[str, SearchTask] = {}
        self._batch: dict[str, SearchTask] = {}
        """Both: what is queued, in order, by the task's id."""
        self._turns: dict[str, int] = {}
        """In which order compiles first wanted what is searched now, by their keys."""
        self._alive_at: dict[tuple[bytes, DeviceEnvironment], float] = {}
        """When a session for a target in a place last sent a message."""
        self._expected: dict[bytes, _Expected] = {}
        self._storing: set[asyncio.Task[Any]] = set()
        scheduler.join(self)

    # --- for compiles and tuning jobs ------------------------------------------------------------------

    def expect(self, target: SearchTarget) -> None:
        """A compile that tunes begins: starts sessions, so that they are warm when it knows its problems. After
        UNUSED_STARTS compiles in a row without a problem none is started."""
        name = target.name()
        if name not in self._expected and len(self._expected) >= _MOST_EXPECTED:
            self._expected.clear()
        expected = self._expected.setdefault(name, _Expected(target))
        if expected.unused < UNUSED_STARTS:
            expected.unused += 1
            expected.until = time.monotonic() + EXPECT_SECONDS
            self._scheduler.notify()

    def expects(self) -> list[SearchTarget]:
        """Targets for which sessions should be warm now."""
        now = time.monotonic()
        return [expected.target for expected in self._expected.values() if now < expected.until]

    async def want(
        self,
        place: DeviceEnvironment,
        problems: Sequence[Problem],
        request: CompileRequest,
        *,
        wait_seconds: float = 0.0,
    ) -> KnownEntries:
        """What is known of `problems` in `place`, for a compile that asks again. The rest is searched before the tasks
        of tuning jobs, once for all compiles that want it. wait_seconds: how long to wait until anything is known or
        given up. If Redis does not answer, all counts as unknown."""
        known = await self._want(place, problems, request)
        if known.open == len(set(problems)) and wait_seconds:
            searches = [self._wants[place, problem] for problem in set(problems)]
            await asyncio.wait(
                [search.settled for search in searches],
                timeout=wait_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            known = await self._want(place, problems, request)
        return known

    async def _want(
        self, place: DeviceEnvironment, problems: Sequence[Problem], request: CompileRequest
    ) -> KnownEntries:
        entries = {entry.problem: entry for entry in await self.known(place, problems)}
        target = SearchTarget(request.toolchain, request.target, place.threads)
        fits = place.threads <= MOST_THREADS and is_measurable(place, request.toolchain, request.target)
        still_open, given_up = 0, []
        waiting = len(self._urgent)
        for problem in dict.fromkeys(problems):
            if problem in entries:
                continue
            search = self._wanted(place, problem, target, request.key) if fits else None
            found = search.found() if search is not None else None
            if found is not None:
                entries[problem] = found.entry
            elif search is not None and search.open:
                still_open += 1
            else:
                given_up.append(problem)
        if len(self._urgent) > waiting:
            self._urgent = dict(sorted(self._urgent.items(), key=lambda item: item[1].order))
        found_entries = [entries[problem] for problem in dict.fromkeys(problems) if problem in entries]
        return KnownEntries(found_entries, still_open, given_up)

    def found(self, place: DeviceEnvironment, problem: Problem) -> SearchResult | None:
        """The result for compiles that have asked for it lately, with all timings."""
        search = self._wants.get((place, problem))
        return None if search is None else search.found()

    def _wanted(
        self, place: DeviceEnvironment, problem: Problem, target: SearchTarget, key: str
    ) -> SearchTask | None:
        """The search of a problem that a compile has asked for just now; None: there are too many."""
        search = self._wants.get((place, problem))
        if search is None:
            if len(self._wants) >= MOST_WANTED:
                return None
            turn = self._turns.setdefault(key, next(self._numbers))
            task = TuningTask(id=f"compile-{next(self._numbers)}", problem=problem)
            search = self._wants[place, problem] = SearchTask(task, target, place=place, turn=turn)
            log.debug("search_wanted", task=task.id, problem=problem.text()[:300])
            if search.target_name in self._expected:
                self._expected[search.target_name].unused = 0
            self._enqueue(search)
        search.wanted = time.monotonic()
        return search

    def submit(
        self, task: TuningTask, target: SearchTarget, *, on_change: OnChange | None = None
    ) -> SearchTask:
        """Searches `task` when compiles leave room. The caller chooses its `id`.

        Any number of tasks can wait, in memory. Raises ValueError for an id that is open already.
        """
        if task.id in self._urgent or (task.id in self._open and self._open[task.id].open):
            raise ValueError(f"the task {task.id} is open already")
        search = self._open[task.id] = SearchTask(task, target, on_change=on_change)
        self._enqueue(search)
        return search

    async def close(self) -> None:
        """Stops this queue's sessions; open tasks then fail with "the gateway stops"."""
        await self._scheduler.leave(self)
        for search in [*self._open.values(), *self._wants.values()]:
            search.fail("the gateway stops")
        await end(*self._storing)

    def _enqueue(self, search: SearchTask) -> None:
        (self._urgent if search.urgent else self._batch)[search.task.id] = search
        self._scheduler.notify()

    # --- for the scheduler and its sessions-------------------------------------------------------------

    async def known(self, place: DeviceEnvironment, problems: Sequence[Problem]) -> list[TuningEntry]:
        """The entries that Redis has; none if it does not answer."""
        try:
            async with asyncio.timeout(_REDIS_SECONDS):
                return await self._tunings.known(place, problems)
        except (RedisError, TimeoutError) as error:
            log.warning("tunings_not_known", error=f"{type(error).__name__}: {error}"[:300])
            return []

    def queued(self, *, urgent: bool) -> Iterator[SearchTask]:
        """What waits to be searched, in order."""
        tasks = self._urgent if urgent else self._batch
        for task_id, search in list(tasks.items()):
            if search.state == "queued":
                yield search
            else:  # it was cancelled
                tasks.pop(task_id, None)
                self._forget(search)

    def busy(self) -> bool:
        """Whether the scheduler has anything to do for this queue."""
        return bool(self._urgent or self._batch or self._wants or self.expects())

    def lost(self, search: SearchTask) -> None:
        """It has failed, or was cancelled, while a session had it."""
        self._metrics.searches.labels("lost" if search.state == "failed" else "cancelled").inc()
        self._forget(search)

    def count(self, *, urgent: bool) -> int:
        return len(self._urgent if urgent else self._batch)

    def assign(self, search: SearchTask, worker: str) -> None:
        (self._urgent if search.urgent else self._batch).pop(search.task.id, None)
        search.become("searching", worker)
        log.debug("search_assigned", task=search.task.id, worker=worker)

    def requeue(self, search: SearchTask) -> None:
        """Queues it again, before all others."""
        if not search.open:
            self._forget(search)
            return
        search.become("queued", "")
        if search.urgent:
            self._urgent = {search.task.id: search, **self._urgent}
        else:
            self._batch = {search.task.id: search, **self._batch}
        self._scheduler.notify()

    async def finish(self, search: SearchTask, found: SearchResult) -> TuningEntry:
        """Stores what a session found, and returns the entry that stands for the problem now. Continues even if the
        caller is cancelled: a session's last result counts."""
        return await asyncio.shield(self._in_background(self._finish(search, found)))

    async def _finish(self, search: SearchTask, found: SearchResult) -> TuningEntry:
        standing = await self.store(found.entry)
        known = not found.timings and found.entry.winner == standing.winner
        self._metrics.searches.labels("known" if known else "found").inc()
        search.finish(msgspec.structs.replace(found, entry=standing), known=known)
        log.debug("search_found", task=search.task.id)
        self._forget(search)
        return standing

    def finish_known(self, search: SearchTask, entry: TuningEntry) -> None:
        """It became known before it was assigned."""
        self._metrics.searches.labels("known").inc()
        search.finish(SearchResult(entry, search.task.id), known=True)
        self._forget(search)

    def fail(self, search: SearchTask, why: str, outcome: str) -> None:
        """It will not be searched. outcome: as the metrics name it."""
        if search.open:
            self._metrics.searches.labels(outcome).inc()
            log.warning("search_given_up", problem=search.task.problem.text()[:300], why=why)
        search.fail(why)
        self._forget(search)

    def _forget(self, search: SearchTask) -> None:
        """A compile's search stays until the compile has asked for its result."""
        queued = self._urgent if search.urgent else self._batch
        if queued.get(search.task.id) is search:  # a cancelled task may have been submitted again
            del queued[search.task.id]
        if self._open.get(search.task.id) is search:
            del self._open[search.task.id]

    async def store(self, entry: TuningEntry) -> TuningEntry:
        """Stores an entry, now or once Redis is back, and returns the one that stands."""
        try:
            return await self._store(entry)
        except LimitExceeded as error:
            log.warning("tuning_not_stored", error=error.message)
        except (RedisError, TimeoutError) as error:
            log.warning("tuning_not_stored_yet", error=f"{type(error).__name__}: {error}"[:300])
            if len(self._storing) < _MOST_UNSTORED:
                self._in_background(self._store_later(entry))
        return entry

    async def _store(self, entry: TuningEntry) -> TuningEntry:
        async with asyncio.timeout(_REDIS_SECONDS):
            (stored,) = await self._tunings.store([entry])
        return stored.entry

    async def _store_later(self, entry: TuningEntry) -> None:
        try:
            await retry_while_down(
                lambda: self._store(entry),
                seconds=_STORE_SECONDS,
                longest_pause=_LONGEST_PAUSE_SECONDS,
                errors=(RedisError, TimeoutError),
            )
        except (RedisError, TimeoutError):
            log.error("tuning_lost", problem=entry.problem.text()[:300])

    def _in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that `close` ends."""
        task = asyncio.create_task(work)
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)
        return task

    def note_alive(self, target_name: bytes, place: DeviceEnvironment) -> None:
        """A session has sent a message."""
        self._alive_at[target_name, place] = time.monotonic()

    def expire(self) -> None:
        """Drops what no compile asks for any more, and gives up what makes no progress."""
        now = time.monotonic()
        for key, search in list(self._wants.items()):
            if search.state != "searching" and now - search.wanted > FORGET_SECONDS:
                search.cancel()
                self._forget(search)
                del self._wants[key]
            elif search.state == "queued":
                alive_at = self._alive_at.get((search.target_name, key[0]), 0.0)
                if now - max(search.since, alive_at) > STALL_SECONDS:
                    self.fail(
                        search, f"no search session has sent anything for {STALL_SECONDS:g} s", "stalled"
                    )
        turns = {search.order[0] for search in self._wants.values()}
        self._turns = {key: turn for key, turn in self._turns.items() if turn in turns}
        self._alive_at = {name: at for name, at in self._alive_at.items() if now - at <= STALL_SECONDS}

    def no_worker(self, target_name: bytes, why: str) -> None:
        """No worker can search for a target: its compiles go on without, and tuning jobs wait for one."""
        for search in [each for each in self.queued(urgent=True) if each.target_name == target_name]:
            self.fail(search, why, "no_searcher")
        for search in [each for each in self.queued(urgent=False) if each.target_name == target_name]:
            search.become("queued", why)
