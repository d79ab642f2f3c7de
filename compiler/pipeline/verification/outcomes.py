"""Runs a graph on given inputs and compares what two forms of it give: outputs, changed inputs and gradients.

The measure is a tensor's largest difference relative to its largest magnitude, within the tolerance of the lowest
precision in the graph (docs/decisions/0007).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from msgspec import Struct

from ...errors import VerifyFailed
from ...graph import names
from ...request.allowed_names import words
from ...search.numerics import TOLERANCE, difference, rounded_share, shared_places
from ...torch_internals import devices
from ...torch_internals.dynamo.operators import all_nodes


class Outcome(Struct):
    """mutated: the inputs that are tensors, after the call; None where two outcomes have the same. gradients: of the
    inputs that require one, and for those that are views of one base, of the base."""

    outputs: list[Any]
    mutated: list[Any]
    gradients: list[torch.Tensor | None]


class Chaotic(Exception):
    """Eager's own value changes so much by rounding that a comparison with it means nothing; the text says which."""


class Precision(NamedTuple):
    """What the lowest precision in a graph means for a comparison of two runs of it."""

    sure: float
    """The largest difference relative to a tensor's largest magnitude that needs no further look."""
    tolerance: float
    """The largest one where there is no float64 to compare with."""
    noise_multiple: float
    """A value may differ by this many times what eager's value changes by when it is rounded at random."""
    known_multiple: float
    """The same where float64 is known, and compiled code is further from it than it should be."""
    exact_multiple: float
    """Compiled code may be this many times as far from float64 as eager is, because it adds in another order."""


class AtenReference(NamedTuple):
    """How exact ATen's value is. Computed on demand, because it takes further runs."""

    noise: Callable[[], float]
    """How far the value changes in runs that round at random (random_rounding.py)."""
    exact: Callable[[], Any]
    """The value in float64; None if ATen cannot compute it."""
    unstable: Callable[[], Any]
    """Where an integer or boolean changes by rounding: it was computed from a float near a threshold."""
    rounded: bool = True
    """Whether it was computed from floats; False: from integers alone."""


def outcome_of(function: Callable[..., Any], inputs: Sequence[Any]) -> Outcome:
    """Call `function`, which may change the inputs, and differentiate its outputs by them. The gradients of the outputs
    are the same in every call. `mutated` holds the inputs themselves."""
    origins = _gradient_origins(inputs)
    sources: list[Any] = [
        value if value.is_leaf else torch.autograd.graph.get_gradient_edge(value) for value in origins
    ]
    places = [shared_places(value) for value in origins]
    result = function(*inputs)
    outputs = list(result) if isinstance(result, tuple | list) else [result]
    gradients: list[torch.Tensor | None] = []
    differentiable = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if differentiable and sources:
        # The gradients of the outputs are random: equal ones would vanish in any normalization.
        # They are drawn on the device: a CPU takes seconds for a language model's logits.
        draws = {o.device: torch.Generator(o.device).manual_seed(1) for o in differentiable}
        loss = _loss_gradient(differentiable)
        seeds = [
            (
                torch.randn(o.shape, generator=draws[o.device], device=o.device)
                if o.dim()
                else o.new_tensor(loss)
            ).to(o)
            if type(o) in (torch.Tensor, torch.nn.Parameter)
            else torch.ones_like(o)  # a DTensor, say
            for o in differentiable
        ]
        with _without_autocast():
            found = torch.autograd.grad(differentiable, sources, seeds, allow_unused=True)
        gradients = [_by_memory(each, place) for each, place in zip(found, places, strict=True)]
    mutated = [value.detach() for value in inputs if isinstance(value, torch.Tensor)]
    return Outcome([_detached(o) for o in outputs], mutated, gradients)


def _loss_gradient(outputs: Sequence[torch.Tensor]) -> float:
    """The gradient of an output that is a number: a loss, which is a mean. Its part in other gradients would be nothing
    beside that of other outputs, such as logits, if it were 1."""
    elements = sum(output.numel() for output in outputs)
    half = any(not output.dim() and output.dtype.itemsize < 4 for output in outputs)
    return 1e3 if half else 32.0 * math.sqrt(max(elements, 10_000))


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Inside the block, autocast is off, as where a program calls backward."""
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _gradient_origins(inputs: Sequence[Any]) -> list[torch.Tensor]:
    """What autograd.grad differentiates by; for an activation by its edge, as the graph may change it in place later.
    For views it is their base: which of their own edges are used after a change is different in compiled code, which
    computes all of them from the base, and only the sum reaches the program's parameters."""
    wanted = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
    return list({id(origin): origin for origin in map(_origin, wanted)}.values())


