"""Compares an exported model with eager on the same inputs.

Inputs are the example's and random ones like it, at the example's sizes and, where sizes vary, at the least, the
largest and some between. Differences are measured as for a compile (compiler/pipeline/verification/verify.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import sympy
import torch
from msgspec import Struct

from ...compiler.errors import ExportFailed, VerifyFailed
from ...compiler.search.numerics import TOLERANCE, difference, rounded_share
from ...compiler.torch_internals.dynamo import symbolic_shapes
from .options import EagerComparison, ExportedTensor

ELEMENTS = 1 << 26
"""The most elements of all inputs together; larger sizes are not checked."""
_SEED = 20


class ProgramShapes(Struct, frozen=True):
    """The inputs of an exported program. dimensions: of each input, numbers and expressions. ranges: of each symbol."""

    names: list[str]
    dimensions: list[list[Any]]
    ranges: dict[Any, tuple[int, int]]

    def at(self, sizes: Mapping[Any, int]) -> list[list[int]]:
        return [
            [int(d.subs(sizes)) if isinstance(d, sympy.Expr) else d for d in dims] for dims in self.dimensions
        ]


def shapes_of(program: torch.export.ExportedProgram) -> ProgramShapes:
    """Bounds that are open above end at 2**24."""
    wanted = set(program.graph_signature.user_inputs)
    names, dimensions = [], []
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and node.name in wanted and isinstance(value, torch.Tensor):
            names.append(node.name)
            dimensions.append([d if isinstance(d, int) else symbolic_shapes.sym_expr(d) for d in value.shape])
    symbols = {s for dims in dimensions for d in dims if isinstance(d, sympy.Expr) for s in d.free_symbols}
    ranges = {}
    for symbol in sorted(symbols, key=str):
        bounds = program.range_constraints[symbol]
        ranges[symbol] = (int(bounds.lower), int(min(bounds.upper, 1 << 24)))
    return ProgramShapes(names, dimensions, ranges)


def tensors_of(
    program: torch.export.ExportedProgram, shapes: ProgramShapes, names: Mapping[Any, str]
) -> tuple[list[ExportedTensor], list[ExportedTensor]]:
    """Inputs and outputs, for people; `names` of symbols."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    ends = [getattr(spec.arg, "name", None) for spec in program.graph_signature.output_specs]
    outputs = [name for name in ends if isinstance(name, str) and isinstance(values.get(name), torch.Tensor)]

    def described(name: str) -> ExportedTensor:
        value = values[name]
        sizes = [d if isinstance(d, int) else symbolic_shapes.sym_expr(d) for d in value.shape]
        shape = [
            d if isinstance(d, int) else str(d.subs({s: sympy.Symbol(n) for s, n in names.items()}))
            for d in sizes
        ]
        return ExportedTensor(name, str(value.dtype).removeprefix("torch."), shape)

    return [described(name) for name in shapes.names], [described(name) for name in outputs]


def checked(
    what: str,
    exported: Callable[..., Any],
    model: torch.nn.Module,
    example: Sequence[torch.Tensor],
    shapes: ProgramShapes,
    device: torch.device,
) -> list[EagerComparison]:
    """Compare `exported` with `model`, whose parameters are on `device`. Raises ExportFailed; its message begins with
    `what`."""
    found = []
    for kind, inputs in _cases(example, shapes):
        given = [tensor.to(device) for tensor in inputs]
        sizes = [list(tensor.shape) for tensor in given]
        with torch.no_grad():
            try:
                want = model(*[tensor.clone() for tensor in given])
            except Exception as error:
                raise ExportFailed(
                    f"eager refuses {kind} inputs of shapes {sizes}: {_line(error)}"
                ) from error
            try:
                have = exported(*[tensor.clone() for tensor in given])
            except Exception as error:
                raise ExportFailed(f"{what} fails on inputs of shapes {sizes}: {_line(error)}") from error
        worst, tolerance = _compared(f"{what}, inputs of shapes {sizes}", want, have, given, model)
        found.append(EagerComparison(kind, sizes, worst, tolerance))
    return found


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:300]}"


