"""Stage 2: the GraphRequest: every struct that a request is made of. Python values, no torch.

Evolution: SCHEMA names the exact format and is part of every key. A change of meaning raises it; a gateway
answers another schema with `schema_mismatch`. Structs forbid unknown fields, so nothing is ignored silently.
A field that came later has a default and is left out while it has it: requests that do not use it keep their keys.

A GraphRequest is canonical by construction: it holds no names of nodes, files, users or devices' indices,
nodes refer to each other by position, and tables are sorted. Its bytes are codec.encode_request's, and the key
(key.py) is a digest of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from msgspec import Struct, structs

from ..tuning import records

SCHEMA = 1
PIPELINE = 1
"""Part of every key: raised when the workers compile what is published already anew (CONTRIBUTING.md says when)."""
REVISION = f"{SCHEMA}.{PIPELINE}"
"""Requests of one revision are compiled by workers of that revision only."""


class WireStruct(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """A message: fields by name."""


class _Arg(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value inside a node's arguments: [tag, fields...]."""


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


class DTypeArg(_Arg, frozen=True, tag="dt"):
    """torch.<name>, e.g. float32."""

    name: str


class DeviceArg(_Arg, frozen=True, tag="dv"):
    """A device type; the index is not sent: a graph lives on one device of each type."""

    kind: str


class MemoryFormatArg(_Arg, frozen=True, tag="mf"):
    name: str


class LayoutArg(_Arg, frozen=True, tag="ly"):
    name: str


class Complex(_Arg, frozen=True, tag="c"):
    re: float
    im: float


class BigInt(_Arg, frozen=True, tag="bi"):
    """An integer past 64 bits, in decimal."""

    text: str


class Sym(_Arg, frozen=True, tag="sy"):
    """A symbolic integer, as an expression of compiler/request/size_expr.py over `GraphRequest.symbols`."""

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
    | DTypeArg
    | DeviceArg
    | MemoryFormatArg
    | LayoutArg
    | Complex
    | BigInt
    | Sym
    | Callee
    | UserKernel
    | TritonDType
)


class Node(WireStruct, frozen=True):
    """One FX node. `target`: closed-table name (call_function), method name (call_method), '' otherwise.

    placeholder: args empty. get_attr: one Const or Subgraph in args. output: one value in args. names.TRITON_CALL
    has four keyword arguments: constant_args and kwargs (dicts by parameter), grid (a list of triples, one for each of
    the kernel's configurations), kernel (UserKernel).
    """

    op: Literal["placeholder", "get_attr", "call_function", "call_method", "output"]
    target: str
    args: list[Arg]
    kwargs: list[tuple[str, Arg]] = []


class Graph(WireStruct, frozen=True):
    nodes: list[Node]
    subgraphs: list[Graph] = []


class Constant(WireStruct, frozen=True):
    """A small tensor the graph holds: contiguous little-endian bytes of `shape` elements."""

    dtype: str
    shape: list[int]
    device: str
    data: bytes
    requires_grad: bool = False


KernelConstant = bool | int | float | str | TritonDType | None


class KernelConfig(WireStruct, frozen=True):
    """One candidate of `@triton.autotune`, and what the kernel's parameters are in it."""

    kwargs: list[tuple[str, KernelConstant]]
    num_warps: int
    num_stages: int
    num_ctas: int
    maxnreg: int | None


class KernelSource(WireStruct, frozen=True):
    """A user-written Triton kernel: source that runs at compile time. `source`: a module that holds the kernel,
    its helpers and constants, in the form that compiler/request/triton_source.py describes. `configs`: [] if
    it is not tuned."""

    name: str
    source: str
    configs: list[KernelConfig]


Size = int | str
"""A size: an integer, or an expression over symbols."""


class TensorInput(WireStruct, frozen=True, tag="tensor"):
    """One tensor placeholder. `storage` numbers inputs that share memory; -1 shares with none. `storage_bytes`: all of
    that memory, where another input or the graph itself can reach past this one; 0: as much as the tensor needs."""

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


class SymIntInput(WireStruct, frozen=True, tag="symint"):
    expr: str


class ScalarInput(WireStruct, frozen=True, tag="scalar"):
    """A Python number or None that Dynamo passes as an input without a symbol."""

    value: bool | int | float | None


Input = TensorInput | SymIntInput | ScalarInput


class Base(WireStruct, frozen=True):
    """A tensor that inputs are views of, as autograd has it (Tensor._base). AOTAutograd passes it in their place where
    they overlap and one of them is changed. Only of inputs that share memory."""

    tensor: int | TensorInput
    """The input that it is, by position; or its description, if it is none."""
    views: list[int]
    """Positions of the inputs, sorted."""


class Symbol(WireStruct, frozen=True):
    """A symbolic integer: its name in expressions (canonical: s0, s1, ...), example value and range. What depends on
    the example value is a guard of the artifact, so the key does not cover it (key.py)."""

    name: str
    hint: int | None
    """None: nothing may depend on it (torch._dynamo.decorators.mark_unbacked); the key covers that."""
    lower: int
    upper: int | None


