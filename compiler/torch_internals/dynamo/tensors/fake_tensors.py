"""Tensors without data, and the symbolic number that a fake scalar stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import compute_required_storage_length
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ....tuning import records


def new_fake_mode(env: ShapeEnv) -> FakeTensorMode:
    """A FakeTensorMode whose tensors have sizes of `env`, in which real tensors may take part too."""
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)


def storage_id(tensor: torch.Tensor) -> int:
    """A number that tensors of one storage share, fake ones included (UntypedStorage._cdata). Of a DTensor it is that
    of its local part."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return int(local.untyped_storage()._cdata)


def bytes_reached(tensor: torch.Tensor) -> Any:
    """Bytes from the beginning of its storage to the end of a tensor's last element, which may be symbolic
    (torch._prims_common.compute_required_storage_length)."""
    offset: Any = tensor.storage_offset()
    return compute_required_storage_length(tensor.shape, tensor.stride(), offset) * tensor.element_size()


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that autograd knows this one as a view of (Tensor._base)."""
    return tensor._base


def view_of(
    base: torch.Tensor,
    dtype: torch.dtype,
    size: Sequence[Any],
    stride: Sequence[Any],
    offset: Any,
    *,
    requires_grad: bool,
    is_leaf: bool,
) -> torch.Tensor:
    """A view that autograd knows as one of `base` and that may be changed in place
    (torch._subclasses.meta_utils.MetaConverter.meta_tensor makes fake views in the same way)."""

    def view(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != dtype:
            if tensor.is_complex() and not dtype.is_complex:
                tensor = torch.view_as_real(tensor)
            elif dtype.is_complex and not tensor.is_complex():
                tensor = torch.view_as_complex(tensor)
            else:
                tensor = tensor.view(dtype)
        return tensor.as_strided(size, stride, offset)

    if is_leaf:
        with torch.no_grad():
            made = view(base)
        made.requires_grad_(requires_grad)
    else:
        with torch.no_grad():
            middle = base.view(base.shape) if base.requires_grad != requires_grad else base
        if middle is not base:
            middle.requires_grad_(requires_grad)
        with torch.enable_grad():
            made = view(middle)
    torch._C._autograd._set_creation_meta(made, torch._C._autograd.CreationMeta.DEFAULT)
    return made


def item_memo(value: Any) -> Any:
    """FakeTensor.item_memo: what `.item()` of a fake scalar answers, if that is known; else None. Every 0-d int64 or
    float64 tensor on the CPU that comes into a graph has one, whether the graph reads it or not."""
    return getattr(value, "item_memo", None)


def set_item_memo(tensor: torch.Tensor, value: Any) -> None:
    """FakeTensor.item_memo: what `.item()` of a fake scalar answers."""
    tensor.item_memo = value  # type: ignore[attr-defined]


def fake_operands(operands: Sequence[records.Operand], device: str) -> list[torch.Tensor]:
    """Tensors without data (torch._subclasses.FakeTensorMode)."""
    with FakeTensorMode():
        return [
            torch.empty_strided(x.size, x.stride, dtype=getattr(torch, x.dtype), device=device)
            for x in operands
        ]
