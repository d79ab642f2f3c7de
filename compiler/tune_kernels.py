"""Kernels in a tuning job's file: an entry of `kernels:` in, items out; a gathered kernel in, its request and problem out.

An item says which Triton function, what it is called with, over which grid, and what to try. Numbers are expressions of
compiler/expr.py over the entry's `sizes`, the other arguments, and in a grid what a configuration sets. No torch and no
Triton: the function itself is looked up by clients/tune_kernels.py, where the user's code is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from . import wire
from .tuning import Operand, Problem

Lines = Mapping[tuple[str | int, ...], int]
"""The line of each part of an entry, by its path: () is the entry, ("arguments", "x_ptr") that value."""


class BadEntry(Exception):
    """An entry that cannot be: `line` of the file, and what is wrong."""

    def __init__(self, line: int, message: str) -> None:
        self.line = line
        self.message = message
        super().__init__(f"line {line}: {message}")


class KernelItem(Struct, frozen=True, kw_only=True):
    """One kernel on one set of arguments, as the file has it.

    module, function: where the Triton kernel is. text: the item for people. arguments: by parameter; tensors are
    Operands. grid: one to three expressions. tune: values to try for parameters. warps, stages: to try; () leaves them
    to the space. space: default takes the configurations of @triton.autotune.
    """

    line: int
    module: str
    function: str
    text: str
    arguments: tuple[tuple[str, Operand | wire.KernelConstant], ...]
    grid: tuple[str, ...]
    tune: tuple[tuple[str, tuple[wire.KernelConstant, ...]], ...] = ()
    warps: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()
    space: Literal["default", "exhaustive"] = "default"


class Kernel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kernel as it is sent: source with all candidates, their grids in the same order, and what it is called with.

    tensors: parameter and shape, in the order of the function's signature. constants: all other arguments.
    """

    source: wire.KernelSource
    grids: Annotated[list[tuple[int, int, int]], Meta(min_length=1, max_length=1024)]
    tensors: Annotated[list[tuple[str, Operand]], Meta(min_length=1, max_length=64)]
    constants: Annotated[list[tuple[str, wire.KernelConstant]], Meta(max_length=64)]


def parse(
    entry: Mapping[str, Any], lines: Lines, *, space: Literal["default", "exhaustive"] = "default"
) -> list[KernelItem]:
    """The items of an entry of `kernels:`, one for each combination of its sizes. Raises BadEntry.

    space: the job's; an entry may say its own.
    """
    raise NotImplementedError


def request(kernel: Kernel, toolchain: wire.Toolchain, target: wire.Target) -> wire.GraphRequest:
    """What a worker compiles for a kernel item: a graph of one call, which searches among its configurations.

    It goes the way of any graph with source: checked, by permission (docs/decisions/0015), through the Dispatcher.
    """
    raise NotImplementedError


def problem(kernel: Kernel) -> Problem:
    """What the database calls it: `triton.<name>` on those operands, with the source's digest among the settings."""
    raise NotImplementedError
