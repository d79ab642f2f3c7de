"""Pictures of values over steps: a line for each rank, or the range of many."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from ..training.series import TITLES, Line, MetricSeries
from . import svg
from .page import bytes_of, milliseconds, number
from .svg import Axis, Picture, Shape, shape

WIDTH, HEIGHT = 560, 210
LEFT, RIGHT, TOP, BOTTOM = 62, WIDTH - 16, 12, HEIGHT - 26
"""Pixels of the plot in the picture."""
_DRAWN = 240
"""Parts of a line; a line with many more points is drawn as the least and the greatest of each part."""
_SEPARATE = 6
"""Up to this many ranks have a line each; more are drawn as their range and their mean."""

Format = Callable[[float], str]
Chart = tuple[str, str, Picture, list[tuple[str, str]]]
"""Title, last value, picture, and the key to its colours."""


def chart(series: MetricSeries, *, restarts: Sequence[int] = (), checkpoints: Sequence[int] = ()) -> Chart:
    """See `lines`."""
    title = TITLES.get(series.name) or series.name[:60]
    title = f"{title} ({series.unit})" if series.name == "throughput" else title
    last = "" if series.last is None else format_of_unit(series.unit)(series.last)
    return title, last, lines(series, restarts=restarts, checkpoints=checkpoints), ranks_drawn(series)


def lines(series: MetricSeries, *, restarts: Sequence[int] = (), checkpoints: Sequence[int] = ()) -> Picture:
    """A series over steps. restarts: steps after which ranks started again. checkpoints: steps of complete ones."""
    steps = [step for line in series.lines.values() for step, _ in line]
    first, last = min(steps), max(steps)
    x = Axis(first, max(last, first + 1), LEFT, RIGHT)
    y = Axis(*_range([value for line in series.lines.values() for _, value in line]), BOTTOM, TOP)
    formatted = format_of_unit(series.unit)
    shapes = [*levels(x, y, formatted), *scale(x, "step")]
    for step in restarts:
        title = f"ranks started again after step {step}"
        shapes.append(shape("line", "mark restart", x1=x(step), x2=x(step), y1=TOP, y2=BOTTOM, title=title))
    for step in checkpoints:
        if first <= step <= last:
            triangle = f"M{x(step):.1f} {BOTTOM} l-4 7 h8 z"
            shapes.append(shape("path", "mark kept", d=triangle, title=f"checkpoint of step {step}"))
    if len(series.lines) > _SEPARATE:
        shapes += _band(series, x, y, formatted)
    else:
        for rank, (color, name) in zip(sorted(series.lines), ranks_drawn(series), strict=True):
            shapes.append(_line(series.lines[rank], x, y, color, name, formatted))
    return picture(f"{series.name.replace('_', ' ')} over {len(set(steps))} steps", shapes)


def ranks_drawn(series: MetricSeries) -> list[tuple[str, str]]:
    """(color, name) of each line."""
    if len(series.lines) > _SEPARATE:
        return [("kind0", f"mean and range of {len(series.lines)} ranks")]
    return [
        (f"kind{place % 6}", "all ranks" if rank < 0 else f"rank {rank}")
        for place, rank in enumerate(sorted(series.lines))
    ]


def format_of_unit(unit: str) -> Format:
    """How a value of a unit is written."""
    if unit == "B":
        return bytes_of
    if unit == "ms":
        return lambda value: milliseconds(value) if value else "0"
    if unit == "s":
        in_milliseconds = format_of_unit("ms")
        return lambda value: in_milliseconds(value * 1e3) if abs(value) < 1 else f"{number(value)} s"
    return number


def picture(label: str, shapes: Sequence[Shape]) -> Picture:
    return Picture("chart", label, WIDTH, HEIGHT, shapes)


def levels(x: Axis, y: Axis, formatted: Format) -> list[Shape]:
    """Horizontal lines with their values."""
    ticks = marks(y.low, y.high, 4, binary=formatted is bytes_of)
    return svg.grid(x, y, [], [(value, formatted(value)) for value in ticks])


def scale(x: Axis, unit: str) -> list[Shape]:
    """Values below the plot; the last one with the unit."""
    shapes = []
    ticks = marks(x.low, x.high, 6, whole=unit == "step")
    for value in ticks:
        text = f"{value:,.6g} {unit}" if value == ticks[-1] else f"{value:,.6g}"
        at, kind = x(value), "tick"
        if at > WIDTH - 60:
            at, kind = min(at + 16, WIDTH - 2), "side"
        shapes.append(shape("text", kind, x=float(at), y=HEIGHT - 6, text=text))
    return shapes


def _range(values: Sequence[float]) -> tuple[float, float]:
    """With room above and below; from zero if the values are near it."""
    low, high = min(values), max(values)
    if low >= 0 and low <= 0.4 * high:
        return 0.0, high * 1.06 or 1.0
    room = (high - low) * 0.08 or abs(high) * 0.05 or 1.0
    return low - room, high + room


def marks(low: float, high: float, most: int, *, binary: bool = False, whole: bool = False) -> list[float]:
    """Round numbers between them; binary: round as KiB, MiB, GiB; whole: without a fraction."""
    unit = 1024.0 ** max(int(math.log(high or 1.0, 1024)), 0) if binary and high >= 1 else 1.0
    span = ((high - low) or 1.0) / unit
    size = 10.0 ** math.floor(math.log10(span / most))
    factors = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = unit * next(size * factor for factor in factors if span / (size * factor) <= most)
    step = max(step, 1.0) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _line(line: Line, x: Axis, y: Axis, color: str, name: str, formatted: Format) -> Shape:
    step, last = line[-1]
    least = min(value for _, value in line)
    title = f"{name}: {formatted(last)} at step {step}, at least {formatted(least)}"
    if len(line) == 1:
        return shape("circle", f"point {color}", cx=x(step), cy=y(last), r=4, title=title)
    return shape("path", f"line {color}", d=svg.path(_thinned(line), x, y), title=title)


def _band(series: MetricSeries, x: Axis, y: Axis, formatted: Format) -> list[Shape]:
    """All ranks from the least to the greatest, and their mean."""
    by_step: dict[int, list[float]] = defaultdict(list)
    for line in series.lines.values():
        for step, value in line:
            by_step[step].append(value)
    steps = sorted(by_step)
    drawn = steps[:: max(len(steps) // _DRAWN, 1)]
    upper = [(step, max(by_step[step])) for step in drawn]
    lower = [(step, min(by_step[step])) for step in reversed(drawn)]
    mean = [(step, sum(by_step[step]) / len(by_step[step])) for step in steps]
    ranks = f"{len(series.lines)} ranks"
    outline = f"{svg.path([*upper, *lower], x, y)} Z"
    return [
        shape("path", "band kind0", d=outline, title=f"{ranks}, least to greatest"),
        _line(mean, x, y, "kind0", f"mean of {ranks}", formatted),
    ]


def _thinned(line: Line) -> Line:
    if len(line) <= 2 * _DRAWN:
        return line
    size = math.ceil(len(line) / _DRAWN)
    drawn: Line = []
    for start in range(0, len(line), size):
        part = line[start : start + size]
        drawn += sorted({min(part, key=lambda each: each[1]), max(part, key=lambda each: each[1])})
    return drawn if drawn[-1] == line[-1] else [*drawn, line[-1]]
