"""Stage 8: the compiled graph is compared with eager on random inputs. Raises VerifyFailed where they disagree.

Forward outputs, in-place changes of inputs, and gradients are compared, once, on inputs of the request's own
shapes (symbols at their example values). The measure is the largest difference of a tensor relative to its
largest magnitude; the tolerance follows the lowest precision at work, and a value that is rounding noise in eager too
may differ by a multiple of that noise. Graphs that draw random numbers are compared half by half
(random_replay.py). What
cannot be compared is skipped, and the manifest says why: graphs past the memory limit, graphs that eager itself
refuses on random inputs, and random numbers that cannot be drawn again.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct

from ..artifact import manifest
from ..errors import VerifyFailed
from ..graph import ambient, decode, dtensor_calls, targets
from ..graph.numerics import TOLERANCE, difference, fill
from ..request import schema
from ..torch_internals.inductor import compiled_graphs
from . import philox, program, random_replay


class VerifySettings(Struct, frozen=True, kw_only=True):
    memory_bytes: int = 4 << 30
    """Inputs larger than this, all together, are not verified."""
    gpu_memory_fraction: float = 0.125
    """On a GPU, inputs may also take this part of its memory: outputs, gradients and eager's own come on top."""

    def limit(self, kind: str) -> int:
        """Bytes of inputs up to which a graph for a `cpu` or `cuda` target is run."""
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
    """Compare `compiled` with eager. `runnable`: why this worker cannot run the code at all, '' if it can.

    A graph that draws random numbers is compared half by half instead (random_replay.py), by `halves`: the graphs that
    Inductor compiled, by the id of their compiled form. Raises VerifyFailed with the first value that differs.
    """
    start = time.perf_counter()

    def skipped(reason: str) -> manifest.Verification:
        return manifest.Verification("skipped", reason, 0.0, time.perf_counter() - start)

    symbols = {s.name: s.hint for s in request.symbols}
    need = _input_bytes(request, symbols)
    if runnable:
        return skipped(runnable)
    if need > (limit := settings.limit(request.target.kind)):
        return skipped(f"inputs need {need} bytes, limit {limit}")
    gm = decode.decode_graph(
        request.graph,
        request.constants,
        device_index={"cuda": 0},
        symbols=symbols,
        kernels=request.kernels,
        spread=dtensor_calls.RequestMeshes(request.meshes, request.target.kind),
    )
    if name := _random_node(gm):
        unknown = next(filter(None, map(random_replay.cannot_draw, (halves or {}).values())), "")
        if not halves or unknown:
            return skipped(f"the graph draws random numbers ({unknown or name})")
        try:
            worst = _replayed(request, gm, compiled, symbols, halves)
        except philox.CannotReplay as error:
            return skipped(f"the graph draws random numbers, and cannot be run with ATen: {error}")
        except torch.OutOfMemoryError as error:
            return skipped(f"the GPU has too little memory for both: {str(error)[:200]}")
        return manifest.Verification("passed", "", worst, time.perf_counter() - start)
    try:
        expected = _run(request, gm, symbols)
    except Exception as error:  # eager's own refusal of random inputs: indices out of range and the like
        return skipped(f"eager cannot run on random inputs: {type(error).__name__}: {str(error)[:200]}")
    try:
        worst = _compared(request, gm, compiled, symbols, expected)
    except torch.OutOfMemoryError as error:  # eager's results are held beside the compiled graph's
        return skipped(f"the GPU has too little memory for both: {str(error)[:200]}")
    return manifest.Verification("passed", "", worst, time.perf_counter() - start)


def _compared(
    request: schema.GraphRequest,
    gm: torch.fx.GraphModule,
    compiled: Callable[..., Any],
    symbols: dict[str, int],
    expected: _Outcome,
) -> float:
    """The largest difference of any value from eager's. Raises VerifyFailed."""
    found = _run(request, compiled, symbols)
    tolerance = _tolerance(request, gm, expected.outputs)
    worst = 0.0
    noise: _Noise | None = None
    floor = _gradient_floor(expected)
    for name, want, have in _pairs(expected, found):
        relative, absolute = difference(
            name, want, have, floor if name.startswith("gradient") else 1e-3, tolerance
        )
        worst = max(worst, absolute)
        if not relative <= tolerance:
            noise = noise or _Noise(request, gm, symbols, expected)
            if not absolute <= NOISE_MULTIPLE * noise.of(name) and not _is_rounding(
                want, have, noise.exact(name), 20.0 * tolerance * floor
            ):
                raise _disagreement(name, relative, tolerance)
    return worst


