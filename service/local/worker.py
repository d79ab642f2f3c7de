"""Runs a node of the Ray cluster that offers slots, and starts it again when it ends by itself.

`ray start --block` goes on without a raylet whose agent was killed: it takes that for an orderly end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ...workers.pool import become_subreaper, descendants, die_with_parent, kill_below, reap
from .listening import say

_LOOK_SECONDS = 0.5
_START_SECONDS = 180.0
"""A node has a raylet after this time, however busy its machine is."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds before a node is started again; they double while it does not last."""
_CALM_SECONDS = 300.0
"""A node that ran for so long has lasted."""
_STOP_SECONDS = 20.0


class _Node:
    """One run of `ray start`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._began = time.monotonic()
        self._had_raylet = False
        self._process = subprocess.Popen(
            command,
            close_fds=False,  # the lock of its folder is one of them
            start_new_session=True,  # Ctrl-C is this process's
            preexec_fn=partial(die_with_parent, os.getpid()),
        )

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def problem(self) -> str:
        """Why it is no node any more, or ''."""
        if (status := self._process.poll()) is not None:
            return f"`ray start` has ended with {status}"
        if any(_name(process) == "raylet" for process in descendants(os.getpid())):
            self._had_raylet = True
            return ""
        if self._had_raylet:
            return "its raylet has ended"
        return "it has got no raylet" if self.seconds() > _START_SECONDS else ""

    def end(self) -> None:
        """And all that it has started."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        kill_below(os.getpid())
        reap()


def run(command: Sequence[str]) -> None:
    """Keeps a node running that `command` starts, until SIGINT or SIGTERM."""
    become_subreaper()
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    pause = _FIRST_PAUSE
    while not stopping:
        node, problem = _Node(command), ""
        while not stopping and not problem:
            time.sleep(_LOOK_SECONDS)
            problem = node.problem()
        node.end()
        if stopping:
            return
        pause = _FIRST_PAUSE if node.seconds() > _CALM_SECONDS else pause
        say(f"the node is lost, {problem}; it is started again in {pause:g} s")
        until = time.monotonic() + pause
        while not stopping and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _name(process: int) -> str:
    try:
        return Path("/proc", str(process), "comm").read_text().strip()
    except OSError:  # it has ended meanwhile
        return ""
