"""A fork of this process, and whole messages to and from it, each within a time limit; a server of clean forks."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Pipe
from typing import Self

MAX_MESSAGE_BYTES = 1 << 30


class ForkedProcessLost(Exception):
    """The other process has ended, or sent nothing for too long. ended: which of the two."""

    def __init__(self, message: str, *, ended: bool = True) -> None:
        super().__init__(message)
        self.ended = ended


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
        raise ForkedProcessLost(f"it sent nothing for {seconds:.1f} s, which is too long", ended=False)

    def disconnect(self) -> None:
        """Close this side's connection. A fork of this process must do it, or the other side would not see its end."""
        self._connection.close()

    def close(self) -> int:
        """Outside the fork: kill and reap it. Returns what `kill` does."""
        status = self.kill()
        self.disconnect()
        return status

    def kill(self) -> int:
        """Its exit status, or the negative number of the signal that ended it: SIGKILL if it had not ended before."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


_BEGUN, _SENT, _DONE, _ENDED = b"b", b"s", b"d", b"e"
"""First byte of a message: a fork's process id; a message of the fork; its work is done; it has ended."""
_FORK_SECONDS = 60.0

SendMessage = Callable[[bytes], None]
ForkedWork = Callable[[bytes, SendMessage], None]


class CleanForkServer:
    """Runs `work(task, send)` in forks of this process as it is at `with`; ends all of them after the block.

    CUDA cannot be used in a fork of a process that has used it, and a kernel that hangs or faults ends its process's
    use of the GPU. So a process that must try such kernels starts this server before it uses the GPU.
    """

    def __init__(self, work: ForkedWork) -> None:
        self._work = work
        self._server: ForkedProcess

    def __enter__(self) -> CleanForkServer:
        self._server = ForkedProcess.running(self._serve)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.close()

    def run(self, task: bytes, timeout: Callable[[], float]) -> Iterator[bytes]:
        """The messages of a new fork, until its work is done. timeout(): the longest wait for the next message. Raises
        ForkedProcessLost."""
        self._server.send(task)
        pid = int.from_bytes(self._server.receive(_FORK_SECONDS)[1:], "little")
        ended = done = False
        try:
            while not ended:
                message = self._server.receive(timeout())
                ended = message[:1] == _ENDED
                done = done or message[:1] == _DONE
                if message[:1] == _SENT:
                    yield message[1:]
        finally:
            if not ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ForkedProcessLost):
                    while self._server.receive(_FORK_SECONDS)[:1] != _ENDED:
                        pass
        if not done:
            raise ForkedProcessLost("its process ended")

    def _serve(self, server: ForkedProcess) -> None:
        """Make a fork for each task, in the server, and forward its messages and its end."""
        with contextlib.suppress(ForkedProcessLost):  # the process that uses the server has ended
            while True:
                task = server.receive()
                fork = ForkedProcess.running(lambda fork: self._once(task, fork, server))  # noqa: B023 (it runs at once)
                server.send(_BEGUN + fork.pid.to_bytes(8, "little"))
                with contextlib.suppress(ForkedProcessLost):
                    while True:
                        server.send(fork.receive())
                fork.close()
                server.send(_ENDED)

    def _once(self, task: bytes, fork: ForkedProcess, server: ForkedProcess) -> None:
        server.disconnect()
        self._work(task, lambda message: fork.send(_SENT + message))
        fork.send(_DONE)
