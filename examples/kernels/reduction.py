"""A reduction: the sum of squares of each row, as a gradient's norm needs it.

A program takes a row and walks along it; partial sums stay in registers until the end. Long steps keep more loads in
flight, and cost registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def square_sum_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):  # noqa: N803
    """out[row] = sum of x[row]^2, in float32; x is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    partial = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * columns + offsets, mask=offsets < columns, other=0.0).to(tl.float32)
        partial += x * x
    tl.store(out_ptr + row, tl.sum(partial, axis=0))


def square_sum(x: Tensor, block: int = 1024) -> Tensor:
    out = torch.empty(x.shape[0], device=x.device)
    square_sum_kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=block)
    return out


def reference(x: Tensor) -> Tensor:
    return x.float().square().sum(dim=1)
