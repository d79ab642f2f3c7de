"""Stage 2: every message that crosses a wire, as frozen msgspec structs; Python values in, bytes out.

Evolution: SCHEMA names the exact format and is part of every key. A change of meaning raises it; a gateway
answers another schema with `schema_mismatch`. Structs forbid unknown fields, so nothing is ignored silently.
A field that came later has a default and is left out while it has it: who does not use it keeps his keys.

A GraphRequest is canonical by construction: it holds no names of nodes, files, users or devices' indices,
nodes refer to each other by position, and tables are sorted. Its bytes are `encode_request`'s, and the key
(compiler/key.py) is a digest of them.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from . import decoding, tuning
from .errors import LimitExceeded, MalformedRequest, SchemaMismatch

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SCHEMA = 1
GRAPH_MEDIA_TYPE = "application/vnd.torchrelay.graph+msgpack"
ARTIFACT_MEDIA_TYPE = "application/vnd.torchrelay.artifact"


class _Wire(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """A message: fields by name."""


class _Arg(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value inside a node's arguments: [tag, fields...]."""


# --- values in args and kwargs ---------------------------------------------------------------------------


class Ref(_Arg, frozen=True, tag="n"):
    """The value of an earlier node of the same graph, by position."""

    index: int


class Const(_Arg, frozen=True, tag="k"):
    """A tensor constant of the request, by position in `GraphRequest.constants`."""

    index: int


class Subgraph(_Arg, frozen=True, tag="g"):
    """A subgraph of a higher-order operator, by position in `Graph.subgraphs`."""

    index: int


class ListArg(_Arg, frozen=True, tag="l"):
    items: list[Arg]


class TupleArg(_Arg, frozen=True, tag="t"):
    items: list[Arg]


class DictArg(_Arg, frozen=True, tag="d"):
    """A dict, in the program's own order (order can reach an operator's outputs)."""

    items: list[tuple[Arg, Arg]]


class SliceArg(_Arg, frozen=True, tag="s"):
    start: Arg
    stop: Arg
    step: Arg


class EllipsisArg(_Arg, frozen=True, tag="e"):
    pass


class DType(_Arg, frozen=True, tag="dt"):
    """torch.<name>, e.g. float32."""

    name: str


class Device(_Arg, frozen=True, tag="dv"):
    """A device type; the index is not sent: a graph lives on one device of each type."""

    kind: str


class MemoryFormat(_Arg, frozen=True, tag="mf"):
    name: str


class Layout(_Arg, frozen=True, tag="ly"):
    name: str


class Complex(_Arg, frozen=True, tag="c"):
    re: float
    im: float


class BigInt(_Arg, frozen=True, tag="bi"):
    """An integer past 64 bits, in decimal."""

    text: str


class Sym(_Arg, frozen=True, tag="sy"):
    """A symbolic integer, as an expression of compiler/expr.py over `GraphRequest.symbols`."""

    expr: str


class Callee(_Arg, frozen=True, tag="f"):
    """An operator overload passed as a value to a higher-order operator: torch.ops.<ns>.<op>.<overload>."""

    target: str


class UserKernel(_Arg, frozen=True, tag="uk"):
    """A user-written Triton kernel, by position in `GraphRequest.kernels`; only a call of one holds it."""

    index: int


class TritonDType(_Arg, frozen=True, tag="td"):
    """triton.language.<name>, as a constant that a user-written kernel is given."""

    name: str


Arg = (
    None
    | bool
    | int
    | float
    | str
    | Ref
    | Const
    | Subgraph
    | ListArg
    | TupleArg
    | DictArg
    | SliceArg
    | EllipsisArg
    | DType
    | Device
    | MemoryFormat
    | Layout
    | Complex
    | BigInt
    | Sym
    | Callee
    | UserKernel
    | TritonDType
)

# --- the graph -------------------------------------------------------------------------------------------


class Node(_Wire, frozen=True):
    """One FX node. `target`: closed-table name (call_function), method name (call_method), '' otherwise.

    placeholder: args empty. get_attr: one Const or Subgraph in args. output: one value in args. names.TRITON_CALL
    has four keyword arguments: constant_args and kwargs (dicts by parameter), grid (a list of triples, one for each of
    the kernel's configurations), kernel (UserKernel).
    """

    op: Literal["placeholder", "get_attr", "call_function", "call_method", "output"]
    target: str
    args: list[Arg]
    kwargs: list[tuple[str, Arg]] = []


class Graph(_Wire, frozen=True):
    nodes: list[Node]
    subgraphs: list[Graph] = []


class Constant(_Wire, frozen=True):
    """A small tensor the graph holds: contiguous little-endian bytes of `shape` elements."""

    dtype: str
    shape: list[int]
    device: str
    data: bytes
    requires_grad: bool = False


