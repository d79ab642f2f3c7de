"""Verification of graphs that draw random numbers: Inductor's own graphs in; agreement with ATen out.

Eager draws its random numbers in another order than compiled code, so their outputs cannot be compared. What can
be: each graph that AOTAutograd hands to Inductor (forward, backward) against the same graph run node by node with
ATen, on the very inputs of the compiled run and from the same generator state. Random values come from the same
counter-based generator that the kernels use, Philox-4x32-10 at (seed, position), worked out here with tensors
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011; ATen/core/PhiloxRNGEngine.h).

CPU graphs only: Triton spells its generator differently.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import torch_internals

_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_PIECE = 1 << 15

Compare = Callable[[str, Any, Any, float, Callable[[], float]], None]
"""(name, what ATen gives, what compiled code gives, the largest magnitude among the graph's outputs, how far ATen's own
value moves when the inputs change by a few units in the last place); raises VerifyFailed where they differ."""


class CannotReplay(Exception):
    """ATen itself refused the graph on these inputs; nothing can be said of the compiled form."""


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
        state = torch.get_rng_state()
        try:
            want, changed = _reference(gm, before)
        except Exception as error:  # indices out of range and the like: the inputs are random
            raise CannotReplay(f"{type(error).__name__}: {str(error)[:200]}") from error
        torch.set_rng_state(state)
        have = _listed(run(inputs))
        have += [given[position] for position in changed]
        want += changed.values()
        names = [f"output {p}" for p in range(len(want) - len(changed))]
        names += [f"input {p} after the call" for p in changed]
        scale = max((_magnitude(value) for value in want), default=0.0)
        after = torch.get_rng_state()
        noise = _Noise(gm, before, state, want)
        for position, (name, a, b) in enumerate(zip(names, want, have, strict=True)):
            self._compare(
                f"{name} of graph {self.graphs}", a, b, scale, functools.partial(noise.of, position)
            )
        torch.set_rng_state(after)
        return have[: len(have) - len(changed)]


class _Noise:
    """How far ATen's own values move when the inputs change by four units in the last place, found when asked for."""

    def __init__(
        self, gm: torch.fx.GraphModule, inputs: list[Any], state: torch.Tensor, want: list[Any]
    ) -> None:
        self._gm, self._inputs, self._state, self._want = gm, inputs, state, want
        self._moved: list[float] | None = None

    def of(self, position: int) -> float:
        if self._moved is None:
            self._moved = [0.0] * len(self._want)
            for sign in (4.0, -4.0):
                torch.set_rng_state(self._state)
                outputs, changed = _reference(self._gm, [_nudged(x, sign) for x in self._inputs])
                for index, (a, b) in enumerate(zip(self._want, [*outputs, *changed.values()], strict=True)):
                    if isinstance(a, torch.Tensor) and a.dtype.is_floating_point and a.numel():
                        self._moved[index] = max(self._moved[index], float((a - b).abs().max()))
        return self._moved[position]


def _nudged(value: Any, units: float) -> Any:
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return value
    signs = torch.ones_like(value)
    signs.reshape(-1)[::2] = -1
    return value * (1 + units * torch.finfo(value.dtype).eps * signs)


def _magnitude(value: Any) -> float:
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point or not value.numel():
        return 0.0
    largest = float(value.abs().max())
    return largest if math.isfinite(largest) else 0.0


def _reference(gm: torch.fx.GraphModule, inputs: list[Any]) -> tuple[list[Any], dict[int, Any]]:
    """ATen's outputs, and the inputs that the graph changes, by position; `inputs` themselves stay as they are."""
    mine = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    with torch.no_grad():
        outputs = _listed(_Drawing(gm).run(*mine))
    return outputs, {position: mine[position] for position in _changed_inputs(gm)}


class _Drawing(torch.fx.Interpreter):
    """Interprets a graph with ATen, but draws Inductor's random numbers."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.prims.inductor_seeds.default:
            limits = torch.iinfo(
                torch.int64
            )  # as generated code draws seeds; the operator's own range differs
            return torch.randint(limits.min, limits.max, [args[0]])
        if target is torch.ops.prims.inductor_random.default:
            size, seed, mode = args[:3]
            return uniform(size, seed) if mode == "rand" else normal(size, seed)
        return super().call_function(target, args, kwargs)


def _changed_inputs(gm: torch.fx.GraphModule) -> list[int]:
    """Positions of the inputs that the graph itself changes. Compiled code may reuse others' memory (donated)."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    changed = {
        node.args[0]
        for node in gm.graph.nodes
        if torch_internals.changes_its_inputs(node.target) and node.args
    }
    return [position for position, node in enumerate(placeholders) if node in changed]


def cannot_draw(gm: torch.fx.GraphModule) -> str:
    """The name of a node that draws in a way not worked out here (random integers), '' if there is none."""
    known = ("inductor_seeds", "inductor_lookup_seed", "inductor_random")
    for node in gm.graph.nodes:
        name = str(node.target)
        drawing = name.startswith("prims.inductor_") and any(word in name for word in ("rand", "seed"))
        if drawing and name.split(".")[1] in known:
            continue
        if drawing:
            return str(node)
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return str(node)
    return ""


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


def uniform(size: Sequence[int], seed: torch.Tensor) -> torch.Tensor:
    """float32 in [0, 1) of shape `size`: what a CPU kernel draws for `prims.inductor_random(size, seed, "rand")`."""
    return _to_float(_philox(size, seed)[0])


def normal(size: Sequence[int], seed: torch.Tensor) -> torch.Tensor:
    """float32 standard normal of shape `size`, by Box-Muller, as CPU kernels do it."""
    first, second = _philox(size, seed)
    u1, u2 = 1 - _to_float(first), 1 - _to_float(second)
    return torch.sqrt(-2.0 * torch.log(u1.double())).mul(torch.cos(2.0 * math.pi * u2.double())).float()


def _to_float(word: torch.Tensor) -> torch.Tensor:
    return (word & 0x7FFFFFFF).float() * 4.6566127342e-10


def _philox(size: Sequence[int], seed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first two 32-bit words (in int64) for each position: Philox-4x32-10 of counter (position, 0, 0, 0), key
    (seed, 0). In pieces that stay in a processor's cache, or memory would be what takes the time."""
    key = int(seed) & _MASK
    first, second = (torch.empty(math.prod(size), dtype=torch.int64) for _ in range(2))
    for start in range(0, len(first), _PIECE):
        positions = torch.arange(start, min(start + _PIECE, len(first)), dtype=torch.int64)
        first[start : start + _PIECE], second[start : start + _PIECE] = _rounds(
            positions.bitwise_and_(_MASK), key
        )
    return first.reshape(tuple(size)), second.reshape(tuple(size))


def _rounds(positions: torch.Tensor, key: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Philox' ten rounds. A 64-bit product keeps its bits in int64, whose sign then stands for the highest."""
    a, b, c, d = positions, *(torch.zeros_like(positions) for _ in range(3))
    keys = (key, 0)
    for _ in range(10):
        left, right = a.mul_(_ROUND_A), c.mul_(_ROUND_B)
        low_left, low_right = left & _MASK, right & _MASK
        a = right.bitwise_right_shift_(32).bitwise_and_(_MASK).bitwise_xor_(b).bitwise_xor_(keys[0])
        c = left.bitwise_right_shift_(32).bitwise_and_(_MASK).bitwise_xor_(d).bitwise_xor_(keys[1])
        b, d = low_right, low_left
        keys = ((keys[0] + _KEY_A) & _MASK, (keys[1] + _KEY_B) & _MASK)
    return a, b
