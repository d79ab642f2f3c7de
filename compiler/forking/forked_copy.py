"""A part of this process' work done in a fork of it, which asks what only this process knows, and sends its result.

The fork goes on from the same state on another processor while this process does something else. Its result is an
offer: this process can always do the work itself.
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
"""How long `result` waits at least. It waits twice as long as the fork has run by then, if that is more."""

_END_SECONDS = 5.0

_QUESTION, _RESULT = b"q", b"r"
"""How each message of the fork begins."""


class ForkedCopy(ForkedProcess):
    """One fork, seen from both sides. answer: called with the fork's questions in a thread of this process; raises
    nothing.

    Raises OSError where no process can be made.
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
        """Inside the fork: what the other process answers. Raises ForkedProcessLost if it is gone."""
        self.send(_QUESTION + question)
        return self.receive()

    def finish(self, result: bytes) -> NoReturn:
        """Inside the fork: send the result, and end."""
        self.send(_RESULT + result)
        os._exit(0)

    def result(self) -> bytes | None:
        """Wait for the fork's result. None: it ended without one, or did not send it in time. Leaves nothing of it."""
        self._reader.join(max(LEAST_SECONDS, 2 * (time.monotonic() - self._begun)))
        self.close()
        return self._result

    def close(self) -> None:
        """Leave nothing of the fork. Inside it: end, without a result."""
        if self.inside:
            os._exit(1)
        if not self._closed:
            self._closed = True
            self.kill()
            self._reader.join(
                _END_SECONDS
            )  # it sees the end; a connection that it reads is not closed under it
            self.disconnect()

    def _read(self) -> None:
        with contextlib.suppress(ForkedProcessLost):
            while self._result is None:
                message = self.receive()
                if message[:1] == _RESULT:
                    self._result = message[1:]
                else:
                    self.send(self._answer(message[1:]))
