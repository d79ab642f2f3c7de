"""Bodies of the endpoints of compiles: status, agreement among ranks, prefetching, workers, missed keys."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from ..request.key_diff import KeyDifference
from ..request.schema import Target, Toolchain


class NearestEntry(Struct, frozen=True):
    """The entry nearest to a request. `created`: seconds since 1970; `seconds`: what its compile took."""

    key: str
    created: float
    seconds: float
    distance: float
    differences: tuple[KeyDifference, ...]


class MissExplanation(Struct, frozen=True):
    """Answer of `GET /v1/explain/{key}`."""

    key: str
    published: bool
    """Whether the cache offers it by now."""
    asked: float | None
    """When it missed last, seconds since 1970; None for an entry whose miss is forgotten."""
    compared: int
    """Entries that were looked at."""
    nearest: NearestEntry | None


Stage = Literal["queued", "aot", "inductor", "search", "autotune", "verify", "publish", "done", "failed"]


class CompileProgress(Struct, frozen=True, forbid_unknown_fields=True):
    """One event of a compile. `seconds`: since the compile was queued."""

    stage: Stage
    seconds: float
    detail: str = ""


class ErrorBody(Struct, frozen=True, forbid_unknown_fields=True):
    code: str
    message: str
    hint: str = ""


class CompileStatus(Struct, frozen=True, forbid_unknown_fields=True):
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


class AgreedOutcome(Struct, frozen=True, forbid_unknown_fields=True):
    """What the processes of one job agree on for a key: the SHA-256 of an artifact's file, or why there is none."""

    digest: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$", max_length=64)] = ""
    error: ErrorBody | None = None


Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]


class ScriptUse(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/prefetch`: a script's names (digests, the most exact first) and the keys it used, in order.

    `prefetched`: those of them that were not asked for when they were needed, because they were there already.
    """

    scripts: Annotated[list[Digest], Meta(min_length=1, max_length=4)]
    keys: Annotated[list[Digest], Meta(min_length=1, max_length=256)]
    prefetched: Annotated[list[Digest], Meta(max_length=256)] = []


class ScriptArtifact(Struct, frozen=True, forbid_unknown_fields=True):
    key: Digest
    size: int


class ScriptArtifacts(Struct, frozen=True, forbid_unknown_fields=True):
    """Answer of `GET /v1/prefetch/{script}`; empty for a script that is not known."""

    artifacts: list[ScriptArtifact]


class WorkerInfo(Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    toolchain: Toolchain
    target: Target
    state: Literal["starting", "idle", "busy", "dead"]
    jobs_done: int
    host: str = ""
    isolation: list[str] = []
    """What shuts its compiles in: of namespaces, landlock and seccomp, or `none`, or `off`; [] until it
    is known."""
    searching: bool = False
    """Whether kernels are searched on its device, beside what it compiles."""
    processors: int = 0
    """That it may use; 0: it does not tell."""
