"""Stage 8: the compiled graph is compared with eager on random inputs. Raises VerifyFailed where they disagree.

Forward outputs, in-place changes of inputs, and gradients are compared once, on inputs of the request's own shapes
(symbols at their example values). The measure is a tensor's largest difference relative to its largest magnitude. The
tolerance is that of the lowest precision in the graph; a value that is rounding noise in eager too may differ by a
multiple of that noise. Where a graph draws random numbers, forward and backward are compared separately
(random_replay.py).

Integer inputs are drawn over their range (integer_inputs.py). Integers and booleans must be equal if they were computed
from integers alone. Of those that were computed from floats, the share of numerics.rounded_share may differ.

All inputs are drawn from fixed seeds.

Some graphs cannot be compared: their inputs exceed the memory limit, eager fails on random inputs, or their random
numbers cannot be drawn again. They are skipped, and the manifest says why.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..artifact import manifest
from ..errors import VerifyFailed
from ..graph import ambient
from ..request import schema
from ..search.numerics import fill, memory_of, rounded_share
from ..torch_internals.inductor import compile_fx
from . import block_masks, integer_inputs, outcomes, random_replay, rebuilt_graph
from .integer_inputs import IntegerFacts

_NONE = IntegerFacts()


INPUT_BYTES = 4 << 30
"""A graph whose inputs are larger than this in total is not verified."""
GPU_MEMORY_SHARE = 0.125
"""On a GPU, inputs may also take this part of its memory: outputs, gradients and eager's results need the rest."""


def _input_limit(kind: str) -> int:
    """The most bytes of inputs with which a graph for a `cpu` or `cuda` target is run."""
    if kind != "cuda":
        return INPUT_BYTES
    return max(INPUT_BYTES, int(torch.cuda.get_device_properties(0).total_memory * GPU_MEMORY_SHARE))


def verify(
    request: schema.GraphRequest,
    compiled: Callable[..., Any],
    *,
    runnable: str = "",
    halves: Mapping[int, torch.fx.GraphModule] | None = None,
) -> manifest.Verification:
    """Compare `compiled` with eager. `runnable`: why this worker cannot run the code, '' if it can.

    halves: the graphs that Inductor compiled, by the id of their compiled form; a graph that draws random numbers is
    compared by them. Raises VerifyFailed with the first value that differs.
    """
    start = time.perf_counter()

    def skipped(reason: str) -> manifest.Verification:
        return manifest.Verification("skipped", reason[:1000], 0.0, time.perf_counter() - start)

    def passed(worst: float) -> manifest.Verification:
        seconds = time.perf_counter() - start
        return manifest.Verification("passed", "", min(worst, sys.float_info.max), seconds)

    symbols = {s.name: s.hint for s in request.symbols}
    need = _input_bytes(request, symbols)
    if runnable:
        return skipped(runnable)
    if need > (limit := _input_limit(request.target.kind)):
        return skipped(f"inputs need {need} bytes, limit {limit}")
    gm = rebuilt_graph.decode_request(request, symbols)
    try:
        facts = _integer_facts(request, gm, symbols) if _needs_facts(request, gm) else None
    except integer_inputs.CannotDraw as error:
        return skipped(str(error))
    except Exception as error:  # random inputs may be invalid for a graph
        return skipped(_cannot_run(error))
    if name := outcomes.random_node(gm):
        unknown = next(filter(None, map(random_replay.cannot_draw, (halves or {}).values())), "")
        if not halves or unknown:
            return skipped(f"the graph draws random numbers ({unknown or name})")
        try:
            worst = _replayed(request, gm, compiled, symbols, facts or _NONE, halves)
        except random_replay.CannotReplay as error:
            return skipped(f"the graph draws random numbers, and cannot be run with ATen: {error}")
        except torch.OutOfMemoryError as error:
            return skipped(f"the GPU has too little memory for both: {str(error)[:200]}")
        return passed(worst)
    try:
        expected = _run(request, gm, symbols, facts or _NONE)
        if facts is None and any(map(outcomes.is_without_rounding, (*expected.outputs, *expected.mutated))):
            facts = _integer_facts(request, gm, symbols)
    except Exception as error:
        return skipped(_cannot_run(error))
    try:
        worst = _compared(request, gm, compiled, symbols, expected, facts)
    except torch.OutOfMemoryError as error:  # eager's results are held beside the compiled graph's
        return skipped(f"the GPU has too little memory for both: {str(error)[:200]}")
    except VerifyFailed:
        if facts is not None and block_masks.is_hidden(gm):
            return skipped("a block mask inside another operator's graph: its tables were drawn at random")
        raise
    return passed(worst)


