"""Runs a service in a child process, and ends all processes that the service has started.

The user starts and signals the parent. The parent adopts all orphans below it, so it can kill what is left after the
child's end (Ray's agents outlive a killed raylet by a minute). When the parent is killed, the kernel sends the child
SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable

from ...workers.pool import become_subreaper, descendants, die_with_parent, kill_below, reap

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOP_SECONDS = 20.0
"""How long the service may take to end after a signal. Then it is killed: Ray waits a minute for a lost head node."""
_LEAVE_SECONDS = 3.0
"""How long redis and Ray may take to end after the service was killed. Then they are killed too."""


def run_supervised(service: Callable[[], None]) -> int:
    """Run `service` in a child; return its exit status, 128 + n for signal n. Call before threads exist."""
    become_subreaper()
    supervisor = os.getpid()
    # one that came now would end this process, and nobody would end the child
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # Ctrl-C signals a whole process group; the child gets it from the supervisor
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        die_with_parent(supervisor, signal.SIGTERM)
        status = 1
        try:
            service()
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
        except KeyboardInterrupt:
            status = 130
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)  # without the parent's clean-up handlers
    for number in _SIGNALS:
        signal.signal(number, lambda received, _: _pass_on(child, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    signal.signal(signal.SIGALRM, lambda *_: _send(child, signal.SIGKILL))
    status = _wait(child)
    signal.alarm(0)
    until = time.monotonic() + _LEAVE_SECONDS
    while descendants(supervisor) and time.monotonic() < until:
        time.sleep(0.02)
    kill_below(supervisor)
    reap()
    return status


def _pass_on(child: int, number: int) -> None:
    _send(child, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
    signal.setitimer(signal.ITIMER_REAL, _STOP_SECONDS)


def _send(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


def _wait(child: int) -> int:
    while True:
        pid, status = os.waitpid(-1, 0)  # -1: adopted orphans are collected on the way
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
