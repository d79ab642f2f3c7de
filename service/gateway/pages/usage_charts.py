"""The overview's pictures: columns and lines over the intervals of a period."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from ....compiler.api.html.page import number, seconds
from ....compiler.api.html.svg import Axis, Picture, Shape, grid, path, shape
from ....compiler.api.usage import Overview, Usage

Series = tuple[str, str, Callable[[Usage], float | None]]
"""Colour, name, and the value of an interval; None: it has none."""
Chart = tuple[str, str, Picture, list[tuple[str, str]]]
"""Title, what it says in words, picture, and the key to its colours."""
_WIDTH, _HEIGHT = 560, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 550, 10, 176
_TICKS = {
    "day": (4 * 3600, "%H:%M"),
    "week": (86400, "%d %b"),
    "month": (5 * 86400, "%d %b"),
    "year": (61 * 86400, "%b %Y"),
}
"""Seconds between two times below a chart, and how they are written."""
_DOTS = 60
"""Of more points only the line is drawn."""

_REQUESTS: list[Series] = [
    ("kind2", "hits", lambda each: each.hits),
    ("kind1", "misses", lambda each: each.misses),
    ("kind3", "joined a compile", lambda each: each.coalesced),
    ("bad", "refused", lambda each: each.refused + each.overloaded + each.over_quota),
]
_SECONDS: list[Series] = [
    ("kind2", "saved by hits", lambda each: each.seconds_saved),
    ("kind1", "spent by workers", lambda each: each.seconds_spent),
]
_RATES: list[Series] = [
    ("kind2", "hits of all requests", lambda each: each.hits / each.requests if each.requests else None),
    ("kind0", "median run", lambda each: each.hit_rates[0] if each.hit_rates else None),
    ("kind1", "9 of 10 runs have more", lambda each: each.hit_rates[1] if each.hit_rates else None),
]
_READY: list[Series] = [
    ("kind2", "median run", lambda each: each.ready_seconds[0] if each.ready_seconds else None),
    ("kind0", "9 of 10 runs take less", lambda each: each.ready_seconds[1] if each.ready_seconds else None),
    ("kind1", "99 of 100", lambda each: each.ready_seconds[2] if each.ready_seconds else None),
]


def charts(whole: Overview) -> list[Chart]:
    each = f"in each {'hour' if whole.interval_seconds == 3600 else 'day'}, UTC"
    return [
        _chart(whole, "Requests", f"For an artifact, {each}.", _REQUESTS, number, stacked=True),
        _chart(whole, "Compile time", f"{each[0].upper()}{each[1:]}.", _SECONDS, seconds, stacked=True),
        _chart(
            whole, "Hit rate", "Of requests, and of the runs that told of their end.", _RATES, "{:.0%}".format
        ),
        _chart(
            whole, "Until graphs were ready", "Of a run, without tracing.", _READY, seconds, logarithmic=True
        ),
    ]


def _chart(
    whole: Overview,
    title: str,
    note: str,
    series: Sequence[Series],
    text: Callable[[float], str],
    *,
    stacked: bool = False,
    logarithmic: bool = False,
) -> Chart:
    rows = [(each, [value(each) for _, _, value in series]) for each in whole.intervals]
    heights = [
        sum(it or 0 for it in values) if stacked else max(it or 0 for it in values) for _, values in rows
    ]
    top = _round_up(max(heights, default=0))
    up = [top * tick / 4 for tick in range(5)]
    if logarithmic:
        up = [10.0**power for power in range(-1, max(0, math.ceil(math.log10(top))) + 1)]
    first, step = int(whole.total.began), whole.interval_seconds
    last = first + step * max(1, math.ceil((time.time() - first) / step))
    x, y = Axis(first, last, _LEFT, _RIGHT), Axis(up[0], up[-1], _BOTTOM, _TOP, logarithmic)
    every, written = _TICKS[whole.period]
    ticks = range(math.ceil(first / every) * every, last, every)
    across = [(at, time.strftime(written, time.gmtime(at))) for at in ticks]
    shapes = grid(x, y, across, [(value, text(value)) for value in up])
    draw = _columns if stacked else _lines
    shapes += draw(rows, [(color, name) for color, name, _ in series], x, y, step, text)
    picture = Picture(
        "chart", f"{title}: {', '.join(name for _, name, _ in series)}", _WIDTH, _HEIGHT, shapes
    )
    return title, note, picture, [(color, name) for color, name, _ in series]


_Rows = list[tuple[Usage, list[float | None]]]
_Names = list[tuple[str, str]]


def _columns(
    rows: _Rows, names: _Names, x: Axis, y: Axis, step: int, text: Callable[[float], str]
) -> list[Shape]:
    shapes = []
    for usage, values in rows:
        below = 0.0
        for (color, name), value in zip(names, values, strict=True):
            if value:
                left, right = x(usage.began), x(usage.began + step)
                title = f"{_moment(usage.began, step)}: {name} {text(value)}"
                width, top = max(right - left - 0.6, 0.8), y(below + value)
                bar = shape(
                    "rect", f"column {color}", title=title, x=left, width=width, y=top, height=y(below) - top
                )
                shapes.append(bar)
                below += value
    return shapes


def _lines(
    rows: _Rows, names: _Names, x: Axis, y: Axis, step: int, text: Callable[[float], str]
) -> list[Shape]:
    shapes = []
    dot = "point" if len(rows) <= _DOTS else "hover"
    for number_of, (color, name) in enumerate(names):
        points = [
            (usage.began + step / 2, it) for usage, values in rows if (it := values[number_of]) is not None
        ]
        if len(points) > 1:
            shapes.append(shape("path", f"line {color}", d=path(points, x, y)))
        for at, value in points:
            title = f"{_moment(at - step / 2, step)}: {name} {text(value)}"
            shapes.append(shape("circle", f"{dot} {color}", title=title, cx=x(at), cy=y(value), r=2.5))
    return shapes


def _moment(at: float, step: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC" if step == 3600 else "%Y-%m-%d", time.gmtime(at))


def _round_up(value: float) -> float:
    """1, 2 or 4 times a power of ten: its quarters are short numbers."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1.0, 2.0, 4.0, 10.0) if value <= factor * power)
