"""What a process tells of a run: its graphs, and the functions that started without tracing; and a run as the gateway
keeps it.

`POST /v1/runs` takes a RunRecord of each process and answers RunReply; `GET /runs`, `/runs/{run}` and `/misses/{key}`
answer RunList, Run and MissExplanation as JSON, or as pages.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct

from .lowered import NodeSources

_SHOWN_GRAPHS = 50
"""The latest, in a notebook."""
RANKS = 100_000
"""A rank is below."""
Key = Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]

Outcome = Literal[
    "hit", "disk_hit", "miss", "coalesced", "shared", "background", "fallback", "eager", "raised"
]
"""shared: another process of the job fetched it. background: it runs eagerly while the service compiles it. eager: a
fallback that Inductor could not compile here either. raised: the error went to the program, in mode `require`."""
OUTCOMES: dict[Outcome, str] = {
    "hit": "hit",
    "disk_hit": "hit, on this machine",
    "miss": "miss",
    "coalesced": "miss, joined a compile",
    "shared": "hit, through another rank",
    "background": "miss, ran eagerly to the end",
    "fallback": "compiled locally",
    "eager": "not compiled, runs eagerly",
    "raised": "error",
}
"""What people read of each."""
Stage = Literal[
    "lookup", "digests", "guards", "install", "trace", "encode", "key", "wait", "fetch", "verify", "load"
]
"""The first four are those of a function that may start without tracing: its records read; the functions that were
traced, and the values that have guards, compared; Dynamo's own guards made."""
STAGES: tuple[Stage, ...] = get_args(Stage)
HITS: tuple[Outcome, ...] = ("hit", "disk_hit", "shared")
"""Nothing was compiled for these."""


class GraphRecord(Struct, frozen=True, kw_only=True):
    """One graph. key: 64 hex digits, '' if it has none. seconds: from the request to the callable. reason: the code of
    the error that kept the graph from being served, or ''. eager_calls: how often it ran eagerly before its artifact
    took over. ended: seconds after the start of the process, 0 if that is not known. stages: what of the seconds went
    to which stage."""

    key: Key
    outcome: Outcome
    seconds: float
    nodes: int
    reason: str = ""
    eager_calls: int = 0
    ended: float = 0.0
    stages: dict[Stage, float] = {}


class TracedFunction(Struct, frozen=True):
    """A function that was traced although programs are on, and why: it had no record, can have none, or its records do
    not fit."""

    function: str
    reason: str


class RefusedOperator(Struct, frozen=True):
    """An operator that the service does not take. line: `FILE:LINE` of its first use, '' if that is not known. graphs:
    how many fell back, or raised, because of it."""

    operator: str
    line: str
    graphs: int


