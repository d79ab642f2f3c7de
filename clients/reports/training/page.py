"""A training job's report as one HTML page. The template is templates/training.html; this module gives its values."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Sequence

from ....compiler.api.html.page import Tile, milliseconds, number, plural, seconds
from ....compiler.api.html.series import chart
from ....compiler.api.training.series import MetricSeries
from .. import html_page
from ..profiling.summary import ProfileSummary
from . import charts
from .summary import TrainingReport

_SHOWN = 12
"""Kernels or operators of a rank; the rest can be unfolded."""
_LISTED = 100
_PHASE_COLORS = {
    "capturing": "kind3",
    "compiling": "kind0",
    "starting": "kind5",
    "running": "kind2",
    "recovering": "kind1",
}


def page(report: TrainingReport) -> str:
    """The whole page, advice first."""
    spec = report.job.spec
    phases = [(_PHASE_COLORS.get(it.state, ""), it.state, it.end - it.start) for it in report.stages]
    total = sum(took for _, _, took in phases)
    return html_page.render(
        "training.html",
        title=spec.name,
        command=" ".join([spec.script or spec.function, *spec.arguments])[:200],
        tiles=_tiles(report),
        report=report,
        shown=_SHOWN,
        listed=_LISTED,
        ranks=_ranks,
        marks=_marks(report),
        series=[
            chart(series, restarts=_restarts(report), checkpoints=_checkpoints(report))
            for series in report.series
        ],
        time_names=charts.TIME_NAMES,
        time_shares=_time_shares,
        phase_shares=[(color, f"{name}: {seconds(took)}", took / total) for color, name, took in phases],
        phase_names=_phase_names(phases),
        facts=_facts,
        memory_drawn=charts.memory,
        memory_names=charts.MEMORY_NAMES,
        short=short_name,
        steps_drawn=charts.steps,
    )


def _tiles(report: TrainingReport) -> list[Tile]:
    job, counts = report.job, report.job.compiles
    tiles = [("steps", f"{job.step + 1:,}" if report.series else "0", plural(job.restarts, "restart"))]
    loss = report.named("loss")
    if loss is not None and loss.last is not None:
        first = min(line[0] for line in loss.lines.values())[1]
        tiles.append(("loss", number(loss.last), f"{number(first)} at first"))
    throughput = report.named("throughput")
    if throughput is not None:
        tiles.append((throughput.unit, number(_median(throughput)), "median, all ranks together"))
    step_time = report.named("step_seconds")
    if step_time is not None:
        tiles.append(("a step", milliseconds(_median(step_time) * 1e3), "median"))
    if job.first_step_seconds:
        tiles.append(("to the first step", seconds(job.first_step_seconds), "from when all ranks were there"))
    note = (
        f"{counts.captured} graphs captured before, {counts.compiled} compiled; {counts.hits} hits, "
        f"{counts.misses} misses, {counts.fallbacks} fallbacks"
    )
    tiles.append(("compiles while ranks waited", str(counts.misses + counts.fallbacks), note))
    if report.checkpoints:
        failed = sum(not each.kept for each in report.checkpoints)
        written = len(report.checkpoints) - failed
        tiles.append(("checkpoints", str(written), f"{failed} failed" if failed else "none failed"))
    return tiles


def _median(series: MetricSeries) -> float:
    """Without each line's first two values, which include compiles."""
    return statistics.median_high(value for line in series.lines.values() for _, value in line[2:] or line)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:12]))}{' ...' if len(ranks) > 12 else ''}"


# --- over steps --------------------------------------------------------------------------------------------


def _restarts(report: TrainingReport) -> list[int]:
    return [step for step, _, _ in report.restarts]


def _checkpoints(report: TrainingReport) -> list[int]:
    return [each.step for each in report.checkpoints if each.kept]


def _marks(report: TrainingReport) -> list[str]:
    marks = {"dashed: ranks started again": _restarts(report), "triangles: checkpoints": _checkpoints(report)}
    return [text for text, steps in marks.items() if steps]


# --- shares of time ----------------------------------------------------------------------------------------


def _time_shares(summary: ProfileSummary) -> list[tuple[str, str, float]]:
    return [
        (kind, f"{name}: {share:.1%}", min(share, 1.0))
        for kind, name in charts.TIME_NAMES.items()
        if (share := summary.share(kind)) > 0.0005
    ]


def _phase_names(phases: Sequence[tuple[str, str, float]]) -> list[tuple[str, str]]:
    spent: dict[tuple[str, str], float] = defaultdict(float)
    for color, name, took in phases:
        spent[color, name] += took
    return [(color, f"{name} {seconds(took)}") for (color, name), took in spent.items()]


# --- a rank's profile --------------------------------------------------------------------------------------


def _facts(summary: ProfileSummary) -> list[str]:
    facts = [
        summary.device_name or summary.device.upper(),
        f"on {summary.host}" if summary.host else "",
        f"torch {summary.torch}" if summary.torch else "",
    ]
    return [fact for fact in facts if fact]


def short_name(name: str) -> str:
    """A C++ kernel's name without PyTorch's namespaces, return type and arguments."""
    plain = name.removeprefix("void ").replace("at::native::", "").replace("(anonymous namespace)::", "")
    plain = re.sub(r"(?<=[\w>])\(.*", "", plain, flags=re.DOTALL)
    return plain if len(plain) <= 96 else f"{plain[:95]}…"
