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
from typing import NoReturn

from ...workers.pool import become_subreaper, descendants, die_with_parent, kill_below, reap
from .listening import say

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_SECONDS = 20.0
"""How long the service may take to end after a signal. Then it is killed: Ray waits a minute for a lost head node."""
_PAUSE_SECONDS = 1.0
"""Before a service is started again. It doubles up to a limit while the service does not last."""
_CALM_SECONDS = 300.0
"""A service that ran for so long has lasted."""
_LEAVE_SECONDS = 3.0
"""How long redis and Ray may take to end after the service was killed. Then they are killed too."""


def run_supervised(service: Callable[[], None], *, longest_pause: float = 0.0) -> int:
    """Run `service` in a child; return its exit status, 128 + n for signal n. longest_pause: if it is not 0, a child
    that ends by itself with an error is replaced after some seconds, unless its settings are wrong (2) or it could not
    start (3, uvicorn's). Call before threads exist."""
    become_subreaper()
    supervisor, child, stopped, pause = os.getpid(), 0, False, _PAUSE_SECONDS
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}

    def pass_on(received: int, _: object) -> None:
        nonlocal stopped
        stopped = True
        _send(child, signal.SIGINT if received == signal.SIGINT else signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, STOP_SECONDS)

    def kill(*_: object) -> None:
        _send(child, signal.SIGKILL)

    while True:
        began = time.monotonic()
        # one that came now would end this process, and nobody would end the child
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)  # Ctrl-C signals a whole process group; the child gets it from the supervisor
            for number in _SIGNALS:
                signal.signal(number, handlers[number])
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            die_with_parent(supervisor, signal.SIGTERM)
            run_and_exit(service)
        for number in _SIGNALS:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        signal.signal(signal.SIGALRM, kill)
        status = _wait(child)
        signal.alarm(0)
        until = time.monotonic() + _LEAVE_SECONDS
        while descendants(supervisor) and time.monotonic() < until:
            time.sleep(0.02)
        kill_below(supervisor)
        reap()
        if not longest_pause or stopped or status in (0, 2, 3):
            return status
        pause = _PAUSE_SECONDS if time.monotonic() - began > _CALM_SECONDS else min(pause, longest_pause)
        say(f"it has ended with {status}, and is started again in {pause:g} s")
        until, pause = time.monotonic() + pause, 2 * pause
        while time.monotonic() < until:
            time.sleep(0.1)
            if stopped:
                return status


def run_and_exit(service: Callable[[], None]) -> NoReturn:
    """Run `service`, in a process that was just forked, and end with its exit status."""
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


def _send(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


def _wait(child: int) -> int:
    while True:
        pid, status = os.waitpid(-1, 0)  # -1: adopted orphans are collected on the way
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
