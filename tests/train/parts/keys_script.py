"""A training script, as a user has it: KIND in; it trains three steps, a line each. KEYS_ON=cuda: on GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, gelu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH = 64, 64
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp-split": {"width": 320, "accumulate": 2},
    "ddp-autocast-checkpoint": {"autocast": True, "checkpoint": True, "accumulate": 2},
    "fsdp": {"accumulate": 2},
    "fsdp-blocks-autocast-checkpoint": {"autocast": True, "blocks": True, "checkpoint": True},
    "tensor": {"blocks": True},
}
"""What tells them apart. width: of the model; at 320 it has more than one of DDP's buckets."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fall(gelu(self.rise(x)))


class Net(nn.Module):
    def __init__(self, width: int, checkpoint: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.checkpoint = checkpoint

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoint else block(x)
        return self.head(x)


def device() -> torch.device:
    if os.environ.get("KEYS_ON") == "cuda":
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def built(kind: str, *, width: int = WIDTH, checkpoint: bool = False, blocks: bool = False) -> Any:
    net = Net(width, checkpoint).to(device())
    if kind.startswith("ddp"):
        ddp = DistributedDataParallel(net, bucket_cap_mb=1.0)
        if kind == "ddp":
            ddp.register_comm_hook(None, halved)
        return torch.compile(ddp)
    for block in net.blocks:
        if blocks:
            block.compile()
        if kind == "tensor":
            mesh = init_device_mesh(device().type, (dist.get_world_size(),))
            parallelize_module(block, mesh, {"rise": ColwiseParallel(), "fall": RowwiseParallel()})
        else:
            fully_shard(block)
    if kind != "tensor":
        fully_shard(net)
    return net if blocks else torch.compile(net)


def halved(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and no texts
    """A hook of one's own; what it gets for a sum must be there."""
    done = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()
    return done.then(lambda future: future.value()[0])


def train(kind: str, steps: int) -> None:
    options = dict(KINDS[kind])
    accumulate, autocast = options.pop("accumulate", 1), options.pop("autocast", False)
    torch.manual_seed(0)
    model = built(kind, **options)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)  # some may be DTensors, and some not
    torch.manual_seed(1 + dist.get_rank())
    for step in range(steps):
        for part in range(accumulate):
            words = torch.randint(0, WORDS, (4, 8)).to(device())
            last = part + 1 == accumulate
            with torch.autocast(device().type, torch.bfloat16, enabled=autocast):
                loss = cross_entropy(model(words).float().view(-1, WORDS), words.view(-1))
            if not last and isinstance(model, DistributedDataParallel):
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}", flush=True)


def main(kinds: list[str], steps: int, after: Callable[[str], None] = lambda kind: None) -> None:
    if device().type == "cuda":
        torch.cuda.set_device(device())
    dist.init_process_group("gloo" if device().type == "cpu" else "nccl")
    assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])
    for kind in kinds:
        train(kind, steps)
        after(kind)
    dist.destroy_process_group()


def entry() -> None:
    """What `keys_script:entry` does."""
    main(sys.argv[1:], 1)


if __name__ == "__main__":
    main(sys.argv[1:2], 3)
