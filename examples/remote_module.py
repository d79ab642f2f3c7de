"""A module that lives in another process: RemoteModule over RPC, its own half of the model compiled through torchrelay.

    torchrun --nproc-per-node 2 examples/remote_module.py [--steps 60]

Rank 1 holds the first layer and does what it is asked; rank 0 reads scikit-learn's digits, holds the rest, and trains
both: one distributed backward, one distributed optimizer. Each half is compiled where it lives.
"""

from __future__ import annotations

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import autograd, rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer


class First(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.LayerNorm(width))
        self.compiled = torch.compile(self.layers, backend="torchrelay")

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.compiled(pixels)
        return found


def train(steps: int) -> list[float]:
    """The loss of each step."""
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    first = RemoteModule("rank1/cpu", First, args=(128,))
    rest = nn.Linear(128, 10)
    compiled = torch.compile(rest, backend="torchrelay")
    here = [rpc.RRef(parameter) for parameter in rest.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, [*first.remote_parameters(), *here], lr=0.5)
    losses = []
    for _ in range(steps):
        chosen = torch.randint(0, len(labels), (64,))
        with autograd.context() as context:
            loss = nn.functional.cross_entropy(compiled(first(pixels[chosen])), labels[chosen])
            autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    rank = int(os.environ["RANK"])
    # torchrun's store is at MASTER_ADDR:MASTER_PORT; RPC makes connections of its own beside it.
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    if rank == 0:
        losses = train(steps)
        print(f"loss {losses[0]:.3f} -> {sum(losses[-5:]) / 5:.3f} in {steps} steps", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main()
