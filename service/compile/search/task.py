"""A problem to be searched: for which target, on which device, who waits for it, and its state."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct

from ....compiler.request import schema
from ....compiler.request.cpu_isa import capability
from ....compiler.tuning.queries import SearchResult, TuningTask
from ....compiler.tuning.records import DeviceEnvironment, Problem
from ..single_flight import Priority

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

    def is_measurable(self, environment: DeviceEnvironment) -> bool:
        """Whether its kernels could be measured there. The service cannot tell CPU models apart."""
        own = self.toolchain
        if (environment.torch, environment.triton, environment.cuda) != (own.torch, own.triton, own.cuda):
            return False
        if self.target.kind == "cuda":
            return (environment.device, environment.capability) == (self.target.name, self.target.capability)
        return environment.capability == capability(self.target.cpu) and environment.threads > 0


class SearchTask:
    """A task and what has become of it.

    environment: where it must be measured; None: on any device of its target. turn: of its compile or, for a tuning
    job's task, its own: lower ones come first. compile: the key of the compile that asked for it first. worker: the
    last that got it. on_searching: called with each that gets it. losses: how many sessions ended that had it.
    """

    def __init__(
        self,
        task: TuningTask,
        target: SearchTarget,
        *,
        turn: int,
        priority: Priority = Priority.BATCH,
        environment: DeviceEnvironment | None = None,
        compile: str = "",
        on_searching: Callable[[str], None] = lambda worker: None,
    ) -> None:
        self.task = task
        self.target = target
        self.target_name = target.name()
        self.environment = environment
        self.priority = priority
        self.turn = turn
        self.compile = compile
        self.state: Literal["queued", "searching", "done", "failed", "cancelled"] = "queued"
        self.worker = ""
        self.begun = False
        """Its session has measured something of it."""
        self.losses = 0
        self.alone = False
        """It may have ended a session that held other tasks too: the next session holds this task alone."""
        self.since = self.wanted = time.monotonic()
        """Since when it waits for a session; when a compile last asked for it."""
        self._on_searching = on_searching
        self._elements = _elements(task.problem)
        self._suspects: set[str] = set()
        self._unexplained = 0
        self.settled: asyncio.Future[SearchResult | str] = asyncio.get_running_loop().create_future()
        """Its outcome. Not to be cancelled."""

    def rank(self) -> tuple[int, int, int]:
        """Its place in the order of its namespace's tasks: the more urgent first, then the compile that asked first,
        and of its problems the largest, which take longest and should not come last."""
        return self.priority, self.turn, -self._elements

    @property
    def urgent(self) -> bool:
        """Whether a compile waits for it, and holds a worker meanwhile."""
        return self.priority is not Priority.BATCH

    @property
    def open(self) -> bool:
        return self.state in ("queued", "searching")

    async def outcome(self) -> SearchResult | str:
        """The result, or why there is none. Cancelling the caller leaves the task as it is."""
        return await asyncio.shield(self.settled)

    def result(self) -> SearchResult | None:
        """The result, if there is one by now."""
        outcome = self.settled.result() if self.settled.done() else None
        return outcome if isinstance(outcome, SearchResult) else None

    def assign(self, worker: str) -> None:
        """`worker` has it from now on."""
        if self.open:
            self.state, self.worker = "searching", worker
            self._on_searching(worker)

    def put_back(self) -> None:
        """Its session has ended, and others may have it."""
        self.state, self.since = "queued", time.monotonic()

    def cancel(self) -> None:
        """Its outcome is "cancelled". A search that has begun may go on to its end."""
        self._settle("cancelled", "cancelled")

    def finish(self, result: SearchResult) -> None:
        self._settle("done", result)

    def fail(self, why: str) -> None:
        self._settle("failed", why)

    def _settle(self, state: Literal["done", "failed", "cancelled"], outcome: SearchResult | str) -> None:
        if self.open:
            self.state = state
            self.settled.set_result(outcome)

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


def _elements(problem: Problem) -> int:
    return sum(math.prod(operand.size) for operand in (*problem.operands, problem.result))
