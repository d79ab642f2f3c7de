"""One rank of a small DDP job with torchrelay.background; torchrun starts it: FOLDER [MODE] in; FOLDER/<rank>.json out.

It trains until no rank has a graph in the background, and two steps more; then eagerly from the same start. Each rank
has a disk cache of its own. Rank 1 is slower than rank 0. MODE is torch.compile's, and makes graphs of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torchrelay
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MODE = sys.argv[2] if len(sys.argv) > 2 else None


class Net(nn.Module):
    """Two of its graphs are alike, so that they have one key."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.fall = nn.Linear(8, 20), nn.Linear(8, 20), nn.Linear(20, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        factor = 0.9375 if MODE is None else 0.8125
        left = nn.functional.gelu(self.left(rows)) * factor
        torch._dynamo.graph_break()
        right = nn.functional.gelu(self.right(rows)) * factor
        torch._dynamo.graph_break()
        return self.fall((left + right) * factor)


class Training:
    def __init__(self, rank: int, *, compiled: bool) -> None:
        torch.manual_seed(0)
        model = DistributedDataParallel(Net())
        self._run: Any = torch.compile(model, backend="torchrelay", mode=MODE) if compiled else model
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        torch.manual_seed(1 + rank)
        self._rows, self._wanted = torch.randn(16, 8), torch.randn(16, 1)
        self.losses: list[float] = []

    def step(self) -> None:
        loss = nn.functional.mse_loss(self._run(self._rows), self._wanted)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.item())


def main() -> None:
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(sys.argv[1])
    os.environ["TORCHRELAY_CACHE_DIR"] = str(folder / f"cache-{rank}")
    relay = Training(rank, compiled=True)
    relay.step()
    began = torchrelay.report().background
    while True:
        left = torch.tensor(torchrelay.report().background)
        dist.all_reduce(left)
        if not left:
            break
        time.sleep(0.02 * rank)
        relay.step()
    for _ in range(2):
        relay.step()
    eager = Training(rank, compiled=False)
    for _ in relay.losses:
        eager.step()
    report = msgspec.to_builtins(torchrelay.report())
    told = {"began": began, "relay": relay.losses, "eager": eager.losses, "report": report}
    (folder / f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