def _origin(value: torch.Tensor) -> torch.Tensor:
    base = value._base
    return value if value.is_leaf or base is None or not base.requires_grad else base


def _by_memory(gradient: torch.Tensor | None, places: torch.Tensor | None) -> torch.Tensor | None:
    """Elements that share memory have one gradient, the sum; which of them gets which part of it is not defined."""
    if gradient is None or places is None or not gradient.numel():
        return gradient
    total = gradient.new_zeros(int(places.max()) + 1)
    return total.index_add_(0, places.flatten(), gradient.flatten())


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


RUNS = (2, 8)
"""With how many runs that round at random values are judged; and in the second draw, where one seemed wrong."""


class EagerRounding:
    """How exact eager's values are: how they change with other rounding, and what they are in float64.

    Some values are nothing but rounding noise, such as the gradient of a bias that a batch norm cancels. Any two
    correct programs then disagree by more than the tolerance. The noise also depends on the order of summation, which
    other rounding does not change; float64 shows that part.
    """

    def __init__(
        self,
        expected: Mapping[Any, Any],
        rounded: Callable[[int], Mapping[Any, Any]],
        exact: Callable[[], Mapping[Any, Any]],
        runs: int = RUNS[0],
    ) -> None:
        """expected: eager's values by name. rounded(run): those of a run that rounds at random, by its number.
        exact(): in float64; raises RuntimeError or TypeError if an operator does not take it."""
        self.runs = runs
        self._expected = expected
        self._run_rounded = rounded
        self._run_exact = exact
        self._done = 0
        self._noise: dict[Any, float] = {}
        """For each float how far it changes."""
        self._changes: dict[Any, torch.Tensor] = {}
        """For each integer where it changes."""

    def of(self, name: Any, rounded: bool = True) -> AtenReference:
        """The reference for the value with a name."""
        return AtenReference(
            lambda: self._run().get(name, 0.0),
            lambda: self._exact.get(name),
            lambda: self._unstable(name),
            rounded,
        )

    def _run(self) -> dict[Any, float]:
        while self._done < self.runs:
            self._done += 1
            values = self._run_rounded(self._done)
            for name, want in self._expected.items():
                have = values[name]
                if isinstance(want, torch.Tensor) and want.shape != have.shape:  # it depends on the data
                    self._noise[name] = math.inf
                    self._changes[name] = torch.ones_like(want, dtype=torch.bool)
                elif is_without_rounding(want):
                    before = self._changes.get(name, torch.zeros_like(want, dtype=torch.bool))
                    self._changes[name] = before | (want != have)
                else:
                    moved = difference(str(name), want, have)[1]
                    self._noise[name] = max(self._noise.get(name, 0.0), moved)
            del values  # before the next run
        return self._noise

    def _unstable(self, name: Any) -> torch.Tensor:
        self._run()
        changed, want = self._changes[name], self._expected[name]
        exact = self._exact.get(name)
        return changed if exact is None or exact.shape != want.shape else changed | (want != exact)

    @functools.cached_property
    def _exact(self) -> Mapping[Any, Any]:
        try:
            return self._run_exact()
        except (RuntimeError, TypeError) as error:
            if devices.is_out_of_memory(error):
                raise  # there is a value, and no room for it: that says nothing of the code
            return {}


def drop_equal_inputs(want: Outcome, have: Outcome) -> None:
    """Free the inputs that hold the same after both calls, as parameters do: further runs need the memory."""
    for position, (left, right) in enumerate(zip(want.mutated, have.mutated, strict=True)):
        plain = type(left) is type(right) is torch.Tensor
        if plain and left.dtype == right.dtype and torch.equal(left, right):
            want.mutated[position] = have.mutated[position] = None


