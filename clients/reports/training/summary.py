"""What a training job told, worked out for people: its events and its ranks' profiles in; series, marks and advice out.

Pure, no torch. Of a step that was taken again after a restart the last value counts.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

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
from ..profiling.advice import Advice, advice, of_compiles, of_steps
from ..profiling.summary import ProfileSummary

KNOWN = (
    "loss",
    "throughput",
    "step_seconds",
    "memory_bytes",
    "learning_rate",
    "wait_seconds",
    "gradient_norm",
)
"""In the order in which they are shown; a script's own come after them."""
_COUNTED = ("tokens", "samples")
_OTHERS = 12
_SKIPPED_STEPS = 2
"""Compiles and the first batch make the first steps no measure of a step."""

Line = list[tuple[int, float]]
"""(step, value), by step."""


class MetricSeries(Struct, frozen=True):
    """One value over steps. unit: `tokens/s`, `s`, `B` or ''. lines: by rank; -1: of all ranks together."""

    name: str
    unit: str
    lines: dict[int, Line]

    @property
    def last(self) -> float | None:
        """Of all ranks, or of the lowest."""
        line = self.lines.get(-1) or next((self.lines[rank] for rank in sorted(self.lines)), None)
        return line[-1][1] if line else None


class TrainingPhase(Struct, frozen=True):
    """A state that the job was in. Seconds since 1970; end: of the last one, when it was last heard of."""

    state: str
    start: float
    end: float
    detail: str


class TrainingReport(Struct, frozen=True, kw_only=True):
    """restarts: (step that was reached, how many ranks go on, why). first_steps: seconds from a rank's start to the end
    of its first step, by attempt and rank. compiles: the last count of each rank's last attempt."""

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

    def one(self, name: str) -> MetricSeries | None:
        return next((series for series in self.series if series.name == name), None)


def report(
    job: TrainJob,
    events: Iterable[TrainEvent],
    profiles: Sequence[ProfileSummary] = (),
    traces: Sequence[str] = (),
) -> TrainingReport:
    """events: metrics in their order, the others in theirs. traces: names of the job's files."""
    values: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    checkpoints: list[CheckpointEvent] = []
    losses: list[tuple[StateChanged, str]] = []
    turns: list[StateChanged] = []
    notes: list[JobNote] = []
    started: dict[tuple[int, int], float] = {}
    first: dict[int, dict[int, float]] = defaultdict(dict)
    compiles: dict[int, RankCompiles] = {}
    reached: list[tuple[float, int]] = []
    why = ""
    for event in events:
        match event:
            case StepMetrics():
                for name, value in event.values.items():
                    if math.isfinite(value):
                        values[name][event.rank][event.step] = value
                reached.append((event.at, event.step))
            case CheckpointEvent():
                checkpoints.append(event)
            case JobNote():
                notes.append(event)
            case RankStarted():
                started[event.attempt, event.rank] = event.at
            case FirstStep():
                begun = started.get((event.attempt, event.rank))
                if begun is not None:
                    first[event.attempt][event.rank] = event.at - begun
            case RankCompiles():
                compiles[event.rank] = event
            case RankEnded(code=code) if code != 0:
                why = describe_rank_exit(event)
            case StateChanged():
                turns.append(event)
                if event.state == "recovering":
                    losses.append((event, event.detail or why))
    reached.sort()
    told = [at for at, _ in reached]
    restarts = [
        (reached[place - 1][1] if place else 0, turn.ranks, said)
        for turn, said in losses
        for place in [bisect.bisect_right(told, turn.at)]
    ]
    lines = {
        name: {rank: sorted(line.items()) for rank, line in by_rank.items()}
        for name, by_rank in values.items()
    }
    return TrainingReport(
        job=job,
        series=_series(lines),
        checkpoints=checkpoints,
        restarts=restarts,
        stages=_stages(job, turns, max([job.created, *told, *(turn.at for turn in turns)])),
        notes=notes,
        first_steps=dict(first),
        compiles=dict(sorted(compiles.items())),
        advice=_advice(job, values, profiles, compiles),
        profiles=sorted((each for each in profiles if each.steps), key=lambda each: each.rank),
        traces=sorted(traces),
    )


