"""Work done ahead in a copy of this process: a fork in; the bytes that the copy worked out, or None, out.

The copy goes on from the same state while this process does something else, on another processor. What it finds is
an offer: whoever asked for it can always do the work itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import NoReturn


class Copy:
    """One fork, seen from both sides. `inside`: whether this is the copy. Raises OSError where none can be made."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        try:
            self.pid = os.fork()
        except OSError:
            os.close(self._reading)
            os.close(self._writing)
            raise
        self.inside = self.pid == 0
        os.close(self._reading if self.inside else self._writing)
        self._waits = not self.inside

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
