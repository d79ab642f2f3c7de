"""The precision that a job's spec asks for: of float32 matrix products, and of autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...compiler.api.training.jobs import Precision
from .rank_environment import load_rank

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PRODUCTS = {"fp32": "highest", "tf32": "high"}


def set_precision(precision: Precision) -> None:
    """Set the precision of float32 matrix products; bf16 and fp16 are `autocast`'s."""
    if precision in _PRODUCTS:
        torch.set_float32_matmul_precision(_PRODUCTS[precision])


def autocast(device_type: str | None = None) -> AbstractContextManager[Any]:
    """`torch.autocast` to the job's precision, bf16 or fp16; with another one it does nothing. device_type: cuda
    where there is one, if not given."""
    spec = load_rank().spec
    half = _HALF.get(spec.precision) if spec is not None else None
    if half is None:
        return nullcontext()
    device = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.autocast(device, dtype=half)
