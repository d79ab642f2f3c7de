"""What a job's spec asks of a rank's process, before its script begins: precision, and who compiles."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from ...compiler.errors import Unsupported
from ...compiler.train_records import Precision
from ..settings import load_rank

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PRODUCTS = {"fp32": "highest", "tf32": "high"}


def set_precision(precision: Precision) -> None:
    """Of float32 matrix products; bf16 and fp16 are `autocast`'s."""
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


TUNED_MODE: Literal["max-autotune-no-cudagraphs"] = "max-autotune-no-cudagraphs"


def compile_through_service(*, tune: bool = False) -> None:
    """Make torchrelay the back end of every torch.compile in this process that names none, or PyTorch's default. tune:
    and TUNED_MODE the mode of those that name none."""
    from ..backend import enable, torchrelay
    from ..redirect import DEFAULT, compile_with

    with contextlib.suppress(Unsupported):  # before torch 2.13
        enable()
    torch.compile = compile_with(torchrelay, ("torchrelay", DEFAULT), mode=TUNED_MODE if tune else None)
