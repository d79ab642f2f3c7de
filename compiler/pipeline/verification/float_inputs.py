"""Finds how the floats of each input are drawn so that values keep their size from layer to layer, as a model's do.

With weights of one standard deviation, whatever their size, a layer of real width multiplies its input by ten or more,
softmax saturates, and rounding decides the results: right code is refused, and wrong code may pass.

The graph runs with eager, and operators are looked at. The weight that a matrix product or convolution takes is scaled
so that the result has the standard deviation that is wanted. A vector is near one where it multiplies and small where
it is added. Running variances are positive, and what is multiplied by a very large number is a mask of zeros and ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from msgspec import Struct

from ...search.numerics import memory_of
from ...torch_internals.dynamo.operators import packets, tensors_in

Kind = Literal["normal", "near one", "small", "zero or one"]


class FloatDraw(Struct, frozen=True):
    """How an input's floats are drawn. scale: of normal ones, as numerics.fill draws them."""

    kind: Kind
    scale: float = 1.0

    def apply(self, value: torch.Tensor, draw: torch.Generator) -> None:
        """Change the floats of an input that numerics.fill has filled. Memory that is shared changes once."""
        memory = memory_of(value)
        if self.kind == "normal":
            memory.mul_(self.scale)
            return
        uniform = torch.rand(memory.shape, generator=draw, device=memory.device)
        if self.kind == "near one":
            memory.copy_(uniform + 0.5)
        elif self.kind == "small":
            memory.copy_((uniform - 0.5) * 0.5)
        else:
            memory.copy_(uniform < 0.75)


def vary(value: torch.Tensor, draw: torch.Generator) -> None:
    """Add to an input that numerics.fill has filled what neighbours have in common, as in an image, a sequence or a
    trained convolution's window: a number for each first and second index, and one for each first and last. Where all
    are independent, a mean over an image is nearly the same for all of a batch, a batch norm after it divides by next
    to nothing, and rounding decides what follows. The standard deviation stays as it is."""
    if value.dim() < 3 or not value.dtype.is_floating_point or memory_of(value) is not value:
        return
    first, second, *_, last = value.shape
    ones = [1] * (value.dim() - 2)
    wide = value.float()
    for shape in ((first, second, *ones), (first, *ones, last)):
        wide.add_(torch.randn(shape, generator=draw, device=value.device), alpha=0.5)
    value.copy_(wide.div_(math.sqrt(3)))