class Unbacked(WireStruct, frozen=True):
    """What tracing knows of a size or an integer that depends on data. The graph checks it too, but a worker must know
    it when the value first appears, as the client does: else the same trace needs further such sizes, or fails."""

    node: int
    """The node of the top graph whose value has it first."""
    path: str
    """Where in that value, as torch.utils._pytree.keystr writes it: '' for the value itself, '[1].size()[0]'."""
    lower: int
    upper: int | None
    size_like: bool
    """Whether PyTorch may take it for neither 0 nor 1 where a program does the same for all sizes."""


class Mesh(WireStruct, frozen=True):
    """Devices in rows and columns over which tensors are spread, as DTensor has them: its shape, and where in it the
    process stands that asks. What is compiled may differ between places, and never with the ranks' numbers."""

    shape: list[int]
    coordinate: list[int]


class Autocast(WireStruct, frozen=True):
    device: str
    dtype: str
    cache: bool


class Ambient(WireStruct, frozen=True):
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


def usual_ambient(*, grad: bool, threads: int, flags: list[tuple[str, bool | int | str]]) -> Ambient:
    """The state of a process that has set nothing else."""
    return Ambient(
        grad=grad,
        inference=False,
        autocast=[],
        default_dtype="float32",
        matmul_precision="highest",
        deterministic=False,
        deterministic_warn_only=False,
        fill_uninitialized=True,
        threads=threads,
        flags=flags,
    )


class Toolchain(WireStruct, frozen=True):
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


class Target(WireStruct, frozen=True):
    """The device the code is for."""

    kind: Literal["cpu", "cuda"]
    name: str
    """GPU name, e.g. 'NVIDIA H200'; of a CPU target (cpu_isa.py), '' for x86-64."""
    capability: str
    """CUDA compute capability, e.g. '9.0'; '' for a CPU."""
    units: int
    """Streaming multiprocessors; 0 for a CPU."""
    cpu: list[str]
    """Instruction-set names of the host, sorted (compiler/request/cpu_isa.py)."""


class OtherTarget(WireStruct, frozen=True):
    """A CPU target that a worker builds for beside its own. toolchain: of its clients, but for Triton, which a CPU's
    code does not need."""

    name: str
    toolchain: Toolchain


def builds_for(
    own: Toolchain, machine: Target, others: Collection[OtherTarget], toolchain: Toolchain, target: Target
) -> bool:
    """Whether a worker with the first three compiles for the last two: a GPU of its model, any processor of its kind,
    or another CPU target."""
    if machine.kind != target.kind:
        return False
    if target.kind == "cpu" and target.name != machine.name:
        return OtherTarget(target.name, structs.replace(toolchain, triton="")) in others
    return own == toolchain and (machine.name, machine.capability) == (target.name, target.capability)


class TuningLock(WireStruct, frozen=True):
    """Winners that a team has pinned: entries that fit toolchain and target, sorted, one for a problem and place.

    strict: a problem that none of them answers is an error (TuningUnknown); else the team's database is asked, and
    what it does not know is measured.
    """

    strict: bool
    entries: list[records.TuningEntry]


class Library(WireStruct, frozen=True):
    """A library whose operators a graph calls (operator_table/libraries.py). source: SHA-256 of the file that defines
    them, in hex."""

    name: str
    version: str
    source: str


OptionValue = bool | int | float | str | None

Level = Literal[
    "captured",
    "joint",
    "forward",
    "backward",
    "core_aten",
    "prims",
    "post_grad",
    "ir_before_fusion",
    "ir_after_fusion",
    "diagram",
    "code",
    "assembly",
    "ptx",
    "sass",
]
"""What a graph is lowered to, in that order: compiler/api/lowered.py says what each is."""


class GraphRequest(WireStruct, frozen=True, omit_defaults=True):
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
    """Sorted by first use."""
    eager: list[list[int]] = []
    """Nodes that are compiled to calls of their operators, sorted; each the positions of the subgraphs that lead to it,
    then its own."""
    tuning_lock: TuningLock | None = None
    """Only in requests that tune."""
    meshes: list[Mesh] = []
    """Sorted by first use. A tensor that is spread over one comes as this process' part of it: see
    compiler/request/meshes.py for the calls that make a DTensor of it, and of a DTensor a part."""
    exact_sizes: bool = False
    """The key covers the symbols' hints, because an artifact for other hints has guards that these do not meet."""
    libraries: list[Library] = []
    """Sorted by name; those whose operators the graph calls."""
    bases: list[Base] = []
    """Sorted by their first view."""
    levels: list[Level] = []
    """Sorted. If there are any, the graph is lowered to be looked at: the artifact lists it at these levels, and has
    nothing to run."""
    unbacked: list[Unbacked] = []
    """Sorted by node; those of which anything is known."""
