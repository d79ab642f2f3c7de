"""Bounds of what a job's driver tells: training code, which runs on the same nodes, can speak for it.

Texts are cut. An event with an impossible number, of a rank that the job has not, or with too many values is left out,
and a note says so. What drivers and ranks of ours send is within all bounds, and stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from ....compiler.api.training.events import JobNote, LogLines, TrainEvent

_TEXT = 4_000
"""Characters of a text that is no line of a log."""
_TEXTS, _SHORT_TEXT = 100, 300
_LINES_CHARACTERS = 2 << 20
"""How much of one event's lines is kept: a rank reads its output in parts of 256 KiB."""
_VALUES_BYTES = 32 << 10
"""The most that one report's metrics may take."""
_LARGEST = float(1 << 53)
_EVENT_BYTES = 200
"""What an event takes in Redis besides its texts and values."""


def bounded(event: TrainEvent, ranks: int) -> TrainEvent:
    """The event of a job that has at most so many ranks."""
    fields = msgspec.structs.asdict(event)
    problem = next(filter(None, (_problem(name, value, ranks) for name, value in fields.items())), None)
    if problem is not None:
        kind = event.__struct_config__.tag
        return JobNote(level="warning", text=f"the job's driver sent {kind!r} with {problem}: it is left out")
    if isinstance(event, LogLines):
        return msgspec.structs.replace(event, lines=cut_lines(event.lines, _LINES_CHARACTERS))
    return msgspec.structs.replace(event, **{name: _shortened(value) for name, value in fields.items()})


def about_bytes(event: TrainEvent) -> int:
    """What an event takes in Redis, roughly."""
    texts = [value for value in msgspec.structs.asdict(event).values() if isinstance(value, str)]
    lines = event.lines if isinstance(event, LogLines) else []
    return _EVENT_BYTES + sum(map(len, (*texts, *lines))) + _bytes(getattr(event, "values", {}))


def _bytes(values: Mapping[str, float]) -> int:
    return sum(map(len, values)) + 20 * len(values)


def _problem(name: str, value: Any, ranks: int) -> str | None:
    match value:
        case float() if not math.isfinite(value) or abs(value) > _LARGEST:
            return f"{name} {value:g}"
        case int() if abs(value) > _LARGEST:
            return f"{name} {value:.3g}"
        case int() if name == "rank" and not -1 <= value < ranks:
            return f"{name} {value}"
        case dict() if (size := _bytes(value)) > _VALUES_BYTES:
            return f"{name} of {size} bytes, more than {_VALUES_BYTES}"
        case dict() if not all(map(math.isfinite, value.values())):
            return f"{name} that are no numbers"
    return None


def _shortened(value: Any) -> Any:
    match value:
        case str():
            return value[:_TEXT]
        case list():
            return [each[:_SHORT_TEXT] for each in value[:_TEXTS]]
    return value


def cut_lines(lines: list[str], characters: int) -> list[str]:
    """The first lines, up to so many characters."""
    found: list[str] = []
    for line in lines:
        if characters <= 0:
            break
        found.append(line[:characters])
        characters -= len(line) + 1
    return found