KernelConstant = bool | int | float | str | TritonDType | None


class KernelConfig(_Wire, frozen=True):
    """One candidate of `@triton.autotune`, and what the kernel's parameters are in it."""

    kwargs: list[tuple[str, KernelConstant]]
    num_warps: int
    num_stages: int
    num_ctas: int
    maxnreg: int | None


class KernelSource(_Wire, frozen=True):
    """A user-written Triton kernel: source that runs at compile time. `source`: a module that holds the kernel,
    its helpers and constants, in the form that compiler/user_kernels.py describes. `configs`: [] if it is not tuned."""

    name: str
    source: str
    configs: list[KernelConfig]


# --- inputs ----------------------------------------------------------------------------------------------

Size = int | str
"""A size: an integer, or an expression over symbols."""


class TensorInput(_Wire, frozen=True, tag="tensor"):
    """One tensor placeholder. `storage` numbers inputs that share memory; -1 shares with none."""

    shape: list[Size]
    stride: list[Size]
    dtype: str
    device: str
    requires_grad: bool
    offset: Size = 0
    is_leaf: bool = True
    is_parameter: bool = False
    static_address: Literal["", "guarded", "unguarded"] = ""
    storage: int = -1
    storage_bytes: Size = 0
    number: float | None = None
    """Example value, where the tensor stands for a Python float that Dynamo left symbolic."""


class SymIntInput(_Wire, frozen=True, tag="symint"):
    expr: str


class ScalarInput(_Wire, frozen=True, tag="scalar"):
    """A Python number or None that Dynamo passes as an input without a symbol."""

    value: bool | int | float | None


Input = TensorInput | SymIntInput | ScalarInput


class Symbol(_Wire, frozen=True):
    """A symbolic integer: its name in expressions (canonical: s0, s1, ...), example value and range."""

    name: str
    hint: int
    lower: int
    upper: int | None


class Mesh(_Wire, frozen=True):
    """Devices in rows and columns over which tensors are spread, as DTensor has them: its shape, and where in it the
    process stands that asks. What is compiled may differ between places, and never with the ranks' numbers."""

    shape: list[int]
    coordinate: list[int]


# --- surroundings ----------------------------------------------------------------------------------------


class Autocast(_Wire, frozen=True):
    device: str
    dtype: str
    cache: bool


class Ambient(_Wire, frozen=True):
    """Process state that changes what a graph compiles to."""

    grad: bool
    inference: bool
    autocast: list[Autocast]
    default_dtype: str
    matmul_precision: str
    deterministic: bool
    deterministic_warn_only: bool
    fill_uninitialized: bool
    threads: int
    flags: list[tuple[str, bool | int | str]]
    """Sorted (name, value): cudnn, tf32, reduced precision, SDPA back ends; names in names.AMBIENT_FLAGS."""


class Toolchain(_Wire, frozen=True):
    """What built, and must load, an artifact."""

    python: str
    """PEP 425 interpreter tag, e.g. cp311."""
    torch: str
    """torch.__version__ with its local part, e.g. 2.13.0+cpu."""
    triton: str
    """'' where Triton is not installed."""
    cuda: str
    """'' for a CPU build."""
    platform: str
    """e.g. linux-x86_64."""


class Target(_Wire, frozen=True):
    """The device the code is for."""

    kind: Literal["cpu", "cuda"]
    name: str
    """GPU name, e.g. 'NVIDIA H200'; '' for a CPU."""
    capability: str
    """CUDA compute capability, e.g. '9.0'; '' for a CPU."""
    units: int
    """Streaming multiprocessors; 0 for a CPU."""
    cpu: list[str]
    """Instruction-set names of the host, sorted (compiler/target.py)."""


class TuningLock(_Wire, frozen=True):
    """Winners that a team has pinned: entries that fit toolchain and target, sorted, one for a problem and place.

    strict: a problem that none of them answers is an error (TuningUnknown); else the team's database is asked, and
    what it does not know is measured.
    """

    strict: bool
    entries: list[tuning.Entry]


OptionValue = bool | int | float | str | None


class GraphRequest(_Wire, frozen=True, omit_defaults=True):
    schema: int
    graph: Graph
    inputs: list[Input]
    symbols: list[Symbol]
    relations: list[str]
    constants: list[Constant]
    ambient: Ambient
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
    options: list[tuple[str, OptionValue]]
    """Sorted (Inductor config name, value), only those that differ from Inductor's defaults after `mode`."""
    aot_options: list[tuple[str, OptionValue]]
    """Sorted torch._functorch.config entries that differ from the defaults."""
    toolchain: Toolchain
    target: Target
    kernels: list[KernelSource] = []
    """In order of first use."""
    tuning_lock: TuningLock | None = None
    """Only in requests that tune."""
    meshes: list[Mesh] = []
    """In order of first use. A tensor that is spread over one comes as this process' part of it: see
    compiler/meshes.py for the calls that make a DTensor of it, and of a DTensor a part."""


