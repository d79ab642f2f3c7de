"""A problem to be searched: for which target, on which device, and its state."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Literal

import msgspec
import structlog
from msgspec import Struct

from ....compiler.request import schema
from ....compiler.tuning.queries import SearchResult, TuningTask
from ....compiler.tuning.records import DeviceEnvironment, Problem

log = structlog.get_logger(__name__)

SearchState = Literal["queued", "searching", "done", "failed", "cancelled"]
OnChange = Callable[[SearchState, str], None]
"""Called in the event loop with a task's new state and the worker that searches it, or why it failed."""

LOSSES = 3
"""Sessions that one task may end without a known candidate at fault."""
_AVOIDED = 16
"""Candidates of one task that may end a session's process; each costs a start."""


class SearchTarget(Struct, frozen=True):
    """What kernels are for. `threads`: of a CPU's kernels; 0 for a GPU."""

    toolchain: schema.Toolchain
    target: schema.Target
    threads: int = 0

    def name(self) -> bytes:
        """Equal for all that one session can search."""
        return msgspec.msgpack.encode(self)


class SearchTask:
    """A task and what has become of it.

    place: where it must be measured; None: on any device of its target. state, detail: as OnChange gets them. known:
    the entry was in the database already, and nothing was measured. losses: how many sessions ended that had it.
    """

    def __init__(
        self,
        task: TuningTask,
        target: SearchTarget,
        *,
        place: DeviceEnvironment | None = None,
        turn: int = 0,
        on_change: OnChange | None = None,
    ) -> None:
        self.task = task
        self.target = target
        self.target_name = target.name()
        self.place = place
        self.order = turn, -_elements(task.problem)
        """Order of compiles' tasks: the compile that asked first, and of its problems the largest, which take longest
        and should not come last."""
        self.state: SearchState = "queued"
        self.detail = ""
        self.known = False
        self.losses = 0
        self.alone = False
        """It may have ended a session that held other tasks too: the next session holds this task alone."""
        self.since = self.wanted = time.monotonic()
        """When it came to its state; when a compile last asked for it."""
        self._on_change = on_change
        self._suspects: set[str] = set()
        self._unexplained = 0
        self._outcome: asyncio.Future[SearchResult | str] = asyncio.get_running_loop().create_future()

    @property
    def urgent(self) -> bool:
        """Whether a compile waits for it."""
        return self.place is not None

    @property
    def open(self) -> bool:
        return self.state in ("queued", "searching")

    @property
    def settled(self) -> asyncio.Future[SearchResult | str]:
        """What `outcome` waits for, to wait for one of many."""
        return self._outcome

    async def outcome(self) -> SearchResult | str:
        """The result, or why there is none. Cancelling the caller leaves the task as it is."""
        return await asyncio.shield(self._outcome)

    def found(self) -> SearchResult | None:
        """The result, if there is one by now."""
        result = self._outcome.result() if self._outcome.done() else None
        return result if isinstance(result, SearchResult) else None

    def cancel(self) -> None:
        """Its outcome is "cancelled". A search that has begun may go on to its end."""
        if self.open:
            self._settle("cancelled", "cancelled", "")

    def become(self, state: Literal["queued", "searching"], detail: str) -> None:
        if self.open and (self.state, self.detail) != (state, detail):
            if self.state != state:
                self.since = time.monotonic()
            self.state, self.detail = state, detail
            self._report()

    def finish(self, found: SearchResult, *, known: bool) -> None:
        if self.open:
            self.known = known
            self._settle("done", found, self.detail)

    def fail(self, why: str) -> None:
        if self.open:
            self._settle("failed", why, why)

    def lose(self, *, candidate: str, certain: bool, why: str) -> None:
        """A session that had it has ended. candidate: what it was trying, or ''. certain: its process died of it.

        A lost worker is hardly the candidate's fault, unless it happens twice.
        """
        self.losses += 1
        if candidate and (certain or candidate in self._suspects) and candidate not in self.task.avoid:
            avoid = (*self.task.avoid, candidate)
            if len(avoid) > _AVOIDED:
                self.fail(f"{len(avoid)} of its candidates end the search process")
            self.task = msgspec.structs.replace(self.task, avoid=avoid)
            return
        if candidate:
            self._suspects.add(candidate)
        self._unexplained += 1
        if self._unexplained >= LOSSES:
            self.fail(f"{self._unexplained} search sessions ended over it, at last: {why}")

    def _settle(self, state: SearchState, outcome: SearchResult | str, detail: str) -> None:
        self.state, self.detail, self.since = state, detail, time.monotonic()
        self._outcome.set_result(outcome)
        self._report()

    def _report(self) -> None:
        if self._on_change is None:
            return
        try:
            self._on_change(self.state, self.detail)
        except Exception:  # an error of the listener is not the queue's
            log.exception("task_listener_failed", task=self.task.id, state=self.state)


def _elements(problem: Problem) -> int:
    return sum(math.prod(operand.size) for operand in (*problem.operands, problem.result))
