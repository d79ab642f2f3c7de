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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct

from ..artifact import manifest
from ..errors import VerifyFailed
from ..graph import ambient, targets
from ..graph.numerics import TOLERANCE, difference, fill, memory_of, rounded_share
from ..request import schema
from ..torch_internals.inductor import compiled_graphs
from . import integer_inputs, philox, program, random_replay
from .integer_inputs import IntegerFacts


class VerifySettings(Struct, frozen=True, kw_only=True):
    memory_bytes: int = 4 << 30
    """A graph whose inputs are larger than this in total is not verified."""
    gpu_memory_fraction: float = 0.125
    """On a GPU, inputs may also take this part of its memory: outputs, gradients and eager's results need the rest."""

    def limit(self, kind: str) -> int:
        """The most bytes of inputs with which a graph for a `cpu` or `cuda` target is run."""
        if kind != "cuda":
            return self.memory_bytes
        total = torch.cuda.get_device_properties(0).total_memory
        return max(self.memory_bytes, int(total * self.gpu_memory_fraction))


class _Outcome(Struct):
    outputs: list[Any]
    mutated: list[torch.Tensor]
    gradients: list[torch.Tensor | None]


def verify(
    request: schema.GraphRequest,
    compiled: Callable[..., Any],
    settings: VerifySettings,
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
    if need > (limit := settings.limit(request.target.kind)):
        return skipped(f"inputs need {need} bytes, limit {limit}")
    gm = program.decode_request(request, symbols)
    try:
        facts = _integer_facts(request, gm, symbols) if _takes_integers(request) else None
    except Exception as error:  # random inputs may be invalid for a graph
        return skipped(_cannot_run(error))
    ranges = {} if facts is None else facts.ranges
    if name := random_node(gm):
        unknown = next(filter(None, map(random_replay.cannot_draw, (halves or {}).values())), "")
        if not halves or unknown:
            return skipped(f"the graph draws random numbers ({unknown or name})")
        try:
            worst = _replayed(request, gm, compiled, symbols, ranges, halves)
        except philox.CannotReplay as error:
            return skipped(f"the graph draws random numbers, and cannot be run with ATen: {error}")
        except torch.OutOfMemoryError as error:
            return skipped(f"the GPU has too little memory for both: {str(error)[:200]}")
        return passed(worst)
    try:
        expected = _run(request, gm, symbols, ranges)
        if facts is None and any(map(_is_without_rounding, (*expected.outputs, *expected.mutated))):
            facts = _integer_facts(request, gm, symbols)
    except Exception as error:
        return skipped(_cannot_run(error))
    try:
        worst = _compared(request, gm, compiled, symbols, expected, facts)
    except torch.OutOfMemoryError as error:  # eager's results are held beside the compiled graph's
        return skipped(f"the GPU has too little memory for both: {str(error)[:200]}")
    return passed(worst)


def _cannot_run(error: Exception) -> str:
    return f"eager cannot run on random inputs: {type(error).__name__}: {str(error)[:200]}"


def _compared(
    request: schema.GraphRequest,
    gm: torch.fx.GraphModule,
    compiled: Callable[..., Any],
    symbols: dict[str, int],
    expected: _Outcome,
    facts: IntegerFacts | None,
) -> float:
    """The largest difference of any value from eager's. Raises VerifyFailed."""
    ranges = {} if facts is None else facts.ranges
    found = _run(request, compiled, symbols, ranges)
    tolerance = _tolerance(request, gm, expected.outputs)
    worst = 0.0
    eager = _Eager(request, gm, symbols, ranges, expected)
    exact = frozenset() if facts is None else _exact_names(request, facts)
    gradient_floor = _gradient_floor(expected)
    for name, want, have in _pairs(expected, found):
        floor = gradient_floor if name.startswith("gradient") else 1e-3
        doubt = random_replay.AtenReference(
            functools.partial(eager.noise_of, name), functools.partial(eager.exact, name)
        )
        share = 0.0 if name in exact else rounded_share(tolerance)
        worst = max(
            worst, _judge(name, want, have, doubt, floor, tolerance, share, 20.0 * tolerance * gradient_floor)
        )
    return worst


def _integer_facts(
    request: schema.GraphRequest, gm: torch.fx.GraphModule, symbols: dict[str, int]
) -> IntegerFacts:
    """Raises what eager raises even where all integers are 0 or 1."""

    def run(inputs: Sequence[Any]) -> Sequence[Any]:
        with ambient.apply_ambient(request.ambient), torch.no_grad():
            result = gm(*inputs)
        return result if isinstance(result, tuple | list) else [result]

    return integer_inputs.find_facts(run, _random_inputs(request, symbols, {}), _draw_integers)


def _draw_integers(position: int, value: torch.Tensor, integers: integer_inputs.Range) -> None:
    """Fill the input at a position; its integers depend on nothing else."""
    fill(value, torch.Generator(value.device).manual_seed(position), integers)


def _exact_names(request: schema.GraphRequest, facts: IntegerFacts) -> frozenset[str]:
    """Names, as `_named` has them, of the values that contain no rounding."""
    tensors = [p for p, spec in enumerate(request.inputs) if isinstance(spec, schema.TensorInput)]
    mutated = (f"input after the call {i}" for i, position in enumerate(tensors) if position in facts.inputs)
    return frozenset([*(f"output {position}" for position in facts.outputs), *mutated])


def _is_without_rounding(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not (value.dtype.is_floating_point or value.dtype.is_complex)


def _takes_integers(request: schema.GraphRequest) -> bool:
    return any(
        integer_inputs.is_integer_dtype(getattr(torch, spec.dtype))
        for spec in request.inputs
        if isinstance(spec, schema.TensorInput)
    )


def _replayed(
    request: schema.GraphRequest,
    gm: torch.fx.GraphModule,
    compiled: Callable[..., Any],
    symbols: dict[str, int],
    ranges: Mapping[int, integer_inputs.Range],
    halves: Mapping[int, torch.fx.GraphModule],
) -> float:
    """The largest difference of any value of the forward or the backward from ATen's. Raises VerifyFailed."""
    tolerance = _tolerance(request, gm, [])
    worst = 0.0

    def compare(name: str, want: Any, have: Any, scale: float, doubt: random_replay.AtenReference) -> None:
        nonlocal worst
        floor = max(1e-3, 1e-3 * scale)
        share = rounded_share(tolerance) if doubt.rounded else 0.0
        worst = max(worst, _judge(name, want, have, doubt, floor, tolerance, share, 20.0 * tolerance * floor))

    with compiled_graphs.intercepting_calls(halves, random_replay.Replay(compare)):
        _run(request, compiled, symbols, ranges)
    return worst


def _judge(
    name: str,
    want: Any,
    have: Any,
    doubt: random_replay.AtenReference,
    floor: float,
    tolerance: float,
    integer_share: float,
    residue: float,
) -> float:
    """The largest difference of a value from eager's. Raises VerifyFailed if it is too large to be rounding."""
    relative, absolute = difference(name, want, have, floor, integer_share)
    if (
        not relative <= tolerance
        and not absolute <= NOISE_MULTIPLE * doubt.noise()
        and not _is_rounding(want, have, doubt.exact(), residue)
    ):
        if _is_without_rounding(want):
            raise VerifyFailed(f"{name} differs from eager in {_share(want, have)} integers")
        raise VerifyFailed(
            f"{name} differs from eager by {relative:.3g} of its magnitude, tolerance {tolerance:g}"
        )
    return absolute


def _share(want: torch.Tensor, have: torch.Tensor) -> str:
    return f"{int((want != have).sum())} of {want.numel()}"


def _is_rounding(want: Any, have: Any, exact: Any, residue: float) -> bool:
    """Whether compiled code is about as near to float64 as eager is. A value that is much smaller than `residue` in
    float64 is a sum of terms that cancel: it may be off by `residue`, because the terms' order decides what remains."""
    if not isinstance(exact, torch.Tensor) or exact.dtype != torch.float64 or exact.shape != have.shape:
        return False
    own, theirs = (float((value.double() - exact).abs().max()) for value in (want, have))
    # A backward's inputs are rounded already, so the exact sum is seldom 0.0.
    if float(exact.abs().max()) <= 0.1 * residue:
        return theirs <= residue
    return theirs <= EXACT_MULTIPLE * own


EXACT_MULTIPLE = 10.0
"""Compiled code may be this many times as far from float64 as eager is, because it adds in another order."""


NOISE_MULTIPLE = 20.0
"""A value may differ by this many times what eager's value changes by when its inputs change by rounding errors."""


def exercise(request: schema.GraphRequest, compiled: Callable[..., Any], settings: VerifySettings) -> None:
    """Run the compiled graph once, so that its kernels measure their candidates. Its results are ignored."""
    symbols = {s.name: s.hint for s in request.symbols}
    if _input_bytes(request, symbols) > settings.limit(request.target.kind):
        return
    # Random inputs may be invalid for the graph; its kernels then keep all candidates.
    with contextlib.suppress(RuntimeError, IndexError):
        _run(request, compiled, symbols, {})


class _Eager:
    """How exact eager's values are: how they change with their inputs, and what they are in float64.

    Some values are nothing but rounding noise, such as the gradient of a bias that a batch norm cancels. Any two
    correct programs then disagree by more than the tolerance. The noise also depends on the order of summation, which
    changed inputs do not change; float64 shows that part.
    """

    def __init__(
        self,
        request: schema.GraphRequest,
        gm: torch.fx.GraphModule,
        symbols: dict[str, int],
        ranges: Mapping[int, integer_inputs.Range],
        expected: _Outcome,
    ) -> None:
        self._expected = expected
        self._run = functools.partial(_run, request, gm, symbols, ranges)

    def noise_of(self, name: str) -> float:
        """How far a value changes when its inputs change by four units in the last place."""
        return self._noise[name]

    def exact(self, name: str) -> Any:
        """A value in float64; None if an operator of the graph does not take float64."""
        return self._exact.get(name)

    @functools.cached_property
    def _noise(self) -> dict[str, float]:
        noise: dict[str, float] = {}
        for nudge in (4.0, -4.0):
            for name, want, have in _pairs(self._expected, self._run(nudge=nudge)):
                noise[name] = max(
                    noise.get(name, 0.0), difference(name, want, have, integer_share=rounded_share(0.0))[1]
                )
        return noise

    @functools.cached_property
    def _exact(self) -> dict[str, Any]:
        try:
            return dict(_named(self._run(exact=True)))
        except (RuntimeError, TypeError):
            return {}


def _input_bytes(request: schema.GraphRequest, symbols: dict[str, int]) -> int:
    return sum(
        math.prod(int(program.size_value(s, symbols)) for s in spec.shape)
        * getattr(torch, spec.dtype).itemsize
        for spec in request.inputs
        if isinstance(spec, schema.TensorInput)
    )


def random_node(gm: torch.fx.GraphModule) -> str:
    """The name of the first node that draws random numbers, in the graph or a graph inside it; '' if there is none."""
    calls = (node for node in _all_nodes(gm) if node.op in ("call_function", "call_method"))
    return next((str(node) for node in calls if _draws(node)), "")


def _all_nodes(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """The nodes of a graph and of all graphs inside it."""
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from module.graph.nodes


_RANDOM_WORDS = (
    "rand",
    "dropout",
    "bernoulli",
    "multinomial",
    "normal_",
    "uniform_",
    "exponential_",
    "rrelu",
)


def _draws(node: torch.fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else targets.target_name(node.target)
    name = name.rpartition("ops.")[2].lower()
    if "scaled_dot_product" in name:
        return _argument(node, 4, "dropout_p", 0.0) != 0
    if "dropout" in name:
        return _argument(node, 1, "p", 0.5) != 0 and _argument(node, 2, "training", True) is not False
    return any(word in name for word in _RANDOM_WORDS)


def _argument(node: torch.fx.Node, position: int, name: str, default: object) -> object:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _random_inputs(
    request: schema.GraphRequest,
    symbols: dict[str, int],
    ranges: Mapping[int, integer_inputs.Range],
    nudge: float = 0.0,
    exact: bool = False,
) -> list[Any]:
    """Seeded inputs. ranges: of integers, by position; the others are 0 or 1. nudge: change each float by so many units
    in the last place, up or down at random. exact: the same floats as float64."""
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

    inputs = program.make_inputs(request, symbols, make)
    for position, integers in ranges.items():
        _draw_integers(position, inputs[position], integers)
    return inputs


def _run(
    request: schema.GraphRequest,
    function: Callable[..., Any],
    symbols: dict[str, int],
    ranges: Mapping[int, integer_inputs.Range],
    nudge: float = 0.0,
    *,
    exact: bool = False,
) -> _Outcome:
    inputs = _random_inputs(request, symbols, ranges, nudge, exact)
    sources = [_gradient_source(v) for v in inputs if isinstance(v, torch.Tensor) and v.requires_grad]
    with ambient.apply_ambient(request.ambient):
        result = function(*inputs)
    outputs = list(result) if isinstance(result, tuple | list) else [result]
    gradients: list[torch.Tensor | None] = []
    differentiable = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if differentiable and sources:
        # The gradients of the outputs are random: equal ones would vanish in any normalization.
        # They are drawn on the device: a CPU takes seconds for a language model's logits.
        draws = {o.device: torch.Generator(o.device).manual_seed(1) for o in differentiable}
        seeds = [
            torch.randn(o.shape, generator=draws[o.device], device=o.device).to(o) for o in differentiable
        ]
        gradients = list(torch.autograd.grad(differentiable, sources, seeds, allow_unused=True))
    mutated = [value.detach() for value in inputs if isinstance(value, torch.Tensor)]
    return _Outcome([_detached(o) for o in outputs], mutated, gradients)


def _gradient_source(value: torch.Tensor) -> Any:
    """What autograd.grad differentiates by: for an activation its edge, as the graph may change it in place later."""
    return value if value.is_leaf else torch.autograd.graph.get_gradient_edge(value)


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _pairs(want: _Outcome, have: _Outcome) -> Iterable[tuple[str, Any, Any]]:
    if len(want.outputs) != len(have.outputs) or len(want.gradients) != len(have.gradients):
        raise VerifyFailed(f"{len(have.outputs)} outputs where eager gives {len(want.outputs)}")
    for (name, left), (_, right) in zip(_named(want), _named(have), strict=True):
        yield name, left, right


def _named(outcome: _Outcome) -> Iterable[tuple[str, Any]]:
    for kind, values in (
        ("output", outcome.outputs),
        ("input after the call", outcome.mutated),
        ("gradient", outcome.gradients),
    ):
        for position, value in enumerate(values):
            yield f"{kind} {position}", value


def _gradient_floor(outcome: _Outcome) -> float:
    """The magnitude below which a gradient counts as zero: a thousandth of the graph's largest gradient."""
    largest = [float(g.abs().max()) for g in outcome.gradients if g is not None and g.numel()]
    finite = [value for value in largest if math.isfinite(value)]
    return max(1e-3, 1e-3 * max(finite, default=0.0))


def _tolerance(request: schema.GraphRequest, gm: torch.fx.GraphModule, outputs: Sequence[Any]) -> float:
    """The tolerance of the lowest precision among inputs, outputs, autocast and casts inside the graph."""
    dtypes = {getattr(torch, s.dtype) for s in request.inputs if isinstance(s, schema.TensorInput)}
    dtypes |= {o.dtype for o in outputs if isinstance(o, torch.Tensor)}
    dtypes |= {getattr(torch, cast.dtype) for cast in request.ambient.autocast}
    for node in _all_nodes(gm):
        dtypes |= {a for a in (*node.args, *node.kwargs.values()) if isinstance(a, torch.dtype)}
        if node.op == "call_method" and node.target in ("half", "bfloat16"):
            dtypes.add(torch.float16 if node.target == "half" else torch.bfloat16)
    return max((TOLERANCE.get(dtype, 0.0) for dtype in dtypes), default=5e-3) or 5e-3
