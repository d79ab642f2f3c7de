"""What a C++ compiler printed as it failed in; whether its source was at fault, or the machine it ran on, out."""

from __future__ import annotations

import re

_NO_ROOM = re.compile(r"No space left on device|Cannot allocate memory|memory exhausted|Killed signal")
_IN_THE_SOURCE = re.compile(
    r"^[^\s:][^:\n]*:\d+(:\d+)?: (fatal error|error|internal compiler error):|undefined reference to",
    re.MULTILINE,
)
_NEWS = re.compile(r"error:|exhausted|can't write", re.IGNORECASE)
_MOST = 300


def refuses_source(output: str) -> bool:
    """Whether the same source would be refused again: a diagnostic names a place in it, or a name that it lacks.

    Otherwise the compiler could not do its work, which it may do the next time or elsewhere: it found no room, was
    killed, could not start one of its own programs. GCC's and Clang's words.
    """
    return _NO_ROOM.search(output) is None and _IN_THE_SOURCE.search(output) is not None


def complaint(output: str) -> str:
    """The line that says what was wrong, without the rest; the first there is, where none says so."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if _NO_ROOM.search(line) or _NEWS.search(line)]
    return next(iter([*telling, *lines]), "it said nothing")[:_MOST]
