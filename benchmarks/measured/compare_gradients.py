"""One process, one model: gradients of a training step by torchrelay and by local Inductor; JSON out.

The two run on the same weights, batch and seed. `difference` is the largest, over parameters, of
max|relay - local| / max|local|, and `worst` the parameter; a gradient below a thousandth of the model's largest counts
as that, because a bias that softmax or a norm cancels has nothing but rounding for a gradient. `noise` is the same
between two steps of the one local compilation (atomic additions land in any order); `equal` says that loss and all
gradients agree in every bit. On a GPU, Inductor measures reductions' candidates, which add in different orders, and one
compile's winners need not be the next one's; --deterministic is Inductor's option that measures nothing, so that both
sides run the same kernels.
`measured` counts the Triton kernels that were measured in this process for the service's artifacts.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import tiny_architectures
import torch
import torchrelay
import workloads
from torch import Tensor, nn
from torchrelay.clients.reports.run_report import FallbackWarning
from torchrelay.compiler.torch_internals import counters

Gradients = dict[str, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    known = [*tiny_architectures.ARCHITECTURES, *workloads.WORKLOADS]
    parser.add_argument("--model", required=True, choices=known)
    parser.add_argument("--layers", type=int, default=tiny_architectures.LAYERS, help="of an architecture")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args()

    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False  # it turns a difference in the last place into one of 1e-3
    model, loss_of = build(args.model, device, args.layers)
    loss, gradients, again, seconds = {}, {}, {}, {}
    options = {"deterministic": True} if args.deterministic else None
    measured = 0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", FallbackWarning)
        for backend in ("inductor", "torchrelay"):
            compiled = torch.compile(model, backend=backend, options=options)
            before = counters.kernels_measured()
            began = time.perf_counter()
            loss[backend], gradients[backend] = training_step(model, loss_of, compiled)
            seconds[backend] = time.perf_counter() - began
            measured = counters.kernels_measured() - before
            _, again[backend] = training_step(model, loss_of, compiled)
            torch._dynamo.reset()
    local, relay = gradients["inductor"], gradients["torchrelay"]
    same = torch.equal(loss["inductor"], loss["torchrelay"]) and local.keys() == relay.keys()
    difference, worst = largest_difference(local, relay)
    report: dict[str, Any] = msgspec.to_builtins(torchrelay.report())
    record = {
        "model": args.model,
        "device": str(device),
        "graphs": len(report["graphs"]),
        "remote": report["hits"] + report["misses"] + report["disk_hits"] + report["coalesced"],
        "fallbacks": report["fallbacks"],
        "reasons": [str(w.message) for w in warned if issubclass(w.category, FallbackWarning)],
        "difference": difference,
        "worst": worst,
        "noise": largest_difference(local, again["inductor"])[0],
        "equal": same and all(torch.equal(local[name], relay[name]) for name in local),
        "measured": measured,
        "losses": {backend: value.item() for backend, value in loss.items()},
        "seconds": seconds,
    }
    print(json.dumps(record))


def build(
    name: str, device: torch.device, layers: int
) -> tuple[nn.Module, Callable[[Callable[..., Any]], Tensor]]:
    if name in workloads.WORKLOADS:
        workload = workloads.build(name, device)
        return workload.model, workload.loss
    model, inputs = tiny_architectures.build(name, device, layers=layers)
    return model, lambda f: f(**inputs).loss


def training_step(
    model: nn.Module, loss_of: Callable[[Callable[..., Any]], Tensor], compiled: Callable[..., Any]
) -> tuple[Tensor, Gradients]:
    """Loss and gradients; buffers are put back, so that the next step starts from the same state."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = loss_of(compiled)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return loss.detach(), gradients


def largest_difference(local: Gradients, relay: Gradients) -> tuple[float, str]:
    """With the name of the parameter."""
    if local.keys() != relay.keys():
        return float("inf"), ""
    floor = 1e-3 * max(gradient.abs().max().item() for gradient in local.values())
    differences = {
        name: (relay[name] - expected).abs().max().item() / max(expected.abs().max().item(), floor)
        for name, expected in local.items()
    }
    worst = max(differences, key=differences.__getitem__)
    return differences[worst], worst


if __name__ == "__main__":
    main()
