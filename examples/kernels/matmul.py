"""A matrix product in tiles: Triton stages each tile of the operands in shared memory, and pipelines the loads.

Tile sizes, warps and stages decide together, and their best values change with shape, dtype and GPU: too large a tile
spills or does not fit into shared memory, too small a one waits for memory. Programs go through the result in groups
of rows, so that the L2 cache sees each tile of `a` again before it is gone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.autotune(
    configs=[
        triton.Config({"TILE_M": 64, "TILE_N": 64, "TILE_K": 32}, num_warps=4, num_stages=3),
        triton.Config({"TILE_M": 64, "TILE_N": 128, "TILE_K": 32}, num_warps=4, num_stages=4),
        triton.Config({"TILE_M": 128, "TILE_N": 64, "TILE_K": 32}, num_warps=4, num_stages=4),
        triton.Config({"TILE_M": 128, "TILE_N": 128, "TILE_K": 32}, num_warps=4, num_stages=4),
        triton.Config({"TILE_M": 128, "TILE_N": 128, "TILE_K": 64}, num_warps=8, num_stages=3),
        triton.Config({"TILE_M": 128, "TILE_N": 256, "TILE_K": 64}, num_warps=8, num_stages=3),
    ],
    key=["m", "n", "k"],
)
@triton.jit
def matmul_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    m,
    n,
    k,
    TILE_M: tl.constexpr,  # noqa: N803
    TILE_N: tl.constexpr,  # noqa: N803
    TILE_K: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
):
    """out[m, n] = a[m, k] @ b[k, n], all contiguous; sums in float32."""
    tiles_m = tl.cdiv(m, TILE_M)
    tiles_n = tl.cdiv(n, TILE_N)
    program = tl.program_id(0)
    group = program // (GROUP * tiles_n)
    first = group * GROUP
    height = min(tiles_m - first, GROUP)
    row = first + (program % (GROUP * tiles_n)) % height
    column = (program % (GROUP * tiles_n)) // height

    rows = row * TILE_M + tl.arange(0, TILE_M)
    columns = column * TILE_N + tl.arange(0, TILE_N)
    depth = tl.arange(0, TILE_K)
    a_ptrs = a_ptr + (rows % m).to(tl.int64)[:, None] * k + depth[None, :]
    b_ptrs = b_ptr + depth.to(tl.int64)[:, None] * n + (columns % n)[None, :]
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for start in range(0, k, TILE_K):
        a = tl.load(a_ptrs, mask=depth[None, :] < k - start, other=0.0)
        b = tl.load(b_ptrs, mask=depth[:, None] < k - start, other=0.0)
        total = tl.dot(a, b, total)
        a_ptrs += TILE_K
        b_ptrs += TILE_K * n
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(out_ptrs, total, mask=(rows[:, None] < m) & (columns[None, :] < n))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, device=a.device, dtype=a.dtype)
    matmul_kernel[lambda meta: (triton.cdiv(m, meta["TILE_M"]) * triton.cdiv(n, meta["TILE_N"]),)](
        a, b, out, m, n, k, GROUP=8
    )
    return out


def reference(a: Tensor, b: Tensor) -> Tensor:
    return a @ b
