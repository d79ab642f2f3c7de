"""Reads a rank's settings from the environment that the worker sets. Outside a job, there are defaults.

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
    """The settings of one rank of a training job. The defaults are for a process outside a job.

    checkpoints: their folder or URL; '' if the job names none. capture: whether this is the capture run.
    """

    spec: TrainSpec | None = None
    job: str = ""
    checkpoints: str = ""
    capture: bool = False
    rank: int = 0
    world_size: int = 1
    attempt: int = 0


def load_rank() -> RankEnvironment:
    """Raises SettingsError if the environment cannot be read."""
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
        world_size=launch.world_size if launch else 1,
        attempt=launch.restart if launch else 0,
    )


def take_channel() -> int:
    """The file descriptor for this rank's RankMessages; -1 if there is none. The variable is removed, because in the
    processes that a rank starts the number is not a file, or is another one."""
    from ...compiler.api.training.rank_environment import ANSWER_ENVIRONMENT

    text = os.environ.pop(ANSWER_ENVIRONMENT, "")
    return int(text) if text.isdecimal() else -1


def begin_capture() -> None:
    """Mark this process as a capture run, and disable Weights & Biases, which would record it as a run."""
    from ...compiler.api.training.rank_environment import CAPTURE_ENVIRONMENT

    os.environ |= {CAPTURE_ENVIRONMENT: "1", "WANDB_MODE": "disabled"}
