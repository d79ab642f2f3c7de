"""One process that launches a kernel under Triton's own autotuner; JSON out: whether it was measured, and is right."""

from __future__ import annotations

import json

import torch
import torchrelay
import triton
import triton.language as tl


@triton.autotune(
    configs=[
        triton.Config({"BLOCK": 128}, num_warps=2),
        triton.Config({"BLOCK": 512}, num_warps=4),
        triton.Config({"BLOCK": 2048}, num_warps=8),
    ],
    key=["n"],
    cache_results=True,
)
@triton.jit
def double_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):  # noqa: N803
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    tl.store(out_ptr + offsets, 2 * tl.load(x_ptr + offsets, mask=inside), mask=inside)


def main() -> None:
    x = torch.randn(100_003, device="cuda")
    out = torch.empty_like(x)
    double_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
    report = torchrelay.report()
    record = {
        "right": torch.equal(out, 2 * x),
        "measured": hasattr(double_kernel, "bench_time"),
        "block": double_kernel.best_config.kwargs["BLOCK"],
        "hits": report.autotune_hits,
        "failures": report.autotune_failures,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
