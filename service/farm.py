"""The farm of a namespace: problems in, from compiles that wait and from batch jobs; what searchers found, out.

A searcher is a job on a worker's search lane. It takes tasks one by one, whole problems each: only samples that were
interleaved on one device can be compared, so one problem's candidates never go to two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct

from ..compiler import wire
from ..compiler.tuning import Found, Known, Place, Problem, Task
from .intake import Ask

State = Literal["queued", "searching", "done", "failed", "cancelled"]
OnChange = Callable[[State, str], None]
"""Hears, in the event loop, what a task has become and on which worker it is searched, or why it failed."""


class Aim(Struct, frozen=True):
    """What a batch job's kernels are for. `threads`: of a CPU's kernels; 0 for a GPU."""

    toolchain: wire.Toolchain
    target: wire.Target
    threads: int = 0


class Ticket:
    """A task that a batch job has submitted.

    state, detail: as OnChange hears them. known: the entry stood in the database already, and nothing was measured.
    losses: how many searchers it has cost.
    """

    task: Task
    state: State
    detail: str
    known: bool
    losses: int

    async def outcome(self) -> Found | str:
        """What was found, or why nothing was. Cancelling the caller leaves the task as it is."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Nobody wants it any more: outcome is "cancelled"; a search that has begun may go on to its end."""
        raise NotImplementedError


class Farm:
    """The tasks of one namespace."""

    async def want(self, place: Place, problems: Sequence[Problem], ask: Ask) -> Known:
        """For a compile that polls: what is known of `problems` in `place`; the rest is searched before any batch job's
        tasks, once for all compiles that want it. Raises nothing of Redis: what it does not tell counts as unknown."""
        raise NotImplementedError

    def check(self, aim: Aim) -> None:
        """Raises NoWorker if no worker searches for `aim`, nor is one to come."""
        raise NotImplementedError

    def submit(self, task: Task, aim: Aim, *, on_change: OnChange | None = None) -> Ticket:
        """Have `task` searched when compiles leave room. Its `id` is the caller's, unique among the open ones of the
        namespace. At any number of them: they wait in memory."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop all searchers; open tickets' outcome is then "the gateway stops"."""
        raise NotImplementedError
