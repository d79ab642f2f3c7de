"""Tensors without data, and the symbolic number that a fake scalar stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ...tuning import records


def new_fake_mode(env: ShapeEnv) -> FakeTensorMode:
    """A FakeTensorMode whose tensors have sizes of `env`, in which real tensors may take part too."""
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)


def storage_id(tensor: torch.Tensor) -> int:
    """A number that tensors of one storage share, fake ones included (UntypedStorage._cdata)."""
    return int(tensor.untyped_storage()._cdata)


def item_memo(tensor: torch.Tensor) -> Any:
    """FakeTensor.item_memo: a symbolic float, for a tensor that stands for a Python number; else None."""
    return getattr(tensor, "item_memo", None)


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
