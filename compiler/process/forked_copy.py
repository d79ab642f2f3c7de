"""A part of this process's work, done in a fork that can ask this process questions and sends its result.

The result is optional: this process can always do the work itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from .forked_process import ForkedProcess, ForkedProcessLost

AnswerQuestion = Callable[[bytes], bytes]

LEAST_SECONDS = 60.0
"""`result` waits this long, or twice as long as the fork has run by then, if that is more."""

_END_SECONDS = 5.0

_QUESTION, _RESULT = b"q", b"r"
"""First byte of the fork's messages."""


class ForkedCopy(ForkedProcess):
    """One fork, used from both sides. answer: called with the fork's questions in a thread of this process; never
    raises. Raises OSError if no process can be made.
    """

    def __init__(self, answer: AnswerQuestion = lambda question: b"") -> None:
        super().__init__()
        self._answer = answer
        self._result: bytes | None = None
        self._closed = False
        self._begun = time.monotonic()
        self._reader = threading.Thread(target=self._read, name="torchrelay fork's messages", daemon=True)
        if not self.inside:
            self._reader.start()

    def ask(self, question: bytes) -> bytes:
        """In the fork: the other process's answer. Raises ForkedProcessLost."""
        self.send(_QUESTION + question)
        return self.receive()

    def finish(self, result: bytes) -> NoReturn:
        """In the fork: send the result and exit."""
        self.send(_RESULT + result)
        os._exit(0)

    def result(self) -> bytes | None:
        """Wait for the fork's result, and end it. None: it sent none in time."""
        self._reader.join(max(LEAST_SECONDS, 2 * (time.monotonic() - self._begun)))
        self.close()
        return self._result

    def close(self) -> None:
        """End the fork. In the fork: exit without a result."""
        if self.inside:
            os._exit(1)
        if not self._closed:
            self._closed = True
            self.kill()
            self._reader.join(_END_SECONDS)  # it reads the connection, which must not be closed meanwhile
            self.disconnect()

    def _read(self) -> None:
        with contextlib.suppress(ForkedProcessLost):
            while self._result is None:
                message = self.receive()
                if message[:1] == _RESULT:
                    self._result = message[1:]
                else:
                    self.send(self._answer(message[1:]))