class Comparison(Struct):
    """worst: the largest difference of any value. values: how many results and gradients there are. chaotic: of which
    values eager is no reference, and why. wrong: which differ by more than rounding, by name, and by how much.
    right: the names of the others."""

    worst: float = 0.0
    values: int = 0
    chaotic: list[str] = []
    wrong: dict[str, str] = {}
    right: set[str] = set()

    def add(self, name: str, judged: Callable[[], float]) -> None:
        """Take what `judge` says of a value. Raises VerifyFailed."""
        self.values += not name.startswith("input")
        try:
            self.worst = max(self.worst, judged())
            self.right.add(name)
        except Chaotic as error:
            self.chaotic = [*self.chaotic, str(error)]


def compare(
    expected: Outcome,
    actual: Outcome,
    precision: Precision,
    rounding: EagerRounding,
    exact: Iterable[str] = (),
) -> Comparison:
    """Compare all values with eager's. exact: names of values that contain no rounding. Raises VerifyFailed for another
    number of values."""
    comparison = Comparison()
    without_rounding = frozenset(exact)
    gradient_floor = _gradient_floor(expected)
    for name, want, have in _pairs(expected, actual):
        floor = gradient_floor if name.startswith("gradient") else 1e-3
        reference = rounding.of(name, name not in without_rounding)
        judged = functools.partial(judge, name, want, have, reference, floor, precision, gradient_floor)
        try:
            comparison.add(name, judged)
        except VerifyFailed as error:
            comparison.wrong = {**comparison.wrong, name: error.message}
    return comparison


def judge(
    name: str,
    want: Any,
    have: Any,
    reference: AtenReference,
    floor: float,
    precision: Precision,
    residue_floor: float,
) -> float:
    """The largest difference of a value from eager's. floor: a magnitude that counts as zero. Raises VerifyFailed if it
    is too large to be rounding, Chaotic if rounding may do anything to it."""
    share = rounded_share(precision.tolerance) if reference.rounded else 0.0
    relative, absolute = difference(name, want, have, floor, share)
    if relative <= precision.sure:
        return absolute
    if is_without_rounding(want):
        _judge_integers(name, want, have, reference, share)
        return 0.0
    exact = reference.exact()
    if relative <= precision.tolerance and exact is None:
        return absolute
    limit = precision.tolerance * max(_magnitude(want), 100.0 * floor)
    residue = 20.0 * precision.tolerance * residue_floor
    if _is_rounding(name, want, have, exact, residue, limit, precision.exact_multiple):
        return absolute
    noise = reference.noise()
    if noise > limit:
        raise Chaotic(f"{name}, at most {_magnitude(want):.3g}, changes by {noise:.3g} with other rounding")
    if absolute <= noise * (precision.noise_multiple if exact is None else precision.known_multiple):
        return absolute
    raise VerifyFailed(
        f"{name} differs from eager by {relative:.3g} of its magnitude, tolerance {precision.tolerance:g}"
    )


def _judge_integers(name: str, want: Any, have: Any, reference: AtenReference, share: float) -> None:
    """Integers and booleans that were computed from floats must be equal where the floats are away from a threshold."""
    wrong = want != have
    if reference.rounded:
        unstable = reference.unstable()
        near = int(unstable.sum())
        if int((wrong & ~unstable).sum()) <= max(share * want.numel(), near):
            if near > CHAOTIC_SHARE * want.numel():
                raise Chaotic(f"{near} of {want.numel()} integers of {name} change by rounding")
            return
    raise VerifyFailed(f"{name} differs from eager in {int(wrong.sum())} of {want.numel()} integers")


CHAOTIC_SHARE = 0.05
"""Where more of a tensor's integers than this change by rounding, a comparison says little."""


def _magnitude(value: Any) -> float:
    """The largest finite magnitude."""
    if not isinstance(value, torch.Tensor) or not value.numel():
        return 0.0
    magnitudes = value.detach().abs()
    largest = float(magnitudes.max())
    return largest if math.isfinite(largest) else float(magnitudes.nan_to_num(0.0, 0.0, 0.0).max())


def is_without_rounding(value: Any) -> bool:
    """Whether it is a tensor of integers or booleans."""
    return isinstance(value, torch.Tensor) and not (value.dtype.is_floating_point or value.dtype.is_complex)


