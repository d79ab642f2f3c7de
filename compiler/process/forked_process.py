"""A fork of this process, and whole messages to and from it, each within a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Pipe
from typing import Self

MAX_MESSAGE_BYTES = 1 << 30


class ForkedProcessLost(Exception):
    """The other process has ended, or sent nothing for too long."""


class ForkedProcess:
    """One fork, used from both sides to exchange messages. inside: whether this is the fork.

    Raises OSError if no process can be made. Locks that other threads held stay locked in a fork for ever: wait for it
    with a time limit.
    """

    def __init__(self) -> None:
        here, there = Pipe()
        try:
            self.pid = os.fork()
        except OSError:
            here.close()
            there.close()
            raise
        self.inside = self.pid == 0
        self._connection, other = (there, here) if self.inside else (here, there)
        other.close()

    @classmethod
    def running(cls, body: Callable[[Self], None]) -> Self:
        """A fork that runs body(itself) and exits without this process's exit handlers."""
        process = cls()
        if process.inside:
            status = 1
            try:
                body(process)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        return process

    def send(self, message: bytes) -> None:
        """Raises ForkedProcessLost if the other process has ended."""
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise ForkedProcessLost(f"its process ended: {error}") from None

    def receive(self, seconds: float | None = None) -> bytes:
        """The next message. Raises ForkedProcessLost: none within `seconds` (None: no limit), or the process ended."""
        try:
            if self._connection.poll(seconds):
                return self._connection.recv_bytes(MAX_MESSAGE_BYTES)
        except (EOFError, OSError):
            raise ForkedProcessLost("its process ended") from None
        raise ForkedProcessLost(f"it sent nothing for {seconds:.1f} s, which is too long")

    def disconnect(self) -> None:
        """Close this side's connection. A fork of this process must do it, or the other side would not see its end."""
        self._connection.close()

    def close(self) -> None:
        """Outside the fork: kill and reap it."""
        self.kill()
        self.disconnect()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
