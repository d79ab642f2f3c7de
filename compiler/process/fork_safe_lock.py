"""A lock that a forked child finds free, whatever other threads of its parent were doing."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable


class ForkSafeLock:
    """A lock for `with`. Of the threads that may hold it, only the forking one goes on in the child, so that one keeps
    it and all others lose it. after_fork: called in the child then, to bring what the lock protects in order."""

    def __init__(self, after_fork: Callable[[], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._after_fork = after_fork
        _all.add(self)

    def __enter__(self) -> None:
        holder = threading.get_ident()
        self._lock.acquire()  # nothing that can fail comes after it: nobody would release the lock
        self._holder = holder

    def __exit__(self, *error: object) -> None:
        self._holder = None
        self._lock.release()

    def _forked(self) -> None:
        self._lock = threading.Lock()
        if self._holder == threading.get_ident():
            self._lock.acquire()
        else:
            self._holder = None
        if self._after_fork is not None:
            self._after_fork()


_all: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _in_child() -> None:
    for lock in list(_all):
        lock._forked()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_in_child)
