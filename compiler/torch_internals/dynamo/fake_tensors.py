"""Tensors without data, and the symbolic number that a fake scalar stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...tuning import records


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
