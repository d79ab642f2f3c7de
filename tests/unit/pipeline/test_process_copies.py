"""Copies of a process: what they tell arrives, whatever becomes of them, and the next one is a fresh one."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Generator, Iterator

import psutil
import pytest
from torchrelay.compiler.process.forked_process import (
    CleanForkServer,
    ForkedProcess,
    ForkedProcessLost,
    SendMessage,
)

SEEN: list[bytes] = []


def work(order: bytes, tell: SendMessage) -> None:
    SEEN.append(order)
    tell(b"seen %d" % len(SEEN))
    match order:
        case b"crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case b"raise":
            raise ValueError("for the test")
        case b"hang":
            signal.pause()
        case b"large":
            tell(b"x" * (3 << 20))
        case b"cut":
            os.write(_connection_of(tell), struct.pack("!i", 255) + b"half a message")
            os._exit(1)
    tell(b"bye")


def _connection_of(tell: SendMessage) -> int:
    (fork,) = (cell.cell_contents for cell in tell.__closure__ or ())
    assert isinstance(fork, ForkedProcess)
    return fork._connection.fileno()


@pytest.fixture
def fork_server() -> Iterator[CleanForkServer]:
    with CleanForkServer(work) as running:
        yield running


def test_what_a_copy_tells_arrives(fork_server: CleanForkServer) -> None:
    assert list(fork_server.run(b"well", lambda: 30)) == [b"seen 1", b"bye"]
    assert [len(message) for message in fork_server.run(b"large", lambda: 30)] == [6, 3 << 20, 3]


@pytest.mark.parametrize("order", [b"crash", b"raise", b"cut"])
def test_a_copy_that_ends_early_is_lost_and_the_next_is_fresh(
    order: bytes, fork_server: CleanForkServer
) -> None:
    told: list[bytes] = []
    with pytest.raises(ForkedProcessLost, match="ended"):
        for message in fork_server.run(order, lambda: 30):
            told.append(message)
    assert told == [b"seen 1"]
    assert list(fork_server.run(b"well", lambda: 30)) == [b"seen 1", b"bye"]  # not 2


def test_a_copy_that_is_silent_for_too_long_is_killed(fork_server: CleanForkServer) -> None:
    begun = fork_server.run(b"hang", lambda: 0.5)
    assert next(begun) == b"seen 1"
    with pytest.raises(ForkedProcessLost, match="too long"):
        next(begun)
    assert list(fork_server.run(b"well", lambda: 30)) == [b"seen 1", b"bye"]


def test_who_stops_listening_ends_the_copy(fork_server: CleanForkServer) -> None:
    begun = fork_server.run(b"hang", lambda: 30)
    assert isinstance(begun, Generator)
    next(begun)
    begun.close()
    assert list(fork_server.run(b"well", lambda: 30)) == [b"seen 1", b"bye"]


def test_nothing_is_left_after_the_block() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with CleanForkServer(work) as running:
        assert list(running.run(b"well", lambda: 30)) == [b"seen 1", b"bye"]
        assert {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert SEEN == []
