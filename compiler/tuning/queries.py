"""Queries of compiles and search workers to the service, and its replies, as structs. No torch.

A compile looks winners up, reports its measurements, and has unknown problems searched. A search worker requests tasks,
reports each candidate before its first run, and reports results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from msgspec import Meta, Struct

from .records import (
    CandidateFailure,
    Count,
    DeviceEnvironment,
    Finite,
    Name,
    Problem,
    Text,
    Timing,
    TuningEntry,
)

Space = Literal["default", "exhaustive"]
"""Which candidates there are."""


class TuningTask(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A problem to be searched.

    exact: search this very problem; False: a user described the operator, and the search worker completes its settings.
    seconds, samples: limits of the search, and for one candidate; 0: the default.
    avoid: candidates that ended a search worker's process.
    """

    id: Name
    problem: Problem
    exact: bool = True
    space: Space = "default"
    seconds: Finite = 0.0
    samples: Count = 0
    avoid: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()


class EntryLookup(Struct, frozen=True, forbid_unknown_fields=True, tag="lookup"):
    """Which of these problems have winners in this device environment? The reply is KnownEntries."""

    place: DeviceEnvironment
    problems: Annotated[list[Problem], Meta(max_length=256)]


class SearchResult(Struct, frozen=True, tag="found"):
    """A search is finished: store its entry, unless there is one. The reply is KnownEntries with the stored entry.

    task: '' for a compile that measured by itself. timings: of all candidates that ran, fastest first.
    """

    entry: TuningEntry
    task: Annotated[str, Meta(max_length=128)] = ""
    timings: Annotated[list[Timing], Meta(max_length=1024)] = []
    failures: Annotated[list[CandidateFailure], Meta(max_length=1024)] = []


class SearchRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="wanted"):
    """A compile needs these problems: search those without a winner. The reply is KnownEntries; the compile repeats the
    query until nothing is open. wait_seconds: how long the reply may be held back until any of them is known or given
    up."""

    place: DeviceEnvironment
    problems: Annotated[list[Problem], Meta(max_length=256)]
    wait_seconds: Annotated[float, Meta(ge=0, le=5)] = 0.0


class TaskRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="next"):
    """A search worker requests a task. holding: tasks that it has and has not measured yet. The reply is TaskBatch: at
    once if it holds any, else as soon as there is a task, and within five seconds."""

    place: DeviceEnvironment
    holding: Count


class CandidateAttempt(Struct, frozen=True, tag="trying"):
    """A search worker is about to run a candidate for the first time: if its process ends, that is the cause. '': none.
    The reply is KnownEntries, or TaskReassigned."""

    task: Name
    candidate: Text


class UnsupportedTask(Struct, frozen=True, tag="unfit"):
    """A search worker cannot search this task."""

    task: Name
    why: Text


class KnownEntries(Struct, frozen=True, tag="known"):
    """The existing entries, in the order of the query's problems.

    For a SearchRequest: open: how many are still being searched; given_up: those that will not be searched, so the
    compile measures them itself.
    """

    entries: list[TuningEntry]
    open: Count = 0
    given_up: list[Problem] = []


class TaskBatch(Struct, frozen=True, tag="work"):
    """Tasks for a search worker. over: there will be no more, and it ends."""

    tasks: list[TuningTask]
    over: bool = False


class TaskReassigned(Struct, frozen=True, tag="taken_over"):
    """The task was given to an idle search worker: skip it."""


TuningQuery = EntryLookup | SearchResult | SearchRequest | TaskRequest | CandidateAttempt | UnsupportedTask
TuningReply = KnownEntries | TaskBatch | TaskReassigned

QUESTION_LIMIT = 1 << 20
"""Bytes of an encoded query."""

ENTRY_LIMIT = 16 << 10
"""Bytes of an encoded entry in the database; a usual one has one KiB."""

SendQuery = Callable[[TuningQuery], TuningReply]
"""Sends a query to the service and waits for the reply; safe for threads. Raises Unavailable if no reply comes; for a
while after that it raises at once."""


def entries_of(reply: TuningReply) -> list[TuningEntry]:
    """The entries of a reply that should be KnownEntries."""
    return reply.entries if isinstance(reply, KnownEntries) else []
