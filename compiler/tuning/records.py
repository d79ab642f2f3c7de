"""Problems, candidates' timings and winners, as structs and as texts. No torch.

A problem is one operator on operands of certain shapes, dtypes and strides. Its candidates (ATen's kernel, templates in
many configurations) are measured in one device environment: a device, its driver, and the versions that made the code.
An entry is the result, and is valid for the same problem in the same environment only.
"""

from __future__ import annotations

import hashlib
import re
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

SCHEMA = 1

Text = Annotated[str, Meta(max_length=4096)]

_NAME = "[A-Za-z0-9_.:+-]{1,128}"

_NUMBERS = "((?:[0-9]+(?:,[0-9]+)*)?)"

Name = Annotated[str, Meta(pattern=rf"^{_NAME}(?![\s\S])")]  # `$` would let a newline follow

Milliseconds = Annotated[float, Meta(gt=0, lt=1e9)]

Length = Annotated[int, Meta(ge=0, le=1 << 53)]

Count = Annotated[int, Meta(ge=0, le=1 << 31)]

Several = Annotated[int, Meta(ge=1, le=1 << 31)]

Finite = Annotated[float, Meta(ge=0, lt=1e9)]

_SHORT = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "b8",
}

LONG = {short: name for name, short in _SHORT.items()}

WRITTEN = LONG | {"fp64": "float64", "fp32": "float32", "fp16": "float16", "fp8": "float8_e4m3fn"}
"""Short names that people write; torch's own names are accepted too."""


class TuningRecord(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Operand(TuningRecord, frozen=True):
    """A tensor as a kernel sees it. `dtype` as torch prints it without `torch.`; sizes and strides in elements."""

    dtype: Name
    size: Annotated[tuple[Length, ...], Meta(max_length=64)]
    stride: Annotated[tuple[Length, ...], Meta(max_length=64)]

    def __post_init__(self) -> None:
        if self.dtype in LONG:
            raise ValueError(f"the dtype is {LONG[self.dtype]}, {self.dtype} only its short form")

    def text(self) -> str:
        """`bf16[128,64]`, with the strides after a colon unless the tensor is contiguous."""
        shown = f"{_SHORT.get(self.dtype, self.dtype)}[{','.join(map(str, self.size))}]"
        return shown if self.stride == contiguous(self.size) else f"{shown}:{','.join(map(str, self.stride))}"


_NEVER = re.compile(r"(?!)")

_USUAL = {
    name: re.compile(value)
    for name, value in {
        "precision": "highest",
        "arg.alpha": "1",
        "arg.beta": "1",
        "arg.bias": "None",
        "arg.dilation": r"\((1, )*1,?\)",
        "arg.groups": "1",
        "arg.output_padding": r"\((0, )*0,?\)",
        "arg.padding": r"\((0, )*0,?\)",
        "arg.stride": r"\((1, )*1,?\)",
        "arg.transposed": "False",
    }.items()
}
"""Patterns of the default values of settings."""


class Problem(TuningRecord, frozen=True):
    """op: the operator, by Inductor's name (mm, addmm, bmm, convolution ...). settings: what else determines the
    candidates and their speed (precision, padding, the search space), sorted."""

    op: Name
    operands: Annotated[tuple[Operand, ...], Meta(max_length=64)]
    result: Operand
    settings: Annotated[tuple[tuple[Name, Text], ...], Meta(max_length=64)] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.settings]
        if any(one >= other for one, other in pairwise(names)):
            raise ValueError("a problem's settings are sorted by name, each given once")

    def text(self) -> str:
        """One line, the same for the same problem: `mm(f32[8,4], f32[4,2]) -> f32[8,2] {precision=highest}`."""
        named = ", ".join(f"{name}={value}" for name, value in self.settings)
        return f"{self.shape()} {{{named}}}" if named else self.shape()

    def brief(self) -> str:
        """The text for people, without settings that have default values."""
        named = ", ".join(f"{name}={value}" for name, value in self.unusual_settings())
        return f"{self.shape()} {{{named}}}" if named else self.shape()

    def unusual_settings(self) -> list[tuple[str, str]]:
        """Those without default values."""
        return [
            (name, value) for name, value in self.settings if not _USUAL.get(name, _NEVER).fullmatch(value)
        ]

    def shape(self) -> str:
        """The text without the settings."""
        operands = ", ".join(operand.text() for operand in self.operands)
        return f"{self.op}({operands}) -> {self.result.text()}"