def _series(values: Mapping[str, dict[int, Line]]) -> list[MetricSeries]:
    found: dict[str, MetricSeries] = {}
    for counted in _COUNTED:
        if counted in values and "step_seconds" in values and "throughput" not in found:
            lines = _throughput(values[counted], values["step_seconds"])
            if lines:
                found["throughput"] = MetricSeries("throughput", f"{counted}/s", lines)
    for name, lines in values.items():
        if name not in _COUNTED:
            found[name] = MetricSeries(name, _unit(name), lines)
    own = sorted(set(found) - set(KNOWN))[:_OTHERS]
    return [found[name] for name in (*KNOWN, *own) if name in found]


def _unit(name: str) -> str:
    if name.endswith("seconds"):
        return "s"
    return "B" if name.endswith("bytes") else ""


def _throughput(counted: Mapping[int, Line], seconds: Mapping[int, Line]) -> dict[int, Line]:
    """Of all ranks together: what the ranks that then trained did in a step, by the slowest one's time. Ranks tell of
    their times now and then, each of other steps: the value before a step stands for it, or the first."""
    both = {rank: (counted[rank], line) for rank, line in seconds.items() if line and counted.get(rank)}
    found: Line = []
    for step in sorted({step for _, line in both.values() for step, _ in line}):
        there = [(counts, line) for counts, line in both.values() if _covers(line, step)]
        took = max((_at(line, step) for _, line in there), default=0.0)
        if took > 0:
            found.append((step, sum(_at(counts, step) for counts, _ in there) / took))
    return {-1: found} if found else {}


def _at(line: Line, step: int) -> float:
    return line[max(bisect.bisect_right(line, (step, math.inf)) - 1, 0)][1]


def _covers(line: Line, step: int) -> bool:
    """Whether a rank that told of these steps was there at this one."""
    apart = max((later[0] - earlier[0] for earlier, later in itertools.pairwise(line)), default=1)
    return line[0][0] - apart <= step <= line[-1][0] + apart


def _stages(job: TrainJob, turns: Sequence[StateChanged], latest: float) -> list[TrainingPhase]:
    """The states between the job's begin and its end; one that lasted no time at all is left out."""
    marks = [("waiting", job.created, ""), *((turn.state, turn.at, turn.detail) for turn in turns)]
    end = job.ended or latest
    found = []
    for number, (state, start, detail) in enumerate(marks):
        until = marks[number + 1][1] if number + 1 < len(marks) else end
        if until > start:
            found.append(TrainingPhase(state, start, until, detail))
    return found


def _advice(
    job: TrainJob,
    values: Mapping[str, Mapping[int, Mapping[int, float]]],
    profiles: Sequence[ProfileSummary],
    compiles: Mapping[int, RankCompiles],
) -> list[Advice]:
    """What profiles say, and of what they say nothing, the steps."""
    found = advice(profiles)
    said = {each.rule for each in found}
    seconds = _of_ranks(values.get("step_seconds", {}))
    waited = _of_ranks(values.get("wait_seconds", {}))
    found += [each for each in of_steps(seconds, waited) if each.rule not in said]
    late = {rank: each.reasons for rank, each in compiles.items() if each.misses + each.fallbacks}
    return found + of_compiles(job.compiles.misses + job.compiles.fallbacks, late)


def _of_ranks(values: Mapping[int, Mapping[int, float]]) -> dict[int, list[float]]:
    found = {rank: [line[step] for step in sorted(line)[_SKIPPED_STEPS:]] for rank, line in values.items()}
    return {rank: line for rank, line in found.items() if line}
