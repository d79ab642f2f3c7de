"""One process that trains on user-written Triton kernels: by local Inductor and by torchrelay; JSON out.

`difference`: the largest, over values and gradients, of max|relay - local| / max|local|. `measured` counts the
kernels that were measured in this process for the service's artifacts.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torchrelay
import triton
import triton.language as tl
from torch import Tensor, nn
from torchrelay.clients.reports.run_report import FallbackWarning
from torchrelay.compiler.torch_internals import counters
from triton.language.extra import libdevice
from triton.language.extra.libdevice import rsqrt

SCALE = tl.constexpr(0.5)


@triton.jit
def scaled(x):
    """A helper, which refers to a constant."""
    return x * SCALE


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):  # noqa: N803
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=inside)
    y = tl.load(y_ptr + offsets, mask=inside)
    tl.store(out_ptr + offsets, scaled(x) + y, mask=inside)


@triton.autotune(
    configs=[
        triton.Config({"BLOCK": 128}, num_warps=2),
        triton.Config({"BLOCK": 512}, num_warps=4),
        triton.Config({"BLOCK": 2048}, num_warps=8),
    ],
    key=["n"],
)
@triton.jit
def gelu_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):  # noqa: N803
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=inside)
    tl.store(out_ptr + offsets, x * tl.sigmoid(1.702 * x), mask=inside)


@triton.jit
def square_forward(x_ptr, out_ptr, n, BLOCK: tl.constexpr):  # noqa: N803
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, x * x, mask=offsets < n)


@triton.jit
def square_backward(x_ptr, grad_ptr, out_ptr, n, BLOCK: tl.constexpr):  # noqa: N803
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    grad = tl.load(grad_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, 2.0 * x * grad, mask=offsets < n)


@triton.jit
def add_up(a, b):
    return a + b


@triton.autotune(
    configs=[triton.Config({"BLOCK": 128}, num_warps=1), triton.Config({"BLOCK": 256}, num_warps=2)],
    key=["columns"],
)
@triton.heuristics({"EVEN": lambda given: given["columns"] % given["BLOCK"] == 0})
@triton.jit
def normalize_kernel(
    x_ptr,
    bias_ptr,
    out_ptr,
    columns,
    eps,
    MODE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    EVEN: tl.constexpr,  # noqa: N803
):
    """A row at a time: a reduction with a helper of its own, a name imported from Triton, a mode, no bias."""
    offsets = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * columns + offsets
    x = tl.load(x_ptr + at) if EVEN else tl.load(x_ptr + at, mask=offsets < columns, other=0.0)
    x = x.to(tl.float32)
    x = x * rsqrt(tl.reduce(x * x, 0, add_up) / columns + eps)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + offsets, mask=offsets < columns)
    if MODE == "tanh":
        x = libdevice.tanh(x)
    tl.store(out_ptr + at, x, mask=offsets < columns)


@triton.jit
def double_in_place(x_ptr, n, BLOCK: tl.constexpr):  # noqa: N803
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(x_ptr + offsets, 2 * x, mask=offsets < n)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        square_forward[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), BLOCK=256)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        grad = grad.contiguous()
        square_backward[(triton.cdiv(x.numel(), 256),)](x, grad, out, x.numel(), BLOCK=256)
        return out


def add(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)
    return out.relu() + 1


def tuned(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    gelu_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
    return out * 2


def rich(x: Tensor) -> Tensor:
    out = torch.empty(x.shape, device=x.device)
    normalize_kernel[(x.shape[0],)](x, None, out, x.shape[1], 1e-5, MODE="tanh")
    out = out + 1
    double_in_place[(triton.cdiv(out.numel(), 512),)](out, out.numel(), BLOCK=512, num_warps=8)
    return out.sum(dim=1)


class Step(nn.Module):
    """Linear layers around a custom autograd function that calls Triton forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 96)
        self.second = nn.Linear(96, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(Square.apply(self.first(x)))
        return result


Values = dict[str, Tensor]


def run_add(backend: str) -> Values:
    made = torch.Generator("cuda").manual_seed(0)
    x, y = (torch.randn(5000, generator=made, device="cuda") for _ in range(2))
    return {"out": torch.compile(add, backend=backend)(x, y)}


def run_tuned(backend: str) -> Values:
    made = torch.Generator("cuda").manual_seed(0)
    return {"out": torch.compile(tuned, backend=backend)(torch.randn(100_000, generator=made, device="cuda"))}


def run_dynamic(backend: str) -> Values:
    made = torch.Generator("cuda").manual_seed(0)
    compiled = torch.compile(lambda x: tuned(x) + add(x, x), backend=backend, dynamic=True)
    sizes = (1000, 4096, 33_333)
    return {str(n): compiled(torch.randn(n, generator=made, device="cuda")) for n in sizes}


def run_rich(backend: str) -> Values:
    made = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(77, 100, generator=made, device="cuda").bfloat16()
    return {"out": torch.compile(rich, backend=backend)(x)}


def run_step(backend: str) -> Values:
    torch.manual_seed(0)
    model = Step().cuda()
    x = torch.randn(32, 64, device="cuda")
    loss = torch.compile(model, backend=backend)(x).square().mean()
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


RUNS: dict[str, Callable[[str], Values]] = {
    "add": run_add,
    "tuned": run_tuned,
    "dynamic": run_dynamic,
    "step": run_step,
    "rich": run_rich,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("--relay-only", action="store_true", help="do not compile locally first")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    found: dict[str, Values] = {}
    measured = 0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", FallbackWarning)
        for backend in ("torchrelay",) if args.relay_only else ("inductor", "torchrelay"):
            before = counters.kernels_measured()
            found[backend] = RUNS[args.run](backend)
            torch.cuda.synchronize()
            measured = counters.kernels_measured() - before
            torch.compiler.reset()
    report: dict[str, Any] = msgspec.to_builtins(torchrelay.report())
    relay, local = found["torchrelay"], found.get("inductor", found["torchrelay"])
    print(
        json.dumps(
            {
                "run": args.run,
                "graphs": len(report["graphs"]),
                "hits": report["hits"] + report["disk_hits"],
                "misses": report["misses"],
                "fallbacks": report["fallbacks"],
                "warnings": [str(w.message) for w in warned if issubclass(w.category, FallbackWarning)],
                "difference": max(difference(local[name], relay[name]) for name in local),
                "measured": measured,
            }
        )
    )


def difference(local: Tensor, relay: Tensor) -> float:
    assert local.shape == relay.shape and local.dtype == relay.dtype
    scale = local.abs().max().item()
    return (relay - local).abs().max().item() / max(scale, 1e-30)


if __name__ == "__main__":
    main()
