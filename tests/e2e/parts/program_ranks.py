"""One rank that may start without tracing: CASE[,CASE...] FOLDER [ROWS,...] in; FOLDER/<rank>.json out. torchrun starts
it.

ROWS: the batch size of each step. With OWN_STORES in the environment each rank has a disk cache of its own,
FOLDER/cache-<rank>, and so records of its own. With GPUS in it, each rank trains on a GPU of its own. "plain" has no
process group; it comes before all other cases.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchrelay
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

RANK, FOLDER = int(os.environ["RANK"]), Path(sys.argv[2])
ROWS = [int(rows) for rows in (sys.argv[3] if len(sys.argv) > 3 else "16,16").split(",")]
DEVICE = torch.device("cuda", RANK) if "GPUS" in os.environ else torch.device("cpu")
SCALE = 0.9375


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(8, inner), nn.Linear(inner, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + SCALE * self.fall(nn.functional.gelu(self.rise(rows)))


class Net(nn.Module):
    def __init__(self, inner: int = 24) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(inner) for _ in range(2))
        self.last = nn.Linear(8, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = block(rows)
        return self.last(rows)


class Asking(Net):
    """Its code depends on the rank and on the number of ranks."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * (1 + dist.get_rank()) / dist.get_world_size()


class Reducing(Net):
    """A collective in the graph."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        sums = rows.sum(0)
        dist.all_reduce(sums)
        return super().forward(rows + sums)


def compiled(net: nn.Module) -> nn.Module:
    return torch.compile(net, backend="torchrelay")  # type: ignore[return-value]


def sharded(net: Net) -> nn.Module:
    for block in net.blocks:
        fully_shard(block)
        block.compile(backend="torchrelay")
    return fully_shard(net)


CASES: dict[str, Callable[[], nn.Module]] = {
    "ddp_compiled": lambda: compiled(DistributedDataParallel(Net().to(DEVICE))),
    "compiled_in_ddp": lambda: DistributedDataParallel(compiled(Net(20).to(DEVICE))),
    "split": lambda: compiled(DistributedDataParallel(Net(24_000).to(DEVICE), bucket_cap_mb=1)),
    "fsdp": lambda: sharded(Net().to(DEVICE)),
    "plain": lambda: compiled(Net().to(DEVICE)),
    "asking": lambda: compiled(Asking().to(DEVICE)),
    "reducing": lambda: compiled(Reducing().to(DEVICE)),
}


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    torch.manual_seed(1 + RANK)
    losses = []
    for size in ROWS:
        rows, wanted = torch.randn(size, 8, device=DEVICE), torch.randn(size, 1, device=DEVICE)
        loss = nn.functional.mse_loss(model(rows), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def told(case: str) -> dict[str, Any]:
    before = torchrelay.report()
    torch.compiler.reset()
    torch.manual_seed(0)
    losses = train(CASES[case]())
    run = torchrelay.report()
    return {
        "losses": losses,
        "programs": run.programs - before.programs,
        "traced": run.seconds["trace"] > before.seconds["trace"],
        "reasons": [each.reason for each in run.traced[len(before.traced) :]],
        "outcomes": [graph.outcome + graph.reason for graph in run.graphs[len(before.graphs) :]],
        "alone": run.alone,
    }


def main() -> None:
    if "OWN_STORES" in os.environ:
        os.environ["TORCHRELAY_CACHE_DIR"] = str(FOLDER / f"cache-{RANK}")
    backend = "gloo"
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        backend = "nccl"
    found = {}
    for case in sys.argv[1].split(","):
        if case != "plain" and not dist.is_initialized():
            dist.init_process_group(backend)
        found[case] = told(case)
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found))
    if not dist.is_initialized():
        dist.init_process_group(backend)  # the end of one rank is not the end of the others
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
