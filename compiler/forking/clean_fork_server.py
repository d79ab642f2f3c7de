"""Copies of a process as it was before it touched a GPU: a function and an order in; what each copy says of it, out.

CUDA cannot be used after a fork from a process that has used it, and a kernel that hangs or faults ends its process's
use of the GPU. So whoever runs kernels that may do either keeps a copy of itself from before
(`CleanForkServer`), and has that one make a fresh copy for each attempt.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

_LENGTH = struct.Struct("<I")
_MOST = 64 << 20
_BEGUN, _SAID, _DONE, _ENDED = b"b", b"s", b"d", b"e"
"""How a message begins: a copy's process id; what it tells; its work is done; it is no more."""
_FORK_SECONDS = 60.0

SendMessage = Callable[[bytes], None]
ForkedWork = Callable[[bytes, SendMessage], None]


class ForkedProcessLost(Exception):
    """The copy ended before its work did, or said nothing for too long."""


class CleanForkServer:
    """`work(order, tell)` runs in copies of this process as it is at `with`; nothing is left after the block."""

    def __init__(self, work: ForkedWork) -> None:
        self._work = work
        self._orders = self._answers = -1
        self._pid = 0

    def __enter__(self) -> CleanForkServer:
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._orders)
            os.close(self._answers)
            _leave_after(lambda: self._serve(orders, answers))
        os.close(orders)
        os.close(answers)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._orders)
        os.close(self._answers)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def run(self, order: bytes, patience: Callable[[], float]) -> Iterator[bytes]:
        """What a new copy tells, until its work is done. patience: seconds for which it may be silent now; asked
        before each message. Raises ForkedProcessLost."""
        _write(self._orders, order)
        copy = int.from_bytes(_read(self._answers, _FORK_SECONDS)[1:], "little")
        ended = done = False
        try:
            while True:
                message = _read(self._answers, patience())
                kind, message = message[:1], message[1:]
                if kind == _ENDED:
                    ended = True
                    break
                done = done or kind == _DONE
                if kind == _SAID:
                    yield message
        finally:
            if not ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(copy, signal.SIGKILL)
                with contextlib.suppress(ForkedProcessLost):
                    while _read(self._answers, _FORK_SECONDS)[:1] != _ENDED:
                        pass
        if not done:
            raise ForkedProcessLost("its process ended")

    def _serve(self, orders: int, answers: int) -> None:
        """In the copy that is kept: a fresh copy for each order; its whole messages, passed on, and its end."""
        while True:
            try:
                order = _read(orders, None)
            except ForkedProcessLost:
                return
            told, tell = os.pipe()
            pid = os.fork()
            if pid == 0:
                for descriptor in (orders, answers, told):
                    os.close(descriptor)
                _leave_after(lambda: self._once(order, tell))  # noqa: B023 (it runs at once)
            os.close(tell)
            _write(answers, _BEGUN + pid.to_bytes(8, "little"))
            with contextlib.suppress(ForkedProcessLost):
                while True:
                    _write(answers, _read(told, None))
            os.close(told)
            os.waitpid(pid, 0)
            _write(answers, _ENDED)

    def _once(self, order: bytes, tell: int) -> None:
        self._work(order, lambda message: _write(tell, _SAID + message))
        _write(tell, _DONE)


def _leave_after(body: Callable[[], None]) -> NoReturn:
    status = 1
    try:
        body()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _write(pipe: int, message: bytes) -> None:
    data = memoryview(_LENGTH.pack(len(message)) + message)
    try:
        while data:
            data = data[os.write(pipe, data) :]
    except OSError as error:
        raise ForkedProcessLost(f"nobody reads: {error}") from None


def _read(pipe: int, seconds: float | None) -> bytes:
    """A whole message. Raises ForkedProcessLost: none within `seconds`, or nobody writes any more."""
    until = None if seconds is None else time.monotonic() + seconds
    (length,) = _LENGTH.unpack(_exactly(pipe, _LENGTH.size, until))
    if length > _MOST:
        raise ForkedProcessLost(f"a message of {length} bytes")
    return _exactly(pipe, length, until)


def _exactly(pipe: int, length: int, until: float | None) -> bytes:
    data = b""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while len(data) < length:
        left = None if until is None else (until - time.monotonic()) * 1e3
        if (left is not None and left <= 0) or not poll.poll(left):
            raise ForkedProcessLost("it said nothing for too long")
        piece = os.read(pipe, length - len(data))
        if not piece:
            raise ForkedProcessLost("its process ended")
        data += piece
    return data
