"""Bodies of `GET /jobs` and `GET /jobs/{id}`: training jobs as their pages show them."""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import Struct

from .events import LogLines, NumberedEvent
from .jobs import TrainFile, TrainJob
from .series import MetricSeries

JobAction = Literal["stop", "resume"]
JOB_ACTIONS: tuple[JobAction, ...] = get_args(JobAction)


class ShownJob(Struct, frozen=True):
    """A training job. series: of its latest reports. history: the latest events that are neither a report nor a log.
    logs: the latest lines of the ranks that were asked for. actions: what the caller may do."""

    job: TrainJob
    series: list[MetricSeries]
    history: list[NumberedEvent]
    logs: list[LogLines]
    files: list[TrainFile]
    actions: list[JobAction]
