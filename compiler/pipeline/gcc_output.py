"""Reads a failed C++ compiler's output: was the source at fault, or the machine?"""

from __future__ import annotations

import re

_NO_ROOM = re.compile(r"No space left on device|Cannot allocate memory|memory exhausted|Killed signal")
_IN_THE_SOURCE = re.compile(
    r"^[^\s:][^:\n]*:\d+(:\d+)?: (fatal error|error|internal compiler error):|undefined reference to",
    re.MULTILINE,
)
_COMPLAINT = re.compile(r"error:|exhausted|can't write", re.IGNORECASE)
_MAX_CHARACTERS = 300


def refuses_source(output: str) -> bool:
    """Whether the same source would fail again: a diagnostic names a line of it, or an undefined reference.

    Otherwise the compiler itself could not work, and may succeed later or on another machine: there was no room, it was
    killed, or it could not start one of its programs. Knows the messages of GCC and Clang.
    """
    return _NO_ROOM.search(output) is None and _IN_THE_SOURCE.search(output) is not None


def complaint(output: str) -> str:
    """The first line that says what was wrong; if there is none, the first line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if _NO_ROOM.search(line) or _COMPLAINT.search(line)]
    return next(iter([*telling, *lines]), "it said nothing")[:_MAX_CHARACTERS]