class DeviceEnvironment(TuningRecord, frozen=True):
    """Where timings are valid: a device's model, its driver, and the versions that make its code.

    device: a GPU's name, or a CPU's model. capability: `9.0`, or a CPU's vector set. threads: for kernels on a CPU; 0
    for a GPU. driver: '' for a CPU.
    """

    device: Text
    capability: Text
    driver: Text
    torch: Text
    triton: Text
    cuda: Text
    threads: Count = 0

    def digest(self) -> str:
        """Hexadecimal."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:32]


class Timing(TuningRecord, frozen=True):
    """A candidate's time: the median of `samples` and its 95% confidence interval, in milliseconds."""

    candidate: Text
    milliseconds: Milliseconds
    low: Milliseconds
    high: Milliseconds
    samples: Several

    def __post_init__(self) -> None:
        if not self.low <= self.milliseconds <= self.high:
            raise ValueError("a median lies within its interval")


class TuningEntry(TuningRecord, frozen=True, kw_only=True):
    """The result of a search.

    aten: PyTorch's own kernel; None if it was no candidate. default: what Inductor takes without max-autotune; None if
    it was no candidate. failed: candidates that did not build, did not run or were wrong. error: the winner's largest
    difference from the reference in higher precision, as a share of the largest value; None: there was no reference.
    clock: of the device during the measurement; '' if unknown.
    """

    problem: Problem
    place: DeviceEnvironment
    winner: Timing
    runner_up: Timing | None = None
    aten: Timing | None = None
    default: Timing | None = None
    candidates: Several
    failed: Count = 0
    error: Finite | None = None
    clock: Text = ""
    seconds: Finite = 0.0
    """Spent on the search."""


def problem_digest(problem: Problem) -> str:
    """Names a problem within a device environment; hexadecimal."""
    return hashlib.sha256(msgspec.msgpack.encode((SCHEMA, problem))).hexdigest()


NAME = re.compile(r"[0-9a-f]{64}")


def entry_sort_key(entry: TuningEntry) -> tuple[object, ...]:
    """Sorts entries by device environment, then problem; equal only for the same problem in the same environment."""
    return (*msgspec.structs.astuple(entry.place), entry.problem.shape(), entry.problem.settings)


def rounded(value: float) -> float:
    """To four digits; preserves order."""
    return float(f"{value:.4g}")


def parse_operand(text: str) -> Operand:
    """The inverse of `Operand.text`. Raises ValueError."""
    found = re.fullmatch(rf"({_NAME})\[{_NUMBERS}\](?::{_NUMBERS})?", text)
    if found is None:
        raise ValueError(f"{text[:80]!r} is no tensor like bf16[128,64] or bf16[64,32]:1,64")
    dtype, size, stride = found[1], _numbers(found[2]), found[3]
    return Operand(WRITTEN.get(dtype, dtype), size, contiguous(size) if stride is None else _numbers(stride))


def parse_problem(shape: str, settings: tuple[tuple[str, str], ...] = ()) -> Problem:
    """The inverse of `Problem.shape`. Raises ValueError."""
    found = re.fullmatch(rf"({_NAME})\(([^()]*)\) -> (.+)", shape)
    if found is None:
        raise ValueError(f"{shape[:80]!r} is no problem like mm(f32[8,4], f32[4,2]) -> f32[8,2]")
    operands = found[2].split(", ") if found[2] else []
    return Problem(found[1], tuple(map(parse_operand, operands)), parse_operand(found[3]), settings)


def parse_problem_text(text: str) -> Problem | None:
    """The inverse of `Problem.text`; None for another text."""
    shape, brace, rest = text.partition(" {")
    settings: list[tuple[str, str]] = []
    if brace:
        if not rest.endswith("}"):
            return None
        begins = list(re.finditer(rf"(?:^|, )({_NAME})=", rest[:-1]))
        ends = [found.start() for found in begins[1:]] + [len(rest) - 1]
        settings = [(found[1], rest[found.end() : end]) for found, end in zip(begins, ends, strict=True)]
    try:
        problem = parse_problem(shape, tuple(settings))
    except ValueError:
        return None
    return problem if problem.text() == text else None


def contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for length in reversed(size):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",")) if text else ()


class CandidateFailure(TuningRecord, frozen=True):
    """A candidate that did not build, did not run or was wrong."""

    candidate: Text
    why: Text
