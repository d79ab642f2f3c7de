"""One rank of what train.py compares: flags in, RECORD/rank-N.json out. torchrun, a job or plain Python starts it.

A GPT-2 learns the bytes of the standard library: the same windows at each step, spread over the ranks, whatever their
number. Nothing in it is torchrelay's. With --paired, two copies that are compiled either way take turns in blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

MARKS: dict[str, float] = {}
"""When what was done, in seconds since 1970."""
STRATEGIES = ("single", "ddp", "fsdp2", "2d")
SHAPES = {
    "tiny": {"layers": 2, "width": 64, "heads": 4, "context": 32, "vocabulary": 256},
    "small": {"layers": 4, "width": 256, "heads": 4, "context": 64, "vocabulary": 256},
    "gpt2": {"layers": 12, "width": 768, "heads": 12, "context": 512, "vocabulary": 50257},
}


class Block(nn.Module):
    """Apart from the projections' names GPT-2's; heads are counted by what a tensor-parallel rank has of them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.of_head = width // heads
        self.attention_norm, self.forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.projection = nn.Linear(width, width)
        self.rise, self.fall = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normed = self.attention_norm(x)
        q, k, v = (
            each(normed).view(batch, length, -1, self.of_head).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(batch, length, -1))
        return x + self.fall(F.gelu(self.rise(self.forward_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """Tokens (B, T) and what follows them in, the loss out."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.context = context
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def build(shape: str, strategy: str, device: torch.device, backend: str) -> tuple[nn.Module, Any]:
    """(what is trained, what is called). backend: '' where torch.compile names none."""
    torch.manual_seed(0)
    with device:
        model = GPT(**SHAPES[shape])
    named = {"backend": backend} if backend else {}
    if strategy == "single":
        return model, torch.compile(model, **named)
    if strategy == "ddp":
        wrapped = DistributedDataParallel(model)
        return model, torch.compile(wrapped, **named)
    spread(model, strategy, device, named)
    return model, model


def spread(model: GPT, strategy: str, device: torch.device, named: dict[str, Any]) -> None:
    """FSDP2, alone or over a tensor-parallel mesh; each block compiled by itself."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(device.type, sizes(strategy), mesh_dim_names=("data", "tensor"))
    for block in model.blocks:
        if strategy == "2d":
            plan: dict[str, ParallelStyle] = {
                name: ColwiseParallel() for name in ("query", "key", "value", "rise")
            }
            plan |= {name: RowwiseParallel() for name in ("projection", "fall")}
            parallelize_module(block, mesh["tensor"], plan)
        block.compile(**named)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])


def sizes(strategy: str) -> tuple[int, int]:
    """(ranks that have data of their own, ranks that share a layer)."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return (ranks // 2, 2) if strategy == "2d" else (ranks, 1)


def windows(args: argparse.Namespace, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's part of each step's global batch, without end."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) > 1_000_000:
            break
    data = torch.frombuffer(text, dtype=torch.uint8).long()
    parts, shared = sizes(args.strategy)
    mine = (dist.get_rank() if dist.is_initialized() else 0) // shared
    own = args.batch // parts
    context = SHAPES[args.model]["context"]
    order = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(data) - context - 1, (args.batch,), generator=order).tolist()
        rows = torch.stack([data[s : s + context + 1] for s in starts[mine * own : (mine + 1) * own]])
        rows = rows.to(device)
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Training:
    def __init__(self, args: argparse.Namespace, device: torch.device, backend: str = "") -> None:
        self.model, self._run = build(args.model, args.strategy, device, backend)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self._batches = windows(args, device)
        self._device = device

    def step(self) -> Tensor:
        """The loss of this rank's part; the device has done its work."""
        loss: Tensor = self._run(*next(self._batches))
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return loss.detach()


def train(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    training = Training(args, device)
    MARKS["built"] = time.time()
    losses, seconds, first = [], [], 0.0
    for _ in range(args.steps):
        begin = time.perf_counter()
        losses.append(training.step())
        seconds.append(time.perf_counter() - begin)
        first = first or time.time()
    told = torch.stack(losses).float()
    if dist.is_initialized():
        dist.all_reduce(told)
        told /= dist.get_world_size()
    return {"losses": told.tolist(), "first_step_at": first, "step_seconds": seconds[1:]}


def paired(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Blocks of steps by turns; of each block's medians the ratio."""
    ways = {backend: Training(args, device, backend) for backend in ("inductor", "torchrelay")}
    for way in ways.values():
        for _ in range(5):
            way.step()
    ratios, times = [], {name: [] for name in ways}
    for number in range(args.paired):
        median = {}
        for name in list(ways) if number % 2 == 0 else list(ways)[::-1]:
            spent = []
            for _ in range(args.block_steps):
                begin = time.perf_counter()
                ways[name].step()
                spent.append(time.perf_counter() - begin)
            times[name] += spent
            median[name] = statistics.median(spent)
        ratios.append(median["torchrelay"] / median["inductor"])
    return {"ratios": ratios, "milliseconds": {n: statistics.median(t) * 1e3 for n, t in times.items()}}


def process_start() -> float:
    """Of this process, in seconds since 1970, to a hundredth (proc_pid_stat(5), starttime). psutil's create_time counts
    from a boot that is rounded to a second."""
    ticks = float(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    MARKS["imported"] = time.time()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=STRATEGIES, required=True)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=16, help="of all ranks together")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--paired", type=int, default=0, help="blocks of steps of either way")
    parser.add_argument("--block-steps", type=int, default=10)
    parser.add_argument("--record", type=Path, required=True, help="a folder that is there")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    rank = int(os.environ.get("RANK", "0"))
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if args.strategy != "single":
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    MARKS["grouped"] = time.time()
    record = paired(args, device) if args.paired else train(args, device)
    began = process_start()
    record |= {"began": began, "rank": rank, "marks": {name: at - began for name, at in MARKS.items()}}
    (args.record / f"rank-{rank}.json").write_text(json.dumps(record))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
