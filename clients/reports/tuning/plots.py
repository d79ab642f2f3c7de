"""A tuning report's picture: how much faster the winners are, as a PNG file. Needs matplotlib."""

from __future__ import annotations

import importlib.util
import io

from ....compiler import install_hint
from ....compiler.errors import SettingsError
from .summary import TuningReport

PICTURE = "faster.png"
_SHOWN = 30
_LABEL_LENGTH = 76


def require() -> None:
    """Raises SettingsError where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError(
            "pictures need matplotlib",
            hint=f"{install_hint('report')}, or leave them out: --no-pictures",
        )


def faster(report: TuningReport) -> bytes | None:
    """Bars for the 30 problems that gain most: the time of Inductor's default choice and of ATen, as multiples of the
    winner's. None if neither was measured for any problem. Raises SettingsError."""
    rows = [row for device in report.devices for row in device.rows if row.of_default or row.of_aten]
    rows = rows[:_SHOWN]
    if not rows:
        return None
    require()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 1.5 + 0.44 * len(rows)), dpi=150)
    for name, color, offset, ratios in (
        ("Inductor's default", "#7b8aa5", -0.19, [row.of_default for row in rows]),
        ("ATen", "#b7a98a", 0.19, [row.of_aten for row in rows]),
    ):
        known = [(y + offset, ratio) for y, ratio in enumerate(ratios) if ratio is not None]
        bars = axes.barh(
            [y for y, _ in known], [ratio for _, ratio in known], height=0.34, color=color, label=name
        )
        axes.bar_label(bars, fmt="%.2f\N{MULTIPLICATION SIGN}", padding=3, fontsize=7.5)
    axes.axvline(1, color="#0f8b7e", linewidth=1.2)
    labels = [_plain(row.entry.problem.shape(), _LABEL_LENGTH) for row in rows]
    axes.set_yticks(range(len(rows)), labels, parse_math=False, fontsize=7.5)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_title("Times as a multiple of the winner's", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle(_plain(report.title), x=0.01, ha="left", fontweight="bold", parse_math=False)
    figure.tight_layout()
    data = io.BytesIO()
    figure.savefig(data, format="png")
    plt.close(figure)
    return data.getvalue()


def _plain(text: str, length: int = 160) -> str:
    """The text as one line that a font can draw."""
    plain = "".join(c if c.isprintable() else "?" for c in text)
    return plain if len(plain) <= length else f"{plain[: length - 1]}…"
