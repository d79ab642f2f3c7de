"""A row of benchmarks/scale.py's table: what was measured, its bar, and how it grows; out: the rows as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One measurement. `bar`: as people read it ("< 2", ">= 1.5"), or "" without one. `ok`: whether it was met, None
    without a bar. `law`: how the value grows with what ("ranks^0.98, 250 to 1,000"), or the least and the most of
    the rounds whose median it is, or ""."""

    name: str
    value: float
    unit: str
    bar: str = ""
    ok: bool | None = None
    law: str = ""


def at_most(name: str, value: float, unit: str, bar: float, law: str = "") -> Row:
    return Row(name, value, unit, f"<= {bar:g}", value <= bar, law)


def at_least(name: str, value: float, unit: str, bar: float, law: str = "") -> Row:
    return Row(name, value, unit, f">= {bar:g}", value >= bar, law)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Of the power law value ~ size^exponent that fits best: the slope of the logarithms. NaN when a value is not
    positive, which has no logarithm."""
    if min(values) <= 0:
        return math.nan
    x = [math.log(size) for size in sizes]
    y = [math.log(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| | value | unit | bar | | growth, or rounds |", "|---|---|---|---|---|---|"]
    for row in rows:
        met = {None: "", True: "met", False: "**missed**"}[row.ok]
        lines.append(f"| {row.name} | {row.value:.4g} | {row.unit} | {row.bar} | {met} | {row.law} |")
    return "\n".join(lines)
