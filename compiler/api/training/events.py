"""Events of a training job: in `GET /v1/trains/{id}/events`, in the driver's journal, and on a rank's channel.

A rank's events count for its own job only. Times are seconds since 1970, UTC."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from msgspec import Struct

from .jobs import TrainState

AFTER_HEADER = "x-torchrelay-after"
"""On a page of a job's metrics, logs or history: the number after which the next page begins; missing where nothing
follows for now."""


class StepMetrics(Struct, frozen=True, kw_only=True, tag="metrics"):
    """A rank's report of a step. Names with a meaning: loss, samples, tokens (of this step and rank), learning_rate,
    step_seconds, memory_bytes, wait_seconds (for the data loader), gradient_norm."""

    rank: int
    step: int
    at: float
    values: dict[str, float]


class LogLines(Struct, frozen=True, kw_only=True, tag="log"):
    """A rank's output, without line ends."""

    rank: int
    stream: Literal["stdout", "stderr"]
    lines: list[str]


class CheckpointEvent(Struct, frozen=True, kw_only=True, tag="checkpoint"):
    """kept: all ranks stored it completely. Otherwise it failed, `detail` says why, and training continues."""

    step: int
    name: str
    kept: bool
    seconds: float = 0.0
    bytes: int = 0
    detail: str = ""


class JobNote(Struct, frozen=True, kw_only=True, tag="note"):
    """A message for people. rank -1: about the job."""

    level: Literal["info", "warning", "error"]
    text: str
    rank: int = -1


class RankStarted(Struct, frozen=True, kw_only=True, tag="rank_started"):
    """A rank's process runs. attempt: from 0. warm: it was forked from a process that had imported PyTorch."""

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
    """A rank's client counters so far (clients/reports/run_report.py); sent after its first step, and when it ends."""

    rank: int
    hits: int
    misses: int
    fallbacks: int
    reasons: list[str] = []
    attempt: int = 0


class RankEnded(Struct, frozen=True, kw_only=True, tag="rank_ended"):
    """code: exit code, or minus the signal's number. detail: the error's last line."""

    rank: int
    code: int
    at: float
    attempt: int
    detail: str = ""


def describe_exit(code: int) -> str:
    """How a process ended, in words. code: exit code, or minus the signal's number."""
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
    """The job's state changed. The driver reports starting, running, recovering, done, failed and cancelled."""

    state: TrainState
    at: float
    detail: str = ""
    ranks: int = 0
    restarts: int = 0


RankMessage = StepMetrics | CheckpointEvent | JobNote | FirstStep | RankCompiles
"""What a rank's own process may send."""

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
    """number: of a job's events, from 1, without gaps; a restarted driver continues the numbers."""

    number: int
    event: TrainEvent


Decode = Callable[..., Any]
"""decoding.from_json, or decoding.from_msgpack."""


class _Entry(Struct):
    number: int
    event: msgspec.Raw


def read_event(data: bytes, decode: Decode) -> TrainEvent:
    """An event; for one of a kind that this release does not know, a note: a driver may be of the next release. Raises
    msgspec.DecodeError for what is none."""
    try:
        event: TrainEvent = decode(data, type=TrainEvent)
    except msgspec.ValidationError as error:
        return JobNote(level="info", text=f"an event of another release: {error}")
    return event


def read_events(data: bytes, decode: Decode) -> list[NumberedEvent]:
    """Reads a list of NumberedEvent, each as `read_event` does."""
    try:
        events: list[NumberedEvent] = decode(data, type=list[NumberedEvent])
    except msgspec.ValidationError:
        entries = decode(data, type=list[_Entry])
        return [NumberedEvent(each.number, read_event(bytes(each.event), decode)) for each in entries]
    return events
