"""What a training job's report shows: series, marks and advice, from its events and its ranks' profiles.

Needs no torch. Of a step that was taken again after a restart the last value counts.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from ....compiler.api.training.events import (
    CheckpointEvent,
    FirstStep,
    JobNote,
    RankCompiles,
    RankEnded,
    RankStarted,
    StateChanged,
    StepMetrics,
    TrainEvent,
    describe_rank_exit,
)
from ....compiler.api.training.jobs import TrainJob
from ....compiler.api.training.series import Line, MetricSeries, series_of, values_of
from ..profiling.advice import Advice, advice, of_compiles, of_steps
from ..profiling.summary import ProfileSummary

_SKIPPED_STEPS = 2
"""The first steps are not counted: they include compiles and the wait for the first batch."""

_Event = TypeVar("_Event")


class TrainingPhase(Struct, frozen=True):
    """A state that the job was in. start, end: seconds since 1970. The last one ends with the latest event."""

    state: str
    start: float
    end: float


class TrainingReport(Struct, frozen=True, kw_only=True):
    """restarts: (step that was reached, number of ranks that continue, cause). first_steps: seconds from a rank's start
    to the end of its first step, by attempt and rank. compiles: the last count of each rank's last attempt."""

    job: TrainJob
    series: list[MetricSeries]
    checkpoints: list[CheckpointEvent]
    restarts: list[tuple[int, int, str]]
    stages: list[TrainingPhase]
    notes: list[JobNote]
    first_steps: dict[int, dict[int, float]]
    compiles: dict[int, RankCompiles]
    advice: list[Advice]
    profiles: list[ProfileSummary]
    traces: list[str]

    def named(self, name: str) -> MetricSeries | None:
        return next((series for series in self.series if series.name == name), None)


def report(
    job: TrainJob,
    events: Iterable[TrainEvent],
    profiles: Sequence[ProfileSummary] = (),
    traces: Sequence[str] = (),
) -> TrainingReport:
    """events: the metrics in their own order, the others in theirs. traces: names of the job's files."""
    events = list(events)
    metrics = _of_type(events, StepMetrics)
    values = values_of(metrics)
    compiles = {event.rank: event for event in _of_type(events, RankCompiles)}
    return TrainingReport(
        job=job,
        series=series_of(values),
        checkpoints=_of_type(events, CheckpointEvent),
        restarts=_restarts(events, sorted((event.at, event.step) for event in metrics)),
        stages=_stages(job, _of_type(events, StateChanged), metrics),
        notes=_of_type(events, JobNote),
        first_steps=_first_steps(events),
        compiles=dict(sorted(compiles.items())),
        advice=_advice(job, values, profiles, compiles),
        profiles=sorted((each for each in profiles if each.steps), key=lambda each: each.rank),
        traces=sorted(traces),
    )


def _of_type(events: Iterable[TrainEvent], kind: type[_Event]) -> list[_Event]:
    return [event for event in events if isinstance(event, kind)]


def _restarts(
    events: Iterable[TrainEvent], reached: Sequence[tuple[float, int]]
) -> list[tuple[int, int, str]]:
    """reached: (time, step) of each report, sorted."""
    restarts, cause = [], ""
    for event in events:
        if isinstance(event, RankEnded) and event.code != 0:
            cause = describe_rank_exit(event)
        elif isinstance(event, StateChanged) and event.state == "recovering":
            place = bisect.bisect_right(reached, (event.at, math.inf))
            restarts.append((reached[place - 1][1] if place else 0, event.ranks, event.detail or cause))
    return restarts


def _first_steps(events: Sequence[TrainEvent]) -> dict[int, dict[int, float]]:
    """Seconds from a rank's start to the end of its first step, by attempt and rank."""
    started = {(event.attempt, event.rank): event.at for event in _of_type(events, RankStarted)}
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for event in _of_type(events, FirstStep):
        if (event.attempt, event.rank) in started:
            found[event.attempt][event.rank] = event.at - started[event.attempt, event.rank]
    return dict(found)


def _stages(
    job: TrainJob, changes: Sequence[StateChanged], metrics: Sequence[StepMetrics]
) -> list[TrainingPhase]:
    """The states from the job's start to its end; one that took no time is left out."""
    marks = [("waiting", job.created), *((change.state, change.at) for change in changes)]
    latest = max([job.created, *(it.at for it in metrics), *(it.at for it in changes)])
    phases = itertools.pairwise([*marks, ("", job.ended or latest)])
    return [TrainingPhase(state, start, end) for (state, start), (_, end) in phases if end > start]


def _advice(
    job: TrainJob,
    values: Mapping[str, Mapping[int, Line]],
    profiles: Sequence[ProfileSummary],
    compiles: Mapping[int, RankCompiles],
) -> list[Advice]:
    """Advice from profiles; for rules that give none there, from the steps."""
    found = advice(profiles)
    rules = {each.rule for each in found}
    seconds, waited = (_steady(values.get(name, {})) for name in ("step_seconds", "wait_seconds"))
    found += [each for each in of_steps(seconds, waited) if each.rule not in rules]
    reasons = {rank: each.reasons for rank, each in compiles.items() if each.misses + each.fallbacks}
    return found + of_compiles(job.compiles.misses + job.compiles.fallbacks, reasons)


def _steady(lines: Mapping[int, Line]) -> dict[int, list[float]]:
    """Values by rank, without the first steps."""
    found = {rank: [value for _, value in line[_SKIPPED_STEPS:]] for rank, line in lines.items()}
    return {rank: values for rank, values in found.items() if values}
