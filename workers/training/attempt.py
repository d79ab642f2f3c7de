"""One attempt of a job's ranks: which run, which failed first, and whether that was the script's own error."""

from __future__ import annotations

import time

import msgspec
from msgspec import Struct

from ...compiler.api.training.events import RankEnded, RankStarted

LONG_SECONDS = 600.0
"""A script that ran so long may have made progress without a step: not all have an optimizer."""
_OF_SIGNALS = range(129, 193)
"""Exit codes by which a shell, or a script of several processes, passes a signal on."""
_OF_MEMORY = ("out of memory", "outofmemory", "memoryerror", "cannot allocate memory", "bad_alloc")
"""Errors of memory: other processes on the node may have gone at the next start."""


class RankAttempt(Struct):
    """failed: the first rank that failed by itself. lost: a rank was killed from outside, or did not report its end;
    then the errors of others may come from that. over: the attempt was given up; its ranks are not waited for."""

    number: int
    world_size: int
    started: set[int] = msgspec.field(default_factory=set)
    running: set[int] = msgspec.field(default_factory=set)
    failed: RankEnded | None = None
    lost: bool = False
    over: bool = False
    began: float = msgspec.field(default_factory=time.monotonic)

    def record(self, event: RankStarted | RankEnded, stopped: float) -> None:
        """`stopped`: when its ranks were ordered to end, in seconds since 1970; below 0: they were not."""
        match event:
            case RankStarted(rank=rank):
                self.started.add(rank)
                if not self.over:  # otherwise a rank that was just starting would delay the next attempt
                    self.running.add(rank)
            case RankEnded(rank=rank, code=code, at=at):
                self.running.discard(rank)
                if code < 0 and (stopped < 0 or at < stopped):
                    self.lost = True
                if code != 0 and stopped < 0 and (self.failed is None or at < self.failed.at):
                    self.failed = event

    def give_up(self) -> None:
        """Stop waiting for the ranks that still run after they were ordered to end."""
        self.lost = self.lost or bool(self.running)
        self.running.clear()
        self.over = True

    def own_error(self) -> str:
        """The code and error of a script that will probably fail again on any node; '' if that is not known."""
        failed = self.failed
        if failed is None or self.lost or failed.code in _OF_SIGNALS:
            return ""
        if time.monotonic() - self.began > LONG_SECONDS:
            return ""
        if any(words in failed.detail.lower() for words in _OF_MEMORY):
            return ""
        return f"{failed.code} {failed.detail}"
