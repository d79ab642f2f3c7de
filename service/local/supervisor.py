"""A small parent for a service: what the service started ends with the parent, and the other way round.

The parent is what the user starts and signals; the child is the service. The parent adopts every orphan below
it, so that after the child's end, orderly or not, it can kill what is left (Ray's agents outlive a killed
raylet by a minute). When the parent itself is killed, the kernel sends the child SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable

from ...workers.pool import become_subreaper, descendants, die_with_parent, kill_below, reap

_LEAVE_SECONDS = 3.0
"""What redis and Ray may take to end by themselves after the service was killed."""


def run_supervised(service: Callable[[], None]) -> int:
    """Run `service` in a child; return its exit status, 128 + n for signal n. Call before threads exist."""
    become_subreaper()
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # so that Ctrl-C, which goes to a whole group, comes once: from the guard
        die_with_parent(guard, signal.SIGTERM)
        status = 1
        try:
            service()
            status = 0
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else 1
        except KeyboardInterrupt:
            status = 130
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)  # without unwinding what belongs to the parent
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: _pass_on(child, received))
    status = _wait(child)
    until = time.monotonic() + _LEAVE_SECONDS
    while descendants(guard) and time.monotonic() < until:
        time.sleep(0.02)
    kill_below(guard)
    reap()
    return status


def _pass_on(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)


def _wait(child: int) -> int:
    while True:
        pid, status = os.waitpid(-1, 0)  # -1: adopted orphans are collected on the way
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
