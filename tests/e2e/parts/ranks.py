"""One rank of a small DDP job; torchrun or Ray Train starts it: FOLDER [LATE] [CUDA] [NOEXEC] in; FOLDER/<rank>.json
out.

It trains twice from the same start, through torchrelay and compiled locally. With LATE, only rank 0 begins at once; the
others when FOLDER/go appears. With CUDA, each rank has a GPU. With NOEXEC, rank 1 can execute nothing in its folders,
as on a hardened machine, and the model is another one. Each rank has a disk cache of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
import torchrelay
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = 28 if "NOEXEC" in sys.argv else 24
        self.rise, self.fall = nn.Linear(8, width), nn.Linear(width, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.fall(nn.functional.gelu(self.rise(rows)))


def train(backend: str, rank: int, folder: Path, device: torch.device, *, waits: bool) -> list[float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net().to(device))
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    rows, wanted = torch.randn(16, 8).to(device), torch.randn(16, 1).to(device)
    while waits and not (folder / "go").exists():  # after DDP was made: that is a collective
        time.sleep(0.05)
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(compiled(rows), wanted)
        (folder / f"begun-{rank}").touch()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def without_execution(folder: Path) -> None:
    """Start this process again where nothing in a folder that it may use can be executed, but for Inductor's."""
    place, inductor = folder / "noexec", folder / "inductor"
    place.mkdir()
    inductor.mkdir(exist_ok=True)
    script = """
        set -e
        mount -t tmpfs -o noexec none "$0" && mkdir "$0/cache-1"
        mount --bind "$1" "$1" && shift  # what stays executable, the environment and Inductor's folder
        mount --bind "$1" "$1" && shift
        for shared in /tmp /var/tmp /dev/shm; do
            mount --rbind $shared $shared && mount -o remount,bind,noexec $shared
        done
        TMPDIR="$0" NOEXEC=yes exec "$@"
    """
    within = ["unshare", "--user", "--mount", "--map-root-user", "sh", "-c", script, str(place)]
    os.execvp(within[0], [*within, sys.prefix, str(inductor), sys.executable, *sys.argv])


def main() -> None:
    if "NOEXEC" in sys.argv[2:] and os.environ["RANK"] == "1" and "NOEXEC" not in os.environ:
        without_execution(Path(sys.argv[1]))
    device = torch.device("cpu")
    if "CUDA" in sys.argv[2:]:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    run(Path(sys.argv[1]), device, late="LATE" in sys.argv[2:])
    dist.destroy_process_group()


def run(folder: Path, device: torch.device, *, late: bool = False) -> None:
    """What a rank does inside a process group."""
    rank = dist.get_rank()
    cache = folder / ("noexec/" if "NOEXEC" in os.environ else "") / f"cache-{rank}"
    os.environ["TORCHRELAY_CACHE_DIR"] = str(cache)
    relay = train("torchrelay", rank, folder, device, waits=late and rank > 0)
    torch.compiler.reset()
    local = train("inductor", rank, folder, device, waits=False)
    files = [path for path in (cache / "artifacts").rglob("*") if len(path.name) == 64]
    report = msgspec.to_builtins(torchrelay.report())
    told = {
        "relay": relay,
        "local": local,
        "digests": sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in files),
        "keys": [graph["key"] for graph in report["graphs"]],
        "outcomes": [graph["outcome"] + graph["reason"] for graph in report["graphs"]],
        "alone": report["alone"],
    }
    (folder / f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()


if __name__ == "__main__":
    main()
