"""A tuning report as one HTML page. The page's text is in templates/tuning.html; this module writes what it names."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ....compiler.tuning.records import Timing, TuningEntry
from ...jobfiles.tuning_diff import TuningChange
from .. import html_page, roofline, svg
from ..html_page import Tile, digits, milliseconds, plural, seconds
from ..svg import Axis, Picture, Shape, shape
from .summary import TunedDevice, TuningReport, TuningRow

_LISTED = 40
"""Candidates, failures or graphs that are listed of one problem."""
_LISTED_MISSING = 200
_DOTS = 300
_KINDS = 6
"""Colors that there are for dtypes."""
_TIMES = "\N{MULTIPLICATION SIGN}"
_CHANGE_NAMES = {
    "slower": "slower than before",
    "other": "another winner, about as fast",
    "faster": "faster than before",
    "new": "new",
    "gone": "gone",
}


def page(report: TuningReport) -> str:
    """The whole page."""
    return html_page.render(
        "tuning.html",
        title=report.title,
        about=_about(report),
        tiles=_tiles(report),
        report=report,
        listed=_LISTED,
        listed_missing=_LISTED_MISSING,
        counted=_counted,
        facts=_facts,
        fastest_and_slowest=_fastest_and_slowest,
        interval=_interval,
        measured=_measured,
        origin=_origin,
        parts_of_problem=_parts_of_problem,
        rate=_rate,
        roofline=_roofline,
        short=_short,
        spread=_spread,
    )


# --- texts -------------------------------------------------------------------------------------------------


def _about(report: TuningReport) -> list[str]:
    devices = list(dict.fromkeys(device.place.device for device in report.devices))
    job = report.job
    return devices if job is None else [*devices, f"job {job.id}, {job.state}", f"started by {job.by}"]


def _tiles(report: TuningReport) -> list[Tile]:
    tiles = [("problems", str(report.problems), f"{report.known} known before" if report.known else "")]
    if report.of_default is not None:
        note = "geometric mean, each alone"
        tiles.append(("faster than Inductor's default", f"{report.of_default:.2f}{_TIMES}", note))
    if report.of_aten is not None:
        tiles.append(("faster than ATen", f"{report.of_aten:.2f}{_TIMES}", "cuBLAS, cuDNN or oneDNN"))
    if report.graphs:
        best = report.graphs[0]
        tiles.append((f"saved a step of {best.key[:8]}", milliseconds(best.saved), "of its tuned products"))
    tried = f"{plural(report.candidates, 'candidate')}, {report.failed} failed"
    return [*tiles, ("of searching", seconds(report.seconds), tried)]


def _counted(changes: Sequence[TuningChange]) -> str:
    counts = {kind: sum(change.kind == kind for change in changes) for kind in _CHANGE_NAMES}
    return ", ".join(f"{count} {_CHANGE_NAMES[kind]}" for kind, count in counts.items() if count)


def _facts(device: TunedDevice) -> list[str]:
    place = device.place
    facts = [
        ("driver", place.driver),
        ("torch", place.torch),
        ("Triton", place.triton),
        ("CUDA", place.cuda),
        ("threads", place.threads),
        ("clock", device.clock),
    ]
    return [f"capability {place.capability}", *(f"{name} {value}" for name, value in facts if value)]


def _measured(ceilings: roofline.DeviceCeilings) -> list[str]:
    memory = [f"memory {ceilings.bytes / 1e9:,.0f} GB/s"] if ceilings.bytes else []
    return memory + [f"{kind} {_rate(flops)}" for kind, flops in sorted(ceilings.flops.items())]


def _origin(row: TuningRow) -> list[str]:
    """Where the problem comes from; an item that only repeats the problem is left out."""
    result = row.result
    texts = [] if result.item.startswith(f"{row.entry.problem.op}(") else [result.item]
    if result.line:
        texts.append(f"line {result.line}")
    if row.saved:
        texts.append(f"saves {milliseconds(row.saved)} a step in {plural(len(result.graphs), 'graph')}")
    return [text for text in texts if text]


def _parts_of_problem(entry: TuningEntry) -> tuple[str, str, str, str]:
    """Operator, operands, result and settings."""
    op, _, rest = entry.problem.shape().partition("(")
    operands, _, result = rest.rpartition(" -> ")
    settings = ", ".join(f"{name}={value}" for name, value in entry.problem.unusual_settings())
    return op, operands, result, settings


def _short(candidate: str) -> str:
    """A template's candidate by its tile, warps and stages."""
    name, _, rest = candidate.partition(" ")
    given = dict(re.findall(r"(\w+)=([^,\s]+)", rest))
    tile = [given[f"BLOCK_{side}"] for side in "MNK" if f"BLOCK_{side}" in given]
    if not tile:
        return candidate[:160]
    counts = [f"{given[f'num_{it}']} {it}" for it in ("warps", "stages") if f"num_{it}" in given]
    return ", ".join([f"{name} {_TIMES.join(tile)}", *counts])


