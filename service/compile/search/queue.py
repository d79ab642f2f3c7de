"""The search queue of a namespace: problems to search, from compiles that wait and from tuning jobs, in one order.

A search session is a job on a worker's device. It takes whole problems one by one: only samples that were interleaved
on one device can be compared, so one problem's candidates never go to two sessions. The queue is in memory: after a
dispatcher's death compiles ask again, and tuning jobs and results are in Redis.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import structlog
from msgspec import Struct
from redis.exceptions import RedisError

from ....compiler import decoding
from ....compiler.api.tuning.jobs import MOST_THREADS
from ....compiler.errors import LimitExceeded, MalformedRequest
from ....compiler.tuning import queries
from ....compiler.tuning.queries import KnownEntries, SearchResult, TuningTask
from ....compiler.tuning.records import DeviceEnvironment, Problem, TuningEntry
from ...admission.compile_request import CompileRequest
from ...base.async_tasks import end
from ...base.metrics import GatewayMetrics
from ...storage.redis.retry import retry_while_down
from ..single_flight import Priority
from .database import TuningDatabase
from .task import SearchTarget, SearchTask

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


def decode_query(question: bytes) -> queries.TuningQuery:
    """The query of a worker process in these bytes. Raises LimitExceeded, MalformedRequest."""
    if len(question) > queries.QUESTION_LIMIT:
        raise LimitExceeded(f"a question of {len(question)} bytes, limit {queries.QUESTION_LIMIT}")
    try:
        query: queries.TuningQuery = decoding.from_msgpack(question, type=queries.TuningQuery)
    except msgspec.MsgspecError as error:
        raise MalformedRequest(f"the question cannot be decoded: {error}") from None
    return query


class _Expected(Struct):
    """Compiles for a target that may soon have problems. unused: how many in a row had none so far."""

    target: SearchTarget
    until: float = 0.0
    unused: int = 0


class SearchQueue:
    """The tasks of one namespace."""

    def __init__(
        self, namespace: str, tunings: TuningDatabase, metrics: GatewayMetrics, notify: Callable[[], None]
    ) -> None:
        """notify: called when something has changed, so that the scheduler acts at once."""
        self.namespace = namespace
        self.served = 0.0
        """When the scheduler last gave it a device."""
        self.waiting: list[SearchTask] = []
        """The tasks that no session has, by their ranks. Those that were settled meanwhile remain for a moment."""
        self._tunings = tunings
        self._metrics = metrics
        self._notify = notify
        self._numbers = itertools.count(1)
        self._wants: dict[tuple[DeviceEnvironment, Problem], SearchTask] = {}
        """What compiles have asked for lately, until they have heard of the result."""
        self._alive_at: dict[tuple[bytes, DeviceEnvironment], float] = {}
        """When a session for a target in an environment last sent a message."""
        self._expected: dict[bytes, _Expected] = {}
        self._storing: set[asyncio.Task[Any]] = set()

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
            self._notify()

    def expects(self) -> list[SearchTarget]:
        """Targets for which sessions should be warm now."""
        now = time.monotonic()
        return [expected.target for expected in self._expected.values() if now < expected.until]

    async def want(
        self,
        environment: DeviceEnvironment,
        problems: Sequence[Problem],
        request: CompileRequest,
        *,
        priority: Priority = Priority.PERSON,
        wait_seconds: float = 0.0,
    ) -> KnownEntries:
        """What is known of `problems`, for a compile that asks again. The rest is searched before the tasks of tuning
        jobs, once for all compiles that want it. priority: of the compile. wait_seconds: how long to wait until
        anything is known or given up. If Redis does not answer, all counts as unknown."""
        # a compile has a worker while it waits, so a tuning job's is as urgent as those of training jobs
        priority = min(priority, Priority.DEVICES)
        known = await self._want(environment, problems, request, priority)
        if wait_seconds and known.open and known.open == len(set(problems)):
            await asyncio.wait(
                [self._wants[environment, problem].settled for problem in set(problems)],
                timeout=wait_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            known = await self._want(environment, problems, request, priority)
        return known

    async def _want(
        self,
        environment: DeviceEnvironment,
        problems: Sequence[Problem],
        request: CompileRequest,
        priority: Priority,
    ) -> KnownEntries:
        entries = {entry.problem: entry for entry in await self.known(environment, problems)}
        target = SearchTarget(request.toolchain, request.target, environment.threads)
        fits = environment.threads <= MOST_THREADS and target.is_measurable(environment)
        turns = (task.turn for task in self._wants.values() if task.compile == request.key)
        turn = next(turns, 0) or next(self._numbers)
        still_open, given_up = 0, []
        distinct = list(dict.fromkeys(problems))
        for problem in distinct:
            if problem in entries:
                continue
            task = self._wants.get((environment, problem)) if fits else None
            if task is None and fits and len(self._wants) < MOST_WANTED:
                task = SearchTask(
                    TuningTask(id=f"compile-{next(self._numbers)}", problem=problem),
                    target,
                    turn=turn,
                    priority=priority,
                    environment=environment,
                    compile=request.key,
                )
                self._wants[environment, problem] = task
                log.debug("search_wanted", task=task.task.id, problem=problem.text()[:300])
                if task.target_name in self._expected:
                    self._expected[task.target_name].unused = 0
                self._enqueue(task)
            if task is None:
                given_up.append(problem)
                continue
            task.wanted = time.monotonic()
            if priority < task.priority:
                task.priority = priority
                self.waiting.sort(key=SearchTask.rank)
            if (result := task.result()) is not None:
                entries[problem] = result.entry
            elif task.open:
                still_open += 1
            else:
                given_up.append(problem)
        return KnownEntries([entries[each] for each in distinct if each in entries], still_open, given_up)

    def result(self, environment: DeviceEnvironment, problem: Problem) -> SearchResult | None:
        """The result for compiles that have asked for it lately, with all timings."""
        task = self._wants.get((environment, problem))
        return None if task is None else task.result()

    def submit(
        self,
        task: TuningTask,
        target: SearchTarget,
        on_searching: Callable[[str], None] = lambda worker: None,
    ) -> SearchTask:
        """Searches `task` when compiles leave room; its id gets a number. Any number of tasks can wait, in memory."""
        turn = next(self._numbers)
        task = msgspec.structs.replace(task, id=f"{task.id}.{turn}")
        search = SearchTask(task, target, turn=turn, on_searching=on_searching)
        self._enqueue(search)
        return search

    async def close(self) -> None:
        """Fails all open tasks with "the gateway stops". No session may be left."""
        for task in [*self.waiting, *self._wants.values()]:
            task.fail("the gateway stops")
        await end(*self._storing)

    # --- for the scheduler and its sessions ------------------------------------------------------------

    async def known(self, environment: DeviceEnvironment, problems: Sequence[Problem]) -> list[TuningEntry]:
        """The entries that Redis has; none if it does not answer."""
        try:
            async with asyncio.timeout(_REDIS_SECONDS):
                return await self._tunings.known(environment, problems)
        except (RedisError, TimeoutError) as error:
            log.warning("tunings_not_known", error=f"{type(error).__name__}: {error}"[:300])
            return []

    def queued(self) -> Iterator[SearchTask]:
        """What waits to be searched, in order."""
        return (task for task in self.waiting if task.state == "queued")

    def busy(self) -> bool:
        """Whether the scheduler has anything to do for this queue."""
        return bool(self.waiting or self._wants or self.expects())

    def _enqueue(self, task: SearchTask) -> None:
        bisect.insort(self.waiting, task, key=SearchTask.rank)
        self._notify()

    def assign(self, task: SearchTask, worker: str) -> None:
        if task in self.waiting:  # otherwise another session had it
            self.waiting.remove(task)
        task.assign(worker)
        log.debug("search_assigned", task=task.task.id, worker=worker)

    def take_back(self, tasks: Iterable[SearchTask]) -> None:
        """Tasks of a session that has ended: other sessions get them before what ranks behind them."""
        for task in tasks:
            task.begun = False
            if task.open:
                task.put_back()
                self._enqueue(task)
            else:
                self._metrics.searches.labels("lost" if task.state == "failed" else "cancelled").inc()

    async def finish(self, result: SearchResult, task: SearchTask | None = None) -> TuningEntry:
        """Stores what a session found, now or once Redis is back, and returns the entry that stands for the problem.
        Continues even if the caller is cancelled: a session's last result counts. task: what this is the result of."""
        return await asyncio.shield(self._in_background(self._finish(result, task)))

    async def _finish(self, result: SearchResult, task: SearchTask | None) -> TuningEntry:
        standing = result.entry
        try:
            standing = await self._store(standing)
        except LimitExceeded as error:
            log.warning("tuning_not_stored", error=error.message)
        except (RedisError, TimeoutError) as error:
            log.warning("tuning_not_stored_yet", error=f"{type(error).__name__}: {error}"[:300])
            if len(self._storing) < _MOST_UNSTORED:
                self._in_background(self._store_later(standing))
        except asyncio.CancelledError:
            if task is not None:
                task.fail("the gateway stops")
            raise
        if task is not None:
            known = not result.timings and result.entry.winner == standing.winner
            self._metrics.searches.labels("known" if known else "found").inc()
            task.finish(msgspec.structs.replace(result, entry=standing))
            log.debug("search_found", task=task.task.id)
        return standing

    def fail(self, task: SearchTask, why: str, outcome: str) -> None:
        """It will not be searched. outcome: as the metrics name it."""
        if task.open:
            self._metrics.searches.labels(outcome).inc()
            log.warning("search_given_up", problem=task.task.problem.text()[:300], why=why)
        task.fail(why)

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

    def note_alive(self, target_name: bytes, environment: DeviceEnvironment) -> None:
        """A session has sent a message."""
        self._alive_at[target_name, environment] = time.monotonic()

    def expire(self) -> None:
        """Drops what no compile asks for any more, and gives up what makes no progress."""
        now = time.monotonic()
        for key, task in list(self._wants.items()):
            alive_at = self._alive_at.get((task.target_name, key[0]), 0.0)
            if task.state != "searching" and now - task.wanted > FORGET_SECONDS:
                task.cancel()
                del self._wants[key]
            elif task.state == "queued" and now - max(task.since, alive_at) > STALL_SECONDS:
                self.fail(task, f"no search session has sent anything for {STALL_SECONDS:g} s", "stalled")
        self.waiting = list(self.queued())
        self._alive_at = {name: at for name, at in self._alive_at.items() if now - at <= STALL_SECONDS}

    def no_worker(self, target_name: bytes, why: str) -> None:
        """No worker can search for a target: its compiles go on without, and tuning jobs wait for one."""
        for task in self.queued():
            if task.target_name == target_name and task.urgent:
                self.fail(task, why, "no_searcher")
