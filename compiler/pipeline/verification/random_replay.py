"""Verifies graphs that draw random numbers: compares each graph that Inductor compiled with ATen.

Eager draws its random numbers in another order than compiled code, so their outputs cannot be compared. Instead, each
graph that AOTAutograd gives to Inductor (forward, backward) is run node by node with ATen, on the same inputs and from
the same generator state as the compiled graph. Random values come from the kernels' own generator.
Attention with dropout draws inside ATen's kernel, which compiled code calls too.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ...errors import VerifyFailed
from ...torch_internals.dynamo import operators
from ...torch_internals.inductor import compile_fx
from ...torch_internals.inductor.subgraphs import invoke_subgraph
from .outcomes import RUNS, AtenReference, EagerRounding
from .random_rounding import rounding_at_random


class CannotReplay(Exception):
    """The graph cannot be run with ATen as compiled code runs it, so the two cannot be compared."""


RngVariant = Literal["cpu", "triton", "triton4x"]
"""How a kernel makes a number from (seed, position). cpu: C++. triton: tl.rand, whose key has the whole seed.
triton4x: triton_helpers.rand4x (torch 2.13), where four positions share a counter and take one word each."""

Compare = Callable[[str, Any, Any, float, AtenReference], None]
"""Takes a value's name, ATen's value, the compiled graph's, the largest magnitude among the graph's outputs, and how
exact ATen's value is. Raises VerifyFailed if the values differ."""


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
    """Runs graphs with ATen and compares their values with the compiled graphs'. `graphs`: how many it has run;
    `seconds`: of the compiled ones' runs."""

    def __init__(self, compare: Compare, runs: int = RUNS[0]) -> None:
        self._compare = compare
        self._runs = runs
        self.graphs = 0
        self.seconds = 0.0

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any], run: Callable[[list[Any]], Any]) -> Any:
        """Return `run(inputs)`, and compare its outputs and changed inputs with those of `gm`."""
        self.graphs += 1
        given = list(inputs)  # compiled code empties the list it is given
        before = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        state = _Generators.now()
        references = [_Reference(gm, before, state, way) for way in _ways(gm)]
        try:
            references[0].run()
        except CannotReplay:
            raise
        except Exception as error:  # random inputs may be invalid, such as an index out of range
            raise CannotReplay(f"{type(error).__name__}: {str(error)[:200]}") from error
        state.put_back()
        began = time.perf_counter()
        outputs = _listed(run(inputs))
        self.seconds += time.perf_counter() - began
        after = _Generators.now()
        self._judge_by_any(references, outputs, given)
        after.put_back()
        return outputs

    def _judge_by_any(self, references: list[_Reference], outputs: list[Any], inputs: list[Any]) -> None:
        first, *others = references
        try:
            self._judge(first, outputs, inputs)
        except VerifyFailed:
            if not others:
                raise
            others[0].run()
            self._judge_by_any(others, outputs, inputs)

    def _judge(self, reference: _Reference, outputs: list[Any], inputs: list[Any]) -> None:
        changed = reference.changed
        have = outputs + [inputs[position] for position in changed]
        names = [f"output {p}" for p in range(len(outputs))]
        names += [f"input {p} after the call" for p in changed]
        scale = max((_magnitude(value) for value in reference.values), default=0.0)
        rounded = reference.rounded + [True] * len(changed)
        rounding = reference.rounding(self._runs)
        wrong: list[VerifyFailed] = []
        for position, (name, a, b) in enumerate(zip(names, reference.values, have, strict=True)):
            if position in reference.unwritten:
                continue
            doubt = rounding.of(position, rounded[position])
            try:
                self._compare(f"{name} of graph {self.graphs}", a, b, scale, doubt)
            except VerifyFailed as error:  # the others say whether the graph is chaotic
                wrong.append(error)
        if wrong:
            raise wrong[0]


