"""Says what a compile does that the program waits for: one line, after some seconds.

On a terminal the line is renewed each second, and erased at the end. Elsewhere it goes to the log, as INFO, after twice
the time each time. A level above WARNING of the logger `torchrelay` turns both off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

FIRST_SECONDS = 5.0
_EVERY_SECONDS = 1.0
_COLUMNS = 80
"""The width of a terminal that does not say it."""

_log = logging.getLogger(__name__)

OnProgress = Callable[[str, str], None]
"""on_progress(stage, detail): of a compile's event."""


class WaitLines:
    """The lines of a process, one at a time: a thread that waits while another one's line is there gets none."""

    def __init__(self, *, silent: bool = False, first_seconds: float = FIRST_SECONDS) -> None:
        self._first_seconds = first_seconds
        self._free = threading.Lock()
        self._silent = silent

    @contextlib.contextmanager
    def following(self, key: str) -> Iterator[OnProgress]:
        """A line for the compile of `key` while the block runs."""
        if self._silent or not _log.isEnabledFor(logging.WARNING) or not self._free.acquire(blocking=False):
            yield lambda stage, detail: None
            return
        try:
            line = _WaitLine(key, sys.stderr, self._first_seconds)
            with contextlib.suppress(RuntimeError):  # no thread can start, as at exit
                line.start()
            try:
                yield line.take
            finally:
                line.end()
        finally:
            self._free.release()


class _WaitLine(threading.Thread):
    def __init__(self, key: str, stream: TextIO, first_seconds: float) -> None:
        super().__init__(name="torchrelay wait", daemon=True)
        self._key = key
        self._stream = stream
        self._first_seconds = first_seconds
        self._progress = "sent"
        self._ended = threading.Event()

    def take(self, stage: str, detail: str) -> None:
        # the service's text: nothing in it may control a terminal
        text = f"{stage}, {detail}" if detail else stage
        self._progress = "".join(each if each.isprintable() else "?" for each in text)

    def end(self) -> None:
        self._ended.set()
        if self.ident is not None:
            self.join()

    def run(self) -> None:
        began, after = time.monotonic(), self._first_seconds
        terminal = _is_terminal(self._stream)
        drawn = False
        while not self._ended.wait(began + after - time.monotonic()):
            seconds = time.monotonic() - began
            text = f"torchrelay: {seconds:.0f} s for graph {self._key[:12]}: {self._progress}"
            if terminal:
                drawn = self._draw(text[: _columns(self._stream) - 1]) or drawn
                after = seconds + _EVERY_SECONDS
            else:
                _log.info("%s", text)
                after *= 2
        if drawn:
            self._draw("")

    def _draw(self, text: str) -> bool:
        try:
            self._stream.write(f"\r{text}\x1b[K")
            self._stream.flush()
        except (OSError, ValueError):  # it is closed
            return False
        return True


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it is closed
        return False


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _COLUMNS
    except (OSError, ValueError):
        return _COLUMNS
