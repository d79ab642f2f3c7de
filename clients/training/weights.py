"""A model and the name of a checkpoint in; the model with the checkpoint's weights out. Nothing is unpickled freely.

A checkpoint is a folder that PyTorch's distributed checkpoints wrote (one, or the newest whole one of a job's folder:
`step-N`), of any number of ranks, or a file of `torch.save` that holds tensors: a state dict, or a dict with one under
`model` or `state_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load

from ...compiler.errors import ExportFailed

KEYS = ("model", "state_dict")
_WRAPPERS = ("_orig_mod.", "module.")
"""What torch.compile and DistributedDataParallel put before the names of what they wrap."""


def load_weights(model: torch.nn.Module, place: Path) -> str:
    """The name of the file or folder that was read. Raises ExportFailed."""
    if place.is_dir():
        folder = _whole(place)
        try:
            state = {"model": get_model_state_dict(model)}
            load(state, checkpoint_id=str(folder), no_dist=True)
        except Exception as error:  # its readers raise whatever the damage leads to
            raise ExportFailed(f"{folder} cannot be loaded into the model: {_said(error)}") from error
        found = state["model"]
    elif place.is_file():
        folder, found = place, _of_file(place)
    else:
        raise ExportFailed(f"there is no checkpoint {place}", hint="Name a file, or a folder that is there")
    try:
        set_model_state_dict(model, found, options=StateDictOptions(strict=True))
    except (RuntimeError, KeyError) as error:
        raise ExportFailed(f"{folder} is of another model: {_said(error)}") from None
    return folder.name


def _said(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]


def _of_file(place: Path) -> dict[str, Any]:
    try:
        read = torch.load(place, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch all have errors of their own
        hint = "Save the model's state_dict with torch.save"
        raise ExportFailed(
            f"{place} holds more than tensors, or is damaged: {_said(error)}", hint=hint
        ) from None
    for key in KEYS:
        if isinstance(read, Mapping) and isinstance(read.get(key), Mapping):
            read = read[key]
            break
    if not isinstance(read, Mapping) or not all(isinstance(name, str) for name in read):
        raise ExportFailed(f"{place} holds no state dict", hint="Save the model's state_dict with torch.save")
    return {_bare(name): value for name, value in read.items()}


def _bare(name: str) -> str:
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name


def _whole(folder: Path) -> Path:
    """The folder itself, or its newest `step-N` that has what a finished write leaves."""
    if (folder / ".metadata").is_file():
        return folder
    steps = [
        (int(number), path)
        for path in folder.glob("step-*")
        if (number := path.name.removeprefix("step-")).isdecimal() and (path / ".metadata").is_file()
    ]
    if not steps:
        raise ExportFailed(
            f"{folder} holds no whole checkpoint", hint="Name the folder of a job's checkpoints"
        )
    return max(steps)[1]
