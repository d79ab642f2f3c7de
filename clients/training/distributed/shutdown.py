"""How a process that has trained ends: process groups in; none, and no thread of theirs at work, out.

A thread of gloo's lets go of an operation's tensors after it has told that the operation is done, and takes Python's
lock for those that Python knew. If Python ends meanwhile it ends that thread, in C++ that cannot be left: SIGABRT,
"terminate called without an active exception" (https://github.com/pytorch/pytorch/pull/179291).
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from pathlib import Path

_GLOO = "pt_gloo_runloop"
_SECONDS = 10.0
"""For so long at most; it is done after a few milliseconds, unless the machine is busy."""
_LOOK_SECONDS = 0.005


def destroy_process_groups() -> None:
    """To be called when nothing else will use a process group."""
    if "torch.distributed" in sys.modules:  # else there are none
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # its peers are gone
                dist.destroy_process_group()
    wait_for_gloo_threads()


def wait_for_gloo_threads(tasks: Path = Path("/proc/self/task")) -> None:
    """Until gloo's threads have nothing to let go of. Its groups outlive their end where something still knows them."""
    until = time.monotonic() + _SECONDS
    before = _at_work(tasks)
    if before:
        gc.collect()  # a group that only a cycle knows ends its threads
    while before and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)  # without Python's lock
        now = _at_work(tasks)
        if now.items() <= before.items() and not any(running for running, _ in now.values()):
            return
        before = now


def _at_work(tasks: Path) -> dict[str, tuple[bool, str]]:
    """By the number of a gloo thread: whether it runs or would, and the time it has run and how often (Linux's
    Documentation/scheduler/sched-stats.rst); nothing where /proc is not there."""
    found = {}
    with contextlib.suppress(OSError):
        for task in tasks.iterdir():
            with contextlib.suppress(OSError, IndexError):  # it has ended
                if (task / "comm").read_text().strip() == _GLOO:
                    state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                    found[task.name] = state != "S", (task / "schedstat").read_text()
    return found