def draws_random_numbers(gm: torch.fx.GraphModule) -> bool:
    """Whether a graph, or a graph inside it, draws random numbers when it runs."""
    return bool(_random_node(gm))


def _replayed(
    request: schema.GraphRequest,
    gm: torch.fx.GraphModule,
    compiled: Callable[..., Any],
    symbols: dict[str, int],
    halves: Mapping[int, torch.fx.GraphModule],
) -> float:
    """The largest difference of any value of either half from ATen's."""
    tolerance = _tolerance(request, gm, [])
    worst = 0.0

    def compare(name: str, want: Any, have: Any, scale: float, doubt: random_replay.AtenReference) -> None:
        nonlocal worst
        floor = max(1e-3, 1e-3 * scale)
        relative, absolute = difference(name, want, have, floor, tolerance)
        if (
            not relative <= tolerance
            and not absolute <= NOISE_MULTIPLE * doubt.noise()
            and not _is_rounding(want, have, doubt.exact(), 20.0 * tolerance * floor)
        ):
            raise _disagreement(name, relative, tolerance)
        worst = max(worst, absolute)

    with compiled_graphs.intercepting_calls(halves, random_replay.Replay(compare)):
        _run(request, compiled, symbols)
    return worst


def _disagreement(name: str, relative: float, tolerance: float) -> VerifyFailed:
    return VerifyFailed(
        f"{name} differs from eager by {relative:.3g} of its magnitude, tolerance {tolerance:g}"
    )


def _is_rounding(want: Any, have: Any, exact: Any, left: float) -> bool:
    """Whether compiled code is about as near to float64 as eager is. Where the value is nothing beside `left` in
    float64, so much may be left over: how much is, depends on the order in which terms that cancel are added."""
    if not isinstance(exact, torch.Tensor) or exact.dtype != torch.float64 or exact.shape != have.shape:
        return False
    own, theirs = (float((value.double() - exact).abs().max()) for value in (want, have))
    if (
        float(exact.abs().max()) <= 0.1 * left
    ):  # what a backward is given has been rounded, so it is seldom 0.0
        return theirs <= left
    return theirs <= EXACT_MULTIPLE * own


EXACT_MULTIPLE = 10.0
"""Compiled code may be this many times as far from float64 as eager is: it adds in another order."""


NOISE_MULTIPLE = 20.0
"""A difference this many times eager's own answer to rounding-sized changes of its inputs is still rounding."""


def exercise(request: schema.GraphRequest, compiled: Callable[..., Any], settings: VerifySettings) -> None:
    """Run the compiled graph once, so that its kernels measure their candidates; its results are not looked at."""
    symbols = {s.name: s.hint for s in request.symbols}
    if _input_bytes(request, symbols) > settings.limit(request.target.kind):
        return
    with contextlib.suppress(
        RuntimeError, IndexError
    ):  # random inputs may be refused; kernels then stay undecided
        _run(request, compiled, symbols)


class _Noise:
    """How far eager itself moves when its inputs change by a few units in the last place.

    Some values are rounding noise throughout (the gradient of a bias that a batch norm cancels): relative to
    their magnitude any two correct programs disagree about them. How large such noise is depends on the order of
    summation, which nudges do not change: float64 tells how far eager itself is off.
    """

    def __init__(
        self,
        request: schema.GraphRequest,
        gm: torch.fx.GraphModule,
        symbols: dict[str, int],
        expected: _Outcome,
    ) -> None:
        self._moved: dict[str, float] = {}
        self._exact: dict[str, Any] | None = None
        self._in_float64 = functools.partial(_run, request, gm, symbols, exact=True)
        for sign in (1.0, -1.0):
            nudged = _run(request, gm, symbols, nudge=sign * 4.0)
            for name, want, have in _pairs(expected, nudged):
                moved = difference(name, want, have)[1]
                self._moved[name] = max(self._moved.get(name, 0.0), moved)

    def of(self, name: str) -> float:
        return self._moved[name]

    def exact(self, name: str) -> Any:
        """A value in float64; None where an operator takes float32 alone."""
        if self._exact is None:
            try:
                outcome = self._in_float64()
            except (RuntimeError, TypeError):
                outcome = _Outcome([], [], [])
            self._exact = dict(_named(outcome))
        return self._exact.get(name)


def _input_bytes(request: schema.GraphRequest, symbols: dict[str, int]) -> int:
    return sum(
        math.prod(int(program.size_value(s, symbols)) for s in spec.shape)
        * getattr(torch, spec.dtype).itemsize
        for spec in request.inputs
        if isinstance(spec, schema.TensorInput)
    )


