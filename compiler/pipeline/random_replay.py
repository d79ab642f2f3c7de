"""Verification of graphs that draw random numbers: Inductor's own graphs in; agreement with ATen out.

Eager draws its random numbers in another order than compiled code, so their outputs cannot be compared. What can
be: each graph that AOTAutograd hands to Inductor (forward, backward) against the same graph run node by node with
ATen, on the very inputs of the compiled run and from the same generator state. Random values come from the same
counter-based generator that the kernels use, Philox-4x32-10 at (seed, position), worked out here with tensors
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011; ATen/core/PhiloxRNGEngine.h,
triton/language/random.py). Attention with dropout draws inside ATen's own kernel, the same on both sides.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from ..errors import VerifyFailed
from ..torch_internals.dynamo import operators
from ..torch_internals.inductor import compiled_graphs
from .philox import CannotReplay, RngVariant, normal, uniform


class AtenReference(NamedTuple):
    """What else ATen says of a value that compiled code disagrees about; worked out when asked."""

    noise: Callable[[], float]
    """How far ATen's own value moves when the inputs change by a few units in the last place."""
    exact: Callable[[], Any]
    """The value in float64; None where ATen cannot work it out."""


Compare = Callable[[str, Any, Any, float, AtenReference], None]
"""(name, what ATen gives, what compiled code gives, the largest magnitude among the graph's outputs, what else ATen
says); raises VerifyFailed where they differ."""


class _Generators(NamedTuple):
    """The state of the generators that a graph may draw from."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def now(cls) -> _Generators:
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(0) if on_gpu else None)

    def put_back(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, 0)


class Replay:
    """Runs a graph beside its compiled form. `compare` judges each pair of values; `graphs` counts the runs."""

    def __init__(self, compare: Compare) -> None:
        self._compare = compare
        self.graphs = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any], run: Callable[[list[Any]], Any]) -> Any:
        """`run(inputs)`, after which its outputs and changed inputs have been compared with `gm`'s."""
        self.graphs += 1
        given = list(inputs)  # compiled code empties the list it is given
        before = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        state = _Generators.now()
        first, *others = [_Reference(gm, before, state, way) for way in _ways(gm)]
        try:
            first.run()
        except CannotReplay:
            raise
        except Exception as error:  # indices out of range and the like: the inputs are random
            raise CannotReplay(f"{type(error).__name__}: {str(error)[:200]}") from error
        state.put_back()
        outputs = _listed(run(inputs))
        after = _Generators.now()
        self._judge_by_any([first, *others], outputs, given)
        after.put_back()
        return outputs

    def _judge_by_any(self, references: list[_Reference], outputs: list[Any], given: list[Any]) -> None:
        first, *others = references
        try:
            self._judge(first, outputs, given)
        except VerifyFailed:
            if not others:
                raise
            others[0].run()
            self._judge_by_any(others, outputs, given)

    def _judge(self, reference: _Reference, outputs: list[Any], given: list[Any]) -> None:
        changed = reference.changed
        have = outputs + [given[position] for position in changed]
        names = [f"output {p}" for p in range(len(outputs))]
        names += [f"input {p} after the call" for p in changed]
        scale = max((_magnitude(value) for value in reference.values), default=0.0)
        for position, (name, a, b) in enumerate(zip(names, reference.values, have, strict=True)):
            doubt = AtenReference(
                functools.partial(reference.noise_of, position),
                functools.partial(reference.exact, position),
            )
            self._compare(f"{name} of graph {self.graphs}", a, b, scale, doubt)


