"""Pictures of a training job as SVG, drawn without a script: lines over steps, memory over time, shares as bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ..html_page import bytes_of, escaped, milliseconds, number
from ..profiling.memory_timeline import CATEGORIES, MemoryTimeline
from ..profiling.summary import ProfileSummary
from .summary import Line, MetricSeries

WIDTH, HEIGHT = 560, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 12, 26
_DRAWN = 240
"""Points of a line; of more, the least and greatest of each part are drawn."""
_COLUMNS = 40
"""Steps of a profile that are drawn."""
_APART = 6
"""Ranks that have a line each; of more, the band that they fill and their mean are drawn."""
_SAID = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "activations": "activations",
    "temporary": "temporary",
    "before": "from before",
}


def lines(series: MetricSeries, *, restarts: Sequence[int] = (), checkpoints: Sequence[int] = ()) -> str:
    """A series over steps. restarts: steps at which ranks started again; checkpoints: of the whole ones."""
    every = [point for line in series.lines.values() for point in line]
    steps = [step for step, _ in every]
    values = [value for _, value in every]
    low, high = _range(values)
    scale = _Scale(min(steps), max(max(steps), min(steps) + 1), low, high)
    told = _teller(series.unit)
    parts = [scale.grid(told, "step")]
    parts += [
        f'<line class="mark restart" x1="{scale.x(step):.1f}" x2="{scale.x(step):.1f}" y1="{_TOP}" '
        f'y2="{HEIGHT - _BOTTOM}"><title>ranks started again after step {step}</title></line>'
        for step in restarts
    ]
    parts += [
        f'<path class="mark kept" d="M{scale.x(step):.1f} {HEIGHT - _BOTTOM} l-4 7 h8 z">'
        f"<title>checkpoint of step {step}</title></path>"
        for step in checkpoints
        if min(steps) <= step <= max(steps)
    ]
    if len(series.lines) > _APART:
        parts.append(_band(series, scale, told))
    else:
        ranks = sorted(series.lines)
        for rank in ranks:
            parts.append(_line(series.lines[rank], scale, f"kind{ranks.index(rank) % 6}", _who(rank), told))
    label = f"{series.name.replace('_', ' ')} over {len(set(steps))} steps"
    return _svg("chart", label, parts)


def memory(timeline: MemoryTimeline) -> str:
    """What the device's memory is used for, over the profiled steps."""
    top = max([timeline.peak, *(sum(point.bytes) for point in timeline.points)]) or 1
    near = timeline.limit and timeline.limit <= 1.6 * top
    scale = _Scale(
        0.0, max(timeline.points[-1].at, 1.0) / 1000, 0.0, (timeline.limit if near else top) * 1.05
    )
    parts = [scale.grid(bytes_of, "ms")]
    for place, category in reversed(list(enumerate(CATEGORIES))):
        if any(point.bytes[place] for point in timeline.points):
            upper = _steps(
                [(point.at / 1000, sum(point.bytes[: place + 1])) for point in timeline.points], scale
            )
            base = f"L{scale.x(scale.right):.1f} {scale.y(0):.1f} L{scale.x(0):.1f} {scale.y(0):.1f} Z"
            parts.append(
                f'<path class="area {category}" d="{upper} {base}"><title>{_SAID[category]}: at the peak '
                f"{bytes_of(timeline.at_peak.get(category, 0))}</title></path>"
            )
    if near:
        parts.append(
            f'<line class="mark restart" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{scale.y(timeline.limit):.1f}" '
            f'y2="{scale.y(timeline.limit):.1f}"><title>all of the device: {bytes_of(timeline.limit)}</title></line>'
        )
    at = timeline.peak_at / 1000
    parts.append(
        f'<circle class="peak" cx="{scale.x(at):.1f}" cy="{scale.y(timeline.peak):.1f}" r="4">'
        f"<title>peak: {bytes_of(timeline.peak)}</title></circle>"
    )
    return _svg("chart", f"memory of {timeline.device}, at most {bytes_of(timeline.peak)}", parts)


