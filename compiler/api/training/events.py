"""Events of a training job: of `GET /v1/trains/{id}/events`, of the driver's journal, of a rank's channel.

What a rank says of its job is believed for that job alone. Times are seconds since 1970, UTC."""

from __future__ import annotations

import contextlib
import signal
from typing import Literal

from msgspec import Struct

from .jobs import TrainState


class StepMetrics(Struct, frozen=True, kw_only=True, tag="metrics"):
    """What a rank tells of a step. Names that have a meaning here: loss, samples, tokens (of the step, of this rank),
    learning_rate, step_seconds, memory_bytes, wait_seconds (for the data loader), gradient_norm."""

    rank: int
    step: int
    at: float
    values: dict[str, float]


class LogLines(Struct, frozen=True, kw_only=True, tag="log"):
    """Lines that a rank wrote, without their ends."""

    rank: int
    stream: Literal["stdout", "stderr"]
    lines: list[str]


class CheckpointEvent(Struct, frozen=True, kw_only=True, tag="checkpoint"):
    """kept: whole and safe, by all ranks. Otherwise it failed and `detail` says why; training goes on."""

    step: int
    name: str
    kept: bool
    seconds: float = 0.0
    bytes: int = 0
    detail: str = ""


class JobNote(Struct, frozen=True, kw_only=True, tag="note"):
    """Something happened that people should know. rank -1: to the job."""

    level: Literal["info", "warning", "error"]
    text: str
    rank: int = -1


class RankStarted(Struct, frozen=True, kw_only=True, tag="rank_started"):
    """A rank's process runs. attempt: 0 at first. warm: it was forked from a process that had PyTorch imported."""

    rank: int
    world_size: int
    pid: int
    host: str
    attempt: int
    at: float
    warm: bool = False


class FirstStep(Struct, frozen=True, kw_only=True, tag="first_step"):
    """A rank's optimizer has taken its first step in this process."""

    rank: int
    at: float
    attempt: int = 0


class RankCompiles(Struct, frozen=True, kw_only=True, tag="compiles"):
    """A rank's client counters so far (clients/reports/run_report.py): told after its first step, and when it ends."""

    rank: int
    hits: int
    misses: int
    fallbacks: int
    reasons: list[str] = []
    attempt: int = 0


class RankEnded(Struct, frozen=True, kw_only=True, tag="rank_ended"):
    """code: of exit; below 0, the signal. detail: the error's last line."""

    rank: int
    code: int
    at: float
    attempt: int
    detail: str = ""


def describe_exit(code: int) -> str:
    """A process, by its exit code, below 0 the signal; in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = ""
    with contextlib.suppress(ValueError):
        name = f" ({signal.Signals(-code).name})"
    return f"was killed by signal {-code}{name}"


def describe_rank_exit(ended: RankEnded) -> str:
    """How a rank ended, in words."""
    return f"rank {ended.rank} {describe_exit(ended.code)}" + (f": {ended.detail}" if ended.detail else "")


class StateChanged(Struct, frozen=True, kw_only=True, tag="state"):
    """The job's state changed. By the driver: starting, running, recovering, done, failed, cancelled."""

    state: TrainState
    at: float
    detail: str = ""
    ranks: int = 0
    restarts: int = 0


RankMessage = StepMetrics | CheckpointEvent | JobNote | FirstStep | RankCompiles
"""What a rank's own process may tell."""


TrainEvent = (
    StepMetrics
    | LogLines
    | CheckpointEvent
    | JobNote
    | RankStarted
    | FirstStep
    | RankCompiles
    | RankEnded
    | StateChanged
)


class NumberedEvent(Struct, frozen=True):
    """`number`: of a job's events, from 1, without gaps; a driver that starts again goes on where it was."""

    number: int
    event: TrainEvent