class _Reference:
    """A graph run with ATen. `values`: its outputs, then the inputs that it changes, whose positions are `changed`."""

    def __init__(self, gm: torch.fx.GraphModule, inputs: list[Any], state: _Generators, way: Masks) -> None:
        self._gm, self._inputs, self._state, self._way = gm, inputs, state, way
        self.changed = _changed_inputs(gm)
        self.values: list[Any] = []
        self._moved: list[float] | None = None
        self._exact: list[Any] | None = None

    def run(self) -> None:
        self.values = self._run(self._inputs)

    def noise_of(self, position: int) -> float:
        """How far a value moves when the inputs change by four units in the last place."""
        if self._moved is None:
            self._moved = [0.0] * len(self.values)
            for sign in (4.0, -4.0):
                nudged = self._run([_nudged(x, sign) for x in self._inputs])
                for index, (a, b) in enumerate(zip(self.values, nudged, strict=True)):
                    if isinstance(a, torch.Tensor) and a.dtype.is_floating_point and a.numel():
                        self._moved[index] = max(self._moved[index], float((a - b).abs().max()))
        return self._moved[position]

    def exact(self, position: int) -> Any:
        """A value in float64; None where an operator takes float32 alone."""
        if self._exact is None:
            try:
                self._exact = self._run(list(map(_doubled, self._inputs)), exact=True)
            except (RuntimeError, TypeError):
                self._exact = [None] * len(self.values)
        return self._exact[position]

    def _run(self, inputs: list[Any], *, exact: bool = False) -> list[Any]:
        self._state.put_back()
        mine = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        with torch.no_grad():
            outputs = _listed(_Drawing(self._gm, self._way, exact=exact).run(*mine))
        return outputs + [mine[position] for position in self.changed]


def _nudged(value: Any, units: float) -> Any:
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return value
    signs = torch.ones_like(value)
    signs.reshape(-1)[::2] = -1
    return value * (1 + units * torch.finfo(value.dtype).eps * signs)


