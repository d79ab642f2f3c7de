"""A small training with dropout: FOLDER --way single|ddp|fsdp in; FOLDER/result-RANK.json, and checkpoints, out.

It goes on where a checkpoint is. --kill STEP: rank 1 dies there, once. --stop STEP: waits there until SIGTERM came.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from torchrelay import train


def whole_weights(model: nn.Module) -> str:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    made = hashlib.sha256()
    for name in sorted(state):
        made.update(name.encode() + state[name].numpy().tobytes())
    return made.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--way", default="ddp")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--kill", type=int, default=-1)
    parser.add_argument("--stop", type=int, default=-1)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--full-disk", type=int, default=-1, help="rank whose files stay below 500 bytes")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--place", help="of the checkpoints; a folder in FOLDER if not given")
    args = parser.parse_args()

    rank = 0
    if args.way != "single":
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    draw = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(64, 8, generator=draw), torch.randn(64, 1, generator=draw))
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(args.dropout), nn.Linear(32, 1))
    if args.way == "ddp":
        model = DistributedDataParallel(model)
    elif args.way == "fsdp":
        fully_shard(model)
    if args.optimizer == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    torch.manual_seed(100 + rank)
    batches = train.batches(data, 16, seed=3)
    checkpoints = train.Checkpoints(args.place or args.folder / "checkpoints")
    found = checkpoints.restore(model, optimizer, scheduler=scheduler, loader=batches)
    begun_with = whole_weights(model)
    if rank == args.full_disk:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
    losses = {}
    for step, (rows, wanted) in enumerate(batches, found or 0):
        if step >= args.steps:
            break
        if step == args.kill and rank == 1 and found is None:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == args.stop and found is None:
            (args.folder / f"there-{rank}").touch()
            while not (args.folder / "asked").exists():
                time.sleep(0.02)
        loss = nn.functional.mse_loss(model(rows), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses[step] = loss.item()
        train.report(step=step, loss=loss)
        stop = train.should_stop() if args.stop >= 0 else False
        if stop or (step + 1) % args.every == 0:
            checkpoints.save(step + 1, model, optimizer, scheduler=scheduler, loader=batches)
            if args.kill >= 0 and found is None:
                checkpoints.wait()  # so that the test knows which one is there
        if stop:
            break
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    result = {"found": found, "losses": losses, "weights": whole_weights(model), "begun_with": begun_with}
    (args.folder / f"result-{rank}.json").write_text(json.dumps(result))
    if args.way != "single":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