def _cannot_run(error: Exception) -> str:
    return f"eager cannot run on random inputs: {type(error).__name__}: {str(error)[:200]}"


def _compared(
    request: schema.GraphRequest,
    gm: torch.fx.GraphModule,
    compiled: Callable[..., Any],
    symbols: dict[str, int],
    expected: outcomes.Outcome,
    facts: IntegerFacts | None,
) -> float:
    """The largest difference of any value from eager's. Raises VerifyFailed."""
    found = _run(request, compiled, symbols, facts or _NONE)
    eager = functools.partial(_run, request, gm, symbols, facts or _NONE)
    rounding = outcomes.EagerRounding(expected, lambda units: eager(nudge=units), lambda: eager(exact=True))
    exact = frozenset() if facts is None else _exact_names(request, facts)
    return outcomes.compare(expected, found, _tolerance(request, gm, expected.outputs), rounding, exact)


def _integer_facts(
    request: schema.GraphRequest, gm: torch.fx.GraphModule, symbols: dict[str, int]
) -> IntegerFacts:
    """Raises what eager raises even where all integers are 0 or 1."""

    def run(inputs: Sequence[Any]) -> Sequence[Any]:
        with ambient.apply_ambient(request.ambient), torch.no_grad():
            result = gm(*inputs)
        return result if isinstance(result, tuple | list) else [result]

    return integer_inputs.find_facts(run, random_inputs(request, symbols, _NONE), _draw_integers)


def _draw_integers(position: int, value: torch.Tensor, integers: integer_inputs.Range) -> None:
    """Fill the input at a position; its integers depend on nothing else."""
    fill(value, torch.Generator(value.device).manual_seed(position), integers)


def _exact_names(request: schema.GraphRequest, facts: IntegerFacts) -> frozenset[str]:
    """Names, as outcomes.named has them, of the values that contain no rounding."""
    tensors = [p for p, spec in enumerate(request.inputs) if isinstance(spec, schema.TensorInput)]
    mutated = (f"input after the call {i}" for i, position in enumerate(tensors) if position in facts.inputs)
    return frozenset([*(f"output {position}" for position in facts.outputs), *mutated])


def _needs_facts(request: schema.GraphRequest, gm: torch.fx.GraphModule) -> bool:
    """Whether there are integers to be drawn, or inputs that depend on others."""
    names = (str(node.target) for node in gm.graph.nodes if node.op.startswith("call"))
    return any("searchsorted" in name or "bucketize" in name for name in names) or any(
        integer_inputs.is_integer_dtype(getattr(torch, spec.dtype))
        for spec in request.inputs
        if isinstance(spec, schema.TensorInput)
    )


def _replayed(
    request: schema.GraphRequest,
    gm: torch.fx.GraphModule,
    compiled: Callable[..., Any],
    symbols: dict[str, int],
    facts: IntegerFacts,
    halves: Mapping[int, torch.fx.GraphModule],
) -> float:
    """The largest difference of any value of the forward or the backward from ATen's. Raises VerifyFailed."""
    tolerance = _tolerance(request, gm, [])
    worst = 0.0

    def compare(name: str, want: Any, have: Any, scale: float, doubt: outcomes.AtenReference) -> None:
        nonlocal worst
        floor = max(1e-3, 1e-3 * scale)
        share = rounded_share(tolerance) if doubt.rounded else 0.0
        worst = max(
            worst, outcomes.judge(name, want, have, doubt, floor, tolerance, share, 20.0 * tolerance * floor)
        )

    with compile_fx.intercepting_calls(halves, random_replay.Replay(compare)):
        _run(request, compiled, symbols, facts)
    return worst


