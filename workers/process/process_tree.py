"""Finds, measures and kills all descendants of a process. Linux only.

A compile starts g++, which starts cc1plus, as and ld; Inductor may start a pool in a session of its own; ptxas
sometimes hangs. Process groups miss processes that called setsid, so the fork server makes itself a subreaper: orphans
of its jobs become its children, and all its descendants belong to the one job that it runs.

Not psutil: it reports neither that a process is ending in the kernel, nor memory without the pages of files.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from . import linux

FAILED = 70
"""The exit status of a child that raised."""
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4
"""A flag of a process: it is ending, inside the kernel."""


class UnkillableProcesses(Exception):
    """Processes that SIGKILL does not end (stuck in the kernel)."""


class _Process(NamedTuple):
    pid: int
    parent: int
    state: str
    ending: bool


class ProcessUsage(NamedTuple):
    """How many processes there are, and their memory in bytes: anonymous and shared pages, without pages of files."""

    processes: int
    memory: int


class ForeignProcess:
    """A running process that is no child of this one, as subprocess.Popen has one; nobody but its parent knows its
    exit status. Raises OSError if it has ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def poll(self) -> str | None:
        """ "unknown", its status, once it has ended."""
        return "unknown" if select.select([self._descriptor], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> str:
        """Waits, and returns what `poll` does. Raises subprocess.TimeoutExpired."""
        if not select.select([self._descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return "unknown"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            os.close(self._descriptor)


def become_subreaper() -> None:
    """Orphaned descendants of this process become its children, in any session."""
    linux.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def fork(body: Callable[[], object]) -> int:
    """Run `body` in a child; its pid. The child ends without unwinding this process's stack, with status FAILED after
    an error, which it prints."""
    if pid := os.fork():
        return pid
    status = FAILED
    try:
        body()
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def die_with_parent(parent: int, sig: int = signal.SIGKILL) -> None:
    """Have the kernel send `sig` here when the thread that started this process ends; `parent`: its pid."""
    linux.prctl(linux.PR_SET_PDEATHSIG, sig)
    if os.getppid() != parent:  # it died before the call above
        os.kill(os.getpid(), sig)


def descendants(root: int) -> list[int]:
    """All living processes below `root`, zombies left out."""
    return [process.pid for process in _below(root)]


def _below(root: int) -> list[_Process]:
    children: dict[int, list[_Process]] = {}
    for process in _processes():
        children.setdefault(process.parent, []).append(process)
    found: list[_Process] = []
    frontier = [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        frontier += [process.pid for process in below]
        found += below
    return [process for process in found if process.state != "Z"]


def _processes() -> Iterator[_Process]:
    for entry in os.listdir("/proc"):  # noqa: PTH208 (runs four times a second: no Path per process)
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        # "pid (name) state ppid pgrp session tty tpgid flags ...", and a name may hold anything, brackets included
        state, parent, _, _, _, _, flags, _ = stat[stat.rindex(b")") + 2 :].split(None, 7)
        yield _Process(int(entry), int(parent), state.decode(), bool(int(flags) & _PF_EXITING))


def usage(pids: list[int]) -> ProcessUsage:
    """The usage of `pids` together. File-backed pages (libraries) can be dropped and are not counted."""
    memory = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            lines = Path("/proc", str(pid), "status").read_bytes().splitlines()
            sizes = {name: value for name, _, value in (line.partition(b":") for line in lines)}
            exact = [sizes[name] for name in (b"RssAnon", b"RssShmem") if name in sizes]
            # some sandboxes' kernels give only the sum
            memory += sum(int(size.split()[0]) << 10 for size in exact or [sizes.get(b"VmRSS", b"0")])
    return ProcessUsage(len(pids), memory)


def kill_below(root: int, *, mark: str = "", within: float = 10.0) -> None:
    """SIGKILL everything below `root` until nothing is left.

    `mark`: only processes that were started with this "NAME=value" in their environment, and those below them, which
    may have written over theirs. A process that is ending has none any more: all of those are waited for too. Zombies
    that are children of this process remain for their owner, or for `reap`. Raises UnkillableProcesses after `within`
    seconds.
    """
    end = time.monotonic() + within
    while True:
        pids = _marked(root, mark)
        if not pids and not any(process.ending for process in _below(root)):  # asked after what has a mark
            return
        if time.monotonic() > end:
            if pids:
                raise UnkillableProcesses(f"processes {pids} survive SIGKILL")
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


@contextlib.contextmanager
def none_outlives(roots: Iterable[int]) -> Iterator[None]:
    """After it nothing runs any more of what is below `roots` when it begins, even if its parents have ended."""
    before: list[ForeignProcess] = []
    for root in roots:
        for pid in descendants(root):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                before.append(ForeignProcess(pid))
    try:
        yield
    finally:
        for process in before:
            process.kill()


def _marked(root: int, mark: str) -> list[int]:
    found: dict[int, None] = {}
    for process in _below(root):  # parents come before their children
        if not mark or process.parent in found or _has_mark(process.pid, mark):
            found[process.pid] = None
    return list(found)


def _has_mark(pid: int, mark: str) -> bool:
    try:
        return mark.encode() in Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended meanwhile
        return False


def reap() -> None:
    """Collect every dead child of this process, adopted orphans too."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
