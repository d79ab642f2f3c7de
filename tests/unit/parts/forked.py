"""A check that a forked child makes."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable


def child_finds(check: Callable[[], bool]) -> bool:
    """Whether `check` is true in a forked child, which is killed if it hangs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        found = False
        try:
            found = check()
        finally:
            os._exit(0 if found else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
