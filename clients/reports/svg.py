"""SVG pictures as data: axes, and shapes with the text that is shown when the mouse is over them.

The macro `svg` in templates/macros.html writes a Picture as text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct


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
    """One SVG element. attributes: numbers and our own words; what users wrote goes to title or text."""

    tag: str
    attributes: dict[str, object]
    title: str = ""
    text: str = ""


class Picture(Struct, frozen=True):
    """label: what a screen reader says. Later shapes lie on earlier ones."""

    kind: str
    label: str
    width: int
    height: int
    shapes: Sequence[Shape]


def shape(tag: str, kind: str, *, title: str = "", text: str = "", **attributes: object) -> Shape:
    """kind: its CSS classes. Fractions are written with one digit."""
    written = {name: f"{it:.1f}" if isinstance(it, float) else it for name, it in attributes.items()}
    return Shape(tag, {"class": kind, **written} if kind else written, title, text)


def path(points: Iterable[tuple[float, float]], x: Axis, y: Axis) -> str:
    """A line through the points, as the attribute `d` wants it."""
    return "M" + " L".join(f"{x(across):.1f} {y(up):.1f}" for across, up in points)
