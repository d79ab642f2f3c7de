"""The records of a program, as plain values: sources, guards, bytecode, and the graphs that the bytecode calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

REVISION = 11
"""The revision of these records and of what they mean. Another revision's programs are traced again."""
LIMIT_BYTES = 64 << 20
"""The limit of an encoded program."""

_Name = Annotated[str, Meta(max_length=512)]
_Index = Annotated[int, Meta(ge=0, lt=1 << 20)]


class NotPortable(Exception):
    """A value that another process cannot compare, so that a frame has no record; the text names it."""


class SourceRecord(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where Dynamo takes a value from. kind: its class in torch._dynamo.source. bases: fields that are sources
    themselves, as positions of earlier records. values: fields with constants, in the form of values.constant."""

    kind: _Name
    bases: dict[_Name, _Index] = {}
    values: dict[_Name, Any] = {}


class GuardRecord(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A condition on the value at a source. kind: a method of Dynamo's GuardBuilder. expected: a description of the
    value when it was traced; what describes the value now must equal it. None: the kind alone says the condition.
    identity: which of the guards' functions or tensors' memories it is, counted in the order of the guards."""

    kind: _Name
    source: _Index
    sources: dict[_Name, _Index] = {}
    values: dict[_Name, Any] = {}
    expected: Any = None
    identity: int | None = None


class SizesRecord(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Sizes and strides of an input tensor that its guard compares; None: any."""

    source: _Index
    size: list[int | None]
    stride: list[int | None]


class AskedRecord(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A question that tracing asked without a guard, and its answer. kind: one of asked.ANSWERS. source: of what is
    asked; without one, `module` and `name` say where it is found, behind how many `wrappers`."""

    kind: _Name
    answer: Any
    source: _Index | None = None
    module: _Name = ""
    name: _Name = ""
    wrappers: _Index = 0
    arguments: list[Any] = []
    keywords: dict[_Name, Any] = {}


class AutomaticRecord(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What Dynamo remembers of the sizes of one input: those that have changed are symbolic in later traces."""

    name: str
    values: dict[_Name, Any]


class CodeReference(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A function that was traced: where it is found, and the digest of all that is found there."""

    module: _Name
    name: _Name
    digest: _Name


class ConstantRecord(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A constant in bytecode that is an object: its place in co_consts (through code objects inside), and what
    describes it; None: the dict of the frame's global variables."""

    path: list[_Index]
    value: Any


class GlobalRecord(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A global variable that Dynamo made for its bytecode: a module; the global variables of a traced function that has
    no module, `module` and `function` name it; a function of `builtins`, named so; the code of a function to go on
    with after a graph break; or (without all that) a weak reference to the optimizer whose step it is."""

    name: _Name
    module: _Name = ""
    code: bytes = b""
    constants: list[ConstantRecord] = []
    function: _Name = ""


class ProgramGraph(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A compiled graph that the bytecode calls by a global name, or a split graph by this name. request: the canonical
    bytes of its GraphRequest. artifact: the SHA-256 of the artifact's file, if sizes are symbolic: those of one key may
    assume different sizes. device: the GPU that it runs on, None for the CPU. tensors: those of the optimizer's that it
    is given after its inputs."""

    name: _Name
    key: _Name
    request: bytes
    artifact: _Name = ""
    device: _Index | None = None
    tensors: list[_Index] = []


class SplitStep(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """How one value is made: by a graph of others (single: it is alone in a tuple); if `graph` is '', it is one item of
    another. arguments: positions of values."""

    arguments: list[_Index]
    graph: _Name = ""
    item: _Index = 0
    single: bool = False


class SplitGraph(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A graph that Dynamo's DDPOptimizer has made several of; the bytecode calls it by a global name. The values are
    its inputs, then one for each step. outputs: positions of values."""

    name: _Name
    inputs: _Index
    steps: list[SplitStep]
    outputs: list[_Index]


class FrameProgram(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One variant of one function: what Dynamo made of a call with certain values."""

    bytecode: bytes
    constants: list[ConstantRecord]
    """The constants of the bytecode."""
    sources: list[SourceRecord]
    guards: list[GuardRecord]
    compared: list[GuardRecord] = []
    """Guards that Dynamo drops: they are compared, and not made."""
    key_order: list[_Index]
    sizes: list[SizesRecord]
    shapes: list[str]
    """Conditions on symbolic sizes, in the grammar of request/size_expr.py; s7 is the value of the source 7."""
    automatic: list[AutomaticRecord]
    optimizer: list[Any] = []
    """If it is an optimizer's step: the optimizer as tracing found it, and its state (optimizers.described)."""
    same_inputs: list[tuple[_Index, _Index]]
    """Pairs of inputs that were assumed to be one tensor."""
    overlaps: list[tuple[list[_Index], list[_Index]]] = []
    """Inputs of one storage that overlap with another, and those that do not."""
    builtins: _Name
    """What the bytecode calls the dict of builtins; '' if it does not."""
    globals: list[GlobalRecord]
    graphs: list[ProgramGraph]
    splits: list[SplitGraph] = []
    code: dict[_Name, bytes] = {}
    """Bytecode of the code in the graphs' artifacts, by digests of its texts."""
    traced: list[CodeReference]
    asked: list[AskedRecord]
    registered: list[tuple[_Name, list[_Name]]]
    """What digests.Met.registered said of what guards and traced functions name."""
    kernels: _Name
    """A digest of PyTorch's own kernels in Python, before the trace: others are looked at before the record is used."""


def in_order(variants: Sequence[FrameProgram]) -> list[FrameProgram]:
    """The likeliest first: the latest, but those with symbolic sizes after the others, as Dynamo makes them."""
    latest_first = variants[::-1]
    return sorted(latest_first, key=lambda each: bool(each.shapes))
