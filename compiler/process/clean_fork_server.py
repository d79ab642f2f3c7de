"""A fork of this process from before it used a GPU, which forks a fresh process for each order.

CUDA cannot be used in a fork of a process that has used it, and a kernel that hangs or faults ends its process's use of
the GPU. So a process that must try such kernels starts a `CleanForkServer` before it uses the GPU.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

from .forked_process import ForkedProcess, ForkedProcessLost

_BEGUN, _SENT, _DONE, _ENDED = b"b", b"s", b"d", b"e"
"""First byte of a message: a fork's process id; a message of the fork; its work is done; it has ended."""
_FORK_SECONDS = 60.0

SendMessage = Callable[[bytes], None]
ForkedWork = Callable[[bytes, SendMessage], None]


class CleanForkServer:
    """Runs `work(order, send)` in forks of this process as it is at `with`; ends all of them after the block."""

    def __init__(self, work: ForkedWork) -> None:
        self._work = work
        self._server: ForkedProcess

    def __enter__(self) -> CleanForkServer:
        self._server = ForkedProcess.running(self._serve)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.close()

    def run(self, order: bytes, timeout: Callable[[], float]) -> Iterator[bytes]:
        """The messages of a new fork, until its work is done. timeout(): the longest wait for the next message. Raises
        ForkedProcessLost."""
        self._server.send(order)
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
        """In the server: make a fork for each order, and forward its messages and its end."""
        with contextlib.suppress(ForkedProcessLost):  # the process that uses the server has ended
            while True:
                order = server.receive()
                fork = ForkedProcess.running(lambda fork: self._once(order, fork, server))  # noqa: B023 (it runs at once)
                server.send(_BEGUN + fork.pid.to_bytes(8, "little"))
                with contextlib.suppress(ForkedProcessLost):
                    while True:
                        server.send(fork.receive())
                fork.close()
                server.send(_ENDED)

    def _once(self, order: bytes, fork: ForkedProcess, server: ForkedProcess) -> None:
        server.disconnect()
        self._work(order, lambda message: fork.send(_SENT + message))
        fork.send(_DONE)