def exercise(request: schema.GraphRequest, compiled: Callable[..., Any]) -> None:
    """Run the compiled graph once, so that its kernels measure their candidates. Its results are ignored."""
    symbols = {s.name: s.hint for s in request.symbols}
    if _input_bytes(request, symbols) > _input_limit(request.target.kind):
        return
    # Random inputs may be invalid for the graph; its kernels then keep all candidates.
    with contextlib.suppress(RuntimeError, IndexError):
        _run(request, compiled, symbols, _NONE)


def _input_bytes(request: schema.GraphRequest, symbols: dict[str, int]) -> int:
    alone, shared = 0, {}
    for spec in request.inputs:
        if isinstance(spec, schema.TensorInput):
            elements = math.prod(int(rebuilt_graph.size_value(s, symbols)) for s in spec.shape)
            storage = int(rebuilt_graph.size_value(spec.storage_bytes, symbols))
            if spec.storage >= 0:
                shared[spec.storage] = storage
            else:
                alone += max(storage, elements * getattr(torch, spec.dtype).itemsize)
    return alone + sum(shared.values())


def random_inputs(
    request: schema.GraphRequest,
    symbols: dict[str, int],
    facts: IntegerFacts,
    nudge: float = 0.0,
    exact: bool = False,
) -> list[Any]:
    """Seeded inputs; integers that `facts` says nothing of are 0 or 1. nudge: change each float by so many units in the
    last place, up or down at random. exact: the same floats as float64."""
    generators: dict[tuple[str, int], torch.Generator] = {}

    def generator(device: str, seed: int) -> torch.Generator:
        return generators.setdefault((device, seed), torch.Generator(device).manual_seed(seed))

    def make(spec: schema.TensorInput, shape: list[int], stride: list[int]) -> torch.Tensor:
        value = torch.empty_strided(shape, stride, dtype=getattr(torch, spec.dtype), device=spec.device)
        if spec.number is not None:
            return value.fill_(spec.number)
        fill(value, generator(spec.device, 0))
        if nudge and value.dtype.is_floating_point:
            step = nudge * torch.finfo(value.dtype).eps
            memory = memory_of(value)
            drawn = torch.randint(
                0, 2, memory.shape, generator=generator(spec.device, 2), device=value.device
            )
            memory.copy_(memory * (1 + step * (drawn * 2 - 1)))
        return value.double() if exact and value.dtype.is_floating_point else value

    inputs = rebuilt_graph.make_inputs(request, symbols, make)
    for position, integers in facts.ranges.items():
        _draw_integers(position, inputs[position], integers)
    for position, value in facts.derived.items():
        inputs[position].copy_(value)
    return inputs


def _run(
    request: schema.GraphRequest,
    function: Callable[..., Any],
    symbols: dict[str, int],
    facts: IntegerFacts,
    nudge: float = 0.0,
    *,
    exact: bool = False,
) -> outcomes.Outcome:
    inputs = random_inputs(request, symbols, facts, nudge, exact)

    def call(*args: Any) -> Any:  # its gradients are taken outside
        with ambient.apply_ambient(request.ambient):
            return function(*args)

    return outcomes.outcome_of(call, inputs)


def _tolerance(request: schema.GraphRequest, gm: torch.fx.GraphModule, outputs: Sequence[Any]) -> float:
    """The tolerance of the lowest precision among inputs, outputs, autocast and casts inside the graph."""
    dtypes = {getattr(torch, s.dtype) for s in request.inputs if isinstance(s, schema.TensorInput)}
    dtypes |= {getattr(torch, cast.dtype) for cast in request.ambient.autocast}
    return outcomes.tolerance_of(gm, dtypes | outcomes.dtypes_of(outputs))
