"""A tuning report's pictures as PNG files. matplotlib is needed here only."""

from __future__ import annotations

import importlib.util
import io
from typing import Any

from ....compiler.errors import SettingsError
from .. import roofline
from .summary import TunedDevice, TuningReport, TuningRow

_SHOWN = 30
"""Problems of one picture, those that gain most."""
_TIMES = "\N{MULTIPLICATION SIGN}"
_COLORS = {"winner": "#0f8b7e", "default": "#7b8aa5", "aten": "#b7a98a"}
_KIND_COLORS = ("#2f6fde", "#c4601d", "#0f8b7e", "#8a4fc9", "#b1306e", "#6d7a1f")


def require() -> None:
    """Raises SettingsError where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError(
            "pictures need matplotlib",
            hint="Install torchrelay[report], or leave them out: --no-pictures",
        )


def pictures(report: TuningReport) -> dict[str, bytes]:
    """faster.png: winners beside other choices. spread.png: all candidates. roofline-N.png: of the Nth device, where
    ceilings were measured. A picture without data is left out. Raises SettingsError."""
    require()
    rows = [row for device in report.devices for row in device.rows]
    compared = [row for row in rows if row.of_default is not None or row.of_aten is not None][:_SHOWN]
    spread = [row for row in rows if len(row.result.timings) > 1][:_SHOWN]
    found: dict[str, bytes] = {}
    if compared:
        found["faster.png"] = _faster(report, compared)
    if spread:
        found["spread.png"] = _spread(report, spread)
    for number, device in enumerate(report.devices, 1):
        if device.ceilings.bytes and device.ceilings.flops and any(row.rate for row in device.rows):
            found[f"roofline-{number}.png"] = _roofline(report, device)
    return found


def _faster(report: TuningReport, rows: list[TuningRow]) -> bytes:
    figure, axes = _axes(len(rows))
    for y, row in enumerate(rows):
        for offset, ratio, color in (
            (-0.19, row.of_default, _COLORS["default"]),
            (0.19, row.of_aten, _COLORS["aten"]),
        ):
            if ratio is not None:
                axes.barh(y + offset, ratio, height=0.34, color=color)
                axes.text(ratio, y + offset, f" {ratio:.2f}{_TIMES}", va="center", fontsize=7.5)
    axes.axvline(1, color=_COLORS["winner"], linewidth=1.2)
    for name, color in (("Inductor's default", _COLORS["default"]), ("ATen", _COLORS["aten"])):
        axes.barh([0], [0], color=color, label=name)
    _finish(axes, rows, "Times as a multiple of the winner's")
    return _png(figure, report)


def _spread(report: TuningReport, rows: list[TuningRow]) -> bytes:
    figure, axes = _axes(len(rows))
    for y, row in enumerate(rows):
        times = [timing.milliseconds for timing in row.result.timings]
        axes.plot(
            [time / min(times) for time in times], [y] * len(times), "o", color="#7b8aa5", alpha=0.4, ms=4
        )
        axes.plot(row.entry.winner.milliseconds / min(times), y, "o", color=_COLORS["winner"], ms=6)
        if row.entry.aten is not None:
            axes.plot(row.entry.aten.milliseconds / min(times), y, "|", color="#c4601d", ms=11, mew=2)
    axes.plot([], [], "o", color=_COLORS["winner"], label="winner")
    axes.plot([], [], "|", color="#c4601d", ms=11, mew=2, label="ATen")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}{_TIMES}")
    axes.xaxis.set_minor_formatter(
        lambda value, _: f"{value:g}{_TIMES}" if value in (2, 3, 5, 20, 50) else ""
    )
    _finish(axes, rows, "Candidates, as a multiple of the fastest")
    return _png(figure, report)


def _roofline(report: TuningReport, device: TunedDevice) -> bytes:
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(9, 4.6), dpi=150)
    ceilings = device.ceilings
    points = [row for row in device.rows if row.rate is not None and row.intensity is not None]
    kinds = sorted({roofline.kind(row.entry) for row in points} | set(ceilings.flops))
    ridge = max(ceilings.flops.values()) / ceilings.bytes
    left = min([ridge / 8, *(row.intensity or ridge for row in points)]) / 2
    right = max([ridge, *(row.intensity or ridge for row in points)]) * 2
    for kind in kinds:
        color = _KIND_COLORS[kinds.index(kind) % len(_KIND_COLORS)]
        if kind in ceilings.flops:
            corner = ceilings.flops[kind] / ceilings.bytes
            line = [ceilings.bytes * left, ceilings.flops[kind], ceilings.flops[kind]]
            axes.plot([left, corner, right], [each / 1e12 for each in line], color=color, linewidth=1.6)
        mine = [row for row in points if roofline.kind(row.entry) == kind]
        rates = [(row.rate or 0.0) / 1e12 for row in mine]
        axes.plot([row.intensity for row in mine], rates, "o", color=color, alpha=0.75, ms=6, label=kind)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("flops for each byte")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(_plain(device.place.device), loc="left", fontsize=10, parse_math=False)
    axes.grid(True, color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return _png(figure, report)


def _axes(rows: int) -> tuple[Any, Any]:
    return _pyplot().subplots(figsize=(10, 1.5 + 0.44 * rows), dpi=150)  # type: ignore[no-any-return]


def _finish(axes: Any, rows: list[TuningRow], title: str) -> None:
    shapes = [_plain(row.entry.problem.shape()) for row in rows]
    labels = [shape if len(shape) <= 76 else f"{shape[:75]}…" for shape in shapes]
    axes.set_yticks(range(len(rows)), labels, parse_math=False)
    axes.tick_params(axis="y", length=0, labelsize=7.5)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.xaxis.grid(True, color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 9})
    return plt


def _png(figure: Any, report: TuningReport) -> bytes:
    figure.suptitle(_plain(report.title), x=0.01, ha="left", fontsize=13, fontweight="bold", parse_math=False)
    figure.tight_layout()
    data = io.BytesIO()
    figure.savefig(data, format="png")
    _pyplot().close(figure)
    return data.getvalue()


def _plain(text: str) -> str:
    """The text as one line that a font can draw."""
    return "".join(c if c.isprintable() else "?" for c in text)[:160]
