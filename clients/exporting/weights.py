"""Loads a checkpoint's weights into a model.

The location is a training's checkpoints (the newest complete and undamaged one is used), one of them, any folder of
torch.distributed.checkpoint with the model under `model`, or a file of `torch.save` that holds tensors: a state dict,
or a dict with one under `model` or `state_dict`. Such a file is read with weights_only; a folder of checkpoints is
trusted, as the training that restores from it trusts it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load

from ...compiler.errors import CheckpointError, ExportFailed
from ..training.checkpointing.storage import damage, storage_of

KEYS = ("model", "state_dict")
_WRAPPERS = ("_orig_mod.", "module.")
"""Prefixes that torch.compile and DistributedDataParallel add to parameters' names."""


def load_weights(model: torch.nn.Module, location: str, say: Callable[[str], None]) -> str:
    """The name of the file or folder that was read. location: a path, or an object store's URL. Raises ExportFailed."""
    folder = Path(location)
    if "://" not in location and folder.is_file():
        _into(model, _of_file(folder), folder.name)
        return folder.name
    if (folder / ".metadata").is_file():
        _of_folder(model, folder, folder.name)
        return folder.name
    place = storage_of(location)
    try:
        for name in place.names():
            manifest = place.manifest(name)
            with place.opened(name, manifest) as files:
                problem = damage(files, manifest.files)
                if not problem:
                    _of_folder(model, files, name)
                    return name
            say(f"checkpoint {name} is damaged and was skipped: {problem}")
    except CheckpointError as error:
        raise ExportFailed(f"the checkpoints in {location} cannot be read: {error.message}") from None
    raise ExportFailed(
        f"there is no complete checkpoint in {location}",
        hint="Name a file, a folder of checkpoints, or a job",
    )


def _of_folder(model: torch.nn.Module, folder: Path, name: str) -> None:
    state = {"model": get_model_state_dict(model)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there is no process group
            load(state, checkpoint_id=str(folder), no_dist=True)
    except (
        Exception,
        CheckpointException,
    ) as error:  # the latter is not an Exception; damage raises any error
        raise ExportFailed(f"{name} cannot be loaded into the model: {_one_line(error)}") from error
    _into(model, state["model"], name)


def _into(model: torch.nn.Module, state: dict[str, Any], name: str) -> None:
    try:
        set_model_state_dict(model, state, options=StateDictOptions(strict=True))
    except (RuntimeError, KeyError) as error:
        raise ExportFailed(f"{name} is of another model: {_one_line(error)}") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]


def _of_file(file: Path) -> dict[str, Any]:
    try:
        read = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch all have errors of their own
        hint = "Save the model's state_dict with torch.save"
        raise ExportFailed(
            f"{file} holds more than tensors, or is damaged: {_one_line(error)}", hint=hint
        ) from None
    for key in KEYS:
        if isinstance(read, Mapping) and isinstance(read.get(key), Mapping):
            read = read[key]
            break
    if not isinstance(read, Mapping) or not all(isinstance(name, str) for name in read):
        raise ExportFailed(f"{file} holds no state dict", hint="Save the model's state_dict with torch.save")
    return {_bare(name): value for name, value in read.items()}


def _bare(name: str) -> str:
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name
