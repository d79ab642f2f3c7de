"""One process of a job, watched: a Launch in; its lines, its messages and its end out. One thread, no waiting.

What it writes is read as fast as it is taken: whoever stops reading stops it.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from ...compiler.train_records import (
    Checkpoint,
    FirstStep,
    Log,
    Metrics,
    Note,
    RankCompiles,
    RankMessage,
    TrainEvent,
)
from .environment import node_environment
from .keeper import Launch

_MOST_LINE = 16 << 10
"""Bytes of a line; a longer one is cut into several."""
_MOST_MESSAGE = 1 << 20
_MOST_LINES = 500
"""In one Log."""
_LAST_LINES = 20

_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:: .*)?")
"""How Python writes an error, after its traceback."""

_decoder = msgspec.json.Decoder(RankMessage)


class RankProcess:
    """A started process and its keeper. `events` fills as `look` is called."""

    def __init__(self, launch: Launch, rank: int, attempt: int, *, channel: str = "") -> None:
        """`channel`: the variable that names its descriptor for messages; '' gives it none. Raises OSError."""
        self.events: list[TrainEvent] = []
        self.pid = 0
        self.size = 0
        """Bytes of `events`, about."""
        self.last: deque[str] = deque(maxlen=_LAST_LINES)
        """The last lines of its standard error."""
        self.tail: deque[str] = deque(maxlen=_LAST_LINES)
        """Of both streams."""
        self._rank, self._attempt = rank, attempt
        self._noted = False
        self._kill_at = 0.0
        self._waits = selectors.DefaultSelector()
        self._rest: dict[str, bytes] = {}
        ours: dict[str, int] = {}
        theirs: dict[str, int] = {}
        for name in ("stdout", "stderr", "pid", *(["channel"] if channel else [])):
            ours[name], theirs[name] = os.pipe()
        if channel:
            launch = msgspec.structs.replace(
                launch,
                environment={**launch.environment, channel: str(theirs["channel"])},
                keep=[theirs["channel"]],
            )
        try:
            self._keeper = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "torchrelay.workers.training.keeper"),
                    *(str(os.getpid()), str(theirs["pid"])),
                ],
                stdin=subprocess.PIPE,
                stdout=theirs["stdout"],
                stderr=theirs["stderr"],
                pass_fds=[theirs[name] for name in ("pid", "channel") if name in theirs],
                env=node_environment(os.environ),
                start_new_session=True,
            )
        except OSError:
            for descriptor in ours.values():
                os.close(descriptor)
            raise
        finally:
            for descriptor in theirs.values():
                os.close(descriptor)
        for name, descriptor in ours.items():
            os.set_blocking(descriptor, False)
            self._waits.register(descriptor, selectors.EVENT_READ, name)
        assert self._keeper.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._keeper.stdin as pipe:
            pipe.write(msgspec.json.encode(launch))

    def look(self, seconds: float) -> bool:
        """Read what has come, waiting up to `seconds` for it; whether there may be more."""
        if self._kill_at and time.monotonic() > self._kill_at:
            self.kill()
        for key, _ in self._waits.select(seconds):
            try:
                data = os.read(key.fd, 1 << 18)
            except BlockingIOError:
                continue
            self._take(key.data, data)
            if not data:
                self._waits.unregister(key.fd)
                os.close(key.fd)
        return bool(self._waits.get_map())

    def stop(self, grace: float) -> None:
        """Ask it to end; kill it after `grace` seconds. Once is enough."""
        if not self._kill_at:
            self._kill_at = time.monotonic() + grace
            with contextlib.suppress(ProcessLookupError):
                self._keeper.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it; its keeper clears up what is below."""
        if self.pid and self._keeper.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Its exit code, below 0 the signal, once everything below it is gone."""
        return self._keeper.wait()

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
            case "pid":
                self.pid = int(lines[0]) if lines else self.pid
            case "channel":
                for line in lines:
                    self._hear(line)
            case _:
                self._log(name, lines)

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
            stream = "stderr" if name == "stderr" else "stdout"
            self._add(Log(rank=self._rank, stream=stream, lines=some), sum(map(len, some)))

    def _hear(self, line: bytes) -> None:
        """What the rank tells is of itself, whatever it says."""
        if not line:
            return
        try:
            message = _decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            if not self._noted:
                self._noted = True
                text = f"rank {self._rank} told something that is no message: {error}"
                self._add(Note(level="warning", text=text, rank=self._rank), 0)
            return
        match message:
            case FirstStep() | RankCompiles():
                message = msgspec.structs.replace(message, rank=self._rank, attempt=self._attempt)
            case Metrics() | Note():
                message = msgspec.structs.replace(message, rank=self._rank)
            case Checkpoint():
                pass
        self._add(message, len(line))

    def _add(self, event: TrainEvent, size: int) -> None:
        self.events.append(event)
        self.size += size + 100

    def taken(self) -> list[TrainEvent]:
        """The events so far, which are the caller's now."""
        events, self.events, self.size = self.events, [], 0
        return events


def error_line(lines: Sequence[str]) -> str:
    """Of what a program wrote before it ended: the error after the last traceback's frames; else its last line."""
    for number in range(len(lines) - 1, 0, -1):
        if lines[number - 1].startswith("    ") and _ERROR.fullmatch(lines[number]):
            return lines[number]
    return next(reversed(lines), "")
