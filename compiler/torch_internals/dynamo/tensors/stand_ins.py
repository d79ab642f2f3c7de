"""Stand-ins for a graph's inputs: the same memory, with versions and an autograd history of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch


def stand_ins(values: Sequence[Any]) -> list[Any]:
    """What a graph may be run on, and differentiated by, without a trace in the autograd graph of `values`: leaves for
    leaves, activations for activations, views of one base for views of one base. Who changes them changes the memory
    of `values`."""
    bases = Counter(id(_base(value)) for value in values if isinstance(value, torch.Tensor))
    made: dict[int, torch.Tensor] = {}

    def stand_in(value: torch.Tensor) -> torch.Tensor:
        base = _base(value)
        same = (base.dtype, base.requires_grad) == (value.dtype, value.requires_grad)
        if bases[id(base)] < 2 or not same:
            return _alone(value)
        if id(base) not in made:
            made[id(base)] = _alone(base)
        if value is base:
            return made[id(base)]
        return made[id(base)].as_strided(value.size(), value.stride(), value.storage_offset())

    with torch.enable_grad():
        return [stand_in(value) if isinstance(value, torch.Tensor) else value for value in values]


def alone(value: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """A stand-in for `value` that has the memory of `data`."""
    if not value.requires_grad:
        return data
    if value.is_leaf or is_subclass(value):
        return data.requires_grad_()
    with torch.enable_grad():
        return _Activation.apply(data, torch.zeros((), device=data.device, requires_grad=True))  # type: ignore[no-any-return, no-untyped-call]


def _alone(value: torch.Tensor) -> torch.Tensor:
    # Not detach(): what it returns counts changes in place with the original.
    return alone(value, value.detach() if is_subclass(value) else value.data)


class _Activation(torch.autograd.Function):
    """Makes a tensor one that was computed from a leaf, without a change of it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        return None, None


def _base(value: torch.Tensor) -> torch.Tensor:
    """Tensor._base: the tensor that autograd knows it to be a view of; itself for all others."""
    base = None if is_subclass(value) else value._base
    return value if base is None else base


def is_subclass(value: torch.Tensor) -> bool:
    """Whether it is made of other tensors, as a DTensor is (torch.utils._python_dispatch)."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(value)


def parts(value: torch.Tensor) -> tuple[list[torch.Tensor], str]:
    """The plain tensors that a tensor is made of, and what it says of them besides: a DTensor's placements. '' for a
    plain tensor, which is its own part."""
    if not is_subclass(value):
        return [value], ""
    names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    found: list[torch.Tensor] = []
    texts = [repr(context)]
    for name in names:
        inner, text = parts(getattr(value, name))
        found += inner
        texts.append(text)
    return found, " ".join(filter(None, texts))
