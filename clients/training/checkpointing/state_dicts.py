"""State dicts of model and optimizers, gathered for a checkpoint and loaded from one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim.optimizer import Optimizer

from ....compiler.errors import CheckpointError
from ..metrics.optimizer_steps import process_steps
from .rank_group import RankGroup, error_line

Optimizers = Optimizer | Iterable[Optimizer] | None


def optimizer_list(optimizer: Optimizers) -> list[Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def _is_sharded(optimizer: Optimizer) -> bool:
    """ZeroRedundancyOptimizer: each rank has a part of the state, and the optimizer itself gathers it."""
    return hasattr(optimizer, "consolidate_state_dict")


def gather_state(model: nn.Module, optimizers: list[Optimizer]) -> tuple[dict[str, Any], list[Any]]:
    """(state of the model and of optimizers that are not sharded; whole states of the sharded ones on rank 0)."""
    zero = []
    for optimizer in optimizers:
        if _is_sharded(optimizer):
            optimizer.consolidate_state_dict(to=0)  # type: ignore[attr-defined]
            zero.append(optimizer.state_dict() if dist.get_rank() == 0 else None)
    return _named_state(model, [optimizer for optimizer in optimizers if not _is_sharded(optimizer)]), zero


def _named_state(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    """By names of parameters, which do not depend on how the model is distributed."""
    with process_steps().not_counted():
        of_model, of_optimizers = get_state_dict(model, optimizers)
    return {"model": of_model, "optimizer": of_optimizers} if optimizers else {"model": of_model}


def load_state(
    folder: Path, group: RankGroup, model: nn.Module, optimizers: list[Optimizer], own: dict[str, Any]
) -> None:
    """Load a checkpoint into model and optimizers. own: from `load_rank_state`. Raises CheckpointError for a
    checkpoint of another model."""
    spread = [optimizer for optimizer in optimizers if not _is_sharded(optimizer)]
    state = _named_state(model, spread)
    reader = FileSystemReader(folder)
    known = reader.read_metadata().state_dict_metadata
    lacking = [name for name in state["model"] if f"model.{name}" not in known]
    if lacking:
        raise CheckpointError(
            f"the checkpoint has no {lacking[0]!r}, and lacks {len(lacking)} of this model's "
            f"{len(state['model'])} tensors",
            hint="It belongs to another model: name another folder",
        )
    # allow_partial_load: parameters that never had a gradient have no optimizer state in the checkpoint.
    try:
        load(
            state,
            storage_reader=reader,
            planner=DefaultLoadPlanner(allow_partial_load=True),
            process_group=group.group,
            no_dist=group.group is None,
        )
    except CheckpointException as error:
        raise CheckpointError(f"{folder.name} cannot be taken up: {error_line(error)}") from None
    set_state_dict(
        model, spread, model_state_dict=state["model"], optim_state_dict=state.get("optimizer", {})
    )
    for optimizer, whole in zip(filter(_is_sharded, optimizers), own["zero"], strict=True):
        optimizer.load_state_dict(whole)


def load_rank_state(folder: Path, group: RankGroup) -> dict[str, Any]:
    """The random, scheduler and loader states that this rank wrote; those of rank 0 if the number of ranks has changed.
    States of sharded optimizers are always from rank 0."""
    first: dict[str, Any] = _read(folder / "rank-0.pt")
    mine = folder / f"rank-{group.rank}.pt"
    if group.rank == 0 or first["ranks"] != group.size or not mine.exists():
        return first
    return {**_read(mine), "zero": first["zero"]}


def _read(file: Path) -> dict[str, Any]:
    """Reads to the CPU: else each tensor would go to the GPU whose number it was saved with."""
    read: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False)
    return read
