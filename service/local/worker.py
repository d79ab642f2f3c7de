"""Runs a node of the Ray cluster that offers slots, until it is lost: supervisor.py then starts another one.

`ray start --block` goes on without a raylet whose agent was killed: it takes that for an orderly end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ...workers.pool import descendants, die_with_parent
from .listening import say

_LOOK_SECONDS = 0.5
_START_SECONDS = 180.0
"""A node has a raylet after this time, however busy its machine is."""
_STOP_SECONDS = 15.0


def run(command: Sequence[str]) -> None:
    """Runs the node that `command` starts until SIGINT or SIGTERM. Raises SystemExit once it is lost."""
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    process = subprocess.Popen(
        command,
        close_fds=False,  # the lock of its folder is one of them
        start_new_session=True,  # Ctrl-C is this process's
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
    began, had_raylet, problem = time.monotonic(), False, ""
    while not (stopping or problem):
        time.sleep(_LOOK_SECONDS)
        if (status := process.poll()) is not None:
            problem = f"`ray start` has ended with {status}"
        elif any(_name(below) == "raylet" for below in descendants(os.getpid())):
            had_raylet = True
        elif had_raylet:
            problem = "its raylet has ended"
        elif time.monotonic() - began > _START_SECONDS:
            problem = "it has got no raylet"
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if not stopping:
        say(f"the node is lost: {problem}")
        sys.exit(1)


def _name(process: int) -> str:
    try:
        return Path("/proc", str(process), "comm").read_text().strip()
    except OSError:  # it has ended meanwhile
        return ""
