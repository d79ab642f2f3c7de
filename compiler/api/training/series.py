"""A training job's metrics as series over steps. Where a step was taken twice, the last value counts."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from msgspec import Struct

from .events import StepMetrics

TITLES = {
    "loss": "Loss",
    "throughput": "Throughput",
    "step_seconds": "Step time",
    "memory_bytes": "Memory",
    "learning_rate": "Learning rate",
    "wait_seconds": "Waiting for data, each step",
    "gradient_norm": "Gradient norm",
}
"""Titles of series, in the order in which they are shown; a script's own come after them."""
COUNTED = ("tokens", "samples")
"""Units of throughput; the first that a job reports is used."""
_OTHERS = 12

Line = list[tuple[int, float]]
"""(step, value), by step."""


class MetricSeries(Struct, frozen=True):
    """One value over steps. unit: `tokens/s`, `s`, `B` or ''. lines: by rank; -1: of all ranks together."""

    name: str
    unit: str
    lines: dict[int, Line]

    @property
    def last(self) -> float | None:
        """The last value of all ranks together, or else of the lowest rank."""
        line = self.lines.get(-1) or next((self.lines[rank] for rank in sorted(self.lines)), None)
        return line[-1][1] if line else None


def values_of(metrics: Iterable[StepMetrics]) -> dict[str, dict[int, Line]]:
    """By name and rank."""
    values: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for event in metrics:
        for name, value in event.values.items():
            if math.isfinite(value):
                values[name][event.rank][event.step] = value
    return {
        name: {rank: sorted(line.items()) for rank, line in by_rank.items()}
        for name, by_rank in values.items()
    }


def series_of(values: Mapping[str, dict[int, Line]]) -> list[MetricSeries]:
    found = {}
    for counted in reversed(COUNTED):
        lines = _throughput(values.get(counted, {}), values.get("step_seconds", {}))
        if lines:
            found["throughput"] = MetricSeries("throughput", f"{counted}/s", lines)
    for name, lines in values.items():
        if name not in COUNTED:
            found[name] = MetricSeries(name, _unit(name), lines)
    own = sorted(set(found) - set(TITLES))[:_OTHERS]
    return [found[name] for name in (*TITLES, *own) if name in found]


def _unit(name: str) -> str:
    if name.endswith("seconds"):
        return "s"
    return "B" if name.endswith("bytes") else ""


def _throughput(counted: Mapping[int, Line], seconds: Mapping[int, Line]) -> dict[int, Line]:
    """The throughput of all ranks together, by step: the tokens or samples of the ranks that trained then, divided by
    the slowest rank's time. Ranks do not report at the same steps: for a step that a rank did not report, its latest
    earlier value counts, or its first if there is no earlier one."""
    both = [(counted[rank], line) for rank, line in seconds.items() if line and counted.get(rank)]
    found: Line = []
    for step in sorted({step for _, line in both for step, _ in line}):
        training = [(counts, line) for counts, line in both if _covers(line, step)]
        slowest = max((_value_at(line, step) for _, line in training), default=0.0)
        if slowest > 0:
            found.append((step, sum(_value_at(counts, step) for counts, _ in training) / slowest))
    return {-1: found} if found else {}


def _value_at(line: Line, step: int) -> float:
    return line[max(bisect.bisect_right(line, (step, math.inf)) - 1, 0)][1]


def _covers(line: Line, step: int) -> bool:
    """Whether a rank that reported these steps was training at this one."""
    apart = max((later[0] - earlier[0] for earlier, later in itertools.pairwise(line)), default=1)
    return line[0][0] - apart <= step <= line[-1][0] + apart