def _interval(timing: Timing) -> str:
    return f"{timing.milliseconds:g} ms, {timing.low:g} to {timing.high:g}, {timing.samples} samples"


def _rate(flops: float) -> str:
    for limit, unit in ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"), (1e3, "kFLOP/s")):
        if flops >= limit:
            return f"{digits(flops / limit) if flops / limit < 100 else f'{flops / limit:,.0f}'} {unit}"
    return f"{flops:.0f} FLOP/s"


# --- pictures ----------------------------------------------------------------------------------------------


def _fastest_and_slowest(timings: Sequence[Timing]) -> tuple[float, float]:
    times = [timing.milliseconds for timing in timings]
    return min(times), max(times)


def _spread(entry: TuningEntry, timings: Sequence[Timing]) -> Picture:
    """Each candidate that ran as a dot, the fastest at the left, on a logarithmic scale; the winner's on top."""
    x = Axis(*_fastest_and_slowest(timings), 6, 174, logarithmic=True)
    dots: list[Shape] = []
    winners: list[Shape] = []
    for timing in sorted(timings, key=lambda each: each.milliseconds)[:_DOTS]:
        won = timing.candidate == entry.winner.candidate
        kind = "dot won" if won else "dot aten" if timing.candidate.startswith("aten ") else "dot"
        dot = shape(
            "circle",
            kind,
            cx=x(timing.milliseconds),
            cy=10,
            r=4.5 if won else 3.5,
            title=f"{timing.candidate}: {_interval(timing)}",
        )
        (winners if won else dots).append(dot)
    line = shape("line", "", x1=6, x2=174, y1=10, y2=10)
    return Picture("spread", f"times of {len(timings)} candidates", 180, 20, [line, *dots, *winners])


_WIDTH, _HEIGHT = 960, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 104, _WIDTH - 110, 14, _HEIGHT - 40
"""Pixels of the roofline's plot."""


def _roofline(device: TunedDevice) -> Picture | None:
    """Flops a second over flops a byte, both logarithmic: what was reached below what can be."""
    memory, flops = device.ceilings.bytes, device.ceilings.flops
    points = [(row.intensity, row.rate, row) for row in device.rows if row.intensity and row.rate]
    if not points or not flops or not memory:
        return None
    ridge = max(flops.values()) / memory
    left = min([ridge / 8, *(intensity for intensity, _, _ in points)]) / 2
    right = max([ridge, *(intensity for intensity, _, _ in points)]) * 2
    bottom = min([memory * left, *(rate for _, rate, _ in points)]) / 1.6
    top = max([*flops.values(), *(rate for _, rate, _ in points)]) * 1.6
    x = Axis(left, right, _LEFT, _RIGHT, logarithmic=True)
    y = Axis(bottom, top, _BOTTOM, _TOP, logarithmic=True)
    kinds = sorted({roofline.kind(row.entry) for _, _, row in points} | set(flops))
    colors = {kind: f"kind{number % _KINDS}" for number, kind in enumerate(kinds)}

    shapes = []
    for value in _powers_of_ten(left, right):
        shapes.append(shape("line", "grid", x1=x(value), x2=x(value), y1=_TOP, y2=_BOTTOM))
        shapes.append(shape("text", "tick", x=x(value), y=_BOTTOM + 16, text=f"{value:g}"))
    for value in _powers_of_ten(bottom, top):
        shapes.append(shape("line", "grid", x1=_LEFT, x2=_RIGHT, y1=y(value), y2=y(value)))
        shapes.append(shape("text", "tick side", x=_LEFT - 8, y=y(value) + 4, text=_rate(value)))
    shapes.append(shape("text", "tick", x=(_LEFT + _RIGHT) // 2, y=_HEIGHT - 4, text="flops for each byte"))
    label_y = math.inf
    for kind, ceiling in sorted(flops.items(), key=lambda item: item[1]):
        start = max(left, bottom / memory)
        corners = [(start, memory * start), (ceiling / memory, ceiling), (right, ceiling)]
        shapes.append(shape("path", f"ceiling {colors[kind]}", d=svg.path(corners, x, y)))
        label_y = min(y(ceiling) + 4, label_y - 15)  # labels stand above each other
        shapes.append(shape("text", colors[kind], x=x(right) + 6, y=label_y, text=kind))
    for intensity, rate, row in points:
        share = "" if row.share is None else f", {row.share.share:.0%} of the roofline"
        title = f"{row.entry.problem.shape()}: {_rate(rate)}{share}"
        color = colors[roofline.kind(row.entry)]
        shapes.append(shape("circle", f"point {color}", cx=x(intensity), cy=y(rate), r=4.5, title=title))
    return Picture("roofline", f"roofline of {len(points)} problems", _WIDTH, _HEIGHT, shapes)


def _powers_of_ten(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
