"""Options of an export, and its manifest `export.json`, as structs. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from ...compiler.errors import SettingsError

META_FILE, EXAMPLE_FILE = "export.json", "example.pt"
JOB_SCHEME = "job:"
"""Before a training job's id: its checkpoints in the service's own folder."""
TARGETS: dict[str, tuple[str, ...] | None] = {
    "cpu": None,
    "cpu-avx2": (
        *("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "popcnt"),
        *("sse4_1", "sse4_2", "ssse3"),
    ),
    "cpu-avx512": (
        *("avx", "avx2", "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl", "bmi1", "bmi2"),
        *("f16c", "fma", "movbe", "popcnt", "sse4_1", "sse4_2", "ssse3"),
    ),
    "cuda": None,
}
"""Instruction sets that a target's code may use (x86-64-v3, x86-64-v4); None: those of the node's processor or GPU."""
_MOST = 1 << 24

Format = Literal["aoti", "torchscript", "both", "pte"]
FORMATS: tuple[Format, ...] = get_args(Format)
Size = Annotated[int, Meta(ge=0, le=_MOST)]


class DynamicSize(Struct, frozen=True, forbid_unknown_fields=True):
    """A size that may vary, from low to high. at: inputs and dimensions that have it; empty: the first dimension of
    every input."""

    name: Annotated[str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_]{0,60}$")]
    low: Size
    high: Size
    at: list[tuple[str, Annotated[int, Meta(ge=0, lt=64)]]] = []


class ExportOptions(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """function: `module:function`, which returns (model, example inputs) or (model, example inputs, dynamic shapes).
    checkpoint: where the weights are (weights.py); '': the model has them."""

    function: Annotated[str, Meta(pattern=r"^[\w.]{1,300}:[\w.]{1,200}$")]
    name: Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "model"
    checkpoint: Annotated[str, Meta(max_length=2000)] = ""
    targets: Annotated[
        list[Literal["cpu", "cpu-avx2", "cpu-avx512", "cuda"]], Meta(min_length=1, max_length=4)
    ] = msgspec.field(default_factory=lambda: ["cpu"])
    format: Format = "aoti"
    dynamic: Annotated[list[DynamicSize], Meta(max_length=16)] = []

    def __post_init__(self) -> None:
        if self.format == "pte" and self.targets != ["cpu"]:
            raise ValueError("a .pte has no target: XNNPACK chooses instructions where it runs")


class ExportedTensor(Struct, frozen=True):
    """shape: numbers, and names of sizes that vary or expressions of them."""

    name: str
    dtype: str
    shape: list[int | str]


class EagerComparison(Struct, frozen=True):
    """One run compared with eager. inputs: `example`, cut or repeated to these sizes, or `random`. difference: the
    largest of any output, relative to that output's largest magnitude."""

    inputs: Literal["example", "random"]
    shapes: list[list[int]]
    difference: float
    tolerance: float


class ExportedFile(Struct, frozen=True, kw_only=True):
    """instructions: instruction sets, as /proc/cpuinfo names them. device: a GPU's name and capability. how: of
    TorchScript, `scripted` or `traced`; of a .pte, what computes it."""

    name: str
    format: Literal["aoti", "torchscript", "pte"]
    target: str
    bytes: int
    digest: str
    seconds: float
    checks: list[EagerComparison]
    instructions: list[str] = []
    device: str = ""
    how: str = ""


class ExportManifest(Struct, frozen=True, kw_only=True):
    """left_out: formats that failed while another one succeeded, and why. weights: their source. sizes: low and high of
    each that varies. created: seconds since 1970."""

    name: str
    function: str
    weights: str
    torch: str
    created: float = msgspec.field(name="made")
    parameters: int
    inputs: list[ExportedTensor]
    outputs: list[ExportedTensor]
    sizes: dict[str, tuple[int, int]]
    files: list[ExportedFile]
    left_out: list[str] = []


def read_dynamic(texts: Sequence[str]) -> list[DynamicSize]:
    """`batch=1:64`: the first dimension of every input; `length@tokens.1,mask.1=1:128`: these dimensions of the inputs
    so named. Raises SettingsError."""
    return [_one(text) for text in texts]


def _one(text: str) -> DynamicSize:
    found = re.fullmatch(r"([A-Za-z_]\w{0,60})(?:@([\w.,]+))?=(\d{1,8}):(\d{1,8})", text, re.ASCII)
    if found is None:
        raise SettingsError(
            f"--dynamic is {text[:80]!r}", hint="Write batch=1:64, or length@tokens.1,mask.1=1:128"
        )
    name, places, low, high = found[1], found[2] or "", int(found[3]), int(found[4])
    if not low < high <= _MOST:
        raise SettingsError(f"--dynamic {name} goes from {low} to {high}", hint="Write the smaller one first")
    at = []
    for place in filter(None, places.split(",")):
        of, dot, dimension = place.rpartition(".")
        if not dot or not of.isidentifier() or not dimension.isdigit() or int(dimension) > 63:
            raise SettingsError(f"--dynamic {name} stands at {place[:60]!r}", hint="Write INPUT.DIMENSION")
        at.append((of, int(dimension)))
    return DynamicSize(name, low, high, at)
