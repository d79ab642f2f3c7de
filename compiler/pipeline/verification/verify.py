"""Stage 8: the compiled graph is compared with eager on random inputs. Raises VerifyFailed where they disagree.

Forward outputs, in-place changes of inputs, and gradients are compared, on inputs of the request's own shapes (symbols
at their example values). The measure is a tensor's largest difference relative to its largest magnitude, within the
tolerance of the lowest precision in the graph. A larger one may be as far from float64 as eager is, or a multiple of
what eager changes by when it is rounded at random (outcomes.py). What differs by more must do so on other inputs too.
Where a graph draws random numbers, forward and backward are compared separately (random_replay.py).

Inputs are drawn from fixed seeds: floats so that values keep their size (float_inputs.py), integers over their range
(integer_inputs.py). Integers and booleans must be equal if they were computed from integers alone; of those that were
computed from floats, where the floats are away from a threshold.

Values of which eager is chaotic are left out. Where there are several, weights are drawn smaller first, since other
values may be off by chance there. Some graphs cannot be compared: most of their values are chaotic, their inputs or a
run exceed the memory limit, eager fails on random inputs, or their random numbers cannot be drawn again. They are
skipped, and the manifest says why.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from ...artifact import manifest
from ...errors import VerifyFailed
from ...graph import ambient
from ...request import schema
from ...search.numerics import fill, memory_of
from ...torch_internals import devices
from ...torch_internals.dynamo.operators import in_float64
from ...torch_internals.inductor import compile_fx
from .. import rebuilt_graph
from . import block_masks, integer_inputs, outcomes, random_replay
from .float_inputs import generator as float_generator
from .float_inputs import vary
from .integer_inputs import InputFacts
from .random_rounding import rounding_at_random
from .room import NoRoom, Room

_NONE = InputFacts()
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
    on_run: Callable[[float], None] = lambda seconds: None,
    memory: int = 0,
) -> manifest.Verification:
    """Compare `compiled` with eager. `runnable`: why this worker cannot run the code, '' if it can.

    halves: the graphs that Inductor compiled, by the id of their compiled form; a graph that draws random numbers is
    compared by them. on_run: takes the seconds of each run of `compiled`, with its gradients. memory: bytes that this
    process may hold; 0: no limit. Raises VerifyFailed with the first value that differs.
    """
    start = time.perf_counter()

    def skipped(reason: str) -> manifest.Verification:
        return manifest.Verification("skipped", reason[:1000], 0.0, time.perf_counter() - start)

    def passed(worst: float, but: str = "") -> manifest.Verification:
        seconds = time.perf_counter() - start
        return manifest.Verification("passed", but, min(worst, sys.float_info.max), seconds)

    symbols = _example_sizes(request)
    need = _input_bytes(request, symbols)
    room = Room(memory if request.target.kind == "cpu" else 0)
    if runnable:
        return skipped(runnable)
    if need > (limit := _input_limit(request.target.kind)):
        return skipped(f"inputs need {need} bytes, limit {limit}")
    gm = rebuilt_graph.decode_request(request, symbols)
    name = outcomes.random_node(gm)
    if name:
        unknown = next(filter(None, map(random_replay.cannot_draw, (halves or {}).values())), "")
        if not halves or unknown:
            return skipped(f"the graph draws random numbers ({unknown or name})")

    def compared(facts: InputFacts) -> outcomes.Comparison:
        if name and halves:
            return _replayed(request, gm, compiled, symbols, facts, halves, on_run)
        room.require()
        try:
            with room.measuring():
                expected = _run(request, gm, symbols, facts)
        except Exception as error:
            raise _Skipped(_cannot_run(error)) from error
        return _compared(request, gm, compiled, symbols, expected, facts, on_run, room)

    comparisons: list[outcomes.Comparison] = []
    for deviation in DEVIATIONS:
        try:
            facts = input_facts(request, gm, symbols, deviation)
        except integer_inputs.CannotDraw as error:
            return skipped(str(error))
        except Exception as error:  # random inputs may be invalid for a graph
            return skipped(_cannot_run(error))
        try:
            comparison = compared(facts)
            if comparison.wrong and (not comparison.chaotic or deviation == DEVIATIONS[-1]):
                # Of many values one may be off by chance; in two draws the same one is not.
                right = compared(msgspec.structs.replace(facts, seed=1)).right
                if wrong := [message for each, message in comparison.wrong.items() if each not in right]:
                    if block_masks.is_hidden(gm):
                        return skipped(
                            "a block mask inside another operator's graph: its tables were drawn at random"
                        )
                    raise VerifyFailed(wrong[0])
                comparison.wrong = {}
        except (_Skipped, NoRoom) as error:
            return skipped(str(error))
        except random_replay.CannotReplay as error:
            return skipped(f"the graph draws random numbers, and cannot be run with ATen: {error}")
        except RuntimeError as error:
            if not devices.is_out_of_memory(error):  # eager's results are held beside the compiled graph's
                raise
            return skipped(_cannot_run(error))
        if not comparison.wrong:
            comparisons.append(comparison)
            if len(comparison.chaotic) <= FEW * comparison.values:
                break
    best = min(comparisons, key=lambda comparison: len(comparison.chaotic))
    count = len(best.chaotic)
    reason = f"rounding decides {count} of {best.values} values: {best.chaotic[0]}"[:1000] if count else ""
    return skipped(reason) if 2 * count > best.values else passed(best.worst, reason)


DEVIATIONS = (0.7, 0.35, 0.1)
"""The standard deviation of the results of matrix products and convolutions, and if eager is chaotic, smaller ones."""
FEW = 0.05
"""Where rounding decides no larger part of the values than this, they are left out, and no other scale is tried."""


class _Skipped(Exception):
    """There is nothing to compare with; the text says why."""


def _cannot_run(error: Exception) -> str:
    if devices.is_out_of_memory(error):
        return f"the GPU has too little memory: {str(error)[:200]}"
    return f"eager cannot run on random inputs: {type(error).__name__}: {str(error)[:200]}"


def _compared(
    request: schema.GraphRequest,
    gm: torch.fx.GraphModule,
    compiled: Callable[..., Any],
    symbols: dict[str, int],
    expected: outcomes.Outcome,
    facts: InputFacts,
    on_run: Callable[[float], None],
    room: Room,
) -> outcomes.Comparison:
    """Compare with eager. Raises VerifyFailed, NoRoom."""
    room.require()
    began = time.perf_counter()
    found = _run(request, compiled, symbols, facts)
    on_run(time.perf_counter() - began)
    outcomes.drop_equal_inputs(expected, found)
    values = {name: value for name, value in outcomes.named(expected) if value is not None}

    def eager(runs: int, **how: Any) -> dict[str, Any]:
        room.require(runs)
        again = outcomes.named(_run(request, gm, symbols, facts, **how))
        return {name: value for name, value in again if name in values}

    precision = _precision(request, gm, expected.outputs)
    rounding = outcomes.EagerRounding(
        values,
        lambda run: eager(1, rounded=run),
        lambda: eager(2, exact=True),
        outcomes.RUNS[facts.seed],
    )
    return outcomes.compare(expected, found, precision, rounding, _exact_names(request, facts))


def input_facts(
    request: schema.GraphRequest, gm: torch.fx.GraphModule, symbols: dict[str, int], deviation: float
) -> InputFacts:
    """Raises what eager raises even where all integers are 0 or 1."""

    def run(inputs: Sequence[Any]) -> Sequence[Any]:
        with ambient.apply_ambient(request.ambient), torch.no_grad():
            result = gm(*inputs)
        return result if isinstance(result, tuple | list) else [result]

    parameters = frozenset(p for p, spec in enumerate(request.inputs) if getattr(spec, "is_parameter", False))
    inputs = random_inputs(request, symbols, _NONE)
    return integer_inputs.find_facts(run, inputs, _draw_integers, parameters, deviation)


def _draw_integers(position: int, value: torch.Tensor, integers: integer_inputs.Range) -> None:
    """Fill the input at a position; its integers depend on nothing else."""
    fill(value, torch.Generator(value.device).manual_seed(position), integers)


def _exact_names(request: schema.GraphRequest, facts: InputFacts) -> frozenset[str]:
    """Names, as outcomes.named has them, of the values that contain no rounding."""
    tensors = [p for p, spec in enumerate(request.inputs) if isinstance(spec, schema.TensorInput)]
    mutated = (f"input after the call {i}" for i, position in enumerate(tensors) if position in facts.inputs)
    return frozenset([*(f"output {position}" for position in facts.outputs), *mutated])


def _replayed(
    request: schema.GraphRequest,
    gm: torch.fx.GraphModule,
    compiled: Callable[..., Any],
    symbols: dict[str, int],
    facts: InputFacts,
    halves: Mapping[int, torch.fx.GraphModule],
    on_run: Callable[[float], None],
) -> outcomes.Comparison:
    """Compare forward and backward with ATen; only the forward where that is wrong."""
    precision = _precision(request, gm, [])
    comparison = outcomes.Comparison()

    def compare(name: str, want: Any, have: Any, scale: float, reference: outcomes.AtenReference) -> None:
        floor = max(1e-3, 1e-3 * scale)
        judged = functools.partial(outcomes.judge, name, want, have, reference, floor, precision, floor)
        comparison.add(name, judged)

    replay = random_replay.Replay(compare, outcomes.RUNS[facts.seed])
    with compile_fx.intercepting_calls(halves, replay):
        try:
            _run(request, compiled, symbols, facts)
        except VerifyFailed as error:
            name, _, _ = error.message.partition(" differs")
            comparison.wrong = {name: error.message}
    on_run(replay.seconds)
    return comparison


def exercise(request: schema.GraphRequest, compiled: Callable[..., Any]) -> None:
    """Run the compiled graph once, so that its kernels measure their candidates. Its results are ignored."""
    symbols = _example_sizes(request)
    if _input_bytes(request, symbols) > _input_limit(request.target.kind):
        return
    # Random inputs may be invalid for the graph; its kernels then keep all candidates.
    with contextlib.suppress(RuntimeError, IndexError):
        _run(request, compiled, symbols, _NONE)


UNBACKED_SIZE = 24
"""Inputs have this size where a program gives no example. Programs that ask for a multiple ask for a small one."""


def _example_sizes(request: schema.GraphRequest) -> dict[str, int]:
    sizes = {}
    for symbol in request.symbols:
        upper = UNBACKED_SIZE if symbol.upper is None else min(symbol.upper, UNBACKED_SIZE)
        sizes[symbol.name] = max(symbol.lower, upper) if symbol.hint is None else symbol.hint
    return sizes


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
    facts: InputFacts,
    exact: bool = False,
) -> list[Any]:
    """Seeded inputs; integers that `facts` says nothing of are 0 or 1. exact: the same floats as float64."""
    generators: dict[str, torch.Generator] = {}

    def make(spec: schema.TensorInput, shape: list[int], stride: list[int]) -> torch.Tensor:
        value = torch.empty_strided(shape, stride, dtype=getattr(torch, spec.dtype), device=spec.device)
        if spec.number is not None:
            return value.fill_(spec.number)
        draw = generators.setdefault(spec.device, torch.Generator(spec.device).manual_seed(facts.seed))
        fill(value, draw)
        vary(value, draw)
        return value.double() if exact and value.dtype.is_floating_point else value

    inputs = rebuilt_graph.make_inputs(request, symbols, make)
    for position, integers in facts.ranges.items():
        _draw_integers(position, inputs[position], integers)
    for position, value in facts.derived.items():
        inputs[position].copy_(value)
    with torch.no_grad():
        for position, how in facts.floats.items():
            memory = memory_of(inputs[position])
            spec = request.inputs[position]
            assert isinstance(spec, schema.TensorInput)
            dtype = getattr(torch, spec.dtype)
            rounded = memory if memory.dtype == dtype else memory.to(dtype)
            how.apply(rounded, float_generator(memory, position))
            if rounded is not memory:
                memory.copy_(rounded)
    return inputs


def _run(
    request: schema.GraphRequest,
    function: Callable[..., Any],
    symbols: dict[str, int],
    facts: InputFacts,
    *,
    rounded: int = 0,
    exact: bool = False,
) -> outcomes.Outcome:
    inputs = random_inputs(request, symbols, facts, exact)

    callee = in_float64(function) if exact else function

    def call(*args: Any) -> Any:  # its gradients are taken outside
        with ambient.apply_ambient(request.ambient):
            return callee(*args)

    with rounding_at_random(rounded) if rounded else contextlib.nullcontext():
        return outcomes.outcome_of(call, inputs)


def _precision(
    request: schema.GraphRequest, gm: torch.fx.GraphModule, outputs: Sequence[Any]
) -> outcomes.Precision:
    """The lowest precision among inputs, outputs, autocast and casts inside the graph."""
    dtypes = {getattr(torch, s.dtype) for s in request.inputs if isinstance(s, schema.TensorInput)}
    dtypes |= {getattr(torch, cast.dtype) for cast in request.ambient.autocast}
    return outcomes.precision_of(gm, dtypes | outcomes.dtypes_of(outputs))
