"""SVG pictures as data. The macro `svg` in templates/macros.html writes a Picture as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

Ticks = Iterable[tuple[float, str]]
"""Values on an axis, each with its text."""


class Axis(Struct, frozen=True):
    """Maps values from `low` to `high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        if self.logarithmic:
            share = math.log(value / self.low) / (math.log(self.high / self.low) or 1.0)
        else:
            share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.start + share * (self.end - self.start)


class Shape(Struct, frozen=True):
    """One SVG element. title: shown when the mouse is over it. attributes: numbers and fixed words only; what users
    wrote goes to title or text."""

    tag: str
    attributes: dict[str, object]
    title: str = ""
    text: str = ""


class Picture(Struct, frozen=True):
    """kind: its CSS class. label: what a screen reader says. Later shapes cover earlier ones."""

    kind: str
    label: str
    width: int
    height: int
    shapes: Sequence[Shape]


def shape(tag: str, kind: str, *, title: str = "", text: str = "", **attributes: object) -> Shape:
    """kind: CSS classes. Fractions are written with one digit."""
    written = {name: f"{it:.1f}" if isinstance(it, float) else it for name, it in attributes.items()}
    return Shape(tag, {"class": kind, **written}, title, text)


def path(points: Iterable[tuple[float, float]], x: Axis, y: Axis) -> str:
    """A line through the points: the value of the attribute `d`."""
    return "M" + " L".join(f"{x(across):.1f} {y(up):.1f}" for across, up in points)


def grid(x: Axis, y: Axis, across: Ticks, up: Ticks) -> list[Shape]:
    """A horizontal line with its text at the left for each of `up`, and the texts of `across` below the plot."""
    shapes = []
    for value, text in up:
        shapes.append(shape("line", "grid", x1=x.start, x2=x.end, y1=y(value), y2=y(value)))
        shapes.append(shape("text", "side", x=x.start - 8, y=y(value) + 4, text=text))
    for value, text in across:
        shapes.append(shape("text", "tick", x=x(value), y=y.start + 20, text=text))
    return shapes
