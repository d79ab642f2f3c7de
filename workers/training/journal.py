"""A training job's journal: numbers its events and stores them until the service has fetched them.

`news.jsonl` holds the entries that the service may still fetch; `metrics.jsonl`, `events.jsonl` and `logs/rank-N.log`
are for people. If the disk fails, lines of these files are lost, at worst log lines and metrics, but never the job.

What `add` was given is on the disk (fdatasync) when it returns, so that no node's end loses it; events that come while
the disk is busy are written together. Files for people are not waited for: on NFS they may be half a minute behind.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from ...compiler import decoding
from ...compiler.api.training.events import (
    CheckpointEvent,
    FirstStep,
    JobNote,
    LogLines,
    NumberedEvent,
    RankStarted,
    StateChanged,
    StepMetrics,
    TrainEvent,
)
from ...compiler.api.training.jobs import TRAIN_ENDED

MOST_ENTRIES = 1000
"""The most entries of one answer."""
_ANSWER_BYTES = 8 << 20
MEMORY_BYTES = 8 << 20
"""Bytes of entries in memory; older ones are read from the disk."""
UNWRITTEN_BYTES = 64 << 20
"""Bytes of entries that could not be written; past these, log lines and metrics are lost."""
_DISK_BYTES = 1 << 30
"""Bytes of entries that were not fetched; past these, log lines and metrics are lost."""
COMPACT_BYTES = 4 << 20
"""A file whose entries were all fetched begins anew from this size."""
SHOWN_BYTES = 256 << 20
"""A file for people that grew past it replaces its predecessor `NAME.1`: the service has all of it."""
_OPEN_SHARE = 4
"""One in so many of the files that this process may have open is for people."""


class JobJournal:
    """The events of one job, in `folder`. Safe for threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "news.jsonl"
        self._opened: IO[bytes] | None = None
        self._readable = _AppendedFiles()
        self._changed = threading.Condition()
        self._queueing = threading.Lock()
        self._queue: list[TrainEvent] = []
        self._queued = self._added = 0
        """How many calls of `add` there were, and how many of these are done with."""
        self._lines: deque[tuple[int, bytes]] = deque()
        """The newest entries, without gaps up to the last one."""
        self._bytes = 0
        self._written = 0
        """Number of the last one on disk."""
        self._unwritten = 0
        """Bytes of those after it."""
        self._size = 0
        """Bytes of the file that are whole lines."""
        self._position = (0, 0)
        """The number of the first entry not fetched yet, and its position in the file, past the first line."""
        self._fetched = self._loaded = 0
        self._trouble = ""
        self._losing = False
        self.last = 0
        """Number of the newest."""
        self.attempts = 0
        """How often ranks were started."""
        self.stepped = False
        """Some rank has reported a step or a checkpoint."""
        self.restarts = 0
        self.ended: StateChanged | None = None
        """How the job's last turn ended, if nothing came after that."""
        self._load()

    def add(self, events: Iterable[TrainEvent]) -> None:
        """Number and store `events`, and wake callers of `after`."""
        with self._queueing:
            self._queue += events
            self._queued += 1
            number = self._queued
        with self._changed:
            if self._added >= number:
                return  # another thread has stored them with its own
            with self._queueing:
                batch, self._queue = self._queue, []
                number = self._queued
            self._store(batch)
            self._added = number
            self._changed.notify_all()

    def after(self, number: int, seconds: float) -> list[NumberedEvent]:
        """The entries past `number`; the caller has stored all up to it. Waits up to `seconds` for the first."""
        end = time.monotonic() + seconds
        with self._changed:
            if number > self.last:  # the disk lost entries that the service has
                self._renumber(number)
            self._fetched = max(self._fetched, number)
            self._compact()
            while self.last <= number:
                left = end - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return []
            return [decoding.from_json(line, type=NumberedEvent) for line in self._from(number + 1)]

    def resumed(self) -> None:
        """The job was resumed: it has not ended any more."""
        with self._changed:
            self.ended = None

    def _store(self, events: list[TrainEvent]) -> None:
        for number, event in enumerate(self._accepted(events), self.last + 1):
            self._append(number, msgspec.json.encode(NumberedEvent(number, event)) + b"\n")
            self._apply(event)
        trouble = self._write()
        if trouble and not self._trouble:
            text = f"the job's folder takes nothing: {trouble}; its files will lack lines"
            note = NumberedEvent(self.last + 1, JobNote(level="warning", text=text))
            self._append(note.number, msgspec.json.encode(note) + b"\n")
        self._trouble = trouble
        self._write_readable(events)

    def _from(self, number: int) -> list[bytes]:
        lines: list[bytes] = []
        size = 0
        source: Iterable[tuple[int, bytes]] = self._lines
        known, position = self._position if self._position[0] == number else (0, 0)
        on_disk = not self._lines or self._lines[0][0] > number
        if on_disk:
            source = self._on_disk(position)
        for each, line in source:
            known, position = each + 1, position + len(line)
            if each >= number:
                size += len(line)
                lines.append(line)
                if len(lines) == MOST_ENTRIES or size > _ANSWER_BYTES:
                    break
        if on_disk:
            self._position = known, position
        return lines

    def _on_disk(self, position: int) -> Iterator[tuple[int, bytes]]:
        """Entries of the file from position `place` past the first line, up to a line that is damaged (cut by a
        crash)."""
        with contextlib.suppress(OSError), self._file.open("rb") as file:
            next(file, b"")
            file.seek(position, os.SEEK_CUR)
            for line in file:
                try:
                    yield decoding.from_json(line, type=NumberedEvent).number, line
                except msgspec.MsgspecError:
                    return

    def _load(self) -> None:
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._folder / "logs").mkdir(exist_ok=True)
        try:
            with self._file.open("rb") as file:
                first = file.readline()
            state = decoding.from_json(first, type=_JournalHead)
        except (OSError, msgspec.MsgspecError):
            self._begin_file()
            return
        self.last, self.attempts, self.restarts = state.last, state.attempts, state.restarts
        self.ended, self.stepped = state.ended, state.stepped
        self._size = len(first)
        for number, line in self._on_disk(0):
            self.last = number
            self._lines.append((number, line))
            self._bytes += len(line)
            self._size += len(line)
            self._apply(decoding.from_json(line, type=NumberedEvent).event)
            self._forget()
            self._written = number
        self._written = self._loaded = self.last
        with contextlib.suppress(OSError):
            os.truncate(self._file, self._size)

    def _begin_file(self) -> None:
        """Write the file anew with its first line, the state after all entries so far."""
        state = _JournalHead(self.last, self.attempts, self.restarts, self.ended, self.stepped)
        first = msgspec.json.encode(state) + b"\n"
        new = self._file.with_suffix(".new")
        with contextlib.suppress(OSError):
            new.write_bytes(first)
            new.replace(self._file)
            self._close()
            self._position = (0, 0)
            self._size, self._written = len(first), self.last

    def _compact(self) -> None:
        if self._size > COMPACT_BYTES and self._fetched >= self.last:
            self._begin_file()

    def _accepted(self, events: list[TrainEvent]) -> list[TrainEvent]:
        """All, or those that must not be lost if there is too much."""
        losing = self._unwritten > UNWRITTEN_BYTES or self._size > _DISK_BYTES
        if not losing:
            self._losing = False
            return events
        saved: list[TrainEvent] = [event for event in events if not isinstance(event, LogLines | StepMetrics)]
        if not self._losing:
            self._losing = True
            saved.append(
                JobNote(
                    level="warning", text="log lines and metrics are lost: nobody fetches the job's events"
                )
            )
        return saved

    def _append(self, number: int, line: bytes) -> None:
        self.last = number
        self._lines.append((number, line))
        self._bytes += len(line)
        self._unwritten += len(line)

    def _forget(self) -> None:
        while self._bytes > MEMORY_BYTES and self._lines[0][0] <= self._written:
            self._bytes -= len(self._lines.popleft()[1])

    def _write(self) -> str:
        """Write all entries to the file; '' or why that failed."""
        if self._size == 0:
            self._begin_file()
        lines = []
        for number, line in reversed(self._lines):
            if number <= self._written:
                break
            lines.append(line)
        data = b"".join(reversed(lines))
        try:
            if self._opened is None:
                self._opened = self._file.open("r+b")
            self._opened.seek(self._size)
            self._opened.write(data)
            self._opened.flush()
            os.fdatasync(self._opened.fileno())
        except OSError as error:
            self._close()
            with contextlib.suppress(OSError):
                os.truncate(self._file, self._size)
            return error.strerror or str(error)
        self._size += len(data)
        self._written, self._unwritten = self.last, 0
        self._forget()
        return ""

    def _close(self) -> None:
        if self._opened is not None:
            with contextlib.suppress(OSError):  # what it could not write
                self._opened.close()
            self._opened = None

    def _apply(self, event: TrainEvent) -> None:
        match event:
            case RankStarted(attempt=attempt):
                self.attempts = max(self.attempts, attempt + 1)
            case StateChanged(state=state, restarts=restarts):
                self.restarts = max(self.restarts, restarts)
                self.ended = event if state in TRAIN_ENDED else None
            case FirstStep() | StepMetrics() | CheckpointEvent():
                self.stepped = True

    def _renumber(self, known: int) -> None:
        """Number the entries since this driver started from `known` on."""
        new = [
            decoding.from_json(line, type=NumberedEvent).event
            for number, line in self._lines
            if number > self._loaded
        ]
        self._lines.clear()
        self._bytes = self._unwritten = 0
        self.last = self._loaded = self._fetched = known
        self._begin_file()
        for number, event in enumerate(new, known + 1):
            self._append(number, msgspec.json.encode(NumberedEvent(number, event)) + b"\n")
        self._write()

    def _write_readable(self, events: list[TrainEvent]) -> None:
        """Write the files for people. Lines that cannot be written are left out."""
        files: dict[Path, list[bytes]] = {}
        for event in events:
            match event:
                case LogLines(rank=rank, lines=lines):
                    file, text = self._folder / "logs" / f"rank-{rank}.log", "\n".join(lines).encode()
                case StepMetrics():
                    file, text = self._folder / "metrics.jsonl", msgspec.json.encode(event)
                case _:
                    file, text = self._folder / "events.jsonl", msgspec.json.encode(event)
            files.setdefault(file, []).append(text + b"\n")
        for file, texts in files.items():
            with contextlib.suppress(OSError):
                self._readable.append(file, b"".join(texts))


class _AppendedFiles:
    """Appends to files, which stay open: on a network's folder, opening one takes longer than writing it. Not safe for
    threads."""

    def __init__(self) -> None:
        self._most = max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _OPEN_SHARE)
        self._open: OrderedDict[Path, int] = OrderedDict()
        """The descriptor of each, that used longest ago first."""

    def append(self, path: Path, data: bytes) -> None:
        """Raises OSError."""
        file = self._descriptor(path)
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        if os.fstat(file).st_size > SHOWN_BYTES:
            path.replace(path.with_name(f"{path.name}.1"))
            self._close(path)

    def _descriptor(self, path: Path) -> int:
        if path in self._open and not os.fstat(self._open[path]).st_nlink:  # somebody has removed it
            self._close(path)
        if path not in self._open:
            if len(self._open) >= self._most:
                self._close(next(iter(self._open)))
            self._open[path] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._open.move_to_end(path)
        return self._open[path]

    def _close(self, path: Path) -> None:
        os.close(self._open.pop(path))


class _JournalHead(msgspec.Struct, frozen=True):
    """First line of the file: the state after the entries that are no longer in it."""

    last: int
    attempts: int = 0
    restarts: int = 0
    ended: StateChanged | None = None
    stepped: bool = False
