"""The demo's picture: a PNG with each run's time by stage, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchrelay.examples.demo.runs import STAGES, Run

COLOURS = {
    "local": "#b8bcc4",
    "trace": "#4c72b0",
    "encode": "#8172b3",
    "wait": "#dd8452",
    "fetch": "#937860",
    "load": "#55a868",
    "rest": "#dfe3ea",
}
LABELS = {"local": "compile here, and step", "wait": "wait for the service", "rest": "the step, and the rest"}


def draw(runs: Sequence[Run], columns: Sequence[str], rows: Sequence[Sequence[str]], file: Path) -> None:
    """One panel of stacked bars for each example, the table below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    examples = list(dict.fromkeys(run.example for run in runs))
    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10})
    figure = plt.figure(figsize=(12.5, 6.2), dpi=150, facecolor="white")
    grid = figure.add_gridspec(1, len(examples), left=0.2, right=0.98, top=0.81, bottom=0.47, wspace=0.08)
    figure.text(0.02, 0.945, "Seconds to the first training step", fontsize=15, fontweight="bold")

    for index, example in enumerate(examples):
        axes = figure.add_subplot(grid[index])
        shown = [run for run in runs if run.example == example]
        for y, run in enumerate(shown):
            left = 0.0
            for stage, seconds in _segments(run):
                axes.barh(y, seconds, left=left, height=0.58, color=COLOURS[stage], edgecolor="white", lw=0.6)
                left += seconds
            axes.text(left, y, f"  {run.first_step:.1f} s", va="center", fontweight="bold")
        axes.set_yticks(range(len(shown)), [run.who for run in shown] if index == 0 else [])
        axes.invert_yaxis()
        axes.set_xlim(0, max(run.first_step for run in shown) * 1.16)
        axes.set_title(example, loc="left", fontsize=11)
        axes.xaxis.grid(True, color="#e6e6e6")
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)

    patches = [Patch(color=colour, label=LABELS.get(stage, stage)) for stage, colour in COLOURS.items()]
    figure.legend(
        handles=patches, ncols=len(patches), loc="upper left", bbox_to_anchor=(0.015, 0.93), frameon=False,
        handlelength=1.0, columnspacing=1.4, fontsize=9,
    )  # fmt: skip
    _draw_table(figure.add_axes((0.02, 0.02, 0.96, 0.37)), columns, rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, bbox_inches="tight", pad_inches=0.25)
    plt.close(figure)


def _segments(run: Run) -> list[tuple[str, float]]:
    if not run.stages:
        return [("local", run.first_step)]
    return [*((stage, run.stages[stage]) for stage in STAGES), ("rest", run.rest)]


def _draw_table(axes: object, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    axes.axis("off")
    widths = [max(len(line[i]) for line in (columns, *rows)) + 2 for i in range(len(columns))]
    table = axes.table(
        cellText=[list(row) for row in rows],
        colLabels=list(columns),
        colWidths=[width / sum(widths) for width in widths],
        cellLoc="right",
        loc="upper center",
        edges="horizontal",
    )
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    table.scale(1.0, 1.5)
    for (row, column), cell in table.get_celld().items():
        cell.set_edgecolor("#d0d3d9")
        cell.set_linewidth(0.6)
        if column == 0:
            cell.get_text().set_horizontalalignment("left")
            cell.PAD = 0.02
        if row == 0:
            cell.set_text_props(fontweight="bold")