def _doubled(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.dtype.is_floating_point else value


def _magnitude(value: Any) -> float:
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point or not value.numel():
        return 0.0
    largest = float(value.abs().max())
    return largest if math.isfinite(largest) else 0.0


Masks = Literal["as written", "float32", "float32 below a rounded threshold"]
"""How random numbers that decide something are compared. A graph in half precision rounds them first; a kernel may
keep them in float32, and round the threshold or not: a mask then differs where a number is within rounding of it.
Each way is right."""


def _ways(gm: torch.fx.GraphModule) -> list[Masks]:
    return ["float32", "float32 below a rounded threshold", "as written"] if _masks(gm) else ["as written"]


def _masks(gm: torch.fx.GraphModule) -> dict[torch.fx.Node, torch.dtype]:
    """The comparisons with a number that are all that becomes of a rounded random number, views of it between, and
    what it was rounded to: dropout's masks. And the conversions that round, for the same."""
    found: dict[torch.fx.Node, torch.dtype] = {}
    for node in gm.graph.nodes:
        if node.target is torch.ops.prims.convert_element_type.default:
            number, dtype = node.args
            if number.target is torch.ops.prims.inductor_random.default and (ends := _compared(node)):
                found |= dict.fromkeys([node, *ends], dtype)
    return found


def _compared(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The comparisons that a value ends in; none if it ends in anything else too."""
    ends: list[torch.fx.Node] = []
    for user in node.users:
        if user.target in _COMPARISONS:
            ends.append(user)
        elif user.target in _VIEWS and (further := _compared(user)):
            ends += further
        else:
            return []
    return ends


_COMPARISONS = tuple(getattr(torch.ops.aten, name).Scalar for name in ("gt", "ge", "lt", "le"))


_VIEWS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("permute", "view", "reshape", "_unsafe_view", "expand", "unsqueeze", "t", "clone", "alias")
) | {torch.ops.aten.transpose.int, torch.ops.aten.squeeze.dim, torch.ops.aten.squeeze.dims}


class _Drawing(torch.fx.Interpreter):
    """Interprets a graph with ATen, but draws Inductor's random numbers. exact: nothing is rounded to less than
    float64."""

    def __init__(self, gm: torch.fx.GraphModule, way: Masks, *, exact: bool = False) -> None:
        super().__init__(gm)
        self._exact = exact
        self._spelling = rng_variant(gm)
        self._way = way
        self._masks = {} if way == "as written" else _masks(gm)

    def run_node(self, n: torch.fx.Node) -> Any:
        if (dtype := self._masks.get(n)) is None:
            return super().run_node(n)
        (number, other), _ = self.fetch_args_kwargs_from_env(n)
        if n.target not in _COMPARISONS:
            return number
        if self._way == "float32 below a rounded threshold":
            other = torch.tensor(other, dtype=dtype).item()
        return n.target(number, other)  # type: ignore[operator]

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.prims.inductor_seeds.default:
            limits = torch.iinfo(
                torch.int64
            )  # as generated code draws seeds; the operator's own range differs
            return torch.randint(limits.min, limits.max, [args[0]], device=args[1])
        if target is torch.ops.prims.inductor_random.default:
            size, seed, mode = args[:3]
            spelled = "cpu" if seed.device.type == "cpu" else self._spelling
            return (uniform if mode == "rand" else normal)(size, seed, spelled)
        if (
            target is torch.ops.aten.view.default
        ):  # ATen's results may be laid out otherwise than AOTAutograd's
            target = torch.ops.aten.reshape.default
        if self._exact and target is torch.ops.prims.convert_element_type.default:
            return super().call_function(target, (args[0], _widest(args[1])), kwargs)
        if self._exact and isinstance(kwargs.get("dtype"), torch.dtype):
            kwargs = {**kwargs, "dtype": _widest(kwargs["dtype"])}
        return super().call_function(target, args, kwargs)


def _widest(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _changed_inputs(gm: torch.fx.GraphModule) -> list[int]:
    """Positions of the inputs that the graph itself changes. Compiled code may reuse others' memory (donated)."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    changed = {node.args[0] for node in gm.graph.nodes if operators.mutates_inputs(node.target) and node.args}
    return [position for position, node in enumerate(placeholders) if node in changed]


def rng_variant(gm: torch.fx.GraphModule) -> RngVariant:
    """How the Triton kernels compiled from `gm` draw. Raises CannotReplay if they do it in more than one way."""
    code = compiled_graphs.generated_code(gm)
    four, one = (word in code for word in ("triton_helpers.rand", "tl.rand"))
    if four and one:
        raise CannotReplay("its kernels number their random values in two ways")
    return "triton4x" if four else "triton"


def cannot_draw(gm: torch.fx.GraphModule) -> str:
    """Why the graph's random numbers cannot be drawn again here; '' if they can."""
    drawing: dict[str, list[torch.fx.Node]] = {}
    order = []
    for node in gm.graph.nodes:
        name = str(node.target)
        if name.startswith("prims.inductor_") and any(word in name for word in ("rand", "seed")):
            if name.split(".")[1] not in _WORKED_OUT:
                return str(node)
            call = "aten.randint.low_out" if "seeds" in name else ""
        elif torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            if name.split(".")[1].removesuffix("_backward") not in _ATTENTION:
                return str(node)
            draws = "_backward" not in name and operators.schema_argument(node, "dropout_p")
            call = name if draws else ""
        else:
            continue
        if call:
            drawing.setdefault(call, []).append(node)
            order.append(call)
    if len(order) > 1:
        # Compiled code runs what is independent in any order, and then draws other numbers.
        calls = re.compile("|".join(rf"\b{re.escape(call)}\(" for call in drawing))
        if [found[:-1] for found in calls.findall(compiled_graphs.generated_code(gm))] != order:
            return f"{', '.join(order)} in another order"
        for first, second in itertools.chain(*map(itertools.pairwise, drawing.values())):
            if not _leads_to(first, second):
                return f"{first} and {second} in either order"
    return ""


_WORKED_OUT = ("inductor_seeds", "inductor_lookup_seed", "inductor_random")


_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
"""What draws from the device's generator inside ATen's own kernel, which compiled code calls too; its backward takes
the generator's state from it. Not cuDNN's: in a Transformer encoder
layer, not in attention alone, compiled code drew other numbers from the same state."""


def _leads_to(first: torch.fx.Node, second: torch.fx.Node) -> bool:
    seen: set[torch.fx.Node] = set()
    open_ends = [second]
    while open_ends:
        for node in open_ends.pop().all_input_nodes:
            if node is first:
                return True
            if node not in seen:
                seen.add(node)
                open_ends.append(node)
    return False


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]