def steps(summary: ProfileSummary) -> str:
    """Where the time of each profiled step went, upright."""
    shown = summary.steps[-_COLUMNS:]
    top = max(step.duration for step in shown) / 1e3
    scale = _Scale(0.0, float(len(shown)), 0.0, top * 1.06)
    parts = [scale.levels(_teller("ms"))]
    width = (scale.x(1) - scale.x(0)) * 0.72
    for place, step in enumerate(shown):
        x, at = scale.x(place + 0.5) - width / 2, 0.0
        for kind, value in (
            ("computation", step.computation),
            ("exposed", step.exposed),
            ("loader", step.loader),
            ("idle", step.idle),
        ):
            share = value / 1e3
            if share > 0:
                y, low = scale.y(at + share), scale.y(at)
                parts.append(
                    f'<rect class="column {kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                    f'height="{max(low - y, 0.5):.1f}"><title>step {step.number}: {kind} '
                    f"{milliseconds(share)}</title></rect>"
                )
                at += share
        if place % max(len(shown) // 10, 1) == 0:
            parts.append(
                f'<text class="tick" x="{scale.x(place + 0.5):.1f}" y="{HEIGHT - 6}">{step.number}</text>'
            )
    return _svg("chart", f"time of {len(shown)} steps", parts)


def memory_key(timeline: MemoryTimeline) -> str:
    """The colors' meaning, with what each was at the peak."""
    used = [name for name in CATEGORIES if timeline.at_peak.get(name)]
    return "".join(
        f'<span class="key"><i class="{name}"></i>{_SAID[name]} {bytes_of(timeline.at_peak[name])}</span>'
        for name in used
    )


def shares(parts: Mapping[str, float], total: float) -> str:
    """One bar of `total` microseconds; parts by CSS class and name, `class name`."""
    cells = []
    for key, value in parts.items():
        kind, _, name = key.partition(" ")
        share = value / total if total else 0.0
        if share > 0.0005:
            cells.append(
                f'<i class="{kind}" style="width:{min(share, 1):.2%}" title="{escaped(name)}: {share:.1%}"></i>'
            )
    return f'<div class="shares">{"".join(cells)}</div>'


def rank_key(series: MetricSeries) -> str:
    ranks = sorted(series.lines)
    if len(ranks) > _APART:
        return f'<span class="key"><i class="kind0"></i>mean and range of {len(ranks)} ranks</span>'
    return "".join(
        f'<span class="key"><i class="kind{number % 6}"></i>{_who(rank)}</span>'
        for number, rank in enumerate(ranks)
    )


# --- parts -------------------------------------------------------------------------------------------------


class _Scale:
    def __init__(self, left: float, right: float, bottom: float, top: float) -> None:
        self.left, self.right, self.bottom, self.top = left, right, bottom, top

    def x(self, value: float) -> float:
        return _LEFT + (value - self.left) / ((self.right - self.left) or 1.0) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.bottom) / ((self.top - self.bottom) or 1.0)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    def levels(self, told: Callable[[float], str]) -> str:
        parts = []
        for value in _ticks(self.bottom, self.top, 4, binary=told is bytes_of):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="side" x="{_LEFT - 8}" y="{y + 4:.1f}">{told(value)}</text>')
        return "".join(parts)

    def grid(self, told: Callable[[float], str], below: str) -> str:
        parts = [self.levels(told)]
        ticks = _ticks(self.left, self.right, 6, whole=below == "step")
        for place, value in enumerate(ticks):
            unit = f" {below}" if place == len(ticks) - 1 else ""
            anchor = "side" if self.x(value) > WIDTH - 60 else "tick"
            x = min(self.x(value) + (16 if anchor == "side" else 0), WIDTH - 2)
            parts.append(f'<text class="{anchor}" x="{x:.1f}" y="{HEIGHT - 6}">{value:,.6g}{unit}</text>')
        return "".join(parts)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """With room above and below; from zero where that is near."""
    low, high = min(values), max(values)
    if low >= 0 and low <= 0.4 * high:
        return 0.0, high * 1.06 or 1.0
    room = (high - low) * 0.08 or abs(high) * 0.05 or 1.0
    return low - room, high + room


