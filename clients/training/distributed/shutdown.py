"""Destroys process groups at the end of a process, and waits until gloo's threads are idle.

A gloo thread reports an operation as done before it frees the operation's tensors, for which it takes the GIL. If the
interpreter is finalizing by then, it ends the thread inside C++ code that must not be unwound: SIGABRT, "terminate
called without an active exception" (https://github.com/pytorch/pytorch/pull/179291).
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from pathlib import Path

_GLOO = "pt_gloo_runloop"
_SECONDS = 10.0
"""The longest wait. A few milliseconds are enough unless the machine is busy."""
_LOOK_SECONDS = 0.005


def destroy_process_groups() -> None:
    """Call it when nothing else will use a process group."""
    if "torch.distributed" in sys.modules:  # else there are none
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # its peers are gone
                dist.destroy_process_group()
    wait_for_gloo_threads()


def wait_for_gloo_threads(tasks: Path = Path("/proc/self/task")) -> None:
    """Wait until gloo's threads are idle. They still run if something refers to a destroyed group."""
    until = time.monotonic() + _SECONDS
    before = _at_work(tasks)
    if before:
        gc.collect()  # frees groups in reference cycles, which ends their threads
    while before and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)  # without the GIL
        now = _at_work(tasks)
        if now.items() <= before.items() and not any(running for running, _ in now.values()):
            return
        before = now


def _at_work(tasks: Path) -> dict[str, tuple[bool, str]]:
    """By thread number: whether the gloo thread is runnable, and its scheduler statistics (Linux's
    Documentation/scheduler/sched-stats.rst). Empty without /proc."""
    found = {}
    with contextlib.suppress(OSError):
        for task in tasks.iterdir():
            with contextlib.suppress(OSError, IndexError):  # it has ended
                if (task / "comm").read_text().strip() == _GLOO:
                    state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                    found[task.name] = state != "S", (task / "schedstat").read_text()
    return found
