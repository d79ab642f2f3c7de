"""Bodies of `/v1/tunes`: batch tuning jobs, their items, progress and results.

Times are seconds since 1970, UTC, unless a name says otherwise."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from ...request import schema
from ...tuning.queries import Space
from ...tuning.records import CandidateFailure, Problem, Text, Timing, TuningEntry
from .. import compiles as api_compiles
from ..compiles import TEN_YEARS_SECONDS, Count
from . import kernels

TUNE_ITEMS = 4096
"""Problems, graphs and kernels of one batch job."""

TUNE_ID = "^[0-9a-f]{16}$"

ItemState = Literal["waiting", "searching", "done", "known", "failed", "skipped"]
"""known: there was a winner already. skipped: the job's budget was spent, or the job was cancelled."""

TuneState = Literal["waiting", "running", "done", "cancelled"]
"""done: all items have ended; some may have failed. Done and cancelled jobs can be resumed."""

ENDED: frozenset[str] = frozenset({"done", "known", "failed", "skipped"})
"""Final states of an item."""

Line = Annotated[int, Meta(ge=0, le=1 << 31)]

_Seconds = Annotated[float, Meta(ge=0, le=TEN_YEARS_SECONDS)]

TuneMode = Literal["", "max-autotune", "max-autotune-no-cudagraphs"]
"""The mode of a graph. '': the captured mode if it tunes, else max-autotune-no-cudagraphs."""


class OperatorTuneItem(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="operator"):
    """An operator on operands of a user's choice; the search worker completes its settings. line: in the job's file; 0:
    the service added it. ceiling: it measures the device's peak."""

    line: Line
    problem: Problem
    space: Space = "default"
    ceiling: bool = False


class GraphTuneItem(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="graph"):
    """A captured graph, by the key of its request, which was sent (`POST /v1/tunes/graphs`) or compiled recently. name:
    for people."""

    line: Line
    key: api_compiles.Digest
    mode: TuneMode = ""
    name: Text = ""


class KernelTuneItem(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="kernel"):
    """A user-written Triton kernel on inputs of a user's choice. name: for people."""

    line: Line
    name: Text
    kernel: kernels.KernelSpec


TuneItem = OperatorTuneItem | GraphTuneItem | KernelTuneItem


class TuneBudget(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits of a job; once one is reached, no search begins. 0: no limit."""

    seconds: _Seconds = 0.0
    """Limit of the search time, summed over devices."""
    trials: Count = 0
    """Candidates that are run."""
    samples: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """How many one candidate gets; 0: the default."""


class TuneOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a job's file and its request both say.

    device: a GPU by name, or `cpu`; '': the first graph's, or the workers' only kind of GPU, or a CPU if there is none.
    torch: the version, if workers have several. threads: for kernels on a CPU.
    """

    device: Annotated[str, Meta(max_length=200)] = ""
    torch: Annotated[str, Meta(max_length=100)] = ""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    budget: TuneBudget = TuneBudget()
    lines: dict[Literal["device", "torch", "threads"], Line] = {}
    """Where these fields are in the file."""


class TuneRequest(TuneOptions, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of `POST /v1/tunes`.

    file: the job file's name in errors and reports. id: chosen by the client, so that a repeated request starts the job
    once; '': the service chooses.
    """

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    items: Annotated[list[TuneItem], Meta(min_length=1, max_length=TUNE_ITEMS)]
    file: Annotated[str, Meta(max_length=300)] = ""
    id: Annotated[str, Meta(pattern="^([0-9a-f]{16})?$", max_length=16)] = ""


class TuneJob(Struct, frozen=True, kw_only=True):
    """A tuning job, in the answers of `/v1/tunes`. items: how many are in each state. spent: seconds of search time,
    summed over devices. ended: 0 until then."""

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
    """Names of its user-written kernels."""


class TuneProgress(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The progress of a job's item, in `GET /v1/tunes/{id}` and in `item` events.

    kind: operator, ceiling, graph or kernel. text: the problem, or the item's name. detail: the winner, why it failed,
    or where it is searched.
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
    """A tuning job's result for one of its items, or for a ceiling.

    item: as the job's file describes it. line: of that file; 0: none. timings: of all candidates that ran, the
    fastest first. known: the winner was known before the job. ceiling: a copy, or a large matrix product, that measures
    the device's peak. graphs: keys of graphs that have the problem, and how often each has it.
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
    """Answer of `POST /v1/tunes/graphs`: the key by which jobs can name the graph."""

    key: str


MOST_THREADS = 4096


class SearchJobSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The order that starts a search worker: what kernels are made for. threads: for kernels on a CPU; 0 for a GPU."""

    toolchain: schema.Toolchain
    target: schema.Target
    threads: Annotated[int, Meta(ge=0, le=MOST_THREADS)] = 0
