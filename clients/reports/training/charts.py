"""Pictures of a profiled training job: memory over time, the time of each step."""

from __future__ import annotations

from collections.abc import Iterable

from ....compiler.api.html import series
from ....compiler.api.html.page import bytes_of, milliseconds
from ....compiler.api.html.svg import Axis, Picture, shape
from ..profiling.memory_timeline import CATEGORIES, MemoryTimeline
from ..profiling.summary import ProfileSummary

_COLUMNS = 40
"""The last steps of a profile that are drawn."""
MEMORY_NAMES = {name: name for name in CATEGORIES} | {"optimizer": "optimizer state", "before": "from before"}
TIME_NAMES = {
    "computation": "computation",
    "exposed": "communication that nothing hides",
    "loader": "waiting for data",
    "idle": "nothing of these",
}
"""Parts of a step's time: fields of ProfiledStep, in the order in which they are drawn."""


def memory(timeline: MemoryTimeline) -> Picture:
    """What the device's memory is used for, over the profiled steps."""
    top = max([timeline.peak, *(sum(point.bytes) for point in timeline.points)]) or 1
    near_limit = timeline.limit and timeline.limit <= 1.6 * top
    x = Axis(0.0, max(timeline.points[-1].at, 1.0) / 1000, series.LEFT, series.RIGHT)
    y = Axis(0.0, (timeline.limit if near_limit else top) * 1.05, series.BOTTOM, series.TOP)
    shapes = [*series.levels(x, y, bytes_of), *series.scale(x, "ms")]
    for place, category in reversed(list(enumerate(CATEGORIES))):
        if any(point.bytes[place] for point in timeline.points):
            totals = [(x(point.at / 1000), y(sum(point.bytes[: place + 1]))) for point in timeline.points]
            at_peak = bytes_of(timeline.at_peak.get(category, 0))
            title = f"{MEMORY_NAMES[category]}: at the peak {at_peak}"
            shapes.append(shape("path", f"area {category}", d=_stairs(totals), title=title))
    if near_limit:
        level, title = y(timeline.limit), f"all of the device: {bytes_of(timeline.limit)}"
        shapes.append(
            shape("line", "mark restart", x1=series.LEFT, x2=series.RIGHT, y1=level, y2=level, title=title)
        )
    title = f"peak: {bytes_of(timeline.peak)}"
    shapes.append(
        shape("circle", "peak", cx=x(timeline.peak_at / 1000), cy=y(timeline.peak), r=4, title=title)
    )
    return series.picture(f"memory of {timeline.device}, at most {bytes_of(timeline.peak)}", shapes)


def steps(summary: ProfileSummary) -> Picture:
    """The time of each profiled step as a column of its parts."""
    shown = summary.steps[-_COLUMNS:]
    x = Axis(0.0, float(len(shown)), series.LEFT, series.RIGHT)
    y = Axis(0.0, max(step.duration for step in shown) / 1e3 * 1.06, series.BOTTOM, series.TOP)
    width = (x(1) - x(0)) * 0.72
    shapes = series.levels(x, y, series.format_of_unit("ms"))
    for place, step in enumerate(shown):
        middle, low = x(place + 0.5), 0.0
        for kind in TIME_NAMES:
            took = getattr(step, kind) / 1e3
            if took > 0:
                height = max(y(low) - y(low + took), 0.5)
                shapes.append(
                    shape(
                        "rect",
                        f"column {kind}",
                        x=middle - width / 2,
                        y=y(low + took),
                        width=width,
                        height=height,
                        title=f"step {step.number}: {kind} {milliseconds(took)}",
                    )
                )
                low += took
        if place % max(len(shown) // 10, 1) == 0:
            shapes.append(shape("text", "tick", x=middle, y=series.HEIGHT - 6, text=str(step.number)))
    return series.picture(f"time of {len(shown)} steps", shapes)


def _stairs(points: Iterable[tuple[float, float]]) -> str:
    """The area below a line in steps; in pixels."""
    (left, first), *rest = points
    steps = " ".join(f"H{x:.1f} V{y:.1f}" for x, y in rest)
    right, bottom = series.RIGHT, series.BOTTOM
    return (
        f"M{left:.1f} {first:.1f} {steps} H{right:.1f} L{right:.1f} {bottom:.1f} L{left:.1f} {bottom:.1f} Z"
    )