class _Reference:
    """A graph run with ATen. `values`: its outputs, then the inputs that it changes, whose positions are `changed`."""

    def __init__(self, gm: torch.fx.GraphModule, inputs: list[Any], state: _Generators, way: Masks) -> None:
        self._gm, self._inputs, self._state, self._way = gm, inputs, state, way
        self.changed = _changed_inputs(gm)
        self.rounded = _rounded_outputs(gm)
        self.unwritten = unwritten_outputs(gm)
        self.values: list[Any] = []

    def run(self) -> None:
        self.values = self._run(self._inputs)

    def rounding(self, runs: int) -> EagerRounding:
        """How exact the values are, by their positions. runs: see EagerRounding."""
        return EagerRounding(
            dict(enumerate(self.values)),
            self._run_rounded,
            lambda: dict(enumerate(self._run(list(map(_doubled, self._inputs)), exact=True))),
            runs,
        )

    def _run_rounded(self, run: int) -> dict[Any, Any]:
        with rounding_at_random(run):
            return dict(enumerate(self._run(self._inputs)))

    def _run(self, inputs: list[Any], *, exact: bool = False) -> list[Any]:
        self._state.put_back()
        mine = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        with torch.no_grad():
            outputs = _listed(_Drawing(self._gm, self._way, exact=exact).run(*mine))
        return outputs + [mine[position] for position in self.changed]


