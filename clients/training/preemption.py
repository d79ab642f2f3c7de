"""Lets a rank save and end when it gets SIGTERM: after a cancel, a resize or the loss of a node.

Ranks get the signal at slightly different times and must stop at the same step, or the others wait for ever in the next
collective. So each call of `should_stop` starts a small sum over all ranks, and reads the sum that the call before
started: that one had a step's time to arrive, and all ranks read the same value.
"""

from __future__ import annotations

import functools
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist

from .rank_environment import load_rank


class Preemption:
    def __init__(self) -> None:
        self.stopping = False
        """Whether `should_stop` has said yes."""
        self._requested = threading.Event()
        self._listening = False
        self._group: Any = None
        self._sum: tuple[Any, torch.Tensor] | None = None

    def should_stop(self) -> bool:
        if load_rank().capture:
            return False
        self._listen()
        asked = self._requested.is_set()
        if _alone():
            self.stopping = self.stopping or asked
            return self.stopping
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        before, own = self._sum, torch.tensor([int(asked)])
        if before is not None:
            before[0].wait()
            self.stopping = self.stopping or bool(before[1].item())
        self._sum = dist.all_reduce(own, group=self._group, async_op=True), own
        return self.stopping

    def _listen(self) -> None:
        """From the first call on, SIGTERM only asks to stop; before, it ends the process as usual."""
        if self._listening or threading.current_thread() is not threading.main_thread():
            return
        self._listening = True
        signal.signal(signal.SIGTERM, lambda *_: self._requested.set())


def _alone() -> bool:
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


@functools.cache
def process_preemption() -> Preemption:
    return Preemption()


def should_stop() -> bool:
    """Whether to save and end now: `if train.should_stop(): checkpoints.save(...); break`.

    All ranks call it alike, once a step, and get the same answer, at most some steps after the signal. The first
    call makes a process group and replaces the handler of SIGTERM: call it from the main thread.
    """
    return process_preemption().should_stop()
