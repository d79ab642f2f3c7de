"""Programs that draw random numbers, each compiled by the service and locally; JSON out, a line for each:
how the service verified it, and the largest difference between the two under one seed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torchrelay
from torch import Tensor, nn
from torch.nn import functional
from torchrelay.clients.settings import load_settings
from torchrelay.compiler.artifact import container

Program = Callable[[Tensor], Tensor]


def attention(x: Tensor, dropout: float) -> Tensor:
    heads = x.reshape(2, -1, 4, 32).transpose(1, 2)
    out = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=dropout, is_causal=True)
    return out.transpose(1, 2).reshape(x.shape)


def autocast(function: Program) -> Program:
    def run(x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return function(x)

    return run


def encoder() -> Program:
    return nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True).cuda().train()


def masked() -> Program:
    mask = torch.ones(1, device="cuda").expand(128)
    return lambda x: functional.dropout(x, 0.1) * mask


def network() -> Program:
    layers = [
        nn.Linear(128, 64),
        nn.GELU(),
        nn.Dropout(0.3),
        nn.LayerNorm(64),
        nn.Linear(64, 7),
        nn.Dropout1d(0.5),
    ]
    return nn.Sequential(*layers).cuda().train()


PROGRAMS: dict[str, Callable[[], Program]] = {
    "dropout": lambda: lambda x: functional.dropout(x, 0.3) * 2,
    "uniform": lambda: lambda x: x + torch.rand_like(x),
    "normal": lambda: lambda x: x * torch.randn_like(x) + torch.randn(3, device=x.device).sum(),
    "several": lambda: (
        lambda x: functional.dropout(x + torch.rand_like(x), 0.2).sin() + functional.dropout(x.cos(), 0.7)
    ),
    "transposed": lambda: (
        lambda x: functional.dropout(x, 0.3) + functional.dropout(x.mT.contiguous(), 0.3).mT
    ),
    "reduced": lambda: lambda x: functional.layer_norm(functional.dropout(x, 0.3), x.shape[-1:]),
    "half": lambda: autocast(lambda x: functional.dropout(x.bfloat16(), 0.1).float() * x),
    "network": network,
    "encoder": encoder,
    "encoder in bfloat16": lambda: autocast(encoder()),
    "attention": lambda: lambda x: attention(x, 0.1),
    "attention in bfloat16": lambda: autocast(lambda x: attention(x.bfloat16(), 0.1).float()),
    "attention after dropout": lambda: lambda x: attention(functional.dropout(x, 0.1), 0.1),
    "attention that drops nothing": lambda: lambda x: attention(functional.dropout(x, 0.1), 0.0),
    "attention that drops nothing in bfloat16": lambda: autocast(
        lambda x: attention(functional.dropout(x, 0.1).bfloat16(), 0.0).float()
    ),
    "expanded input": masked,
    "attention beside attention": lambda: lambda x: attention(x, 0.1) + attention(x.flip(0), 0.2),
}


def run(function: Program, shape: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(3)
    x = torch.randn(shape, device="cuda", requires_grad=True)
    torch.manual_seed(4)
    out = function(x)
    (out.float() * torch.linspace(-1, 1, out.numel(), device="cuda").reshape(out.shape)).sum().backward()
    assert x.grad is not None
    return [out.detach().float(), x.grad]


def main() -> None:
    settings = load_settings()
    for name, make in PROGRAMS.items():
        for dynamic, shape in ((None, (2, 37, 128)), (True, (2, 64, 128))):
            torch.manual_seed(0)
            program = make()
            torch.compiler.reset()
            before = len(torchrelay.report().graphs)
            found = run(torch.compile(program, backend="torchrelay", dynamic=dynamic), shape)
            keys = {graph.key for graph in torchrelay.report().graphs[before:]}
            torch.compiler.reset()
            expected = run(torch.compile(program, dynamic=dynamic), shape)
            difference = max(
                float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)
            )
            record: dict[str, Any] = {
                "name": name,
                "dynamic": dynamic,
                "difference": difference,
                "verified": [],
            }
            for key in keys:
                data = (settings.cache_dir / "artifacts" / key[:2] / key).read_bytes()
                verification = container.read_manifest(data).verification
                record["verified"].append([verification.status, verification.reason])
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
