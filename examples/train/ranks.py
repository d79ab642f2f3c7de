"""What the training examples share: one process, DDP or FSDP2 by an option, under torchrun or as a torchrelay job."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WAYS = ("auto", "single", "ddp", "fsdp")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--way", default="auto", choices=WAYS, help="auto: ddp where there are several ranks")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", help="of torch.compile; its own default if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoints", help="folder or object store; a job's own if not given")
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps; 0 for none")
    parser.add_argument("--json", type=Path, help="rank 0 writes the losses here")


def begin(device: str, way: str) -> tuple[torch.device, str]:
    """This rank's device, and the way that `auto` selects; makes the process group if there are several ranks."""
    if way == "auto":
        way = "ddp" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "single"
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if way != "single":
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    return torch.device(kind), way


def spread(model: nn.Module, way: str, blocks: Iterable[nn.Module] = ()) -> nn.Module:
    """This rank's model. fsdp: the parameters of each of `blocks` are gathered when it runs."""
    if way == "ddp":
        return DistributedDataParallel(model)
    if way == "fsdp":
        for block in blocks:
            fully_shard(block)
        fully_shard(model)
    return model


def compiled(model: nn.Module, backend: str | None) -> nn.Module:
    return torch.compile(model) if backend is None else torch.compile(model, backend=backend)


def mean_over_ranks(losses: list[Tensor]) -> list[float]:
    """Each step's mean loss over all ranks: that of the global batch, since all have equal shares."""
    if not losses:
        return []
    mean = torch.stack(losses)
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean.tolist()


def first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