def _compared(
    what: str, want: Any, have: Any, inputs: Sequence[torch.Tensor], model: torch.nn.Module
) -> tuple[float, float]:
    wanted, had = leaves(want), leaves(have)
    if len(wanted) != len(had):
        raise ExportFailed(f"{what}: {len(had)} outputs, eager has {len(wanted)}")
    dtypes = {t.dtype for t in (*wanted, *inputs, *model.parameters()) if isinstance(t, torch.Tensor)}
    tolerance = max((TOLERANCE.get(dtype, 0.0) for dtype in dtypes), default=0.0) or 5e-3
    worst = 0.0
    for position, (one, other) in enumerate(zip(wanted, had, strict=True)):
        try:
            gap, _ = difference(f"output {position}", one, other, integer_share=rounded_share(tolerance))
        except VerifyFailed as error:
            raise ExportFailed(f"{what}: {error.message}") from None
        if not gap <= tolerance:
            raise ExportFailed(
                f"{what}: output {position} differs from eager by {gap:.3g} of its magnitude, tolerance {tolerance:g}"
            )
        worst = max(worst, gap)
    return worst, tolerance


def leaves(value: Any) -> list[Any]:
    """The tensors and other values in a model's output, in order."""
    if isinstance(value, Mapping):
        return [leaf for key in value for leaf in leaves(value[key])]
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in leaves(one)]
    return [value]


def _cases(
    example: Sequence[torch.Tensor], shapes: ProgramShapes
) -> Iterator[tuple[Literal["example", "random"], list[torch.Tensor]]]:
    generator = torch.Generator().manual_seed(_SEED)
    yield "example", list(example)
    yield "random", [_random(tensor, tensor.shape, generator) for tensor in example]
    for sizes in _sizes(shapes):
        wanted = shapes.at(sizes)
        yield "example", [_repeated(tensor, shape) for tensor, shape in zip(example, wanted, strict=True)]
        yield (
            "random",
            [_random(tensor, shape, generator) for tensor, shape in zip(example, wanted, strict=True)],
        )


def _sizes(shapes: ProgramShapes) -> Iterator[dict[Any, int]]:
    """The least, the largest within ELEMENTS, one between; and the largest with one symbol at its least."""
    if not shapes.ranges:
        return
    low = {symbol: bounds[0] for symbol, bounds in shapes.ranges.items()}
    high = {symbol: bounds[1] for symbol, bounds in shapes.ranges.items()}
    while _elements(shapes, high) > ELEMENTS and high != low:
        high = {symbol: max(low[symbol], value // 2) for symbol, value in high.items()}
    mixed = [high | {symbol: low[symbol]} for symbol in low] if len(low) > 1 else []
    between = {symbol: (low[symbol] + high[symbol]) // 2 for symbol in low}
    seen: list[dict[Any, int]] = []
    for sizes in (low, high, between, *mixed):
        if sizes not in seen:
            seen.append(sizes)
            yield sizes


def _elements(shapes: ProgramShapes, sizes: Mapping[Any, int]) -> int:
    return sum(math.prod(shape) for shape in shapes.at(sizes))


def _repeated(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The tensor cut to `shape`, or repeated from its start to fill it."""
    for dimension, size in enumerate(shape):
        if size != tensor.shape[dimension]:
            places = torch.arange(size, device=tensor.device) % max(tensor.shape[dimension], 1)
            tensor = tensor.index_select(dimension, places)
    return tensor.contiguous()


def _random(tensor: torch.Tensor, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Random values of the example's dtype, mean and spread; whole numbers and truth values between its least and
    largest."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        wide = tensor.to(torch.complex64 if tensor.dtype.is_complex else torch.float32)
        spread, middle = (wide.std().item(), wide.mean().item()) if wide.numel() > 1 else (1.0, 0.0)
        drawn = torch.randn(tuple(shape), generator=generator, dtype=wide.dtype) * (spread or 1.0)
        return (drawn + middle).to(tensor.dtype)
    low, high = (int(tensor.min()), int(tensor.max())) if tensor.numel() else (0, 0)
    return torch.randint(low, high + 1, tuple(shape), generator=generator).to(tensor.dtype)