def _is_rounding(
    name: str, want: Any, have: Any, exact: Any, residue: float, limit: float, multiple: float
) -> bool:
    """Whether compiled code is about as near to float64 as eager is, by the largest error and, where there are many, by
    the root of the mean square. A value that is much smaller than `residue` in float64 is a sum of terms that cancel:
    it may be off by `residue`, because the terms' order decides what remains. Raises Chaotic if eager is off by more
    than twice `limit`."""
    if not all(isinstance(each, torch.Tensor) for each in (want, have, exact)):
        return False
    if exact.dtype != torch.float64 or exact.shape != have.shape:
        return False
    own, theirs = (value.double().sub(exact).abs() for value in (want, have))
    largest_own, largest = float(own.max()), float(theirs.max())
    # A backward's inputs were rounded before, so the exact sum is seldom 0.0.
    if float(exact.abs().max()) <= 0.1 * residue:
        return largest <= residue
    if largest_own > 2 * limit:
        raise Chaotic(
            f"{name}, at most {_magnitude(want):.3g}, is {largest_own:.3g} from its value in float64"
        )
    if want.numel() >= MANY and float(theirs.square().mean()) > (RMS_MULTIPLE**2) * float(
        own.square().mean()
    ):
        return False
    return largest <= multiple * largest_own


MANY = 1024
"""Where there are this many values, the root of the mean square error is compared too."""
RMS_MULTIPLE = 3.0


def _pairs(want: Outcome, have: Outcome) -> Iterable[tuple[str, Any, Any]]:
    if len(want.outputs) != len(have.outputs) or len(want.gradients) != len(have.gradients):
        raise VerifyFailed(f"{len(have.outputs)} outputs where eager gives {len(want.outputs)}")
    for (name, left), (_, right) in zip(named(want), named(have), strict=True):
        yield name, left, right


def named(outcome: Outcome) -> Iterator[tuple[str, Any]]:
    """Each value with its name in messages."""
    for kind, values in (
        ("output", outcome.outputs),
        ("input after the call", outcome.mutated),
        ("gradient", outcome.gradients),
    ):
        for position, value in enumerate(values):
            yield f"{kind} {position}", value


def _gradient_floor(outcome: Outcome) -> float:
    """The magnitude below which a gradient counts as zero: a thousandth of the graph's largest gradient."""
    largest = [float(g.abs().max()) for g in outcome.gradients if g is not None and g.numel()]
    finite = [value for value in largest if math.isfinite(value)]
    return max(1e-3, 1e-3 * max(finite, default=0.0))


def precision_of(gm: torch.fx.GraphModule, dtypes: Iterable[torch.dtype]) -> Precision:
    """The lowest precision among `dtypes` (of inputs, outputs and autocast) and casts in the graph."""
    found = set(dtypes)
    for node in all_nodes(gm):
        found |= {a for a in (*node.args, *node.kwargs.values()) if isinstance(a, torch.dtype)}
        if node.op == "call_method" and node.target in ("half", "bfloat16"):
            found.add(torch.float16 if node.target == "half" else torch.bfloat16)
    lowest = max(found & TOLERANCE.keys(), key=TOLERANCE.__getitem__, default=torch.float32)
    tolerance = TOLERANCE[lowest]
    if lowest in (torch.float16, torch.bfloat16):
        return Precision(tolerance / 4, tolerance, 10.0, known_multiple=3.0, exact_multiple=3.0)
    return Precision(tolerance, tolerance, 20.0, known_multiple=20.0, exact_multiple=10.0)


def dtypes_of(values: Iterable[Any]) -> set[torch.dtype]:
    return {value.dtype for value in values if isinstance(value, torch.Tensor)}


def random_node(gm: torch.fx.GraphModule) -> str:
    """The name of the first node that draws random numbers, in the graph or a graph inside it; '' if there is none."""
    calls = (node for node in all_nodes(gm) if node.op in ("call_function", "call_method"))
    return next((str(node) for node in calls if draws(node)), "")


_RANDOM_WORDS = words("rand dropout bernoulli multinomial normal_ uniform_ exponential_ rrelu")


def draws(node: torch.fx.Node) -> bool:
    """Whether a node that calls something draws random numbers."""
    name = node.target if isinstance(node.target, str) else names.target_name(node.target)
    name = name.rpartition("ops.")[2].lower()
    if "scaled_dot_product" in name:
        return argument(node, 4, "dropout_p", 0.0) != 0
    if "dropout" in name:
        return argument(node, 1, "p", 0.5) != 0 and argument(node, 2, "training", True) is not False
    return any(word in name for word in _RANDOM_WORDS)


def argument(node: torch.fx.Node, position: int, name: str, default: object) -> object:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