def _doubled(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.dtype.is_floating_point else value


def _magnitude(value: Any) -> float:
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point or not value.numel():
        return 0.0
    largest = float(value.abs().max())
    return largest if math.isfinite(largest) else 0.0


Masks = Literal["as written", "float32", "float32 below a rounded threshold"]
"""How a mask compares random numbers with a threshold. A graph in half precision rounds the numbers first. A kernel may
keep them in float32, and may round the threshold or not. The masks then differ where a number is within rounding of the
threshold; each of them is right."""


def _ways(gm: torch.fx.GraphModule) -> list[Masks]:
    return ["float32", "float32 below a rounded threshold", "as written"] if _masks(gm) else ["as written"]


def _masks(gm: torch.fx.GraphModule) -> dict[torch.fx.Node, torch.dtype]:
    """Dropout's masks: the nodes that round a random number which is then only compared with a number, perhaps through
    views, and those comparisons; each with the dtype that it is rounded to."""
    found: dict[torch.fx.Node, torch.dtype] = {}
    for node in operators.all_nodes(gm):
        if node.target is torch.ops.prims.convert_element_type.default:
            number: Any
            dtype: Any
            number, dtype = node.args
            if number.target is torch.ops.prims.inductor_random.default and (ends := _compared(node)):
                found |= dict.fromkeys([node, *ends], dtype)
    return found


def _compared(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The comparisons that use a value, perhaps through views; none if anything else uses it too."""
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
    """Interprets a graph with ATen, but draws the random numbers of Inductor's kernels. exact: casts to a floating
    dtype give float64."""

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        way: Masks,
        *,
        exact: bool = False,
        spelling: RngVariant | None = None,
    ) -> None:
        super().__init__(gm)
        self._exact = exact
        self._spelling = spelling or rng_variant(gm)
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
            # Generated code draws seeds from this range; the operator itself has another.
            limits = torch.iinfo(torch.int64)
            return torch.randint(limits.min, limits.max, [args[0]], device=args[1])
        if target is torch.ops.prims.inductor_random.default:
            size, seed, mode = args[:3]
            spelled = "cpu" if seed.device.type == "cpu" else self._spelling
            return (uniform if mode == "rand" else normal)(size, seed, spelled)
        if target is invoke_subgraph:
            return _Drawing(args[0], self._way, exact=self._exact, spelling=self._spelling).run(*args[2:])
        # ATen's results may have other strides than AOTAutograd's, and then have no such view.
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default
        if getattr(target, "__name__", "").startswith(
            "_scaled_dot_product"
        ):  # kernels that refuse other layouts
            args = tuple(_with_dense_rows(value) for value in args)
        if self._exact:
            args, kwargs = operators.widened(target, args, kwargs)
        return super().call_function(target, args, kwargs)


def _with_dense_rows(value: Any) -> Any:
    is_laid_out = not isinstance(value, torch.Tensor) or value.dim() < 4 or value.stride(-1) == 1
    return value if is_laid_out else value.contiguous()


def _changed_inputs(gm: torch.fx.GraphModule) -> list[int]:
    """Positions of the inputs that the graph changes. Not donated inputs, whose memory compiled code may reuse."""
    changed = {node.args[0] for node in gm.graph.nodes if operators.mutates_inputs(node.target) and node.args}
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [position for position, node in enumerate(placeholders) if node in changed]


def _rounded_outputs(gm: torch.fx.GraphModule) -> list[bool]:
    """Says of each output whether a float or an unknown value is among what it is computed from."""
    rounded: dict[torch.fx.Node, bool] = {}
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        whole = isinstance(value, int | torch.SymInt) or (
            isinstance(value, torch.Tensor) and not (value.dtype.is_floating_point or value.dtype.is_complex)
        )
        rounded[node] = not whole or any(rounded[given] for given in node.all_input_nodes)
    (output,) = gm.graph.find_nodes(op="output")
    return [isinstance(value, torch.fx.Node) and rounded[value] for value in _listed(output.args[0])]


def unwritten_outputs(gm: torch.fx.GraphModule) -> frozenset[int]:
    """Positions of the outputs that attention on a GPU leaves as their memory was: the state of the generator, if there
    is no dropout, and what its schema calls unused."""
    (output,) = gm.graph.find_nodes(op="output")
    return frozenset(p for p, value in enumerate(_listed(output.args[0])) if _is_unwritten(value))


def _is_unwritten(value: Any) -> bool:
    if not isinstance(value, torch.fx.Node) or value.target is not operator.getitem:
        return False
    call: Any
    position: Any
    call, position = value.args
    name = operators.result_name(call, position)
    return name == "unused" or (name in _GENERATOR_STATE and not operators.schema_argument(call, "dropout_p"))


_GENERATOR_STATE = ("rng_state", "philox_seed", "philox_offset")


def rng_variant(gm: torch.fx.GraphModule) -> RngVariant:
    """How the Triton kernels compiled from `gm` draw. Raises CannotReplay if they draw in both ways."""
    code = compile_fx.generated_code(gm)
    four, one = (word in code for word in ("triton_helpers.rand", "tl.rand"))
    if four and one:
        raise CannotReplay("its kernels number their random values in two ways")
    return "triton4x" if four else "triton"


def cannot_draw(gm: torch.fx.GraphModule) -> str:
    """Why the graph's random numbers cannot be drawn again here; '' if they can."""
    drawing: dict[str, list[torch.fx.Node]] = {}
    order = []
    for node in operators.all_nodes(gm):
        name = str(node.target)
        if name.startswith("prims.inductor_") and any(word in name for word in ("rand", "seed")):
            if name.split(".")[1] not in _WORKED_OUT:
                return str(node)
            call = "aten.randint.low_out" if "seeds" in name else ""
        elif torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            if operators.schema_argument(node, "dropout_p") == 0.0:
                continue
            if name.split(".")[1].removesuffix("_backward") not in ATTENTION:
                return str(node)
            call = "" if "_backward" in name else name
        else:
            continue
        if call:
            drawing.setdefault(call, []).append(node)
            order.append(call)
    if len(order) > 1:
        # Compiled code may run independent calls in any order, and then draws other numbers.
        calls = re.compile("|".join(rf"\b{re.escape(call)}\(" for call in drawing))
        if [found[:-1] for found in calls.findall(compile_fx.generated_code(gm))] != order:
            return f"{', '.join(order)} in another order"
        for first, second in itertools.chain(*map(itertools.pairwise, drawing.values())):
            if not _leads_to(first, second):
                return f"{first} and {second} in either order"
    return ""


_WORKED_OUT = ("inductor_seeds", "inductor_lookup_seed", "inductor_random")


ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
"""Operators that draw from the device's generator inside ATen's kernel, which compiled code calls too; the backward
gets the generator's state from the forward. Not cuDNN's: in a Transformer encoder layer, though not in attention alone,
compiled code drew other numbers from the same state."""


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


# --- random values as compiled kernels draw them ---------------------------------------------------------------
# Philox-4x32-10 at (seed, position), computed with tensors. Salmon et al., "Parallel random numbers: as easy as 1, 2,
# 3", 2011; ATen/core/PhiloxRNGEngine.h, triton/language/random.py.

_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF

_PIECE = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Positions computed at once: so many that they fit into a CPU's cache, or take little of a GPU's memory."""


def uniform(size: Sequence[int], seed: torch.Tensor, spelled: RngVariant = "cpu") -> torch.Tensor:
    """What a kernel draws for `prims.inductor_random(size, seed, "rand")`: float32 in [0, 1) of shape `size`."""
    words = _words(size, seed, spelled, 1)
    return _to_float(words[0], spelled).reshape(tuple(size))


def normal(size: Sequence[int], seed: torch.Tensor, spelled: RngVariant = "cpu") -> torch.Tensor:
    """What a kernel draws for "randn": float32 of shape `size`, standard normal, by the Box-Muller transform."""
    first, second = (_to_float(word, spelled).double() for word in _words(size, seed, spelled, 2))
    if spelled == "cpu":
        first, second = 1 - first, 1 - second
    else:
        first = first.clamp_(min=1e-7)
    angle = second.mul_(2.0 * math.pi)
    if spelled == "triton4x":  # two words make two values
        odd = torch.arange(len(angle), device=angle.device) % 2 == 1
        direction = torch.where(odd, torch.sin(angle), torch.cos(angle))
    else:
        direction = torch.cos(angle)
    return torch.sqrt(-2.0 * torch.log(first)).mul(direction).float().reshape(tuple(size))


def _to_float(word: torch.Tensor, spelled: RngVariant) -> torch.Tensor:
    if spelled == "cpu":
        return (word & 0x7FFFFFFF).float() * 4.6566127342e-10
    negative = word > 0x7FFFFFFF  # the sign bit of a 32-bit word x; Triton then takes -x - 1
    return torch.where(negative, _MASK - word, word).float() * 4.6566127342e-10


def _words(size: Sequence[int], seed: torch.Tensor, spelled: RngVariant, count: int) -> list[torch.Tensor]:
    """The `count` 32-bit words from which each position's number is made: flat tensors of int64."""
    total = math.prod(size)
    if spelled != "triton4x":
        return _philox(total, seed, spelled, count)
    if 1 < total < 4:  # a small block may not draw four at once
        raise CannotReplay(f"a kernel may draw {total} random values in either of two ways")
    four = _philox((total + 3) // 4, seed, spelled, 4)
    if count == 1:
        return [torch.stack(four, dim=1).reshape(-1)[:total]]
    a, b, c, d = four
    return [torch.stack(pair, dim=1).reshape(-1)[:total] for pair in ((a, a, c, c), (b, b, d, d))]


def _philox(total: int, seed: torch.Tensor, spelled: RngVariant, count: int) -> list[torch.Tensor]:
    """The first `count` 32-bit words (as int64) of Philox-4x32-10 for each position below `total`.

    The counter is (position, 0, 0, 0). The key is the seed's lower and upper half; C++ has 0 as the upper one.
    Computed in pieces, because memory bandwidth would limit larger tensors.
    """
    whole = int(seed)
    key = (whole & _MASK, 0 if spelled == "cpu" else (whole >> 32) & _MASK)
    words = [torch.empty(total, dtype=torch.int64, device=seed.device) for _ in range(count)]
    piece = _PIECE[seed.device.type]
    for start in range(0, total, piece):
        positions = torch.arange(
            start, min(start + piece, total), dtype=torch.int64, device=seed.device
        ).bitwise_and_(_MASK)
        for word, value in zip(words, _rounds(positions, key), strict=False):
            word[start : start + piece] = value
    return words


def _rounds(positions: torch.Tensor, keys: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Philox' ten rounds. int64 holds the 64 bits of an unsigned product; its sign is the highest bit."""
    a, b, c, d = positions, *(torch.zeros_like(positions) for _ in range(3))
    for _ in range(10):
        left, right = a.mul_(_ROUND_A), c.mul_(_ROUND_B)
        low_left, low_right = left & _MASK, right & _MASK
        a = right.bitwise_right_shift_(32).bitwise_and_(_MASK).bitwise_xor_(b).bitwise_xor_(keys[0])
        c = left.bitwise_right_shift_(32).bitwise_and_(_MASK).bitwise_xor_(d).bitwise_xor_(keys[1])
        b, d = low_right, low_left
        keys = ((keys[0] + _KEY_A) & _MASK, (keys[1] + _KEY_B) & _MASK)
    return a, b, c, d
