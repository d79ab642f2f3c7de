"""Bodies of the endpoints of compiles: status, agreement among ranks, prefetching, workers, missed keys."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from ..request.key_diff import KeyDifference
from ..request.schema import OtherTarget, Target, Toolchain

USE_HEADER = "Torchrelay-Use"
"""`hit` with `GET /v1/artifacts/{key}`: the request stands for one of a compile, and counts as that."""
EDGE_HEADER = "X-Torchrelay-Edge"
"""On every answer that comes through an edge (deploy/edge/nginx.conf)."""

MAX_WHOLE = (1 << 53) - 1
"""The service's scripts count in doubles."""

TEN_YEARS_SECONDS = 10 * 366 * 86400

Count = Annotated[int, Meta(ge=0, le=MAX_WHOLE)]

Amount = Annotated[float, Meta(ge=0, le=MAX_WHOLE)]


class NearestEntry(Struct, frozen=True):
    """The cache's entry that is nearest to a request. created: seconds since 1970. seconds: its compile time. advice:
    what to change so that one compile serves both, '' if nothing is known."""

    key: str
    created: float
    seconds: float
    distance: float
    differences: tuple[KeyDifference, ...]
    advice: str = ""


class MissExplanation(Struct, frozen=True):
    """Answer of `GET /misses/{key}`."""

    key: str
    published: bool
    """Whether the cache has it now."""
    asked: float | None
    """Time of its last miss, seconds since 1970; None if the miss is no longer recorded."""
    compared: int
    """Entries."""
    nearest: NearestEntry | None


Stage = Literal["queued", "aot", "inductor", "search", "autotune", "verify", "publish", "done", "failed"]


class CompileProgress(Struct, frozen=True):
    """One event of a compile. seconds: since it was queued."""

    stage: Stage
    seconds: float
    detail: str = ""


class ErrorBody(Struct, frozen=True):
    code: str
    message: str
    hint: str = ""


class CompileStatus(Struct, frozen=True):
    """Answer of `202 POST /v1/compile` and of `GET /v1/compiles/{key}`."""

    key: str
    stage: Stage
    seconds: float
    events: str
    """Path of the server-sent events."""
    artifact: str
    """Path of the artifact; 200 once stage is done."""
    error: ErrorBody | None = None
    history: list[CompileProgress] = []


Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]


SIZES_OF_A_SCRIPT = 256
SIZES_OF_A_REPORT = 128

ReportedSizes = Annotated[list[Digest], Meta(max_length=SIZES_OF_A_REPORT)]


class ScriptUse(Struct, frozen=True):
    """Body of `POST /v1/prefetch`: a script's ids, the most exact first, and the keys that it used, in order.

    prefetched: those of them that prefetching had fetched before they were needed. varied: digests of inputs' sizes
    that had several values in the run (torch_internals/dynamo/varied_sizes.py). constant: digests of those that earlier
    runs had reported as varied, and that had not.
    """

    scripts: Annotated[list[Digest], Meta(min_length=1, max_length=4)]
    keys: Annotated[list[Digest], Meta(max_length=256)]
    prefetched: Annotated[list[Digest], Meta(max_length=256)] = []
    varied: ReportedSizes = []
    constant: ReportedSizes = []


class ScriptArtifact(Struct, frozen=True):
    key: Digest
    size: int


class ScriptArtifacts(Struct, frozen=True):
    """Answer of `GET /v1/prefetch/{script}`; empty for a script that is not known."""

    artifacts: list[ScriptArtifact]
    varied: Annotated[list[Digest], Meta(max_length=SIZES_OF_A_SCRIPT)] = []
    """Digests of inputs' sizes that have varied in its runs, and are worth symbols in the first trace."""


class WorkerInfo(Struct, frozen=True):
    id: str
    toolchain: Toolchain
    target: Target
    state: Literal["starting", "idle", "busy", "dead"]
    jobs_done: int
    host: str = ""
    isolation: list[str] = []
    """What isolates its compiles: any of namespaces, landlock, seccomp; or `none`, or `off`; []: not known yet."""
    searching: bool = False
    """Whether a search worker uses its device."""
    processors: int = 0
    """Which it may use; 0: unknown."""
    others: list[OtherTarget] = []
    """CPU targets that it builds for beside its own."""
