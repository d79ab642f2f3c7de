"""One search session: a search job on a worker, to which the dispatcher gives tasks and from which it takes results.

The job runs no code of a tenant, so its results are accepted, for its own device and the tasks that it was given.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import msgspec
import structlog

from ....compiler.api.tuning.jobs import SearchJobSpec
from ....compiler.errors import CompileTimeout, MalformedRequest, RelayError
from ....compiler.tuning import queries, records
from ....compiler.tuning.queries import (
    CandidateAttempt,
    EntryLookup,
    KnownEntries,
    SearchResult,
    TaskBatch,
    TaskReassigned,
    TaskRequest,
    TuningTask,
    UnsupportedTask,
)
from ....compiler.tuning.records import DeviceEnvironment
from ....workers.pool import WorkerLost, WorkerPool
from .queue import SearchQueue, decode_query
from .task import SearchTarget, SearchTask

log = structlog.get_logger(__name__)

_ANSWER_SECONDS = 4.0
"""A TaskRequest is answered within this time, with or without a task."""
_POLL_SECONDS = 0.5
"""How often to check whether the worker's compiles leave room."""
IDLE_SECONDS = 30.0
"""A session without work stays so long: the next one would have to warm up."""
SHIFT_SECONDS = 3600.0
"""After this a session is replaced by a fresh one."""
_DEADLINE_SECONDS = 3 * SHIFT_SECONDS
"""After this it is killed, whatever it does."""
SILENT_SECONDS = 300.0
_SILENT_EXHAUSTIVE_SECONDS = 1800.0
"""A session with tasks that sends nothing for so long is killed. To build an exhaustive space takes long."""


class SessionScheduler(Protocol):
    """What a session needs of the scheduler (scheduler.py)."""

    @property
    def pool(self) -> WorkerPool: ...
    def notify(self) -> None: ...
    async def wait_for_change(self, seconds: float, /) -> None: ...
    def assign_next(self, session: SearchSession, /) -> SearchTask | None: ...
    def may_get_work(self, session: SearchSession, /) -> bool: ...
    def started(self, session: SearchSession, /) -> None: ...
    def ended(self, session: SearchSession, why: str, /) -> None: ...


