"""clients/reports/wait_line.py: who waits for a compile sees what it does, on a terminal of its own and in a log."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr

import pytest
from torchrelay.clients.reports.wait_line import WaitLines
from waiting import wait_until

KEY = "3f2a" * 16
WIDTH = 100
SENT = re.compile(r"torchrelay: \d+ s for graph 3f2a3f2a3f2a: sent")


class Terminal:
    """A pseudo-terminal that stands for standard error, and all that was written to it."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
        self.stream = os.fdopen(slave, "w")
        self.written = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 4096):
                self.written += data.decode()
        except OSError:  # the other side is closed
            pass

    def frames(self) -> list[str]:
        """The texts that the line has had; it is erased by an empty one."""
        return [part.removesuffix("\x1b[K") for part in self.written.split("\r")[1:]]


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.stream.close()


def test_a_terminal_has_one_line_that_is_renewed_and_erased(terminal: Terminal) -> None:
    with redirect_stderr(terminal.stream), WaitLines(first_seconds=0.0).following(KEY) as progress:
        wait_until(lambda: SENT.fullmatch(terminal.frames()[-1]) if terminal.frames() else None)
        progress("queued", "3 ahead of it in the queue")
        wait_until(lambda: "queued, 3 ahead of it in the queue" in terminal.frames()[-1])
        progress("search", "2 of 17 problems searched\x1b[2J")
        wait_until(lambda: "search, 2 of 17 problems searched?[2J" in terminal.frames()[-1])
        progress("autotune", "mm" * WIDTH)
        wait_until(lambda: "autotune" in terminal.frames()[-1])
    wait_until(lambda: terminal.written.endswith("\r\x1b[K"))
    assert "\n" not in terminal.written
    assert max(map(len, terminal.frames())) == WIDTH - 1


def test_a_short_wait_shows_nothing(terminal: Terminal) -> None:
    with redirect_stderr(terminal.stream), WaitLines().following(KEY) as progress:
        progress("aot", "")
    terminal.stream.write("next")
    terminal.stream.flush()
    wait_until(lambda: terminal.written)
    assert terminal.written == "next"


def test_two_threads_that_wait_have_one_line(terminal: Terminal) -> None:
    lines = WaitLines(first_seconds=0.0)
    with redirect_stderr(terminal.stream), lines.following(KEY), lines.following("b" * 64) as progress:
        progress("verify", "")
        wait_until(lambda: len(terminal.frames()) >= 2)
    with redirect_stderr(terminal.stream), lines.following("c" * 64):
        wait_until(lambda: "c" * 12 in terminal.written)
    assert "b" * 12 not in terminal.written
    assert "verify" not in terminal.written


def test_another_rank_shows_nothing(terminal: Terminal) -> None:
    before = threading.active_count()
    with (
        redirect_stderr(terminal.stream),
        WaitLines(silent=True, first_seconds=0.0).following(KEY) as progress,
    ):
        progress("aot", "")
        assert threading.active_count() == before


def test_the_level_of_the_logger_turns_it_off(terminal: Terminal, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "torchrelay")
    before = threading.active_count()
    with redirect_stderr(terminal.stream), WaitLines(first_seconds=0.0).following(KEY):
        assert threading.active_count() == before


def test_without_a_terminal_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    written = io.StringIO()
    caplog.set_level(logging.INFO, "torchrelay")
    with redirect_stderr(written), WaitLines(first_seconds=0.01).following(KEY) as progress:
        progress("inductor", "backward")
        wait_until(lambda: "inductor, backward" in caplog.text)
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert written.getvalue() == ""
