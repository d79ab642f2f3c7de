"""Runs one process of a job and collects its output lines, its messages and its end. One thread, no waiting.

Its output is read only in `poll`: a caller that stops polling stops the process once its pipes are full.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from ....compiler import decoding
from ....compiler.api.training.events import (
    CheckpointEvent,
    FirstStep,
    JobNote,
    LogLines,
    RankCompiles,
    RankMessage,
    StepMetrics,
    TrainEvent,
)
from .environment import node_environment
from .reaper import KILL, STOP, RankLaunch, encode

_MOST_LINE = 16 << 10
"""Bytes of a line; a longer one is cut into several."""
_MOST_MESSAGE = 1 << 20
_MOST_LINES = 500
"""Lines of one Log."""
_LAST_LINES = 20
WARM_SECONDS = 60.0
"""The longest that a warm process may take to fork a rank."""
_LAUNCH_SECONDS = 10.0

_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:: .*)?")
"""How Python writes an error, after its traceback."""

_GROUP_END = re.compile(r" +\+-+")
_IN_GROUP = re.compile(r"^[ |]*\| ")
"""How it draws a group of errors."""

_OF_RANK = re.compile(r"^\[rank\d+\]: ?")
"""torch.distributed writes it before each line of a traceback, once there is a process group."""


class RankProcess:
    """A started process and its reaper. `events` fills as `poll` is called."""

    def __init__(self, launch: RankLaunch, rank: int, attempt: int, *, warm: str = "") -> None:
        """warm: the socket of a process (prefork/server.py) that may fork it; if that does not, it starts as any
        program does. Raises OSError."""
        self.events: list[TrainEvent] = []
        self.pid = 0
        self.warm = False
        """Whether it was forked from a warm process."""
        self.size = 0
        """Bytes of `events`, roughly."""
        self.last: deque[str] = deque(maxlen=_LAST_LINES)
        """The last lines of its standard error."""
        self.tail: deque[str] = deque(maxlen=_LAST_LINES)
        """The last lines of both streams."""
        self._rank, self._attempt, self._launch = rank, attempt, launch
        self._noted = False
        self._kill_at = 0.0
        self._cold_at = 0.0
        """When to stop waiting for the warm process; 0: there is none."""
        self._code = -signal.SIGKILL
        """The exit code if the reaper was killed."""
        self._reaper: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()
        self._rest: dict[str, bytes] = {}
        ours: dict[str, int] = {}
        self._theirs: dict[str, int] = {}
        for name in ("stdout", "stderr", *(["channel"] if launch.channel else [])):
            ours[name], self._theirs[name] = os.pipe()
        for name, descriptor in ours.items():
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ, name)
        try:
            connection = _connected(warm) if warm else None
            if connection is not None:
                self._cold_at = time.monotonic() + WARM_SECONDS
                self._listen(connection)
            else:
                self._start()
        except OSError:
            self._close_theirs()
            for descriptor in ours.values():
                os.close(descriptor)
            raise

    def _start(self) -> None:
        """Start a reaper, which starts the rank in a new interpreter."""
        here, there = socket.socketpair()
        with there:
            self._reaper = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "torchrelay.workers.training.ranks.reaper"),
                    str(there.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._theirs["stdout"],
                stderr=self._theirs["stderr"],
                pass_fds=[there.fileno()],
                env=node_environment(os.environ),
                start_new_session=True,
            )
        self._cold_at = 0.0
        self._listen(here)

    def _listen(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._selector.register(connection, selectors.EVENT_READ, "reaper")

    def _close_theirs(self) -> None:
        for descriptor in self._theirs.values():
            os.close(descriptor)
        self._theirs.clear()

    def poll(self, seconds: float) -> bool:
        """Read the output, waiting up to `seconds` for it; whether there may be more."""
        if self._kill_at and time.monotonic() > self._kill_at:
            self.kill()
        if self._cold_at and time.monotonic() > self._cold_at:
            self._selector.unregister(self._connection)
            self._on_reaper_gone()
        for key, _ in self._selector.select(seconds):
            try:
                data = os.read(key.fd, 1 << 18)
            except BlockingIOError:
                continue
            except ConnectionError:
                data = b""
            self._take(key.data, data)
            if not data:
                self._selector.unregister(key.fileobj)
                if key.data == "reaper":
                    self._on_reaper_gone()
                else:
                    os.close(key.fd)
        return bool(self._selector.get_map())

    def _on_reaper_gone(self) -> None:
        """The reaper has ended, or the warm process does not fork: then the rank starts in a new interpreter."""
        self._connection.close()
        if self._cold_at and not self._kill_at:
            self._start()
        else:
            self._close_theirs()

    def stop(self, grace: float) -> None:
        """Ask it to end; kill it after `grace` seconds. Once is enough."""
        if not self._kill_at:
            self._kill_at = time.monotonic() + grace
            self._ask(STOP)

    def kill(self) -> None:
        """Kill it; the reaper kills all its descendants."""
        self._kill_at = self._kill_at or time.monotonic()
        self._ask(KILL)

    def _ask(self, what: bytes) -> None:
        if self._connection.fileno() < 0:
            return  # its reaper has ended
        if self.pid == 0:  # the reaper has no launch yet, or kills what it started
            self._code = -signal.SIGKILL if what == KILL else -signal.SIGTERM
            self._selector.unregister(self._connection)
            self._on_reaper_gone()
            return
        with contextlib.suppress(OSError):
            self._connection.send(what)

    def wait(self) -> int:
        """Its exit code (below 0: a signal), once `poll` has returned False: all its descendants are gone then."""
        if self._reaper is not None:
            self._reaper.wait()
        return self._code

    def _take(self, name: str, data: bytes) -> None:
        *lines, rest = (self._rest.pop(name, b"") + data).split(b"\n")
        if not data and rest:  # its last line had no end
            lines, rest = [rest], b""
        if name in ("stdout", "stderr") and len(rest) > _MOST_LINE:
            lines, rest = [*lines, rest], b""
        if len(rest) > _MOST_MESSAGE:
            rest = b""
        if rest:
            self._rest[name] = rest
        match name:
            case "reaper":
                for line in lines:
                    self._on_reaper_line(*line.decode().split())
            case "channel":
                for line in lines:
                    self._on_message(line)
            case _:
                self._log(name, lines)

    def _on_reaper_line(self, what: str, number: str = "") -> None:
        if what == "ready":
            self._connection.settimeout(_LAUNCH_SECONDS)
            with contextlib.suppress(OSError):  # it has ended: `poll` notices
                body = encode(self._launch)
                sent = socket.send_fds(self._connection, [body], list(self._theirs.values()))
                self._connection.sendall(body[sent:])
            self._connection.setblocking(False)
        elif what == "pid":
            self.pid = int(number)
            self.warm, self._cold_at = self._cold_at > 0, 0.0
            self._close_theirs()
        elif what == "end":
            self._code = int(number)
            self._cold_at = 0.0

    def _log(self, name: str, lines: list[bytes]) -> None:
        texts = [
            line[start : start + _MOST_LINE].decode(errors="replace").rstrip("\r")
            for line in lines
            for start in range(0, max(1, len(line)), _MOST_LINE)
        ]
        self.tail.extend(texts)
        if name == "stderr":
            self.last.extend(text for text in texts if text.strip())
        for start in range(0, len(texts), _MOST_LINES):
            some = texts[start : start + _MOST_LINES]
            event = LogLines(rank=self._rank, stream="stderr" if name == "stderr" else "stdout", lines=some)
            self._add(event, sum(map(len, some)))

    def _on_message(self, line: bytes) -> None:
        """Take a message of the rank. Its rank number is set here: the rank cannot speak for another."""
        if not line:
            return
        try:
            message = decoding.from_json(line, type=RankMessage)
        except msgspec.MsgspecError as error:
            if not self._noted:
                self._noted = True
                text = f"rank {self._rank} sent an invalid message: {error}"
                self._add(JobNote(level="warning", text=text, rank=self._rank), 0)
            return
        match message:
            case FirstStep() | RankCompiles():
                message = msgspec.structs.replace(message, rank=self._rank, attempt=self._attempt)
            case StepMetrics() | JobNote():
                message = msgspec.structs.replace(message, rank=self._rank)
            case CheckpointEvent():
                pass
        self._add(message, len(line))

    def _add(self, event: TrainEvent, size: int) -> None:
        self.events.append(event)
        self.size += size + 100

    def taken(self) -> list[TrainEvent]:
        """The events so far, which are the caller's now."""
        events, self.events, self.size = self.events, [], 0
        return events


def _connected(path: str) -> socket.socket | None:
    """To the warm process, whether it is ready or not; None if there is none."""
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return connection


def error_line(lines: Sequence[str]) -> str:
    """What a program's last output says of its end: the error after the last traceback's frames; else its last line."""
    lines = [_OF_RANK.sub("", line) for line in lines]
    if lines and _GROUP_END.fullmatch(lines[-1]):  # of the group itself, else of one in it
        outer = [line[4:] for line in lines if line.startswith("  | ")]
        lines = outer or [_IN_GROUP.sub("", line) for line in lines if "| " in line]
    for number in range(len(lines) - 1, 0, -1):
        if lines[number - 1].startswith("    ") and _ERROR.fullmatch(lines[number]):
            return lines[number]
    return next(reversed(lines), "")