class SearchSession:
    """A search session of `queue` on one device.

    tasks: those that it has, by their ids, in the order in which it got them. environment: where it measures, once it
    has said so.
    """

    def __init__(
        self, scheduler: SessionScheduler, queue: SearchQueue, target: SearchTarget, worker: str
    ) -> None:
        self.queue = queue
        self.target = target
        self.target_name = target.name()
        self.worker = worker
        self.environment: DeviceEnvironment | None = None
        self.tasks: dict[str, SearchTask] = {}
        self.since = time.monotonic()
        self.draining = False
        """Others need the device more: it ends once it has done its tasks."""
        self._scheduler = scheduler
        self._trying: CandidateAttempt | None = None
        self._last_query = self._last_work = self.since
        self._warned = False
        self._misplaced = ""
        self.runner: asyncio.Task[None] = asyncio.create_task(self._run(), name=f"search on {worker}")

    def idle(self) -> bool:
        """Whether it takes the next task as soon as there is one."""
        return not self.tasks and not self.draining

    def suits(self, task: SearchTask) -> bool:
        """Whether it could search the task."""
        return task.target_name == self.target_name and task.environment in (None, self.environment)

    def is_peer(self, other: SearchSession) -> bool:
        """Whether the other searches the same tasks, or will once it has started."""
        same = self.queue is other.queue and self.target_name == other.target_name
        return same and other.environment in (None, self.environment)

    def unbegun(self) -> list[SearchTask]:
        """Its tasks that another session may take over."""
        return [task for task in self.tasks.values() if task.open and not (task.begun or task.alone)]

    def silent(self) -> bool:
        """Whether it should have sent something by now."""
        if not self.tasks:
            return False
        exhaustive = any(task.task.space == "exhaustive" for task in self.tasks.values())
        most = _SILENT_EXHAUSTIVE_SECONDS if exhaustive else SILENT_SECONDS
        budget = max(task.task.seconds for task in self.tasks.values())
        return time.monotonic() - self._last_query > most + budget

    async def _run(self) -> None:
        """Never raises."""
        order = SearchJobSpec(self.target.toolchain, self.target.target, self.target.threads)
        failure, certain = "", False
        try:
            await self._scheduler.pool.search(
                msgspec.msgpack.encode(order),
                worker=self.worker,
                namespace=self.queue.namespace,
                toolchain=self.target.toolchain,
                target=self.target.target,
                on_query=self.answer,
                deadline_seconds=_DEADLINE_SECONDS,
            )
            failure = self._misplaced
        except RelayError as error:
            failure = error.message
            certain = not isinstance(error, WorkerLost | CompileTimeout)
        except asyncio.CancelledError:
            pass
        except Exception as error:
            log.exception("search_session_broke", worker=self.worker)
            failure = f"the service failed with {type(error).__name__}"
        if failure:
            log.warning("searcher_lost", worker=self.worker, why=failure, tasks=len(self.tasks))
        self._blame(failure or "it ended before its work", certain=certain)
        self._give_back()
        self._scheduler.ended(self, failure)

    def _blame(self, why: str, *, certain: bool) -> None:
        """The task that it was trying when it ended counts a loss; if it was trying none, each of its tasks does."""
        trying = self._trying
        for task in self.tasks.values():
            if trying is not None and trying.task == task.task.id:
                task.lose(candidate=trying.candidate, certain=certain, why=why)
            elif trying is None and certain:
                task.alone = True
                task.lose(candidate="", certain=True, why=why)

    def _give_back(self) -> None:
        """Its tasks go to other sessions."""
        self.queue.take_back(self.tasks.values())
        self.tasks.clear()

    # --- its queries -----------------------------------------------------------------------------------

    async def answer(self, question: bytes) -> bytes:
        """b'': no session may ask this; the first time the reason is logged."""
        self._last_query = time.monotonic()
        try:
            return msgspec.msgpack.encode(await self._answer(decode_query(question)))
        except RelayError as error:
            if not self._warned:
                self._warned = True
                log.warning("searcher_unanswered", worker=self.worker, error=error.message[:500])
            return b""

    async def _answer(self, question: queries.TuningQuery) -> queries.TuningReply:
        if self.environment is not None:
            self.queue.note_alive(self.target_name, self.environment)
        match question:
            case TaskRequest(environment, holding):
                return await self._next(environment, holding)
            case CandidateAttempt(task, candidate):
                if task not in self.tasks:
                    return TaskReassigned()
                if not self.tasks[task].begun:
                    log.debug("search_begun", task=task, worker=self.worker)
                self.tasks[task].begun = True
                self._trying = question if candidate else None
                return KnownEntries([])
            case UnsupportedTask(task, why):
                search = self._done_with(task)
                if search is not None:
                    self.queue.fail(search, why, "unfit")
                return KnownEntries([])
            case SearchResult():
                return KnownEntries([await self._finished(question, self._done_with(question.task))])
            case EntryLookup(environment, problems):
                return KnownEntries(await self.queue.known(environment, problems))
            case _:
                raise MalformedRequest(f"no search session asks {type(question).__name__}")

    def _done_with(self, task: str) -> SearchTask | None:
        self._last_work = time.monotonic()
        if self._trying is not None and self._trying.task == task:
            self._trying = None
        search = self.tasks.pop(task, None)
        self._scheduler.notify()
        return search

    async def _finished(self, result: SearchResult, task: SearchTask | None) -> records.TuningEntry:
        entry = result.entry
        if entry.place != self.environment:
            if task is not None:
                self.queue.fail(task, "the session measured in another place than its own", "unfit")
            raise MalformedRequest("a session reports what it did not measure here")
        if task is not None and task.task.exact and entry.problem != task.task.problem:
            self.queue.fail(task, f"the session made another problem of it: {entry.problem.text()}", "unfit")
            return entry
        # without a task it was reassigned, or is another session's; the result is true all the same
        return await self.queue.finish(result, task)

    async def _next(self, environment: DeviceEnvironment, holding: int) -> TaskBatch:
        if self.environment is None:
            if not self.target.is_measurable(environment):
                self.draining = True
                self._misplaced = (
                    f"worker {self.worker} measures in another place than was asked for: {environment}"
                )
                log.warning("searcher_misplaced", worker=self.worker, place=environment)
                return TaskBatch([], over=True)
            self.environment = environment
            self._scheduler.started(self)
            self.queue.note_alive(self.target_name, environment)
        if holding:
            # one that has fewer than it was given will say so by holding none
            task = await self._take() if holding >= len(self.tasks) else None
            return TaskBatch([task] if task is not None else [])
        if self.tasks:  # an answer did not reach it
            for dropped in self.tasks.values():
                dropped.lose(candidate="", certain=False, why="the session dropped it")
            self._give_back()
        return await self._next_or_over()

    async def _next_or_over(self) -> TaskBatch:
        until = time.monotonic() + _ANSWER_SECONDS
        while True:
            now = time.monotonic()
            if self.draining or now - self.since > SHIFT_SECONDS:
                return TaskBatch([], over=True)
            task = await self._take()
            if task is not None:
                return TaskBatch([task])
            if not self._scheduler.may_get_work(self) and now - self._last_work > IDLE_SECONDS:
                self.draining = True
                return TaskBatch([], over=True)
            if now >= until:
                return TaskBatch([])
            await self._scheduler.wait_for_change(min(_POLL_SECONDS, until - now))

    async def _take(self) -> TuningTask | None:
        """The next task without a known result, which is this session's then."""
        while (task := self._scheduler.assign_next(self)) is not None:
            if task.task.exact and self.environment is not None:
                known = await self.queue.known(self.environment, [task.task.problem])
                if known:
                    self.tasks.pop(task.task.id, None)
                    await self.queue.finish(SearchResult(known[0], task.task.id), task)
                    continue
            self._last_work = time.monotonic()
            return task.task
        return None
