"""Sends a rank's messages to the worker that started it, as lines of JSON on a file descriptor.

A thread writes, so that a slow reader does not delay training. Messages that are not written yet wait here; beyond a
limit the oldest metrics are dropped, and a note reports how many. Without a descriptor nothing is stored or written,
nor in a forked child: the descriptor belongs to its parent.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import deque

import msgspec

from ....compiler.api.training.events import JobNote, RankMessage, StepMetrics
from ..rank_environment import load_rank, take_channel

WAITING = 10_000
"""Metrics that wait at most."""


class RankChannel:
    """Safe for threads. `descriptor` -1: there is no reader."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._owner = os.getpid()
        self._waiting: deque[RankMessage] = deque()
        self._changed = threading.Condition()
        self._metrics = 0
        self._dropped = 0
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def open(self) -> bool:
        """Whether this process has a reader."""
        return self._descriptor >= 0 and not self._closing and os.getpid() == self._owner

    def send(self, message: RankMessage) -> None:
        """Returns at once. A reader that has gone is not an error."""
        if not self.open:
            return
        with self._changed:
            self._waiting.append(message)
            if isinstance(message, StepMetrics):
                self._metrics += 1
                if self._metrics > WAITING:
                    self._drop_oldest()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._write_all, name="torchrelay-channel", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def close(self, seconds: float = 5.0) -> None:
        """Write the waiting messages, for so long at most; nothing can be sent afterwards."""
        if not self.open:
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)
        if self._thread is None or not self._thread.is_alive():
            with contextlib.suppress(OSError):
                os.close(self._descriptor)

    def _drop_oldest(self) -> None:
        position = next(i for i, message in enumerate(self._waiting) if isinstance(message, StepMetrics))
        del self._waiting[position]
        self._metrics -= 1
        self._dropped += 1

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                batch, dropped = list(self._waiting), self._dropped
                self._waiting.clear()
                self._metrics = self._dropped = 0
                closing = self._closing
            if dropped:
                batch.append(
                    JobNote(level="warning", text=f"{dropped} metrics were reported too fast and are lost")
                )
            if not self._write(b"".join(msgspec.json.encode(message) + b"\n" for message in batch)):
                self._descriptor = -1
                return
            if closing and not self._waiting:
                return

    def _write(self, data: bytes) -> bool:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:  # the worker is gone, and will end this process
            return False
        return True


@functools.cache
def process_channel() -> RankChannel:
    """The channel of this process to its worker. Programs that it starts do not inherit the descriptor."""
    descriptor = take_channel()
    if load_rank().capture or descriptor < 0:
        return RankChannel(-1)
    try:
        os.set_inheritable(descriptor, False)
    except OSError:  # it was not inherited
        return RankChannel(-1)
    return RankChannel(descriptor)
