"""One running searcher, seen from the gateway: its questions in; tasks, and what the farm makes of its findings, out.

It runs nothing of a tenant's, so it is believed: for the place it was started for, and for the tasks that it has.
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
from ....workers.pool import WorkerLost
from ...base.worker_pools import SearchPool
from .query_checks import decode_query, is_measurable
from .queue import SearchQueue
from .task import SearchTarget, SearchTask

log = structlog.get_logger(__name__)

_ANSWER_SECONDS = 4.0
"""In which Next is answered, whatever there is."""
_LOOK_SECONDS = 0.5
"""Between two looks whether the worker's compiles leave room by now."""
IDLE_SECONDS = 30.0
"""A searcher without work stays so long: the next one would have to warm up."""
SHIFT_SECONDS = 3600.0
"""After which a searcher is replaced by a fresh one."""
_DEADLINE_SECONDS = 3 * SHIFT_SECONDS
"""After which it is killed, whatever it does."""
_SILENT_SECONDS = 300.0
_SILENT_EXHAUSTIVE_SECONDS = 1800.0
"""A searcher with tasks that says nothing for so long is killed; to build an exhaustive space takes long."""


class SessionScheduler(Protocol):
    """What a session needs of the scheduler (scheduler.py)."""

    @property
    def pool(self) -> SearchPool: ...
    def stir(self) -> None: ...
    async def news(self, seconds: float, /) -> None: ...
    def next_for(self, session: SearchSession, /) -> SearchTask | None: ...
    def taken_over_by(self, session: SearchSession, /) -> SearchTask | None: ...
    def may_have(self, session: SearchSession, /) -> bool: ...
    def started(self, session: SearchSession, /) -> None: ...
    def ended(self, session: SearchSession, why: str, /) -> None: ...


