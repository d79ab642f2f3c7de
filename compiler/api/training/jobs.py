"""Bodies of `/v1/trains`: what a training job runs, on what, and its progress.

A job runs its submitter's code; nothing here restricts what that code does. Times are seconds since 1970, UTC, unless
a name says otherwise."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

TRAIN_ID = "^[0-9a-f]{16}$"

PACKAGE_BYTES = 256 << 20
"""Limit of a packed working directory."""

MOST_WORKERS = 4096

TrainState = Literal[
    "waiting", "capturing", "compiling", "starting", "running", "recovering", "done", "failed", "cancelled"
]
"""waiting: for its turn, or for suitable workers. capturing: one worker runs the script's first optimizer step.
compiling: its graphs, before ranks are placed. starting: ranks are being placed and started. recovering: ranks were
lost and restart from the last checkpoint. Any ended job except `done` can be resumed."""

TRAIN_ENDED: frozenset[str] = frozenset({"done", "failed", "cancelled"})

Precision = Literal["", "fp32", "tf32", "bf16", "fp16"]
"""fp32, tf32: of float32 matrix products. bf16, fp16: what `train.autocast()` gives. '': as the script has it."""

Kind = Literal["train", "export"]

_Text = Annotated[str, Meta(max_length=4096)]

_Name = Annotated[str, Meta(min_length=1, max_length=200)]

_Line = Annotated[int, Meta(ge=0, le=1 << 31)]

_Variable = Annotated[str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_]{0,200}$")]

_Ranks = Annotated[list[Annotated[int, Meta(ge=0, lt=MOST_WORKERS)]], Meta(min_length=1, max_length=64)]

_Step = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]


class ProfileSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Profile the optimizer's steps [first, last), from 0, on these ranks."""

    first: _Step
    last: _Step
    ranks: _Ranks = msgspec.field(default_factory=lambda: [0])
    nvtx: bool = False
    memory: bool = True


class TrainSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to run, and on what.

    script: a path in the working directory; or function: `module:function`, called without arguments. package: SHA-256
    of the packed working directory (sent by `POST /v1/trains/packages`), '' for none. workers: ranks; if min_workers is
    not 0, the job continues with as few. cpus, memory_bytes: of each rank. checkpoints: a folder that all nodes see, or
    the URL of an object store; '': the service's own. retries: restarts of the ranks after failures. compile:
    torchrelay is the back end of every torch.compile that names none or inductor. capture: compile before ranks are
    placed. tune: and search kernels.
    """

    name: _Name
    kind: Kind = "train"
    script: _Text = ""
    function: _Text = ""
    arguments: Annotated[list[_Text], Meta(max_length=1000)] = []
    package: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$", max_length=64)] = ""
    requirements: Annotated[list[_Text], Meta(max_length=200)] = []
    environment: Annotated[dict[_Variable, _Text], Meta(max_length=200)] = {}
    device: Literal["cpu", "cuda"] = "cpu"
    workers: Annotated[int, Meta(ge=1, le=MOST_WORKERS)] = 1
    min_workers: Annotated[int, Meta(ge=0, le=MOST_WORKERS)] = 0
    cpus: Annotated[float, Meta(gt=0, le=1024)] = 1.0
    memory_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    precision: Precision = ""
    retries: Annotated[int, Meta(ge=0, le=1000)] = 3
    checkpoints: _Text = ""
    compile: Literal["torchrelay", "off"] = "torchrelay"
    capture: bool = True
    tune: bool = False
    profile: ProfileSpec | None = None
    timeout_seconds: Annotated[float, Meta(ge=0, le=10 * 366 * 86400)] = 0.0
    """Limit of the running time; 0: none."""


class TrainRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of `POST /v1/trains`. file, lines: where the spec's fields are in the YAML, for errors. id: chosen by the
    client, so that a repeated request starts the job once; '': the service chooses."""

    spec: TrainSpec
    file: Annotated[str, Meta(max_length=300)] = ""
    lines: dict[str, _Line] = {}
    id: Annotated[str, Meta(pattern="^([0-9a-f]{16})?$", max_length=16)] = ""


class CompileCounts(Struct, frozen=True, omit_defaults=True):
    """captured: graphs found before ranks were placed. compiled: those of them that the cache did not have. hits,
    misses, fallbacks: of all ranks since they started (a miss is a compile that a rank waited for)."""

    captured: int = 0
    compiled: int = 0
    hits: int = 0
    misses: int = 0
    fallbacks: int = 0


class TrainJob(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A training job, in the answers of `/v1/trains`. restarts: of the ranks. ended: 0 until then. detail: why it
    waits, or what stopped it. ranks: running now."""

    id: str
    spec: TrainSpec
    state: TrainState
    by: str
    created: float
    started: float = 0.0
    """When all ranks ran for the first time; 0: not yet."""
    first_step_seconds: float = 0.0
    """From then to the end of the last rank's first optimizer step; 0: unknown."""
    ended: float = 0.0
    ranks: int = 0
    restarts: int = 0
    step: int = 0
    """The last step that rank 0 has reported."""
    checkpoint: str = ""
    """Name of the last complete one."""
    checkpoint_step: int = 0
    compiles: CompileCounts = CompileCounts()
    detail: str = ""
    file: str = ""
    skipped: list[str] = []
    """Graphs that could not be sent, and why; all ranks compile them locally."""


class TrainsReply(Struct, frozen=True):
    """Answer of `GET /v1/trains`, the newest first."""

    jobs: list[TrainJob]


class PackageStored(Struct, frozen=True):
    """Answer of `POST /v1/trains/packages` (body: the packed working directory)."""

    package: str
    bytes: int


class TrainFile(Struct, frozen=True):
    """A file that a job made: a trace, a report, an exported model. name: a relative path with `/`, without `..`."""

    name: str
    bytes: int
    digest: str


class TrainFilesReply(Struct, frozen=True):
    """Answer of `GET /v1/trains/{id}/files`. `GET .../files/{name}` returns a file, `PUT` (with the job's token) stores
    one."""

    files: list[TrainFile]
