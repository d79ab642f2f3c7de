"""The farm of a namespace: problems in, from compiles that wait and from batch jobs; what searchers found, out.

A searcher is a job on a worker's search lane. It takes tasks one by one, whole problems each: only samples that were
interleaved on one device can be compared, so one problem's candidates never go to two. All this lies in memory: a
compile asks again after a gateway's death, a batch job is kept by whoever submitted it, and what was found is in Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec
import structlog
from msgspec import Struct
from redis.exceptions import RedisError

from ....compiler.api.tuning.search_order import MOST_THREADS
from ....compiler.errors import LimitExceeded
from ....compiler.tuning.queries import KnownEntries, SearchResult, TuningTask
from ....compiler.tuning.records import DeviceEnvironment, Problem, TuningEntry
from ....workers.pool import DevicesHeld
from ...admission.compile_request import CompileRequest
from ...base.async_tasks import end
from ...base.metrics import GatewayMetrics
from .database import TuningDatabase
from .query_checks import is_measurable
from .task import OnChange, SearchTarget, SearchTask

log = structlog.get_logger(__name__)

MOST_WANTED = 4096
"""Problems that a namespace's compiles may have searched at once; past it they do it themselves."""
FORGET_SECONDS = 300.0
"""A problem that no compile has asked for so long is not searched for it, and what became of it is forgotten: the
compile has ended. One that lives asks every few seconds where it waits, or after half a minute's rest
(workers/fork_server/queries.py); while it traces a large graph again it asks nothing."""
STALL_SECONDS = 180.0
"""A compile does not wait longer for a searcher to say anything: one that has to import torch first on a busy machine
needs a minute."""
EXPECT_SECONDS = 60.0
"""From a compile's beginning to its first wish, at most: a large graph is lowered once before."""
VAIN_STARTS = 2
_MOST_EXPECTED = 64
_REDIS_SECONDS = 5.0
_KEEP_AGAIN_SECONDS = (1.0, 30.0, 900.0)
"""First and longest pause, and when to give up, while Redis does not take an entry."""
_MOST_UNKEPT = 1000


class _Expected(Struct):
    """Compiles of an aim that may soon want something. vain: how many in a row have wanted nothing so far."""

    aim: SearchTarget
    until: float = 0.0
    vain: int = 0


class QueueScheduler(Protocol):
    """What a queue needs of the scheduler (scheduler.py)."""

    def join(self, queue: SearchQueue, /) -> None: ...
    async def leave(self, queue: SearchQueue, /) -> None: ...
    def stir(self) -> None:
        """Something has changed: look at once."""

    def lanes(self, aim: SearchTarget, /) -> Sequence[object]:
        """Raises NoWorker where there is none for `aim`, nor one to come."""


