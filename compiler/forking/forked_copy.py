"""Work done ahead in a copy of this process: a fork in; the bytes that the copy worked out, or None, out.

The copy goes on from the same state while this process does something else, on another processor. What it finds is
an offer: whoever asked for it can always do the work itself. What only this process can find out the copy asks it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import NoReturn

AnswerQuestion = Callable[[bytes], bytes]


class ForkedCopy:
    """One fork, seen from both sides. `inside`: whether this is the copy. Raises OSError where none can be made.

    answer: what the copy's questions are answered by, in a thread of this process; it raises nothing.
    """

    def __init__(self, answer: AnswerQuestion | None = None) -> None:
        self._reading, self._writing = os.pipe()
        here, there = Pipe() if answer is not None else (None, None)
        try:
            self.pid = os.fork()
        except OSError:
            for end in (here, there):
                if end is not None:
                    end.close()
            os.close(self._reading)
            os.close(self._writing)
            raise
        self.inside = self.pid == 0
        os.close(self._reading if self.inside else self._writing)
        self._waits = not self.inside
        self._questions = there
        if here is None or there is None or answer is None:
            return
        (here if self.inside else there).close()
        if not self.inside:
            threading.Thread(
                target=_answer_questions, args=(here, answer), name="torchrelay copy's questions", daemon=True
            ).start()

    def ask(self, question: bytes) -> bytes:
        """In the copy: what the other process answers. Raises EOFError or OSError if it is gone."""
        assert self.inside and self._questions is not None
        self._questions.send_bytes(question)
        return self._questions.recv_bytes()

    def answer(self, data: bytes) -> NoReturn:
        """In the copy: hand `data` over, and end."""
        with os.fdopen(self._writing, "wb") as stream:
            stream.write(data)
        os._exit(0)

    def result(self) -> bytes | None:
        """Wait for the copy to end; its answer, or None if it had none. To be called once."""
        self._waits = False
        with os.fdopen(self._reading, "rb") as stream:
            data = stream.read()
        return data if os.waitpid(self.pid, 0)[1] == 0 else None

    def close(self) -> None:
        """Have nothing of it left. In the copy: end, without an answer."""
        if self.inside:
            os._exit(1)
        if self._waits:
            self._waits = False
            os.close(self._reading)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _answer_questions(pipe: Connection, answer: AnswerQuestion) -> None:
    """Until the copy has ended."""
    with pipe, contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send_bytes(answer(pipe.recv_bytes()))
