"""What the job told this rank, from the environment that its worker has set; a process outside a job has defaults.

The second of the two modules under clients/ that read the environment; the other is settings.py.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from ...compiler import decoding
from ...compiler.errors import SettingsError
from ..settings import load_launcher_info

if TYPE_CHECKING:
    from ...compiler.api.training.jobs import TrainSpec


class RankEnvironment(Struct, frozen=True, kw_only=True):
    """What a training job told this process, one of its ranks; its defaults are a process on its own.

    spec: None outside a job. checkpoints: where they go; '' where nothing was said. capture: this is the run that only
    finds graphs. attempt: 0 at first.
    """

    spec: TrainSpec | None = None
    job: str = ""
    checkpoints: str = ""
    capture: bool = False
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    attempt: int = 0


def load_rank() -> RankEnvironment:
    """What the job that started this process said. Raises SettingsError."""
    from ...compiler.api.training import (  # here: every import of torchrelay imports this module
        jobs,
        rank_environment,
    )

    found, launch = os.environ.get, load_launcher_info()
    try:
        text = found(rank_environment.SPEC_ENVIRONMENT, "")
        spec = decoding.from_json(text, type=jobs.TrainSpec) if text else None
    except (ValueError, msgspec.MsgspecError) as error:
        raise SettingsError(f"what the training job told this rank cannot be read: {error}") from None
    return RankEnvironment(
        spec=spec,
        job=found(rank_environment.JOB_ENVIRONMENT, ""),
        checkpoints=found(rank_environment.CHECKPOINTS_ENVIRONMENT, ""),
        capture=found(rank_environment.CAPTURE_ENVIRONMENT) == "1",
        rank=launch.rank if launch else 0,
        local_rank=launch.local_rank if launch else 0,
        world_size=launch.world_size if launch else 1,
        attempt=launch.restart if launch else 0,
    )


def take_channel() -> int:
    """The file descriptor on which this rank tells its job RankMessages; -1: nobody listens. Taken once, and so not
    seen by the processes that a rank starts: to them the number means nothing, or another file."""
    from ...compiler.api.training.rank_environment import ANSWER_ENVIRONMENT

    text = os.environ.pop(ANSWER_ENVIRONMENT, "")
    return int(text) if text.isdecimal() else -1


def begin_capture() -> None:
    """From here on `load_rank` says that this process only finds graphs; and Weights & Biases keeps no run of it."""
    from ...compiler.api.training.rank_environment import CAPTURE_ENVIRONMENT

    os.environ |= {CAPTURE_ENVIRONMENT: "1", "WANDB_MODE": "disabled"}