class SearchQueue:
    """The tasks of one namespace."""

    def __init__(
        self, namespace: str, tunings: TuningDatabase, crew: QueueScheduler, metrics: GatewayMetrics
    ) -> None:
        self.namespace = namespace
        self._tunings = tunings
        self._crew = crew
        self._metrics = metrics
        self._numbers = itertools.count(1)
        self._wants: dict[tuple[DeviceEnvironment, Problem], SearchTask] = {}
        self._open: dict[str, SearchTask] = {}
        """Of batch jobs, by the task's id."""
        self._urgent: dict[str, SearchTask] = {}
        self._batch: dict[str, SearchTask] = {}
        """Both: what is queued, in its order, by the task's id."""
        self._turns: dict[str, int] = {}
        """When compiles first wanted something, in numbers, by their keys."""
        self._heard: dict[tuple[bytes, DeviceEnvironment], float] = {}
        """When a searcher of an aim in a place last said something."""
        self._expected: dict[bytes, _Expected] = {}
        self._keeping: set[asyncio.Task[Any]] = set()
        crew.join(self)

    # --- for compiles and batch jobs -------------------------------------------------------------------

    def expect(self, aim: SearchTarget) -> None:
        """A compile begins that tunes: have searchers warm by the time it knows what it wants. After some in a row that
        wanted nothing, since all was known, none is warmed for the next."""
        name = aim.name()
        if name not in self._expected and len(self._expected) >= _MOST_EXPECTED:
            self._expected.clear()
        expected = self._expected.setdefault(name, _Expected(aim))
        if expected.vain < VAIN_STARTS:
            expected.vain += 1
            expected.until = time.monotonic() + EXPECT_SECONDS
            self._crew.stir()

    def expects(self) -> list[SearchTarget]:
        """Searchers for these are to be kept warm just now."""
        now = time.monotonic()
        return [expected.aim for expected in self._expected.values() if now < expected.until]

    async def want(
        self,
        place: DeviceEnvironment,
        problems: Sequence[Problem],
        ask: CompileRequest,
        *,
        patience: float = 0.0,
    ) -> KnownEntries:
        """For a compile that asks again: what is known of `problems` in `place`. The rest is searched before any batch
        job's tasks, once for all compiles that want it. patience: seconds to wait until anything is known or given up.
        What Redis does not tell counts as unknown."""
        known = await self._want(place, problems, ask)
        if known.open == len(set(problems)) and patience:
            tickets = [self._wants[place, problem] for problem in set(problems)]
            await asyncio.wait(
                [ticket.settled for ticket in tickets],
                timeout=patience,
                return_when=asyncio.FIRST_COMPLETED,
            )
            known = await self._want(place, problems, ask)
        return known

    async def _want(
        self, place: DeviceEnvironment, problems: Sequence[Problem], ask: CompileRequest
    ) -> KnownEntries:
        entries = {entry.problem: entry for entry in await self.known(place, problems)}
        aim = SearchTarget(ask.toolchain, ask.target, place.threads)
        fits = place.threads <= MOST_THREADS and is_measurable(place, ask.toolchain, ask.target)
        still_open, given_up = 0, []
        turn = self._turns.setdefault(ask.key, next(self._numbers))
        waiting = len(self._urgent)
        for problem in dict.fromkeys(problems):
            if problem in entries:
                continue
            ticket = self._wanted(place, problem, aim, turn) if fits else None
            found = ticket.found() if ticket is not None else None
            if found is not None:
                entries[problem] = found.entry
            elif ticket is not None and ticket.open:
                still_open += 1
            else:
                given_up.append(problem)
        if len(self._urgent) > waiting:
            self._urgent = dict(sorted(self._urgent.items(), key=lambda item: item[1].order))
        told = [entries[problem] for problem in dict.fromkeys(problems) if problem in entries]
        return KnownEntries(told, still_open, given_up)

    def found(self, place: DeviceEnvironment, problem: Problem) -> SearchResult | None:
        """What was found for compiles that have asked for it lately, with all timings."""
        ticket = self._wants.get((place, problem))
        return None if ticket is None else ticket.found()

    def _wanted(
        self, place: DeviceEnvironment, problem: Problem, aim: SearchTarget, turn: int
    ) -> SearchTask | None:
        """The ticket of a problem that a compile has asked for just now; None: there are too many."""
        ticket = self._wants.get((place, problem))
        if ticket is None:
            if len(self._wants) >= MOST_WANTED:
                return None
            task = TuningTask(id=f"compile-{next(self._numbers)}", problem=problem)
            ticket = self._wants[place, problem] = SearchTask(task, aim, place=place, turn=turn)
            log.debug("search_wanted", task=task.id, problem=problem.text()[:300])
            if ticket.aim_name in self._expected:
                self._expected[ticket.aim_name].vain = 0
            self._enqueue(ticket)
        ticket.wanted = time.monotonic()
        return ticket

    def check(self, aim: SearchTarget) -> None:
        """Raises NoWorker if no worker searches for `aim`, nor is one to come."""
        with contextlib.suppress(DevicesHeld):  # a job can wait for training to end
            self._crew.lanes(aim)

    def submit(self, task: TuningTask, aim: SearchTarget, *, on_change: OnChange | None = None) -> SearchTask:
        """Have `task` searched when compiles leave room. Its `id` is the caller's.

        Any number of tasks wait, in memory. Raises ValueError for an id that is open already.
        """
        if task.id in self._urgent or (task.id in self._open and self._open[task.id].open):
            raise ValueError(f"the task {task.id} is open already")
        ticket = self._open[task.id] = SearchTask(task, aim, on_change=on_change)
        self._enqueue(ticket)
        return ticket

    async def close(self) -> None:
        """Stop this farm's searchers; the outcome of what is open is then "the gateway stops"."""
        await self._crew.leave(self)
        for ticket in [*self._open.values(), *self._wants.values()]:
            ticket.fail("the gateway stops")
        await end(*self._keeping)

    def _enqueue(self, ticket: SearchTask) -> None:
        (self._urgent if ticket.urgent else self._batch)[ticket.task.id] = ticket
        self._crew.stir()

    # --- for the crew and its searchers ----------------------------------------------------------------

    async def known(self, place: DeviceEnvironment, problems: Sequence[Problem]) -> list[TuningEntry]:
        """The entries that Redis tells."""
        try:
            async with asyncio.timeout(_REDIS_SECONDS):
                return await self._tunings.known(place, problems)
        except (RedisError, TimeoutError) as error:
            log.warning("tunings_not_known", error=f"{type(error).__name__}: {error}"[:300])
            return []

    def queued(self, *, urgent: bool) -> Iterator[SearchTask]:
        """What waits to be searched, in its order."""
        book = self._urgent if urgent else self._batch
        for task_id, ticket in list(book.items()):
            if ticket.state == "queued":
                yield ticket
            else:  # it was cancelled
                book.pop(task_id, None)
                self._forget(ticket)

    def busy(self) -> bool:
        """Whether there is anything to look after."""
        return bool(self._urgent or self._batch or self._wants or self.expects())

    def lost(self, ticket: SearchTask) -> None:
        """It has failed, or was cancelled, while a searcher had it."""
        self._metrics.searches.labels("lost" if ticket.state == "failed" else "cancelled").inc()
        self._forget(ticket)

    def count(self, *, urgent: bool) -> int:
        return len(self._urgent if urgent else self._batch)

    def give_out(self, ticket: SearchTask, worker: str) -> None:
        (self._urgent if ticket.urgent else self._batch).pop(ticket.task.id, None)
        ticket.become("searching", worker)
        log.debug("search_given_out", task=ticket.task.id, worker=worker)

    def take_back(self, ticket: SearchTask) -> None:
        """Queue it again, before all others."""
        if not ticket.open:
            self._forget(ticket)
            return
        ticket.become("queued", "")
        if ticket.urgent:
            self._urgent = {ticket.task.id: ticket, **self._urgent}
        else:
            self._batch = {ticket.task.id: ticket, **self._batch}
        self._crew.stir()

    async def finish(self, ticket: SearchTask, found: SearchResult) -> TuningEntry:
        """What stands for the problem now that a searcher has found this. Goes on to its end though the caller is
        cancelled: a searcher's last word counts."""
        task = asyncio.create_task(self._finish(ticket, found), name="finish a search")
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)
        return await asyncio.shield(task)

    async def _finish(self, ticket: SearchTask, found: SearchResult) -> TuningEntry:
        standing = await self.keep(found.entry)
        known = not found.timings and found.entry.winner == standing.winner
        self._metrics.searches.labels("known" if known else "found").inc()
        ticket.finish(msgspec.structs.replace(found, entry=standing), known=known)
        log.debug("search_found", task=ticket.task.id)
        self._forget(ticket)
        return standing

    def finish_known(self, ticket: SearchTask, entry: TuningEntry) -> None:
        """It became known before it was given out."""
        self._metrics.searches.labels("known").inc()
        ticket.finish(SearchResult(entry, ticket.task.id), known=True)
        self._forget(ticket)

    def fail(self, ticket: SearchTask, why: str, outcome: str) -> None:
        """Nobody will search it. outcome: as the metrics name it."""
        if ticket.open:
            self._metrics.searches.labels(outcome).inc()
            log.warning("search_given_up", problem=ticket.task.problem.text()[:300], why=why)
        ticket.fail(why)
        self._forget(ticket)

    def _forget(self, ticket: SearchTask) -> None:
        """A compile's stays until it has asked what became of it."""
        book = self._urgent if ticket.urgent else self._batch
        if book.get(ticket.task.id) is ticket:  # a cancelled task may have been submitted again
            del book[ticket.task.id]
        if self._open.get(ticket.task.id) is ticket:
            del self._open[ticket.task.id]

    async def keep(self, entry: TuningEntry) -> TuningEntry:
        """Keep it, now or once Redis is back; what stands."""
        try:
            return await self._keep(entry)
        except LimitExceeded as error:
            log.warning("tuning_not_kept", error=error.message)
        except (RedisError, TimeoutError) as error:
            log.warning("tuning_not_kept_yet", error=f"{type(error).__name__}: {error}"[:300])
            if len(self._keeping) < _MOST_UNKEPT:
                task = asyncio.create_task(self._keep_later(entry), name="keep a tuning")
                self._keeping.add(task)
                task.add_done_callback(self._keeping.discard)
        return entry

    async def _keep(self, entry: TuningEntry) -> TuningEntry:
        async with asyncio.timeout(_REDIS_SECONDS):
            (kept,) = await self._tunings.keep([entry])
        return kept.entry

    async def _keep_later(self, entry: TuningEntry) -> None:
        pause, longest, most = _KEEP_AGAIN_SECONDS
        until = time.monotonic() + most
        while time.monotonic() < until:
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
            try:
                await self._keep(entry)
                return
            except (RedisError, TimeoutError):
                continue
        log.error("tuning_lost", problem=entry.problem.text()[:300])

    def heard(self, aim_name: bytes, place: DeviceEnvironment) -> None:
        """A searcher lives."""
        self._heard[aim_name, place] = time.monotonic()

    def tidy(self) -> None:
        """Forget what no compile asks for any more, and give up what does not move."""
        now = time.monotonic()
        for key, ticket in list(self._wants.items()):
            if ticket.state != "searching" and now - ticket.wanted > FORGET_SECONDS:
                ticket.cancel()
                self._forget(ticket)
                del self._wants[key]
            elif ticket.state == "queued":
                heard = self._heard.get((ticket.aim_name, key[0]), 0.0)
                if now - max(ticket.since, heard) > STALL_SECONDS:
                    self.fail(ticket, f"no searcher has said anything for {STALL_SECONDS:g} s", "stalled")
        if not self._wants:
            self._turns.clear()
            if not self._open:
                self._heard.clear()

    def no_searcher(self, aim_name: bytes, why: str) -> None:
        """None can be had for an aim: its compiles go on without, and batch jobs wait for one."""
        for ticket in [each for each in self.queued(urgent=True) if each.aim_name == aim_name]:
            self.fail(ticket, why, "no_searcher")
        for ticket in [each for each in self.queued(urgent=False) if each.aim_name == aim_name]:
            ticket.become("queued", why)