class FloatWatch:
    """Looks at the floats of each operator. Adds to `draws`, by the positions of inputs, and changes these inputs."""

    def __init__(
        self,
        inputs: Sequence[Any],
        parameters: frozenset[int],
        draws: dict[int, FloatDraw],
        deviation: float,
    ) -> None:
        """parameters: positions of the inputs that are parameters. deviation: the standard deviation of results."""
        self._inputs = inputs
        self._parameters = parameters
        self._draws = draws
        self._deviation = deviation
        self._decided: set[int] = set()
        self._to_fit: tuple[tuple[int, ...], torch.Tensor] | None = None
        """The inputs that the product which runs now has as an operand, and that operand."""
        self._origins: dict[int, _Origin] = {}
        """By a memory's address."""
        for position, value in enumerate(inputs):
            if isinstance(value, torch.Tensor) and value.dtype.is_floating_point and address_of(value):
                self._origins.setdefault(address_of(value), _Origin(value, (position,)))

    def before(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Look at an operator that is about to run. Returns whether the graph must run again, with a mask."""
        packet = getattr(operator, "overloadpacket", None)
        self._to_fit = self._operand(*args[_PRODUCTS[packet]]) if packet in _PRODUCTS else None
        for place, kind in _VECTORS.get(packet, {}).items():
            if place < len(args):
                self._draw_vector(args[place], kind)
        if packet in _SCALING:
            return self._draw_mask(args)
        return False

    def after(self, operator: Any, args: tuple[Any, ...], results: Any) -> None:
        """Note which results are inputs in another form."""
        packet = getattr(operator, "overloadpacket", None)
        if self._to_fit is not None:
            self._fit(*self._to_fit, tensors_in(results)[0])
        given = tensors_in(args)
        origins = [self._origin(value) for value in given]
        known = bool(origins) and all(origins)
        is_same = known and (packet in _COPIES or getattr(operator, "is_view", False))
        is_shifted = known and packet in _SHIFTS and len(given) == 1
        for result in tensors_in(results):
            address = address_of(result)
            if not (is_same or is_shifted):
                self._origins.pop(address, None)  # it may have been written over
            elif is_shifted or address not in self._origins:
                positions = tuple(p for origin in origins if origin for p in origin.positions)
                shifted = is_shifted or any(origin.shifted for origin in origins if origin)
                self._origins[address] = _Origin(result, positions, shifted)

    def undecided(self) -> Iterator[tuple[int, FloatDraw]]:
        """Draws for the parameters of two and more dimensions that no product takes as they are, such as embeddings."""
        for position in sorted(self._parameters - self._decided):
            value = self._inputs[position]
            if value.dtype.is_floating_point and value.dim() > 1:
                yield position, FloatDraw("normal", 2 / math.sqrt(max(4, value.shape[-1])))

    def _origin(self, value: Any) -> _Origin | None:
        return self._origins.get(address_of(value)) if isinstance(value, torch.Tensor) else None

    def _operand(self, left: Any, right: Any) -> tuple[tuple[int, ...], torch.Tensor] | None:
        """Which operand of a product is to be scaled, and as which inputs; None for neither."""
        whole = [self._whole(left), self._whole(right)]
        if all(whole):
            parameters = [self._parameters.issuperset(positions) for positions in whole]
            whole[0 if parameters[1] or not parameters[0] else 1] = ()
        for positions, weight in zip(whole, (left, right), strict=True):
            if fresh := tuple(position for position in positions if position not in self._decided):
                return fresh, weight
        return None

    def _fit(self, positions: tuple[int, ...], weight: torch.Tensor, result: torch.Tensor) -> None:
        """Scale an operand, and the product, by the product's size: operands are not independent of each other."""
        size = _deviation(result)
        if not math.isfinite(size) or size <= 1e-9:
            return
        factor = self._deviation / size
        result.mul_(factor)
        shares = {address_of(self._inputs[p]) for p in positions}
        for position in positions:
            self._decided.add(position)
            before = self._draws.get(position, FloatDraw("normal"))
            self._draws[position] = FloatDraw("normal", before.scale * factor)
            memory_of(self._inputs[position]).mul_(factor)
        if address_of(weight) not in shares:
            memory_of(weight).mul_(factor)

    def _whole(self, value: Any) -> tuple[int, ...]:
        """The positions of the inputs that a value is, if it is nothing else and has more than one dimension."""
        origin = self._origin(value)
        return origin.positions if origin and not origin.shifted and value.dim() > 1 else ()

    def _draw_vector(self, value: Any, kind: Kind) -> None:
        origin = self._origin(value)
        if origin is None or origin.shifted:
            return
        for position in origin.positions:
            vector = self._inputs[position]
            if position in self._decided or max(vector.shape, default=1) != vector.numel():
                continue
            self._decided.add(position)
            if position not in self._draws:
                self._draws[position] = FloatDraw(kind)
                self._draws[position].apply(vector, generator(vector, position))

    def _draw_mask(self, args: tuple[Any, ...]) -> bool:
        origin = next(filter(None, map(self._origin, args)), None)
        large = any(abs(number) >= _LARGE for number in map(_number, args))
        if origin is None or not large or any(p in self._draws for p in origin.positions):
            return False
        for position in origin.positions:
            self._draws[position] = FloatDraw("zero or one")
            self._draws[position].apply(self._inputs[position], generator(self._inputs[position], position))
        return True


class _Origin(Struct, frozen=True):
    """The inputs whose values a tensor holds. shifted: numbers were added to them or multiplied with them."""

    value: torch.Tensor
    positions: tuple[int, ...]
    shifted: bool = False


def generator(value: torch.Tensor, position: int) -> torch.Generator:
    """The random numbers of the input at a position."""
    return torch.Generator(value.device).manual_seed(1000 + position)


def address_of(value: torch.Tensor) -> int:
    """The memory's address; 0 for all tensors that may have none of their own, such as DTensors."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return 0
    return value.untyped_storage().data_ptr()


def _deviation(value: torch.Tensor) -> float:
    """The root of the mean square."""
    norm = float(torch.linalg.vector_norm(value, dtype=torch.float32))
    return norm / math.sqrt(max(1, value.numel()))


_LARGE = 1e3
"""What is multiplied by more than this is a mask: (1 - mask) * -10000."""


def _number(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and value.dtype.is_floating_point else 0.0
    return float(value) if isinstance(value, int | float) else 0.0


_PRODUCTS = {
    **dict.fromkeys(
        packets("mm bmm mv dot linear _grouped_mm _scaled_mm _scaled_grouped_mm convolution"), slice(2)
    ),
    **dict.fromkeys(packets("addmm baddbmm addmv _addmm_activation"), slice(1, 3)),
}
"""Where a product has its operands."""

_BATCH_NORMS = (
    "native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit "
    "_native_batch_norm_legit_no_training _batch_norm_with_update batch_norm_with_update"
)


_VECTOR_ARGUMENTS: tuple[tuple[str, dict[int, Kind]], ...] = (
    ("mul", {0: "near one", 1: "near one"}),
    ("add sub", {0: "small", 1: "small"}),
    ("rsub addmm baddbmm addmv _addmm_activation", {0: "small"}),
    ("convolution linear", {2: "small"}),
    ("native_layer_norm", {2: "near one", 3: "small"}),
    ("_fused_rms_norm", {2: "near one"}),
    ("native_group_norm", {1: "near one", 2: "small"}),
    (_BATCH_NORMS, {1: "near one", 2: "small", 3: "small", 4: "near one"}),
)
_VECTORS = {packet: kinds for names, kinds in _VECTOR_ARGUMENTS for packet in packets(names)}
"""By place in the arguments: how a vector that the operator takes there is drawn."""

_COPIES = frozenset(packets("_to_copy clone cat stack _unsafe_view"))

_SHIFTS = frozenset(packets("rsub sub add mul neg div"))

_SCALING = frozenset(packets("mul div"))
