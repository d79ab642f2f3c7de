"""Stage 6: the small compile that warms a fork server up, with a limit for its time and its memory.

It runs in the server itself, so that children inherit what it has learned. What a killed compiler would teach them,
such as a processor without vector instructions, they must not inherit: past a limit the whole server ends, with its
compilers, and its actor starts a new one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from ..process.process_tree import descendants, usage

SECONDS = 120.0
"""It takes 2 to 3 s on two processors that do nothing else."""
_CHECK_SECONDS = 0.25


@contextlib.contextmanager
def limited(memory_bytes: int) -> Iterator[None]:
    """Inside, in the main thread: raises SystemExit after SECONDS, or once the processes below this one hold more than
    `memory_bytes`."""
    until = time.monotonic() + SECONDS

    def check(*_: object) -> None:
        now = time.monotonic()
        held = usage(descendants(os.getpid())).memory
        if held > memory_bytes:
            end(f"held {held >> 20} MiB of memory, over the limit of {memory_bytes >> 20} MiB for a job")
        if now > until:
            end(f"took longer than {SECONDS:g} s")
        # a check takes less than a twentieth of a processor, however many processes the machine has
        signal.setitimer(signal.ITIMER_REAL, max(_CHECK_SECONDS, 20 * (time.monotonic() - now)))

    def end(why: str) -> None:
        # no Exception: torch goes on after most errors of a compiler
        raise SystemExit(f"the compile that warms the worker up {why}; it ends, and another one starts")

    before = signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, _CHECK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
