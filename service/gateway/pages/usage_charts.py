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
"""How many points a line may have for these to be drawn too."""

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
    names = [(color, name) for color, name, _ in series]
    shapes += _columns(rows, names, x, y, step) if stacked else _lines(rows, names, x, y, step)
    shapes += _strips(rows, names, x, y, step, text)
    picture = Picture("chart", f"{title}: {', '.join(name for _, name in names)}", _WIDTH, _HEIGHT, shapes)
    return title, note, picture, names


_Rows = list[tuple[Usage, list[float | None]]]
_Names = list[tuple[str, str]]


def _columns(rows: _Rows, names: _Names, x: Axis, y: Axis, step: int) -> list[Shape]:
    """One shape for all columns of a series: a year has 365 of them."""
    columns: list[list[str]] = [[] for _ in names]
    for usage, values in rows:
        below = 0.0
        left, right = x(usage.began), x(usage.began + step)
        for number_of, value in enumerate(values):
            if value:
                bottom, top = y(below), y(below + value)
                right_edge = max(right - 0.6, left + 0.8)
                columns[number_of].append(
                    f"M{left:.1f} {bottom:.1f}V{top:.1f}H{right_edge:.1f}V{bottom:.1f}Z"
                )
                below += value
    return [
        shape("path", f"column {color}", d="".join(drawn))
        for (color, _), drawn in zip(names, columns, strict=True)
        if drawn
    ]


def _lines(rows: _Rows, names: _Names, x: Axis, y: Axis, step: int) -> list[Shape]:
    shapes = []
    for number_of, (color, _) in enumerate(names):
        values = [(usage.began + step / 2, each[number_of]) for usage, each in rows]
        points = [(at, max(value, y.low)) for at, value in values if value is not None]
        if len(points) > 1:
            shapes.append(shape("path", f"line {color}", d=path(points, x, y)))
        if len(points) <= _DOTS:
            shapes += [
                shape("circle", f"point {color}", cx=x(at), cy=y(value), r=2.5) for at, value in points
            ]
    return shapes


def _strips(
    rows: _Rows, names: _Names, x: Axis, y: Axis, step: int, text: Callable[[float], str]
) -> list[Shape]:
    """What says the values of an interval when the mouse is over it."""
    strips = []
    for usage, values in rows:
        told = [
            f"{name} {text(value)}"
            for (_, name), value in zip(names, values, strict=True)
            if value is not None
        ]
        title = f"{_moment(usage.began, step)}: {', '.join(told)}"
        left, width = x(usage.began), x(usage.began + step) - x(usage.began)
        strips.append(
            shape("rect", "hover", title=title, x=left, width=width, y=y.end, height=y.start - y.end)
        )
    return strips


def _moment(at: float, step: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC" if step == 3600 else "%Y-%m-%d", time.gmtime(at))


def _round_up(value: float) -> float:
    """1, 2 or 4 times a power of ten: its quarters are short numbers."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1.0, 2.0, 4.0, 10.0) if value <= factor * power)