def _ticks(low: float, high: float, most: int, *, binary: bool = False, whole: bool = False) -> list[float]:
    """Round numbers between them; binary: round as KiB, MiB, GiB; whole: without a fraction."""
    unit = 1024.0 ** max(int(math.log(high or 1.0, 1024)), 0) if binary and high >= 1 else 1.0
    span = ((high - low) or 1.0) / unit
    size = 10.0 ** math.floor(math.log10(span / most))
    factors = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = unit * next(size * factor for factor in factors if span / (size * factor) <= most)
    step = max(step, 1.0) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _teller(unit: str) -> Callable[[float], str]:
    if unit == "B":
        return bytes_of
    if unit == "ms":
        return lambda value: milliseconds(value) if value else "0"
    if unit == "s":
        return lambda value: (
            (milliseconds(value * 1e3) if value else "0") if abs(value) < 1 else f"{number(value)} s"
        )
    return number


def _who(rank: int) -> str:
    return "all ranks" if rank < 0 else f"rank {rank}"


def _line(line: Line, scale: _Scale, kind: str, who: str, told: Callable[[float], str]) -> str:
    drawn = _thinned(line)
    path = "M" + " L".join(f"{scale.x(step):.1f} {scale.y(value):.1f}" for step, value in drawn)
    step, last = line[-1]
    title = f"<title>{who}: {told(last)} at step {step}, at least {told(min(v for _, v in line))}</title>"
    if len(line) == 1:
        return f'<circle class="point {kind}" cx="{scale.x(step):.1f}" cy="{scale.y(last):.1f}" r="4">{title}</circle>'
    return f'<path class="line {kind}" d="{path}">{title}</path>'


def _band(series: MetricSeries, scale: _Scale, told: Callable[[float], str]) -> str:
    by_step: dict[int, list[float]] = {}
    for line in series.lines.values():
        for step, value in line:
            by_step.setdefault(step, []).append(value)
    steps = sorted(by_step)
    mean = [(step, sum(by_step[step]) / len(by_step[step])) for step in steps]
    every = steps[:: max(len(steps) // _DRAWN, 1)]
    upper = " L".join(f"{scale.x(step):.1f} {scale.y(max(by_step[step])):.1f}" for step in every)
    lower = " L".join(f"{scale.x(step):.1f} {scale.y(min(by_step[step])):.1f}" for step in reversed(every))
    title = f"<title>{len(series.lines)} ranks, least to greatest</title>"
    return f'<path class="band kind0" d="M{upper} L{lower} Z">{title}</path>' + _line(
        mean, scale, "kind0", f"mean of {len(series.lines)} ranks", told
    )


def _thinned(line: Line) -> Line:
    if len(line) <= 2 * _DRAWN:
        return line
    size = math.ceil(len(line) / _DRAWN)
    kept: Line = []
    for start in range(0, len(line), size):
        part = line[start : start + size]
        ends = {min(part, key=lambda each: each[1]), max(part, key=lambda each: each[1])}
        kept += sorted(ends)
    return kept if kept[-1] == line[-1] else [*kept, line[-1]]


def _steps(points: Sequence[tuple[float, float]], scale: _Scale) -> str:
    """A line that stays where it is until it changes."""
    path = [f"M{scale.x(points[0][0]):.1f} {scale.y(points[0][1]):.1f}"]
    for at, value in points[1:]:
        path.append(f"H{scale.x(at):.1f} V{scale.y(value):.1f}")
    path.append(f"H{scale.x(scale.right):.1f}")
    return " ".join(path)


def _svg(kind: str, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg class="{kind}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escaped(label)}">'
        f"{''.join(parts)}</svg>"
    )
