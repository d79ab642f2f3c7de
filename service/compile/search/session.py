"""One search session: a search job on a worker, to which the gateway gives tasks and from which it takes results.

The job runs no code of a tenant, so its results are accepted, for its own device and the tasks that it was given.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import msgspec
import structlog

from ....compiler.api.tuning.search_order import SearchJobSpec
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
from .query_checks import decode_query, is_measurable
from .queue import SearchQueue
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
_SILENT_SECONDS = 300.0
_SILENT_EXHAUSTIVE_SECONDS = 1800.0
"""A session with tasks that sends nothing for so long is killed. To build an exhaustive space takes long."""


class SessionScheduler(Protocol):
    """What a session needs of the scheduler (scheduler.py)."""

    @property
    def pool(self) -> WorkerPool: ...
    def notify(self) -> None: ...
    async def wait_for_change(self, seconds: float, /) -> None: ...
    def next_for(self, session: SearchSession, /) -> SearchTask | None: ...
    def steal_for(self, session: SearchSession, /) -> SearchTask | None: ...
    def may_get_work(self, session: SearchSession, /) -> bool: ...
    def started(self, session: SearchSession, /) -> None: ...
    def ended(self, session: SearchSession, why: str, /) -> None: ...


class SearchSession:
    """A search session of `queue` on one device.

    held: the tasks that it has. place: where it measures, once it has said so.
    """

    def __init__(
        self, scheduler: SessionScheduler, queue: SearchQueue, target: SearchTarget, worker: str
    ) -> None:
        self.queue = queue
        self.target = target
        self.target_name = target.name()
        self.worker = worker
        self.place: DeviceEnvironment | None = None
        self.held: dict[str, SearchTask] = {}
        self.since = time.monotonic()
        self.draining = False
        """Others need the device more: it ends once it has done its tasks."""
        self._begun: set[str] = set()
        self._scheduler = scheduler
        self._trying: CandidateAttempt | None = None
        self._last_query = self._last_work = self.since
        self._warned = False
        self._misplaced = ""
        self.task: asyncio.Task[None] = asyncio.create_task(self._run(), name=f"search on {worker}")

    def idle(self) -> bool:
        """Whether it takes the next task as soon as there is one."""
        return not self.held and not self.draining

    def waiting(self) -> list[SearchTask]:
        """Its tasks of which it has measured nothing, in the order in which it got them."""
        held = (search for task, search in self.held.items() if task not in self._begun)
        return [search for search in held if search.open and not search.alone]

    def silent(self) -> bool:
        """Whether it should have sent something by now."""
        if not self.held:
            return False
        exhaustive = any(search.task.space == "exhaustive" for search in self.held.values())
        most = _SILENT_EXHAUSTIVE_SECONDS if exhaustive else _SILENT_SECONDS
        budget = max(search.task.seconds for search in self.held.values())
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
            log.warning("searcher_lost", worker=self.worker, why=failure, tasks=len(self.held))
        self._hand_back(failure or "it ended before its work", certain=certain)
        self._scheduler.ended(self, failure)

    def _hand_back(self, why: str, *, certain: bool) -> None:
        """Its tasks go to other sessions. The task that it was trying when it ended counts a loss; if it was trying
        none, each of its tasks does."""
        trying = self._trying
        for search in self.held.values():
            if trying is not None and trying.task == search.task.id:
                search.lose(candidate=trying.candidate, certain=certain, why=why)
            elif trying is None and certain:
                search.alone = True
                search.lose(candidate="", certain=True, why=why)
        self._return_held()

    def _return_held(self) -> None:
        for search in reversed(self.held.values()):
            if search.open:
                self.queue.requeue(search)
            else:
                self.queue.lost(search)
        self.held.clear()
        self._begun.clear()

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
        if self.place is not None:
            self.queue.note_alive(self.target_name, self.place)
        match question:
            case TaskRequest(place, holding):
                return await self._next(place, holding)
            case CandidateAttempt(task, candidate):
                if task not in self.held:
                    return TaskReassigned()
                if task not in self._begun:
                    log.debug("search_begun", task=task, worker=self.worker)
                self._begun.add(task)
                self._trying = question if candidate else None
                return KnownEntries([])
            case UnsupportedTask(task, why):
                search = self._done_with(task)
                if search is not None:
                    self.queue.fail(search, why, "unfit")
                return KnownEntries([])
            case SearchResult():
                return KnownEntries([await self._found(question, self._done_with(question.task))])
            case EntryLookup(place, problems):
                return KnownEntries(await self.queue.known(place, problems))
            case _:
                raise MalformedRequest(f"no search session asks {type(question).__name__}")

    def _done_with(self, task: str) -> SearchTask | None:
        self._last_work = time.monotonic()
        if self._trying is not None and self._trying.task == task:
            self._trying = None
        self._begun.discard(task)
        search = self.held.pop(task, None)
        self._scheduler.notify()
        return search

    async def _found(self, found: SearchResult, search: SearchTask | None) -> records.TuningEntry:
        entry = found.entry
        if entry.place != self.place:
            if search is not None:
                self.queue.fail(search, "the session measured in another place than its own", "unfit")
            raise MalformedRequest("a session reports what it did not measure here")
        if search is None:  # it was reassigned, or is another session's; the result is true all the same
            return await self.queue.store(entry)
        if search.task.exact and entry.problem != search.task.problem:
            self.queue.fail(
                search, f"the session made another problem of it: {entry.problem.text()}", "unfit"
            )
            return entry
        return await self.queue.finish(search, found)

    async def _next(self, place: DeviceEnvironment, holding: int) -> TaskBatch:
        if self.place is None:
            if not is_measurable(place, self.target.toolchain, self.target.target):
                self.draining = True
                self._misplaced = (
                    f"worker {self.worker} measures in another place than was asked for: {place}"
                )
                log.warning("searcher_misplaced", worker=self.worker, place=place)
                return TaskBatch([], over=True)
            self.place = place
            self._scheduler.started(self)
            self.queue.note_alive(self.target_name, place)
        if holding:
            # one that has fewer than it was given will say so by holding none
            task = await self._take() if holding >= len(self.held) else None
            return TaskBatch([task] if task is not None else [])
        if self.held:  # an answer did not reach it
            for search in self.held.values():
                search.lose(candidate="", certain=False, why="the session dropped it")
            self._return_held()
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
        """The next task without a known result, assigned to this session."""
        while (search := self._scheduler.next_for(self) or self._scheduler.steal_for(self)) is not None:
            self.queue.assign(search, self.worker)
            self.held[search.task.id] = search
            if search.task.exact and self.place is not None:
                known = await self.queue.known(self.place, [search.task.problem])
                if known:
                    self.held.pop(search.task.id, None)
                    self.queue.finish_known(search, known[0])
                    continue
            self._last_work = time.monotonic()
            return search.task
        return None