class Report(Struct, frozen=True, kw_only=True):
    """A process's counts so far.

    hits: the service had the artifact. disk_hits: this machine had it. misses: compiled for this request. coalesced:
    waited for a compile that another request had started. shared: another process of the job fetched it. prefetched:
    hits without waiting, because the artifact was fetched before the graph was needed. prefetch_failures: prefetches
    that failed. programs: functions that started without tracing; started: how often each of them did, the first 1000.
    programs_checked: functions that were traced all the
    same, to compare their programs with the trace. programs_stale: of these, the ones whose programs differed. traced:
    functions that were traced although programs are on, and why; the first 1000. checked: graphs whose first call was
    compared with eager; those that differed are among the fallbacks too. unchecked: those for which that was not
    possible. background: run eagerly now, while the service compiles them. fallbacks: not served, and compiled locally,
    by error code. eager: these which run eagerly, because Inductor could not compile them here. refused: operators
    that cannot be sent. alone: graphs on which this process decided without the other processes of its job, by error
    code. autotune_hits: kernels that Triton or Helion did not measure because the team had. autotune_failures:
    exchanges of such winners that failed, by error code. seconds: by stage, all graphs together. graphs: the latest
    1000, and after them those in the background.
    """

    hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    coalesced: int = 0
    shared: int = 0
    prefetched: int = 0
    prefetch_failures: int = 0
    programs: int = 0
    started: dict[str, int] = {}
    programs_checked: int = 0
    programs_stale: int = 0
    traced: tuple[TracedFunction, ...] = ()
    checked: int = 0
    unchecked: int = 0
    background: int = 0
    fallbacks: dict[str, int] = {}
    eager: int = 0
    refused: tuple[RefusedOperator, ...] = ()
    alone: dict[str, int] = {}
    autotune_hits: int = 0
    autotune_failures: dict[str, int] = {}
    seconds: dict[str, float] = {}
    graphs: tuple[GraphRecord, ...] = ()

    def _repr_html_(self) -> str:
        """What Jupyter shows: the counts that are not 0, and the latest graphs."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        counts = [(name, value) for name, value in fields.items() if isinstance(value, int | dict) and value]
        rows = [("graph", "what became of it", "nodes", "seconds")]
        for graph in self.graphs[-_SHOWN_GRAPHS:]:
            became = OUTCOMES[graph.outcome] + (f": {graph.reason}" if graph.reason else "")
            rows.append((graph.key[:12], became, f"{graph.nodes:,}", f"{graph.seconds:.2f}"))
        return _html_table(
            [(name.replace("_", " "), _counted(value)) for name, value in counts]
        ) + _html_table(rows)


def _counted(value: int | dict[str, float]) -> str:
    return (
        str(value) if isinstance(value, int) else ", ".join(f"{name} {it:.4g}" for name, it in value.items())
    )


def _html_table(rows: Sequence[tuple[str, ...]]) -> str:
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


class RunRecord(Report, frozen=True, kw_only=True):
    """The report of a process that has compiled something. program: the script's name without folders. ended: seconds
    since 1970. run: the same text in all ranks that one launcher started on this machine, '' for a process without a
    launcher. launch: the launcher's own name for this start, the same on all machines. torch: PyTorch's version.
    sources: the lines and modules of graphs that `torchrelay lower --share` has lowered."""

    program: str
    pid: int
    ended: float
    run: str = ""
    rank: Annotated[int, Meta(ge=0, lt=RANKS)] | None = None
    launch: str = ""
    torch: str = ""
    sources: dict[Key, NodeSources] = {}


class RunReply(Struct, frozen=True):
    """run: its id. path: of its page at this gateway. saved_seconds: what the hits of the process took to compile."""

    run: str
    path: str
    saved_seconds: float


class PageTicket(Struct, frozen=True):
    """Answer of `POST /v1/page-tickets`. path: signs a browser in, once, within seconds; `&then=` and a page's path
    follow it."""

    path: str
    seconds: int


class RunSummary(Struct, frozen=True, kw_only=True):
    """A process of a run in short; in a list of runs the one that ended first. by: the name of its token. ended: when
    the gateway was told, seconds since 1970. hits: also those of the machine's disk, and of other ranks. fallbacks:
    graphs that were compiled locally. alone: graphs on which it decided without the job. seconds: of all stages but
    `trace`. rank: 0 for a process without a launcher. ranks: processes that have told of the run. slowest: the key of
    the miss that took longest, '' without one; slowest_seconds: from its request to the callable."""

    run: str
    program: str
    by: str
    ended: float
    graphs: int
    hits: int
    misses: int
    fallbacks: int
    programs: int
    seconds: float
    saved_seconds: float
    alone: int = 0
    torch: str = ""
    rank: int = 0
    ranks: int = 1
    slowest: str = ""
    slowest_seconds: float = 0.0


class RunList(Struct, frozen=True):
    """The latest first. before: what to ask for the ones after them, 0 if there are none."""

    runs: list[RunSummary]
    before: float = 0.0


class RunProcess(Struct, frozen=True):
    """One process of a run. saved_seconds: as in RunReply."""

    record: RunRecord
    saved_seconds: float


class ComparedGraph(Struct, frozen=True):
    """A graph of two runs, or None for the run that has none there. Runs have a graph in common if the keys are equal;
    between two of these the others stand side by side in their order."""

    here: GraphRecord | None
    there: GraphRecord | None


class Comparison(Struct, frozen=True):
    """there: the run that is compared. Graphs are those of one process of each: the one that is shown, and the lowest
    rank."""

    there: RunSummary
    graphs: list[ComparedGraph]


class Run(Struct, frozen=True):
    """A run. ranks: lowest first. process: the rank that was asked for, else the lowest; None if its record had no
    room. earlier: the id of the latest run of this script before it, '' if it is not among the latest. compared: with
    another run, if one was asked for."""

    summary: RunSummary
    ranks: list[RunSummary]
    process: RunProcess | None
    earlier: str = ""
    compared: Comparison | None = None


def hits(report: Report) -> int:
    """Graphs for which nothing was compiled, wherever the artifact came from."""
    return report.hits + report.disk_hits + report.shared


def local_compiles(report: Report) -> int:
    return sum(report.fallbacks.values())
