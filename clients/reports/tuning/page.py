"""A tuning report as one HTML page. The template is templates/tuning.html; this module gives its values."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from ....compiler.api.html import svg
from ....compiler.api.html.page import Tile, digits, milliseconds, plural, seconds
from ....compiler.api.html.svg import Axis, Picture, shape
from ....compiler.tuning.records import Timing
from .. import html_page
from . import roofline
from .summary import TunedDevice, TuningChange, TuningReport, TuningRow

_LISTED = 40
"""How many of one problem's candidates and failures are listed, and how many graphs."""
_LISTED_MISSING = 200
_COLORS = 6
_CHANGE_NAMES = {
    "slower": "slower than before",
    "other": "another winner, about as fast",
    "faster": "faster than before",
    "new": "new",
    "gone": "gone",
}
_WIDTH, _HEIGHT = 960, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 104, _WIDTH - 110, 14, _HEIGHT - 40
"""Pixels of the roofline plot."""


def page(report: TuningReport) -> str:
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
        interval=_interval,
        measured=_measured,
        origin=_origin,
        rate=_rate,
        roofline=_roofline,
        short=_short,
    )


def _about(report: TuningReport) -> list[str]:
    devices = list(dict.fromkeys(device.environment.device for device in report.devices))
    job = report.job
    return devices if job is None else [*devices, f"job {job.id}, {job.state}", f"started by {job.by}"]


def _tiles(report: TuningReport) -> list[Tile]:
    tiles = [("problems", str(report.problems), f"{report.known} known before" if report.known else "")]
    if report.of_default is not None:
        note = "geometric mean, each alone"
        tiles.append(
            ("faster than Inductor's default", f"{report.of_default:.2f}\N{MULTIPLICATION SIGN}", note)
        )
    if report.of_aten is not None:
        tiles.append(
            ("faster than ATen", f"{report.of_aten:.2f}\N{MULTIPLICATION SIGN}", "cuBLAS, cuDNN or oneDNN")
        )
    if report.graphs:
        best = report.graphs[0]
        tiles.append((f"saved a step of {best.key[:8]}", milliseconds(best.saved), "of its tuned products"))
    tried = f"{plural(report.candidates, 'candidate')}, {report.failed} failed"
    return [*tiles, ("of searching", seconds(report.seconds), tried)]


def _counted(changes: Sequence[TuningChange]) -> str:
    counts = Counter(change.kind for change in changes)
    return ", ".join(f"{count} {_CHANGE_NAMES[kind]}" for kind, count in counts.items())


def _facts(device: TunedDevice) -> list[str]:
    environment = device.environment
    facts = {
        "capability": environment.capability,
        "driver": environment.driver,
        "torch": environment.torch,
        "Triton": environment.triton,
        "CUDA": environment.cuda,
        "threads": environment.threads,
        "clock": device.clock,
    }
    return [f"{name} {value}" for name, value in facts.items() if value]


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


def _short(candidate: str) -> str:
    """A template's candidate by its tile sizes, warps and stages."""
    given = re.findall(r"(?:BLOCK_[MNK]|num_warps|num_stages)=\w+", candidate)
    return " ".join([candidate.partition(" ")[0], *given]) if given else candidate[:160]


def _interval(timing: Timing) -> str:
    return f"{timing.milliseconds:g} ms, {timing.low:g} to {timing.high:g}, {timing.samples} samples"


def _rate(flops: float) -> str:
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= size:
            return f"{digits(flops / size)} {prefix}FLOP/s"
    return f"{flops:.0f} FLOP/s"


def _roofline(device: TunedDevice) -> Picture | None:
    """Flops a second over flops for each byte, both logarithmic: the ceilings as lines, the problems as points."""
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
    colors = {kind: f"kind{number % _COLORS}" for number, kind in enumerate(kinds)}

    across = [(value, f"{value:g}") for value in _powers_of_ten(left, right)]
    shapes = svg.grid(x, y, across, [(value, _rate(value)) for value in _powers_of_ten(bottom, top)])
    shapes.append(shape("text", "tick", x=(_LEFT + _RIGHT) // 2, y=_HEIGHT - 4, text="flops for each byte"))
    label_y = math.inf
    for kind, ceiling in sorted(flops.items(), key=lambda item: item[1]):
        start = max(left, bottom / memory)
        corners = [(start, memory * start), (ceiling / memory, ceiling), (right, ceiling)]
        shapes.append(shape("path", f"ceiling {colors[kind]}", d=svg.path(corners, x, y)))
        label_y = min(y(ceiling) + 4, label_y - 15)  # labels do not overlap
        shapes.append(shape("text", colors[kind], x=_RIGHT + 6, y=label_y, text=kind))
    for intensity, rate, row in points:
        share = "" if row.share is None else f", {row.share.share:.0%} of the roofline"
        title = f"{row.entry.problem.shape()}: {_rate(rate)}{share}"
        color = colors[roofline.kind(row.entry)]
        shapes.append(shape("circle", f"point {color}", cx=x(intensity), cy=y(rate), r=4.5, title=title))
    return Picture("roofline", f"roofline of {len(points)} problems", _WIDTH, _HEIGHT, shapes)


def _powers_of_ten(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