# --- artifact --------------------------------------------------------------------------------------------


class Member(_Wire, frozen=True):
    """One file of an artifact. `size` in bytes, before compression."""

    name: str
    size: int
    sha256: str


class Verification(_Wire, frozen=True):
    """How the worker compared compiled with eager."""

    status: Literal["passed", "skipped"]
    reason: str
    """Why it was skipped; '' when passed."""
    max_abs_error: float
    """Largest |compiled - reference| over outputs and gradients."""
    seconds: float


class Measurement(_Wire, frozen=True):
    """A tuning winner (max-autotune): the problem, the choice, its time and how many were compared.

    uses: how many of the graph's operators are this problem.
    """

    problem: str
    winner: str
    milliseconds: float
    candidates: int
    uses: int = 1


class Manifest(_Wire, frozen=True):
    """What is signed. `stages` are (stage, seconds) in order: aot, inductor, search (the wait for what others search),
    autotune, verify, publish."""

    schema: int
    key: str
    toolchain: Toolchain
    target: Target
    members: list[Member]
    guards: list[str]
    """Boolean expressions over request symbols that the compile assumed; the client adds them to Dynamo's."""
    stages: list[tuple[str, float]]
    verification: Verification
    tuning: list[Measurement]
    kernels: int
    """Kernels inside: C++ libraries and Triton binaries."""
    created: str
    """RFC 3339, UTC."""
    worker: str
    """The worker's id, opaque."""
    kernels_built: int = 0
    """Kernels that this compile built itself."""
    kernels_reused: int = 0
    """Kernels that an earlier compile had built."""
    searched: int = 0
    """Tuning problems that this compile measured."""
    recalled: int = 0
    """Tuning problems whose winner the lock file or the team's database knew."""
    benchmarks: int = 0
    """How often Inductor timed something in this compile, whatever for, as it counts itself. What the search of a
    problem takes is not among them."""


# --- progress and status (JSON on the HTTP side) ------------------------------------------------------------

Stage = Literal["queued", "aot", "inductor", "search", "autotune", "verify", "publish", "done", "failed"]


class Progress(_Wire, frozen=True):
    """One event of a compile. `seconds`: since the compile was queued."""

    stage: Stage
    seconds: float
    detail: str = ""


class ErrorBody(_Wire, frozen=True):
    code: str
    message: str
    hint: str = ""


class CompileStatus(_Wire, frozen=True):
    """Answer of `202 POST /v1/compile` and of `GET /v1/compiles/{key}`."""

    key: str
    stage: Stage
    seconds: float
    events: str
    """Path of the server-sent events."""
    artifact: str
    """Path of the artifact; 200 once stage is done."""
    error: ErrorBody | None = None
    history: list[Progress] = []


class Verdict(_Wire, frozen=True):
    """What the processes of one job agree on for a key: the SHA-256 of an artifact's file, or why there is none."""

    digest: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$", max_length=64)] = ""
    error: ErrorBody | None = None


Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]


class ScriptUse(_Wire, frozen=True):
    """Body of `POST /v1/prefetch`: a script's names (digests, the most exact first) and the keys it used, in order.

    `prefetched`: those of them that were not asked for when they were needed, because they were there already.
    """

    scripts: Annotated[list[Digest], Meta(min_length=1, max_length=4)]
    keys: Annotated[list[Digest], Meta(min_length=1, max_length=256)]
    prefetched: Annotated[list[Digest], Meta(max_length=256)] = []


class ScriptArtifact(_Wire, frozen=True):
    key: Digest
    size: int


class ScriptArtifacts(_Wire, frozen=True):
    """Answer of `GET /v1/prefetch/{script}`; empty for a script that is not known."""

    artifacts: list[ScriptArtifact]


class WorkerInfo(_Wire, frozen=True):
    id: str
    toolchain: Toolchain
    target: Target
    state: Literal["starting", "idle", "busy", "dead"]
    jobs_done: int
    host: str = ""
    isolation: list[str] = []
    """What shuts its compiles in: of bubblewrap, namespaces, landlock and seccomp, or `none`, or `off`; [] until it
    is known."""
    searching: bool = False
    """Whether kernels are searched on its device, beside what it compiles."""
    processors: int = 0
    """That it may use; 0: it does not tell."""


# --- encoding --------------------------------------------------------------------------------------------