class SearchSession:
    """A searcher of `farm` on one lane.

    held: the tasks that it has. place: where it measures, once it has said so.
    """

    def __init__(self, crew: SessionScheduler, farm: SearchQueue, aim: SearchTarget, worker: str) -> None:
        self.farm = farm
        self.aim = aim
        self.aim_name = aim.name()
        self.worker = worker
        self.place: DeviceEnvironment | None = None
        self.held: dict[str, SearchTask] = {}
        self.since = time.monotonic()
        self.yields = False
        """Others need the lane more: it ends once it has done what it has."""
        self._begun: set[str] = set()
        self._crew = crew
        self._trying: CandidateAttempt | None = None
        self._heard = self._worked = self.since
        self._complained = False
        self._killed = self._misplaced = ""
        self.task: asyncio.Task[None] = asyncio.create_task(self._run(), name=f"search on {worker}")

    def hungry(self) -> bool:
        """Whether it takes the next task as soon as it can."""
        return not self.held and not self.yields

    def waiting(self) -> list[SearchTask]:
        """Those of its tasks of which it has measured nothing, last those that it has got last."""
        held = (ticket for task, ticket in self.held.items() if task not in self._begun)
        return [ticket for ticket in held if ticket.open and not ticket.alone]

    def silent(self) -> bool:
        """Whether it should have said something by now."""
        if not self.held:
            return False
        exhaustive = any(ticket.task.space == "exhaustive" for ticket in self.held.values())
        most = _SILENT_EXHAUSTIVE_SECONDS if exhaustive else _SILENT_SECONDS
        budget = max(ticket.task.seconds for ticket in self.held.values())
        return time.monotonic() - self._heard > most + budget

    def kill(self, why: str) -> None:
        self._killed = why
        self.task.cancel()

    async def _run(self) -> None:
        """Never raises."""
        order = SearchJobSpec(self.aim.toolchain, self.aim.target, self.aim.threads)
        why, certain = "it ended before its work", False
        try:
            await self._crew.pool.search(
                msgspec.msgpack.encode(order),
                worker=self.worker,
                namespace=self.farm.namespace,
                toolchain=self.aim.toolchain,
                target=self.aim.target,
                on_query=self.answer,
                deadline_seconds=_DEADLINE_SECONDS,
            )
            why, failed = self._misplaced or why, bool(self._misplaced)
        except RelayError as error:
            why, failed = error.message, True
            certain = not isinstance(error, WorkerLost | CompileTimeout)
        except asyncio.CancelledError:
            why, failed = self._killed, bool(self._killed)
        except Exception as error:
            log.exception("searcher_broke", worker=self.worker)
            why, failed = f"the service failed with {type(error).__name__}", True
        if failed:
            log.warning("searcher_lost", worker=self.worker, why=why, tasks=len(self.held))
        self._hand_back(why, certain=certain)
        self._crew.ended(self, why if failed else "")

    def _hand_back(self, why: str, *, certain: bool) -> None:
        """What it has goes to others; what it was trying when it ended has cost a searcher. Where nothing was being
        tried, each may have."""
        trying = self._trying
        for ticket in self.held.values():
            if trying is not None and trying.task == ticket.task.id:
                ticket.lose(candidate=trying.candidate, certain=certain, why=why)
            elif trying is None and certain:
                ticket.alone = True
                ticket.lose(candidate="", certain=True, why=why)
        self._return_held()

    def _return_held(self) -> None:
        for ticket in reversed(self.held.values()):
            if ticket.open:
                self.farm.take_back(ticket)
            else:
                self.farm.lost(ticket)
        self.held.clear()
        self._begun.clear()

    # --- its questions ---------------------------------------------------------------------------------

    async def answer(self, question: bytes) -> bytes:
        """b'' for what no searcher asks, and the first time a line in the log."""
        self._heard = time.monotonic()
        try:
            return msgspec.msgpack.encode(await self._answer(decode_query(question)))
        except RelayError as error:
            if not self._complained:
                self._complained = True
                log.warning("searcher_unanswered", worker=self.worker, error=error.message[:500])
            return b""

    async def _answer(self, question: queries.TuningQuery) -> queries.TuningReply:
        if self.place is not None:
            self.farm.heard(self.aim_name, self.place)
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
                ticket = self._done_with(task)
                if ticket is not None:
                    self.farm.fail(ticket, why, "unfit")
                return KnownEntries([])
            case SearchResult():
                return KnownEntries([await self._found(question, self._done_with(question.task))])
            case EntryLookup(place, problems):
                return KnownEntries(await self.farm.known(place, problems))
            case _:
                raise MalformedRequest(f"no searcher asks {type(question).__name__}")

    def _done_with(self, task: str) -> SearchTask | None:
        self._worked = time.monotonic()
        if self._trying is not None and self._trying.task == task:
            self._trying = None
        self._begun.discard(task)
        ticket = self.held.pop(task, None)
        self._crew.stir()
        return ticket

    async def _found(self, found: SearchResult, ticket: SearchTask | None) -> records.TuningEntry:
        entry = found.entry
        if entry.place != self.place:
            if ticket is not None:
                self.farm.fail(ticket, "the searcher measured in another place than its own", "unfit")
            raise MalformedRequest("a searcher reports what it did not measure here")
        if ticket is None:  # it was taken from it, or is another's: true all the same
            return await self.farm.keep(entry)
        if ticket.task.exact and entry.problem != ticket.task.problem:
            self.farm.fail(
                ticket, f"the searcher made another problem of it: {entry.problem.text()}", "unfit"
            )
            return entry
        return await self.farm.finish(ticket, found)

    async def _next(self, place: DeviceEnvironment, holding: int) -> TaskBatch:
        if self.place is None:
            if not is_measurable(place, self.aim.toolchain, self.aim.target):
                self.yields = True
                self._misplaced = (
                    f"worker {self.worker} measures in another place than was asked for: {place}"
                )
                log.warning("searcher_misplaced", worker=self.worker, place=place)
                return TaskBatch([], over=True)
            self.place = place
            self._crew.started(self)
            self.farm.heard(self.aim_name, place)
        if holding:
            # one that has fewer than it was given will say so by holding none
            task = await self._take() if holding >= len(self.held) else None
            return TaskBatch([task] if task is not None else [])
        if self.held:  # an answer did not reach it
            for ticket in self.held.values():
                ticket.lose(candidate="", certain=False, why="the searcher dropped it")
            self._return_held()
        return await self._next_or_over()

    async def _next_or_over(self) -> TaskBatch:
        until = time.monotonic() + _ANSWER_SECONDS
        while True:
            now = time.monotonic()
            if self.yields or now - self.since > SHIFT_SECONDS:
                return TaskBatch([], over=True)
            task = await self._take()
            if task is not None:
                return TaskBatch([task])
            if not self._crew.may_have(self) and now - self._worked > IDLE_SECONDS:
                self.yields = True
                return TaskBatch([], over=True)
            if now >= until:
                return TaskBatch([])
            await self._crew.news(min(_LOOK_SECONDS, until - now))

    async def _take(self) -> TuningTask | None:
        """The next task that nobody knows by now, its own from here on."""
        while (ticket := self._crew.next_for(self) or self._crew.taken_over_by(self)) is not None:
            self.farm.give_out(ticket, self.worker)
            self.held[ticket.task.id] = ticket
            if ticket.task.exact and self.place is not None:
                known = await self.farm.known(self.place, [ticket.task.problem])
                if known:
                    self.held.pop(ticket.task.id, None)
                    self.farm.finish_known(ticket, known[0])
                    continue
            self._worked = time.monotonic()
            return ticket.task
        return None
