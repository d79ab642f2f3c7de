"""Reads and writes a tuning lock: a team's winners as a TOML file for version control. No torch.

`[[place]]` has a device environment, each `[[place.problem]]` below it one problem and its winner. The chosen kernel
and its time are on separate lines, so that a diff shows which of them changed. Equal entries give equal bytes: sorted,
no dates, no names of machines or users.
"""

from __future__ import annotations

import functools
import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec import Struct

from ...compiler import decoding
from ...compiler.errors import TuningLockError
from ...compiler.request import schema, tuning_pins
from ...compiler.tuning import queries, records
from ..atomic_file import file_errors

VERSION = 1

_HEAD = """\
# The kernels that this team takes for these problems, on these devices with these versions, and what was measured.
# Written by `torchrelay tune export`, used with TORCHRELAY_TUNING_LOCK=FILE, explained in docs/tuning.md.
# Times are milliseconds: the median, and a 95% confidence interval of it.
"""
_TIMINGS = ("winner", "runner_up", "aten", "default")

T = TypeVar("T")


class _Times(Struct, forbid_unknown_fields=True):
    median: records.Milliseconds
    low: records.Milliseconds
    high: records.Milliseconds
    samples: records.Several


class _ProblemTable(Struct, forbid_unknown_fields=True, kw_only=True):
    """A `[[place.problem]]`: an Entry without its place."""

    problem: str
    settings: dict[records.Name, records.Text] = {}
    winner: records.Text
    winner_ms: _Times
    runner_up: records.Text | None = None
    runner_up_ms: _Times | None = None
    aten: records.Text | None = None
    aten_ms: _Times | None = None
    default: records.Text | None = None
    default_ms: _Times | None = None
    candidates: records.Several
    failed: records.Count = 0
    error: records.Finite | None = None
    clock: records.Text = ""
    seconds: records.Finite = 0.0


class _Version(Struct):
    version: int


class _LockFile(_Version, forbid_unknown_fields=True):
    places: list[dict[str, Any]] = msgspec.field(default_factory=list, name="place")


# --- out -------------------------------------------------------------------------------------------------


def write(entries: Iterable[records.TuningEntry]) -> str:
    """The file's text. `entries` in any order, one for a problem and place."""
    parts = [f"{_HEAD}\nversion = {VERSION}\n"]
    ordered = sorted(entries, key=records.entry_sort_key)
    for place, group in itertools.groupby(ordered, key=lambda entry: entry.place):
        parts.append(_table("place", _place_lines(place)))
        parts += [_table("place.problem", _entry_lines(entry)) for entry in group]
    return "\n".join(parts)


def _table(name: str, lines: Iterable[tuple[str, str]]) -> str:
    return f"[[{name}]]\n" + "".join(f"{key} = {value}\n" for key, value in lines)


def _place_lines(environment: records.DeviceEnvironment) -> Iterator[tuple[str, str]]:
    for name in ("device", "capability", "driver", "torch", "triton", "cuda"):
        yield name, _string(getattr(environment, name))
    if environment.threads:
        yield "threads", str(environment.threads)


def _entry_lines(entry: records.TuningEntry) -> Iterator[tuple[str, str]]:
    yield "problem", _string(entry.problem.shape())
    if entry.problem.settings:
        pairs = ", ".join(f"{_key(name)} = {_string(value)}" for name, value in entry.problem.settings)
        yield "settings", f"{{ {pairs} }}"
    for name in _TIMINGS:
        timing: records.Timing | None = getattr(entry, name)
        if timing is not None:
            yield name, _string(timing.candidate)
            times = f"median = {timing.milliseconds!r}, low = {timing.low!r}, high = {timing.high!r}"
            yield f"{name}_ms", f"{{ {times}, samples = {timing.samples} }}"
    yield "candidates", str(entry.candidates)
    yield "failed", str(entry.failed)
    if entry.error is not None:
        yield "error", repr(entry.error)
    if entry.clock:
        yield "clock", _string(entry.clock)
    yield "seconds", repr(entry.seconds)


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _string(name)


def _string(text: str) -> str:
    """A basic string. Characters that are not printable (control and direction characters) are escaped."""
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable():
        return character
    return f"\\u{ord(character):04x}" if ord(character) <= 0xFFFF else f"\\U{ord(character):08x}"


# --- in --------------------------------------------------------------------------------------------------


def load(path: Path) -> list[records.TuningEntry]:
    """The entries of a lock file, sorted. Raises TuningLockError, which names the line."""
    hint = "`torchrelay tune export FILE` writes one"
    with file_errors(f"the tuning lock {path}", "read", hint=hint, kind=TuningLockError):
        data = path.read_bytes()
    return read(data, str(path))


def read(data: bytes, name: str) -> list[records.TuningEntry]:
    """The entries of a lock file's bytes, sorted; `name`: what errors call it. Raises TuningLockError."""
    return _LockReader(data, name).entries()


