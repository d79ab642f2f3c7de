"""A problem on its way through the farm: whose it is, where it may be searched, what it has become."""

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
"""Hears, in the event loop, what a task has become and on which worker it is searched, or why it failed."""

LOSSES = 3
"""Searchers that one task may cost, beside those of which it is known what ended them."""
_AVOIDED = 16
"""Candidates of one task that may end a searcher's process; each costs a start."""


class SearchTarget(Struct, frozen=True):
    """What kernels are for. `threads`: of a CPU's kernels; 0 for a GPU."""

    toolchain: schema.Toolchain
    target: schema.Target
    threads: int = 0

    def name(self) -> bytes:
        """Equal for what one searcher can do."""
        return msgspec.msgpack.encode(self)


class SearchTask:
    """A task that somebody wants done.

    place: where exactly; None: on any device of its aim. state, detail: as OnChange hears them. known: the entry stood
    in the database already, and nothing was measured. losses: how many searchers it has cost.
    """

    def __init__(
        self,
        task: TuningTask,
        aim: SearchTarget,
        *,
        place: DeviceEnvironment | None = None,
        turn: int = 0,
        on_change: OnChange | None = None,
    ) -> None:
        self.task = task
        self.aim = aim
        self.aim_name = aim.name()
        self.place = place
        self.order = turn, -_elements(task.problem)
        """Of compiles' tasks: who has asked first, and of his the largest. They take longest, and the last one should
        not."""
        self.state: SearchState = "queued"
        self.detail = ""
        self.known = False
        self.losses = 0
        self.alone = False
        """It may have ended a searcher that held others too: the next one holds nothing beside it."""
        self.since = self.wanted = time.monotonic()
        """When it came to its state; when somebody asked for it last."""
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
        """What `outcome` waits for, for who waits for one of many."""
        return self._outcome

    async def outcome(self) -> SearchResult | str:
        """What was found, or why nothing was. Cancelling the caller leaves the task as it is."""
        return await asyncio.shield(self._outcome)

    def found(self) -> SearchResult | None:
        """What was found, if anything has been by now."""
        result = self._outcome.result() if self._outcome.done() else None
        return result if isinstance(result, SearchResult) else None

    def cancel(self) -> None:
        """Nobody wants it any more: its outcome is "cancelled"; a search that has begun may go on to its end."""
        if self.open:
            self._settle("cancelled", "cancelled", "")

    def become(self, state: Literal["queued", "searching"], detail: str) -> None:
        if self.open and (self.state, self.detail) != (state, detail):
            if self.state != state:
                self.since = time.monotonic()
            self.state, self.detail = state, detail
            self._tell()

    def finish(self, found: SearchResult, *, known: bool) -> None:
        if self.open:
            self.known = known
            self._settle("done", found, self.detail)

    def fail(self, why: str) -> None:
        if self.open:
            self._settle("failed", why, why)

    def lose(self, *, candidate: str, certain: bool, why: str) -> None:
        """A searcher that had it has ended. candidate: what it was trying, ''; certain: its process died of it.

        A worker that was lost is hardly the candidate's doing, unless it happens twice.
        """
        self.losses += 1
        if candidate and (certain or candidate in self._suspects) and candidate not in self.task.avoid:
            avoid = (*self.task.avoid, candidate)
            if len(avoid) > _AVOIDED:
                self.fail(f"{len(avoid)} of its candidates end the searcher's process")
            self.task = msgspec.structs.replace(self.task, avoid=avoid)
            return
        if candidate:
            self._suspects.add(candidate)
        self._unexplained += 1
        if self._unexplained >= LOSSES:
            self.fail(f"{self._unexplained} searchers ended over it, at last: {why}")

    def _settle(self, state: SearchState, outcome: SearchResult | str, detail: str) -> None:
        self.state, self.detail, self.since = state, detail, time.monotonic()
        self._outcome.set_result(outcome)
        self._tell()

    def _tell(self) -> None:
        if self._on_change is None:
            return
        try:
            self._on_change(self.state, self.detail)
        except Exception:  # a listener's mistake is not the farm's
            log.exception("task_change_not_heard", task=self.task.id, state=self.state)


def _elements(problem: Problem) -> int:
    return sum(math.prod(operand.size) for operand in (*problem.operands, problem.result))