class Limits(Struct, frozen=True, kw_only=True):
    """Bounds checked before and while a request is decoded."""

    body_bytes: Annotated[int, Meta(gt=0)] = 32 << 20
    """Compressed request, bytes."""
    request_bytes: Annotated[int, Meta(gt=0)] = 128 << 20
    """Decompressed request, bytes."""
    nodes: int = 100_000
    """Nodes of all graphs together."""
    depth: int = 32
    """Nesting of arguments and of subgraphs."""
    constant_bytes: int = 16 << 20
    """All constants together, bytes."""
    inputs: int = 20_000
    kernels: int = 64
    """User-written Triton kernels."""
    source_bytes: int = 1 << 20
    """Their sources together, bytes."""


_PIECE = 1 << 20

_request_encoder = msgspec.msgpack.Encoder()


def encode_request(request: GraphRequest) -> bytes:
    """Canonical bytes of a request, before compression: the key's input."""
    return _request_encoder.encode(request)


def compress(data: bytes, level: int = 3) -> bytes:
    return zstd.compress(data, level)


def unpacked_size(data: bytes, limit: int) -> int:
    """Bytes that a zstd frame holds, counted without keeping them where the frame does not say.

    Raises LimitExceeded past `limit`, MalformedRequest on garbage.
    """
    try:
        size = zstd.get_frame_info(data).decompressed_size
        if size is None:
            decompressor, size = zstd.ZstdDecompressor(), 0
            while not decompressor.eof and size <= limit:
                part = decompressor.decompress(data, max_length=_PIECE)
                data = b""
                size += len(part)
                if not part and decompressor.needs_input:
                    raise MalformedRequest("body ends inside its zstd frame")
    except zstd.ZstdError as error:
        raise MalformedRequest(f"body is not a zstd frame: {error}") from None
    if size > limit:
        raise LimitExceeded(f"body holds more than {limit} bytes after decompression")
    return size


def decompress(data: bytes, limit: int) -> bytes:
    """Decompress at most `limit` bytes; raises LimitExceeded past it and MalformedRequest on garbage."""
    decompressor = zstd.ZstdDecompressor()
    try:
        out = decompressor.decompress(data, max_length=limit + 1)
    except zstd.ZstdError as error:
        raise MalformedRequest(f"body is not a zstd frame: {error}") from None
    if len(out) > limit:
        raise LimitExceeded(f"body holds more than {limit} bytes after decompression")
    if not decompressor.eof:
        raise MalformedRequest("body ends inside its zstd frame")
    if decompressor.unused_data:
        raise MalformedRequest("bytes follow the body's zstd frame")
    return out


def pack_request(request: GraphRequest) -> bytes:
    """The HTTP body: zstd-compressed canonical bytes."""
    return compress(encode_request(request))


def unpack_request(body: bytes, limits: Limits = Limits()) -> GraphRequest:  # noqa: B008 (frozen)
    """The HTTP body back into a request, bounded by `limits`; types checked, targets not yet (graph.check).

    Raises LimitExceeded, MalformedRequest, SchemaMismatch.
    """
    if len(body) > limits.body_bytes:
        raise LimitExceeded(f"body has {len(body)} bytes, limit {limits.body_bytes}")
    data = decompress(body, limits.request_bytes)
    try:
        request = decoding.from_msgpack(data, type=GraphRequest)
    except RecursionError:
        raise LimitExceeded("arguments are nested too deep") from None
    except UnicodeDecodeError as error:
        raise MalformedRequest(f"request holds text that is not UTF-8: {error}") from None
    except msgspec.ValidationError as error:
        _raise_if_other_schema(data)
        raise MalformedRequest(f"request does not match schema {SCHEMA}: {error}") from None
    except msgspec.DecodeError as error:
        raise MalformedRequest(f"request is not MessagePack: {error}") from None
    if request.schema != SCHEMA:
        raise SchemaMismatch(f"request has schema {request.schema}, this side speaks {SCHEMA}")
    return request


class _KernelsOnly(Struct):
    kernels: list[msgspec.Raw] = []


def holds_source(canonical: bytes) -> bool:
    """Whether a request's canonical bytes hold source of user-written kernels."""
    try:
        return bool(decoding.from_msgpack(canonical, type=_KernelsOnly).kernels)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False  # not a request: nothing of it will be run


class _SchemaOnly(Struct):
    schema: int


def _raise_if_other_schema(data: bytes) -> None:
    try:
        found = decoding.from_msgpack(data, type=_SchemaOnly).schema
    except RecursionError:  # in what is skipped on the way to the schema
        raise LimitExceeded("the request is nested too deep") from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return
    if found != SCHEMA:
        raise SchemaMismatch(f"request has schema {found}, this side speaks {SCHEMA}")


def to_json(message: Any) -> bytes:
    return msgspec.json.encode(message)