class _LockReader:
    def __init__(self, data: bytes, name: str) -> None:
        self._name = name
        try:
            self._text = data.decode()
        except UnicodeDecodeError as error:
            self._fail(data.count(b"\n", 0, error.start) + 1, "this is not UTF-8 text")

    def entries(self) -> list[records.TuningEntry]:
        parsed = self._parsed()
        if "version" not in parsed:
            self._fail(
                0,
                "the file is empty" if not parsed else "the file does not say its version",
                hint="`torchrelay tune export FILE` writes a tuning lock, and a merge must leave its first lines",
            )
        written = self._convert(parsed, _Version, ()).version
        if written != VERSION:
            self._fail(
                self._line((), "version"),
                f"the file has version {written}, this torchrelay reads {VERSION}",
                hint="Install the torchrelay that wrote it, or write the file again: `torchrelay tune export`",
            )
        file = self._convert(parsed, _LockFile, ())
        found: dict[tuple[object, ...], tuple[records.TuningEntry, tuple[int, ...]]] = {}
        for number, fields in enumerate(file.places):
            blocks = fields.pop("problem", [])
            place = self._convert(fields, records.DeviceEnvironment, (number,))
            for index, block in enumerate(self._convert(blocks, list[Any], (number,))):
                position = (number, index)
                entry = self._entry(self._convert(block, _ProblemTable, position), place, position)
                first = found.setdefault(records.entry_sort_key(entry), (entry, position))
                if first[1] != position:
                    self._fail(
                        self._line(position, "problem"),
                        f"{entry.problem.text()} has an entry for this place already, "
                        f"at line {self._line(first[1], 'problem')}",
                        hint="Keep one of the two",
                    )
        return [found[key][0] for key in sorted(found)]

    def _parsed(self) -> dict[str, Any]:
        try:
            return tomllib.loads(self._text)
        except (ValueError, RecursionError) as error:
            message = str(error)
            where = re.search(r" \(at line (\d+), column \d+\)$", message)
            line = int(where[1]) if where else 0
            self._fail(line, f"this is not TOML: {message[: where.start() if where else None]}")

    def _entry(
        self, block: _ProblemTable, environment: records.DeviceEnvironment, position: tuple[int, ...]
    ) -> records.TuningEntry:
        try:
            problem = records.parse_problem(block.problem, tuple(sorted(block.settings.items())))
        except ValueError as error:
            self._fail(self._line(position, "problem"), str(error))
        timings = ((name, self._timing(block, name, position)) for name in _TIMINGS)
        entry = records.TuningEntry(
            problem=problem,
            place=environment,
            candidates=block.candidates,
            failed=block.failed,
            error=block.error,
            clock=block.clock,
            seconds=block.seconds,
            **{name: timing for name, timing in timings if timing is not None},
        )
        try:
            data = msgspec.msgpack.encode(entry)
            decoding.from_msgpack(data, type=records.TuningEntry)
        except (msgspec.ValidationError, OverflowError) as error:
            self._fail(self._line(position, "problem"), str(error))
        if len(data) > queries.ENTRY_LIMIT:
            self._fail(self._line(position, ""), f"this entry has more than {queries.ENTRY_LIMIT} bytes")
        return entry

    def _timing(self, block: _ProblemTable, name: str, position: tuple[int, ...]) -> records.Timing | None:
        candidate, times = getattr(block, name), getattr(block, f"{name}_ms")
        if candidate is None and times is None:
            return None
        if candidate is None or times is None:
            present = f"{name}_ms" if candidate is None else name
            self._fail(self._line(position, present), f"{name} and {name}_ms go together")
        try:
            return records.Timing(candidate, times.median, times.low, times.high, times.samples)
        except ValueError as error:
            self._fail(self._line(position, f"{name}_ms"), str(error))

    def _convert(self, value: Any, type: type[T], position: tuple[int, ...]) -> T:
        try:
            return decoding.convert(value, type=type)
        except msgspec.ValidationError as error:
            what, _, path = str(error).partition(" - at `$.")
            unknown = re.search("unknown field `(.+)`", what)
            name = unknown[1] if unknown else path.removesuffix("`")
            self._fail(self._line(position, re.split(r"[.\[]", name)[0]), f"{path and name + ': '}{what}")

    def _line(self, position: tuple[int, ...], field: str) -> int:
        """The line of `field` in the file (), its place (i,) or that place's problem (i, j), or else the line where
        that begins; 0 in TOML of another form."""
        here: tuple[int, ...] = ()
        begins = 0
        for number, line in enumerate(self._text.split("\n"), 1):
            if header := re.match(r"\s*\[\[\s*place\s*(\.\s*problem\s*)?\]\]", line):
                places = here[0] if here else -1
                here = (places, here[1] + 1 if len(here) == 2 else 0) if header[1] else (places + 1,)
                begins = number if here == position else begins
            elif here == position and field and re.match(rf"\s*{re.escape(field)}\s*=", line):
                return number
        return begins

    def _fail(self, line: int, message: str, *, hint: str | None = None) -> NoReturn:
        where = f"{self._name}, line {line}" if line else self._name
        raise TuningLockError(f"{where}: {message}", hint=hint)


# --- in a process that compiles ----------------------------------------------------------------------------


class LockedTunings:
    """The team's tuning lock in this process. Its file is read once, when the first graph that tunes needs it; one that
    cannot be used fails each of them anew."""

    def __init__(self, path: Path, *, strict: bool) -> None:
        self._path = path
        self._strict = strict

    def pin(self, request: schema.GraphRequest) -> schema.GraphRequest:
        """Raises TuningLockError; never for a request that does not tune, which comes back as it is."""
        return (
            tuning_pins.pin(request, self._entries, strict=self._strict)
            if tuning_pins.tunes(request)
            else request
        )

    @functools.cached_property
    def _entries(self) -> list[records.TuningEntry]:
        return load(self._path)
