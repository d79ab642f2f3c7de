"""Bodies of `/v1/tunes`: batch tuning jobs, their items, progress and results.

Times are seconds since 1970, UTC, unless a name says otherwise."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from ...request import schema
from ...tuning.records import CandidateFailure, Problem, Text, Timing, TuningEntry
from .. import compiles as api_compiles
from ..bounds import TEN_YEARS_SECONDS, Count
from . import kernels

TUNE_ITEMS = 4096
"""Problems, graphs and kernels of one batch job."""


TUNE_ID = "^[0-9a-f]{16}$"


ItemState = Literal["waiting", "searching", "done", "known", "failed", "skipped"]
"""known: others had found it. skipped: the job's budget was over before, or it was cancelled."""


TuneState = Literal["waiting", "running", "done", "cancelled"]
"""done: every item is; some may have failed. Only those of cancelled and done jobs can be resumed."""


ENDED: frozenset[str] = frozenset({"done", "known", "failed", "skipped"})
"""States of an item of which nothing more comes."""


Line = Annotated[int, Meta(ge=0, le=1 << 31)]


Space = Literal["default", "exhaustive"]


_Seconds = Annotated[float, Meta(ge=0, le=TEN_YEARS_SECONDS)]


class OperatorTuneItem(Struct, frozen=True, forbid_unknown_fields=True, tag="operator"):
    """An operator on operands of a user's choice; its settings are completed where it is searched. `line`: of the
    file that it comes from; 0: none, the service added it. `ceiling`: it measures what the device can do at most."""

    line: Line
    problem: Problem
    space: Space = "default"
    ceiling: bool = False


class GraphTuneItem(Struct, frozen=True, forbid_unknown_fields=True, tag="graph"):
    """A captured graph, by the key of its request: sent before (`POST /v1/tunes/graphs`), or asked for lately. `name`:
    what to call it beside its key."""

    line: Line
    key: api_compiles.Digest
    mode: Literal["", "max-autotune", "max-autotune-no-cudagraphs"] = ""
    """'': as it was captured if it tunes, else max-autotune-no-cudagraphs."""
    name: Text = ""


class KernelTuneItem(Struct, frozen=True, forbid_unknown_fields=True, tag="kernel"):
    """A user-written Triton kernel on inputs of a user's choice; `name`: what to call it."""

    line: Line
    name: Text
    kernel: kernels.KernelSpec


TuneItem = OperatorTuneItem | GraphTuneItem | KernelTuneItem


class TuneBudget(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a job may spend; once it is spent, no search begins. 0: no limit."""

    seconds: _Seconds = 0.0
    """Of searching, on all devices together."""
    trials: Count = 0
    """Candidates that are run."""
    samples: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """Of one candidate; 0: as usual."""


class TuneRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/tunes`.

    device: a GPU by name, or `cpu`; '': what its first graph is for, or the one kind of GPU that the workers have, or a
    CPU if they have none. torch: the workers' version, where they have several. threads: of a CPU's kernels. file: what
    errors and reports call the file that the lines are of. id: of the job, if whoever begins it chooses one: then it is
    begun once, however often this is sent.
    """

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    items: Annotated[list[TuneItem], Meta(min_length=1, max_length=TUNE_ITEMS)]
    device: Annotated[str, Meta(max_length=200)] = ""
    torch: Annotated[str, Meta(max_length=100)] = ""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    budget: TuneBudget = TuneBudget()
    file: Annotated[str, Meta(max_length=300)] = ""
    lines: dict[Literal["device", "torch", "threads"], Line] = {}
    """Of those fields, in the file."""
    id: Annotated[str, Meta(pattern="^([0-9a-f]{16})?$", max_length=16)] = ""


class TuneJob(Struct, frozen=True, kw_only=True):
    """A batch job, in the answers of `/v1/tunes`. `items`: how many there are in each state. `spent`: seconds of
    searching, on all devices together. `ended`: 0 until it has."""

    id: str
    name: str
    state: TuneState
    by: str
    """Name of the token that started it."""
    created: float
    ended: float = 0.0
    toolchain: schema.Toolchain
    target: schema.Target
    threads: int = 0
    budget: TuneBudget = TuneBudget()
    file: str = ""
    items: dict[ItemState, int] = {}
    spent: float = 0.0
    trials: int = 0
    detail: str = ""
    """Why it waits, or what stopped it."""
    sources: list[str] = []
    """Names of the user-written kernels whose source it holds."""


class TuneProgress(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An item of a job and how far it is: in `GET /v1/tunes/{id}`, and the data of an `item` event.

    kind: operator, ceiling, graph or kernel. text: the problem, or what the item is called. detail: the winner, or why
    it failed, or where it is searched.
    """

    item: int
    line: int
    kind: str
    state: ItemState
    text: str
    detail: str = ""
    seconds: float = 0.0


class TunesReply(Struct, frozen=True):
    """Answer of `GET /v1/tunes`, the newest first."""

    jobs: list[TuneJob]


class TuneReply(Struct, frozen=True):
    """Answer of `GET /v1/tunes/{id}`."""

    job: TuneJob
    progress: list[TuneProgress]


class TuneResult(Struct, frozen=True, kw_only=True):
    """What a tuning job has for one of its items, or for a ceiling that it measured beside them.

    item: as the job's file describes it. line: of that file; 0: none. timings: of all candidates that ran, the
    fastest first. known: the entry stood already, and was not measured for this job. ceiling: a copy, or a large
    matrix product, that says what the device can do. graphs: keys that have the problem, and how often each has it.
    """

    item: str
    line: int = 0
    entry: TuningEntry
    timings: list[Timing] = []
    failures: list[CandidateFailure] = []
    known: bool = False
    ceiling: bool = False
    graphs: list[tuple[str, int]] = []


class TuneResultsReply(Struct, frozen=True):
    """Answer of `GET /v1/tunes/{id}/results`. `next`: the cursor of the next page; '' after the last."""

    results: list[TuneResult]
    next: str


class GraphStored(Struct, frozen=True):
    """Answer of `POST /v1/tunes/graphs`: the key of a request that jobs may now name."""

    key: str
