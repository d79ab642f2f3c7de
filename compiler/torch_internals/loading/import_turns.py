"""Imports in a thread while the program goes on, which never meet an import of another thread.

Python answers two threads that import a cycle of modules from two ends with a half-made module. So here one thread
imports in turns. A turn begins only when no other thread is importing anything; a thread that begins to import during a
turn waits for its end. Imports no torch.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_bootstrap: Any = importlib._bootstrap
_PYTHONS_OWN = _bootstrap._find_and_load.__code__
_PATIENCE_SECONDS = 5.0
"""A turn that imports nothing new for so long may wait for a lock that the waiting thread holds: that one goes on."""
_PAUSE_SECONDS = 0.01


class ImportTurns:
    """In a `with` block, the thread that entered it can import in turns. One block at a time in a process."""

    def __init__(self) -> None:
        self._thread = 0
        self._load: Callable[..., Any]
        self._idle = threading.Event()
        self._idle.set()
        self._importing: list[None] = []
        """One for each import of the other threads, nested ones too. append and pop need no lock."""
        self._earlier_ended = False
        """Whether the imports have ended that had begun before the block, and are not counted."""

    def __enter__(self) -> ImportTurns:
        """Raises RuntimeError if there is another block."""
        global _active
        if not _one_block.acquire(blocking=False):
            raise RuntimeError("another thread imports in turns")
        self._thread = threading.get_ident()
        self._load = _bootstrap._find_and_load
        # Every import of a module that is not there yet comes here, of any thread and in any way.
        _bootstrap._find_and_load = self._find_and_load
        _active = self
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        _one_block.release()

    def take(self, work: Callable[[], object], given_up: Callable[[], bool]) -> bool:
        """Run `work`, which imports something, in a turn of its own; False if `given_up` says so before."""
        while not given_up():
            if not self._importing:
                self._idle.clear()
                try:
                    if not self._importing and self._none_from_before():
                        work()
                        return True
                finally:
                    self._idle.set()
            time.sleep(_PAUSE_SECONDS)
        return False

    def begin(self) -> None:
        """Another thread begins to import, or to fork: not during a turn."""
        # First said, then looked: a turn that begins at the same time does so in the other order.
        self._importing.append(None)
        while not self._idle.is_set():
            self._importing.pop()
            known = len(sys.modules)
            stuck = not self._idle.wait(_PATIENCE_SECONDS) and len(sys.modules) == known
            self._importing.append(None)
            if stuck:
                return

    def end(self) -> None:
        self._importing.pop()

    def close(self) -> None:
        global _active
        _active = None
        if _bootstrap._find_and_load == self._find_and_load:
            _bootstrap._find_and_load = self._load

    def _find_and_load(self, *args: Any) -> Any:
        if self.is_own_thread():
            return self._load(*args)
        self.begin()
        try:
            return self._load(*args)
        finally:
            self.end()

    def is_own_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def _none_from_before(self) -> bool:
        if not self._earlier_ended:
            others = [frame for thread, frame in sys._current_frames().items() if thread != self._thread]
            self._earlier_ended = not any(map(_imports, others))
        return self._earlier_ended


def _imports(frame: Any) -> bool:
    """Whether a thread is importing, by its innermost frame."""
    while frame is not None and frame.f_code is not _PYTHONS_OWN:
        frame = frame.f_back
    return frame is not None


_one_block = threading.Lock()
_active: ImportTurns | None = None


class _Forking(threading.local):
    turns: ImportTurns | None = None


_forking = _Forking()
"""The turns that wait for a fork of this thread."""


def _before_fork() -> None:
    _forking.turns = turns = _active
    if turns is not None and not turns.is_own_thread():
        turns.begin()


def _after_in_parent() -> None:
    turns, _forking.turns = _forking.turns, None
    if turns is not None and not turns.is_own_thread():
        turns.end()


def _after_in_child() -> None:
    """The thread is not there: nothing is to wait for its turns."""
    if _forking.turns is not None:
        _forking.turns.close()


# In the main thread and at once: hooks must not change during a fork.
os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