def _random_node(gm: torch.fx.GraphModule) -> str:
    """The name of the first node that draws random numbers, '' if none does: told by running on fake tensors."""
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if node.op in ("call_function", "call_method") and _draws(node):
                    return str(node)
    return ""


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
    if "scaled_dot_product" in name or "dropout" in name:
        return not _dropout_off(node)
    return any(word in name for word in _RANDOM_WORDS)


def _dropout_off(node: torch.fx.Node) -> bool:
    """Whether a dropout or attention node's probability is zero or its training flag is False."""
    name = node.target if isinstance(node.target, str) else targets.target_name(node.target)
    attention = "scaled_dot_product" in name
    position = 4 if attention else 1
    default = 0.0 if attention else 0.5
    keyword = "dropout_p" if attention else "p"
    p = node.args[position] if len(node.args) > position else node.kwargs.get(keyword, default)
    training = True
    if not attention:
        training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)  # type: ignore[assignment]
    return bool(p == 0) or training is False


def _random_inputs(
    request: schema.GraphRequest, symbols: dict[str, int], nudge: float, exact: bool
) -> list[Any]:
    """Seeded inputs; `nudge` scales floats by 1 + nudge units in the last place, its sign alternating. exact: the
    same floats as float64."""
    generator: dict[str, torch.Generator] = {}

    def make(spec: schema.TensorInput, shape: list[int], stride: list[int]) -> torch.Tensor:
        value = torch.empty_strided(shape, stride, dtype=getattr(torch, spec.dtype), device=spec.device)
        if spec.number is not None:
            return value.fill_(spec.number)
        draw = generator.setdefault(spec.device, torch.Generator(spec.device).manual_seed(0))
        fill(value, draw)
        if nudge and value.dtype.is_floating_point:
            step = nudge * torch.finfo(value.dtype).eps
            signs = torch.randint(0, 2, value.shape, device=value.device) * 2 - 1
            value.copy_(value * (1 + step * signs))
        return value.double() if exact and value.dtype.is_floating_point else value

    return program.make_inputs(request, symbols, make)


def _run(
    request: schema.GraphRequest,
    function: Callable[..., Any],
    symbols: dict[str, int],
    nudge: float = 0.0,
    *,
    exact: bool = False,
) -> _Outcome:
    inputs = _random_inputs(request, symbols, nudge, exact)
    sources = [_gradient_source(v) for v in inputs if isinstance(v, torch.Tensor) and v.requires_grad]
    with ambient.apply_ambient(request.ambient):
        result = function(*inputs)
    outputs = list(result) if isinstance(result, tuple | list) else [result]
    gradients: list[torch.Tensor | None] = []
    differentiable = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if differentiable and sources:
        # Random cotangents: constant ones vanish in any normalization and would compare nothing.
        # Drawn on the device: a language model's logits take seconds to fill on a CPU.
        draws = {o.device: torch.Generator(o.device).manual_seed(1) for o in differentiable}
        seeds = [
            torch.randn(o.shape, generator=draws[o.device], device=o.device).to(o) for o in differentiable
        ]
        gradients = list(torch.autograd.grad(differentiable, sources, seeds, allow_unused=True))
    mutated = [value.detach() for value in inputs if isinstance(value, torch.Tensor)]
    return _Outcome([_detached(o) for o in outputs], mutated, gradients)


def _gradient_source(value: torch.Tensor) -> Any:
    """What autograd.grad differentiates by: an activation as it is before the graph may change it in place."""
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
    """The magnitude below which a gradient counts as zero beside the graph's others: a thousandth of the largest."""
    largest = [float(g.abs().max()) for g in outcome.gradients if g is not None and g.numel()]
    finite = [value for value in largest if math.isfinite(value)]
    return max(1e-3, 1e-3 * max(finite, default=0.0))


def _tolerance(request: schema.GraphRequest, gm: torch.fx.GraphModule, outputs: Sequence[Any]) -> float:
    """By the lowest precision of inputs, outputs, autocast and casts inside the graph."""
    dtypes = {getattr(torch, s.dtype) for s in request.inputs if isinstance(s, schema.TensorInput)}
    dtypes |= {o.dtype for o in outputs if isinstance(o, torch.Tensor)}
    dtypes |= {getattr(torch, cast.dtype) for cast in request.ambient.autocast}
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                dtypes |= {a for a in (*node.args, *node.kwargs.values()) if isinstance(a, torch.dtype)}
                if node.op == "call_method" and node.target in ("half", "bfloat16"):
                    dtypes.add(torch.float16 if node.target == "half" else torch.bfloat16)
    return max((TOLERANCE.get(dtype, 0.0) for dtype in dtypes), default=5e-3) or 5e-3
