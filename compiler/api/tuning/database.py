"""Bodies of `/v1/tunings`, the namespace's tuning database, and of `/v1/autotunes`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from ...tuning.history import TunedProblem
from ...tuning.queries import ENTRY_LIMIT
from ...tuning.records import TuningEntry
from .jobs import TuneJob


class TuningsReply(Struct, frozen=True):
    """Answer of `GET /v1/tunings`. `next`: the cursor of the next page; '' after the last."""

    entries: list[TuningEntry]
    next: str


class Kernels(Struct, frozen=True):
    """Answer of `GET /kernels`: the tuning jobs, the newest first, and the problems whose winners were used last. read:
    how many winners were looked at, of `known`."""

    jobs: list[TuneJob]
    problems: list[TunedProblem]
    read: int
    known: int


class TuningsRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of `POST /v1/tunings`. replace: entries replace existing ones for the same problem."""

    entries: Annotated[list[TuningEntry], Meta(min_length=1, max_length=1000)]
    replace: bool = False


class TuningsImported(Struct, frozen=True):
    """Answer of `POST /v1/tunings`: how many entries are new, existed and were not changed, and were replaced."""

    new: int = 0
    exists: int = 0
    replaced: int = 0


AutotunedLibrary = Literal["triton", "helion"]
"""The libraries whose autotuners may share their winners."""


class AutotuneEntry(Struct, frozen=True):
    """Body of `/v1/autotunes/{library}/{key}`: what a library's own autotuner measured, for a team's other machines.

    key: the library's own key. data: the winner, JSON text that the clients alone read and check."""

    key: Annotated[str, Meta(max_length=256)]
    data: Annotated[str, Meta(max_length=ENTRY_LIMIT)]


BODY_LIMIT = 4 * ENTRY_LIMIT
"""Bytes of an entry as JSON."""
