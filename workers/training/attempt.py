"""The ranks of one start: what they tell in; what stopped them, and whether a script's own error did, out."""

from __future__ import annotations

import time

import msgspec
from msgspec import Struct

from ...compiler.api.training.events import RankEnded, RankStarted

_LONG_SECONDS = 600.0
"""A script that ran so long may have got somewhere, though it told of no step: not all have an optimizer."""
_OF_SIGNALS = range(129, 193)
"""Exit codes by which a shell, or a script of several processes, passes a signal on."""
_OF_MEMORY = ("out of memory", "outofmemory", "memoryerror", "cannot allocate memory", "bad_alloc")
"""Who else was on the node then may be gone at the next start."""


class RankAttempt(Struct):
    """failed: the first rank that ended badly by itself. lost: some rank was ended from outside, or its end was never
    told; then the others' errors may come from that. over: it was given up, and no rank of it is waited for."""

    number: int
    world_size: int
    started: set[int] = msgspec.field(default_factory=set)
    running: set[int] = msgspec.field(default_factory=set)
    failed: RankEnded | None = None
    lost: bool = False
    over: bool = False
    began: float = msgspec.field(default_factory=time.monotonic)

    def hear(self, event: RankStarted | RankEnded, stopped: float) -> None:
        """`stopped`: when its ranks were told to end, in seconds since 1970; below 0: they were not."""
        match event:
            case RankStarted(rank=rank):
                self.started.add(rank)
                if not self.over:  # or a rank that was just starting would hold up the next attempt
                    self.running.add(rank)
            case RankEnded(rank=rank, code=code, at=at):
                self.running.discard(rank)
                if code < 0 and (stopped < 0 or at < stopped):
                    self.lost = True
                if code != 0 and stopped < 0 and (self.failed is None or at < self.failed.at):
                    self.failed = event

    def give_up(self) -> None:
        """Its ranks were told to end, and those that still run are not waited for any longer."""
        self.lost = self.lost or bool(self.running)
        self.running.clear()
        self.over = True

    def own_error(self) -> str:
        """What a script ended with that may well end so again on any node: code and error; '' if that is not known."""
        failed = self.failed
        if failed is None or self.lost or failed.code in _OF_SIGNALS:
            return ""
        if time.monotonic() - self.began > _LONG_SECONDS:
            return ""
        if any(words in failed.detail.lower() for words in _OF_MEMORY):
            return ""
        return f"{failed.code} {failed.detail}"
