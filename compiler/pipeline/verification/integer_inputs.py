"""Finds how the inputs of a graph may be drawn, and what is computed from integers alone.

The graph runs with eager, and each operator's arguments are looked at before it runs: its floats as float_inputs.py
says, its integers so that they are valid. An index out of range
limits the inputs that it was computed from to the size of the dimension: on a GPU the operator itself would end the
process. An operator that is not known to take any integer limits them to 0 and 1.

Some inputs belong together, and drawn apart they are invalid, though eager may not notice: the tables of a block mask
must say what its mask_mod says, boundaries must be sorted, and the offsets of bags must rise from 0. These are derived
from what was drawn for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct

from ...torch_internals.dynamo.operators import (
    called_graph,
    is_pytorchs,
    packets,
    tensors_in,
    watching_calls,
)
from .block_masks import block_mask_of, is_flex_attention
from .float_inputs import FloatDraw, FloatWatch, address_of

Range = tuple[int, int]
"""The least integer, and the one after the largest."""

NARROW: Range = (0, 2)
_WIDE = 1 << 15
_MAX_RUNS = 64
_LAST_RUNS = 8
"""So many of the last runs draw 0 and 1 only."""


class InputFacts(Struct, frozen=True):
    """By position, ranges: of integer inputs. floats: how floats are drawn. derived: the values of inputs that depend
    on others. outputs, inputs: positions of results, and of inputs after the call, that contain no rounding,
    because they are integers and were computed from integers alone. seed: of the other floats."""

    ranges: Mapping[int, Range] = {}
    floats: Mapping[int, FloatDraw] = {}
    derived: Mapping[int, torch.Tensor] = {}
    outputs: frozenset[int] = frozenset()
    inputs: frozenset[int] = frozenset()
    seed: int = 0


class CannotDraw(Exception):
    """Inputs that belong together cannot be drawn; the text says which."""


def wide_range(dtype: torch.dtype) -> Range:
    """All of a type with 8 bits; 16 bits of the others, whose squares then fit into 32."""
    limits = torch.iinfo(dtype)
    return max(limits.min, -_WIDE), min(limits.max + 1, _WIDE)


def is_integer(value: Any) -> bool:
    """Whether it is a tensor of integers; booleans are none."""
    return isinstance(value, torch.Tensor) and is_integer_dtype(value.dtype)


def is_integer_dtype(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def find_facts(
    run: Callable[[Sequence[Any]], Sequence[Any]],
    inputs: Sequence[Any],
    draw: Callable[[int, torch.Tensor, Range], None],
    parameters: frozenset[int] = frozenset(),
    deviation: float = 1.0,
) -> InputFacts:
    """run(inputs): the graph's outputs with eager; it may change its inputs. draw(position, input, range): fills an
    integer input, the same each time. parameters: positions of those. deviation: the standard deviation of the results
    of products. Raises CannotDraw, and what `run` raises even if all integers are 0 or 1."""
    positions = [p for p, value in enumerate(inputs) if is_integer(value)]
    ranges = {p: wide_range(inputs[p].dtype) for p in positions}
    indices: set[int] = set()
    derived: dict[int, torch.Tensor] = {}
    floats: dict[int, FloatDraw] = {}
    for run_number in range(_MAX_RUNS):
        if run_number == _MAX_RUNS - _LAST_RUNS:
            ranges.update(dict.fromkeys(ranges, NARROW))
        for position in positions:
            draw(position, inputs[position], ranges[position])
        for position, value in derived.items():
            inputs[position].copy_(value)
        float_watch = FloatWatch(inputs, parameters, floats, deviation)
        watch = _Watch(inputs, ranges, indices, derived, float_watch)
        others = {p: NARROW for p in positions if p not in indices}
        try:
            with torch.no_grad(), watching_calls(watch):
                outputs = run(inputs)
        except _RangeChanged:
            continue
        except CannotDraw:
            raise
        except Exception:
            if all(low >= 0 and high <= NARROW[1] for low, high in ranges.values()):
                raise
            # Not for every integer: a count below zero, a division by zero.
            ranges.update(
                others if any(ranges[p] != NARROW for p in others) else dict.fromkeys(ranges, NARROW)
            )
            continue
        if not all(map(_is_finite, outputs)) and any(ranges[p] != NARROW for p in others):
            ranges.update(others)  # a mask, perhaps: (1 - mask) * the least number
            continue
        return InputFacts(
            ranges={p: each for p, each in ranges.items() if p not in derived},
            floats={**dict(float_watch.undecided()), **floats},
            derived=derived,
            outputs=frozenset(p for p, value in enumerate(outputs) if watch.is_exact(value)),
            inputs=frozenset(p for p, value in enumerate(inputs) if watch.is_exact(value)),
        )
    raise RuntimeError("no range of its integers was found that the graph accepts")


class _RangeChanged(Exception):
    """The graph must run again, with other integers."""


class _Watch:
    """Looks at each operator's integers. Narrows `ranges`, adds to `indices` the inputs that are used as such, and to
    `derived` those that depend on others."""

    def __init__(
        self,
        inputs: Sequence[Any],
        ranges: dict[int, Range],
        indices: set[int],
        derived: dict[int, torch.Tensor],
        floats: FloatWatch,
    ) -> None:
        self._inputs = inputs
        self._ranges = ranges
        self._indices = indices
        self._derived = derived
        self._floats = floats
        self._known: dict[int, tuple[torch.Tensor, frozenset[int], bool]] = {}
        """By a memory's address: a tensor that keeps it, the inputs it was computed from, whether by floats."""
        for position, value in enumerate(inputs):
            if isinstance(value, torch.Tensor) and not _has_rounding(value):
                self._note(value, frozenset([position] if position in ranges else []), False)

    def is_exact(self, value: Any) -> bool:
        """Whether it is a tensor that was computed from integers alone."""
        return isinstance(value, torch.Tensor) and not self._is_rounded(value)

    def _is_rounded(self, value: torch.Tensor) -> bool:
        if _has_rounding(value):
            return True
        known = self._known.get(address_of(value))
        return known is not None and known[2]

    def __call__(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if called := called_graph(operator, args):
            graph, graph_args = called
            with watching_calls(self):
                return graph(*graph_args)
        tensors = tensors_in((args, kwargs))
        if self._floats.before(operator, args, kwargs):
            raise _RangeChanged
        checked = _INDEXING.get(getattr(operator, "overloadpacket", None))
        sources = frozenset().union(*(self._sources(value) for value in tensors))
        if checked is not None:
            for index, size, *allowed in checked(*args, **kwargs):
                self._check(index, size, *allowed)
        elif not _takes_any_integer(operator) and any(self._ranges[source] != NARROW for source in sources):
            self._ranges.update(dict.fromkeys(sources, NARROW))
            raise _RangeChanged
        self._derive(operator, args, kwargs)
        rounded = any(map(self._is_rounded, tensors))
        results = operator(*args, **kwargs)
        self._floats.after(operator, args, results)
        for result in tensors_in(results):
            if not _has_rounding(result):
                self._note(result, sources if result.dtype is not torch.bool else frozenset(), rounded)
        return results

    def _derive(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises _RangeChanged where inputs that belong together do not fit yet, CannotDraw where they cannot."""
        if is_flex_attention(operator):
            mask = block_mask_of(args, kwargs)
            if mask.has_tables_of_mask_mod():
                return
            wanted = mask.tables_of_mask_mod()
            if wanted is None:
                raise CannotDraw("the tables of a block mask have no room for what its mask_mod says")
            self._set(
                {id(mask.tables[place]): (mask.tables[place], value) for place, value in wanted.items()}
            )
        elif (packet := getattr(operator, "overloadpacket", None)) in _SORTED:
            edges = args[_SORTED[packet]]
            if bool((edges.diff() < 0).any()):
                self._set({0: (edges, edges.sort().values)})
        elif packet in _BAGS:
            offsets, items = args[2], args[1].numel()
            risen = torch.arange(offsets.numel(), device=offsets.device) * items // max(1, offsets.numel())
            if not torch.equal(offsets, risen.to(offsets)):
                self._set({0: (offsets, risen)})

    def _set(self, wanted: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Have these tensors, which must be inputs, hold these values in the next run."""
        found = {}
        for tensor, value in wanted.values():
            position = next((p for p, given in enumerate(self._inputs) if _is_same(given, tensor)), None)
            if position is None or position in self._derived:
                raise CannotDraw("inputs that depend on each other reach an operator in another form")
            found[position] = value
        self._derived.update(found)
        raise _RangeChanged

    def _note(self, value: torch.Tensor, sources: frozenset[int], rounded: bool) -> None:
        _, before, was_rounded = self._known.get(address_of(value), (value, frozenset(), False))
        self._known[address_of(value)] = value, sources | before, rounded or was_rounded

    def _sources(self, value: torch.Tensor) -> frozenset[int]:
        """The inputs that its integers were computed from."""
        known = self._known.get(address_of(value)) if is_integer(value) else None
        return frozenset() if known is None else known[1]

    def _check(self, index: torch.Tensor, size: int, allowed: int = 0) -> None:
        outside = (index < 0) | (index >= size)
        if not is_integer(index) or not bool((outside & (index != allowed)).any()):
            return
        sources = self._sources(index)
        for source in sources:
            low, high = self._ranges[source]
            self._indices.add(source)
            # The index may be the input and a number: then it is still too large for the dimension's size.
            narrower = (0, size) if low < 0 or size < high else (0, high // 2)
            self._ranges[source] = narrower if narrower[1] > 1 else (0, 1)
            if self._ranges[source] == (low, high):
                raise IndexError(f"an index outside 0 to {size - 1}")
        if not sources:
            raise IndexError(f"an index outside 0 to {size - 1}")
        raise _RangeChanged


def _is_same(value: Any, tensor: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor) or (value.dtype, value.shape) != (tensor.dtype, tensor.shape):
        return False
    return value.data_ptr() == tensor.data_ptr() and value.stride() == tensor.stride()


def _has_rounding(value: torch.Tensor) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


def _is_finite(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not _has_rounding(value) or value.dtype.itemsize == 1:
        return True
    return bool(torch.isfinite(value).all())


# --- what operators do with integers ----------------------------------------------------------------------

aten = torch.ops.aten


def _of_dimension(self: Any, dim: int, index: Any, *rest: Any, **named: Any) -> Iterator[tuple[Any, int]]:
    yield index, self.size(dim) if self.dim() else 1


def _of_rows(weight: Any, indices: Any, *rest: Any, **named: Any) -> Iterator[tuple[Any, int]]:
    yield indices, weight.size(0)


def _of_elements(self: Any, index: Any, *rest: Any, **named: Any) -> Iterator[tuple[Any, int]]:
    yield index, self.numel()


def _of_several(self: Any, indices: Any, *rest: Any, **named: Any) -> Iterator[tuple[Any, int]]:
    dim = 0
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            dim += index.dim()  # a mask
            continue
        if index is not None:
            yield index, self.size(dim)
        dim += 1


def _of_classes(
    self: Any, target: Any, weight: Any, reduction: Any, ignore_index: int
) -> Iterator[tuple[Any, int, int]]:
    yield target, self.size(1 if self.dim() > 1 else 0), ignore_index


_INDEXING: dict[Any, Callable[..., Iterator[tuple[Any, int] | tuple[Any, int, int]]]] = {
    **dict.fromkeys(
        packets(
            "gather scatter scatter_add scatter_reduce index_select index_add index_copy index_fill index_reduce"
        ),
        _of_dimension,
    ),
    **dict.fromkeys(packets("embedding _embedding_bag _embedding_bag_forward_only"), _of_rows),
    **dict.fromkeys(packets("take put"), _of_elements),
    **dict.fromkeys(packets("index index_put _index_put_impl _unsafe_index _unsafe_index_put"), _of_several),
    **dict.fromkeys(packets("nll_loss_forward nll_loss2d_forward"), _of_classes),
}
"""Operators that take indices: each index with its dimension's size, and a number that is allowed besides."""

_SORTED = {aten.searchsorted: 0, aten.bucketize: 1}
"""Operators one of whose arguments is sorted, and its place."""

_BAGS = frozenset(packets("_embedding_bag _embedding_bag_forward_only"))

_ANY_INTEGER = frozenset(
    packets(
        "_int_mm _to_copy _unsafe_view addmm all alias amax amin any argmax argmin argsort baddbmm bmm bucketize cat "
        "clone constant_pad_nd copy cummax cummin cumprod cumsum detach empty_like fill flip full_like isin "
        "lift_fresh lift_fresh_copy masked_fill masked_scatter masked_select max mean min mm mv new_empty "
        "new_empty_strided new_full new_ones new_zeros nonzero ones_like prod repeat roll scalar_tensor "
        "searchsorted sort stack sum topk tril triu where zero zeros_like"
    )
)


def _takes_any_integer(operator: Any) -> bool:
    """From a closed list, because a GPU's operator may read any memory by a wrong integer."""
    return is_pytorchs(operator) and (
        operator.is_view or torch.Tag.pointwise in operator.tags or operator.overloadpacket in _ANY_INTEGER
    )
