"""What a compile or a tuning worker asks the service about tuning, and what it answers; structs. No torch.

A compile looks winners up, reports what it measured, and has unknown problems searched. A tuning worker requests tasks,
says which candidate it is about to run, and reports results."""

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


class TuningTask(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A problem that somebody is to search. `id` names it to the service.

    exact: the result counts for this very problem only. Else (an operator that a user described) whoever searches it
    completes its settings. space: which candidates there are. seconds, samples: at most so long, and so many of one
    candidate; 0: as usual. avoid: candidates that ended a searcher's process.
    """

    id: Name
    problem: Problem
    exact: bool = True
    space: Literal["default", "exhaustive"] = "default"
    seconds: Finite = 0.0
    samples: Count = 0
    avoid: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()


class EntryLookup(Struct, frozen=True, forbid_unknown_fields=True, tag="lookup"):
    """Which of these problems are known in this place? Answered by KnownEntries."""

    place: DeviceEnvironment
    problems: Annotated[list[Problem], Meta(max_length=256)]


class SearchResult(Struct, frozen=True, forbid_unknown_fields=True, tag="found"):
    """A search is over: keep what it found, unless there is an entry already. Answered by KnownEntries: what
    stands now.

    task: whose; '' in a compile that measured by itself. timings: of all candidates that ran, fastest first.
    """

    entry: TuningEntry
    task: Annotated[str, Meta(max_length=128)] = ""
    timings: Annotated[list[Timing], Meta(max_length=1024)] = []
    failures: Annotated[list[CandidateFailure], Meta(max_length=1024)] = []


class SearchRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="wanted"):
    """A compile needs these problems: have those searched that nobody knows. Answered by KnownEntries; asked
    again until
    nothing is open. patience: seconds that the answer may be held back, until any of them is known or given up."""

    place: DeviceEnvironment
    problems: Annotated[list[Problem], Meta(max_length=256)]
    patience: Annotated[float, Meta(ge=0, le=5)] = 0.0


class TaskRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="next"):
    """A searcher takes up another problem. `holding`: tasks that it has and has not measured yet. Answered by
    TaskBatch: at once if it holds any, else as soon as there is something, and within five seconds."""

    place: DeviceEnvironment
    holding: Count


class CandidateAttempt(Struct, frozen=True, forbid_unknown_fields=True, tag="trying"):
    """A searcher is about to run a candidate for the first time, '': none for now. If its process ends, that is why.
    Answered by KnownEntries; by TaskReassigned where the task is another's by now."""

    task: Name
    candidate: Text


class UnsupportedTask(Struct, frozen=True, forbid_unknown_fields=True, tag="unfit"):
    """A searcher cannot search this task."""

    task: Name
    why: Text


class KnownEntries(Struct, frozen=True, forbid_unknown_fields=True, tag="known"):
    """The entries that there are, in the order of the problems asked for.

    Of those SearchRequest: `open` are still being searched; `given_up`: nobody will, so whoever wants them
    does it himself.
    """

    entries: list[TuningEntry]
    open: Count = 0
    given_up: list[Problem] = []


class TaskBatch(Struct, frozen=True, forbid_unknown_fields=True, tag="work"):
    """What a searcher is to do. over: nothing more will come, and it may end."""

    tasks: list[TuningTask]
    over: bool = False


class TaskReassigned(Struct, frozen=True, forbid_unknown_fields=True, tag="taken_over"):
    """A task that a searcher had not begun was given to one that had nothing to do: leave it to him."""


TuningQuery = EntryLookup | SearchResult | SearchRequest | TaskRequest | CandidateAttempt | UnsupportedTask


TuningReply = KnownEntries | TaskBatch | TaskReassigned


QUESTION_LIMIT = 1 << 20
"""Bytes of an encoded question."""


ENTRY_LIMIT = 16 << 10
"""Bytes of an encoded entry that is kept; a usual one has one KiB."""


SendQuery = Callable[[TuningQuery], TuningReply]
"""Puts a question to the service and waits for its answer; any thread may. Raises Unavailable: no answer came, and
soon after that none is waited for."""


def entries_of(answer: TuningReply) -> list[TuningEntry]:
    """Of an answer that should be KnownEntries's."""
    return answer.entries if isinstance(answer, KnownEntries) else []
