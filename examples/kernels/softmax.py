"""Softmax over rows: a row is read once, kept in registers, and written once.

BLOCK is the row's length rounded up, so it is no choice; how many rows a program takes, and in how many warps, is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def softmax_kernel(x_ptr, out_ptr, rows, columns, BLOCK: tl.constexpr, ROWS: tl.constexpr):  # noqa: N803
    """out = softmax(x) along the last dimension; both contiguous. BLOCK: a power of two, at least `columns`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=-float("inf")).to(tl.float32)
    # rows past the end have only -inf, and -inf - -inf is no number
    largest = tl.where(row < rows, tl.max(x, axis=1)[:, None], 0.0)
    raised = tl.exp(x - largest)
    total = tl.sum(raised, axis=1)[:, None]
    tl.store(out_ptr + row * columns + column, raised / total, mask=inside)


def softmax(x: Tensor, rows: int = 1) -> Tensor:
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    softmax_kernel[(triton.cdiv(x.shape[0], rows),)](x, out, x.shape[0], x.shape[1], BLOCK=block, ROWS=rows)
    return out


def reference(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=1)
