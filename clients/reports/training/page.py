"""A training job's report as one HTML page: a Report in; text out, that loads nothing and runs nothing.

What users wrote, and what their scripts said, is shown as text: everything goes through `escaped`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ....compiler.api.training.events import CheckpointEvent
from ..html_page import bytes_of, document, escaped, milliseconds, number, seconds, tiles_of
from ..profiling.advice import Advice
from ..profiling.summary import ProfiledKernel, ProfiledOperator, ProfileSummary
from . import charts
from .summary import MetricSeries, TrainingReport

_SHOWN = 12
"""Kernels or operators of a rank; the rest can be unfolded."""
_LISTED = 100
_TITLES = {
    "loss": "Loss",
    "throughput": "Throughput",
    "step_seconds": "Step time",
    "memory_bytes": "Memory",
    "learning_rate": "Learning rate",
    "wait_seconds": "Waiting for data, each step",
    "gradient_norm": "Gradient norm",
}
_STAGE_KINDS = {
    "waiting": "",
    "capturing": "kind3",
    "compiling": "kind0",
    "starting": "kind5",
    "running": "kind2",
    "recovering": "kind1",
}


def page(report: TrainingReport) -> str:
    """The whole page, advice first."""
    parts = [_head(report), _advice(report.advice, bool(report.profiles))]
    if report.series:
        parts.append(_curves(report))
    else:
        parts.append('<p class="quiet">No rank has told of a step yet.</p>')
    if report.profiles:
        parts.append(_times(report.profiles))
        parts += [_profile(summary) for summary in report.profiles]
    parts.append(_life(report))
    parts.append(_foot(report))
    return document(report.job.spec.name, parts, styles=("report.css", "train_report.css"))


# --- head --------------------------------------------------------------------------------------------------


def _head(report: TrainingReport) -> str:
    job, spec = report.job, report.job.spec
    about = [
        f"job {escaped(job.id)}, {escaped(job.state)}",
        f"{spec.workers} rank{'s' * (spec.workers != 1)} on {escaped(spec.device)}",
        f"<code>{escaped(' '.join([spec.script or spec.function, *spec.arguments])[:200])}</code>",
        f"started by {escaped(job.by)}",
    ]
    tiles = [
        (
            "steps",
            f"{job.step + 1:,}" if report.series else "0",
            f"{job.restarts} restart{'s' * (job.restarts != 1)}",
        )
    ]
    loss = report.one("loss")
    if loss is not None and loss.last is not None:
        first = min(line[0] for line in loss.lines.values())[1]
        tiles.append(("loss", number(loss.last), f"{number(first)} at first"))
    throughput = report.one("throughput")
    if throughput is not None:
        tiles.append((escaped(throughput.unit), number(_median(throughput)), "median, all ranks together"))
    took = report.one("step_seconds")
    if took is not None:
        tiles.append(("a step", milliseconds(_median(took) * 1e3), "median"))
    if job.first_step_seconds:
        tiles.append(("to the first step", seconds(job.first_step_seconds), "from when all ranks were there"))
    counts = job.compiles
    tiles.append(
        (
            "compiles while ranks waited",
            str(counts.misses + counts.fallbacks),
            f"{counts.captured} graphs captured before, {counts.compiled} compiled; {counts.hits} hits, "
            f"{counts.misses} misses, {counts.fallbacks} fallbacks",
        )
    )
    kept = [each for each in report.checkpoints if each.kept]
    if report.checkpoints:
        failed = len(report.checkpoints) - len(kept)
        tiles.append(("checkpoints", str(len(kept)), f"{failed} failed" if failed else "none failed"))
    detail = (
        f'<p class="error">{escaped(job.detail[:500])}</p>' if job.detail and job.state == "failed" else ""
    )
    title = f'<h1>{escaped(spec.name)}</h1>\n<p class="quiet">{" &middot; ".join(about)}</p>{detail}'
    return f"<header>\n{title}\n{tiles_of(tiles)}\n</header>"


def _median(series: MetricSeries) -> float:
    values = sorted(value for line in series.lines.values() for _, value in line[2:] or line)
    return values[len(values) // 2]


def _advice(advice: Sequence[Advice], profiled: bool) -> str:
    if not advice:
        looked = "the profile and the steps"
        if not profiled:
            looked = "the steps; a profile would tell more (--profile steps=10:15)"
        said = f"<li>Nothing stands out in {looked}.</li>"
        return f'<section>\n<h2>Advice</h2>\n<ul class="advice none">{said}</ul>\n</section>'
    rows = "".join(f"<li>{escaped(each.text)}.<small>{_ranks(each.ranks)}</small></li>" for each in advice)
    return f'<section>\n<h2>Advice</h2>\n<ul class="advice">{rows}</ul>\n</section>'


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:12]))
    return f"ranks {shown}{' ...' if len(ranks) > 12 else ''}"


# --- over steps --------------------------------------------------------------------------------------------


def _curves(report: TrainingReport) -> str:
    restarts = [step for step, _, _ in report.restarts]
    kept = [each.step for each in report.checkpoints if each.kept]
    drawn = []
    for series in report.series:
        last = "" if series.last is None else _told(series, series.last)
        unit = f" ({escaped(series.unit)})" if series.name == "throughput" else ""
        name = _TITLES.get(series.name) or escaped(series.name[:60])
        drawn.append(
            f"<div><h3>{name}{unit}<b>{last}</b></h3>{charts.lines(series, restarts=restarts, checkpoints=kept)}"
            f"{charts.rank_key(series)}</div>"
        )
    marks = []
    if restarts:
        marks.append("dashed: ranks started again")
    if kept:
        marks.append("triangles: checkpoints")
    note = f'<p class="quiet">{"; ".join(marks)}.</p>' if marks else ""
    return f'<section>\n<h2>Over steps</h2>\n{note}<div class="charts">{"".join(drawn)}</div>\n</section>'


def _told(series: MetricSeries, value: float) -> str:
    if series.unit == "B":
        return bytes_of(value)
    if series.unit == "s":
        return milliseconds(value * 1e3) if abs(value) < 1 else seconds(value)
    return number(value)


# --- the profile -------------------------------------------------------------------------------------------


def _times(profiles: Sequence[ProfileSummary]) -> str:
    """Where a step's time goes, for each rank."""
    rows = []
    for each in profiles:
        total, count = each.total("duration"), len(each.steps)
        split = {
            "computation computation": each.total("computation"),
            "exposed communication that nothing hides": each.total("exposed"),
            "loader waiting for data": each.total("loader"),
            "idle nothing": each.total("idle"),
        }
        moved = each.total("communication")
        hidden = f"{each.overlap / moved:.0%} hidden" if moved else "none"
        rows.append(
            f"<tr><td>rank {each.rank}</td><td>{charts.shares(split, total)}</td>"
            f"<td>{milliseconds(total / count / 1e3)}</td><td>{each.share('computation'):.0%}</td>"
            f"<td>{milliseconds(moved / count / 1e3) if moved else '&ndash;'}<small>{hidden}</small></td>"
            ""
            f"<td>{each.share('exposed'):.0%}</td><td>{each.share('loader'):.0%}</td><td>{each.share('idle'):.0%}</td></tr>"
        )
    first, last = profiles[0].steps[0].number, profiles[0].steps[-1].number
    key = "".join(
        f'<span class="key"><i class="{kind}"></i>{name}</span>'
        for kind, name in (
            ("computation", "computation"),
            ("exposed", "communication that nothing hides"),
            ("loader", "waiting for data"),
            ("idle", "nothing of these"),
        )
    )
    return (
        f'<section>\n<h2>Where a step\'s time goes</h2>\n<p class="quiet">Steps {first} to {last}, profiled. '
        "Communication waits for the slowest rank too.</p>\n"
        f'{key}<table class="plain ranks wide"><thead><tr><th></th><th></th><th>a step</th><th>computation</th>'
        "<th>communication</th><th>exposed</th><th>data</th><th>nothing</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>\n</section>"
    )


def _profile(summary: ProfileSummary) -> str:
    facts = [
        summary.device_name or summary.device.upper(),
        f"on {summary.host}" if summary.host else "",
        f"torch {summary.torch}" if summary.torch else "",
        f"{summary.links} forward operators linked to their backward ones",
    ]
    parts = [
        f"<h2>Rank {summary.rank}</h2>",
        f'<p class="quiet">{" &middot; ".join(escaped(fact) for fact in facts if fact)}</p>',
    ]
    median = sorted(step.duration for step in summary.steps)[len(summary.steps) // 2]
    each = f"<div><h3>Each step<b>median {milliseconds(median / 1e3)}</b></h3>{charts.steps(summary)}</div>"
    parts.append(f'<div class="charts">{each}{_memory(summary)}</div>')
    if summary.kernels:
        parts.append(_tensor_cores(summary))
        parts.append(_kernels(summary))
    if summary.operators:
        parts.append(_operators(summary))
    steps = len(summary.steps) or 1
    collectives = [(each.name, each.calls, each.time) for each in summary.collectives]
    waits = [(each.name, each.calls, each.time) for each in summary.waits]
    small = _small("Collectives", collectives, steps) + _small("Waiting for the GPU", waits, steps)
    parts.append(f'<div class="two">{small}</div>')
    return "<section>\n" + "\n".join(parts) + "\n</section>"


def _memory(summary: ProfileSummary) -> str:
    drawn = []
    for timeline in summary.memory:
        limit = f" of {bytes_of(timeline.limit)}" if timeline.limit else ""
        drawn.append(
            f"<div><h3>Memory of {escaped(timeline.device)}<b>peak {bytes_of(timeline.peak)}{limit}</b></h3>"
            f"{charts.memory(timeline)}{charts.memory_key(timeline)}</div>"
        )
    return "".join(drawn)


def _tensor_cores(summary: ProfileSummary) -> str:
    if not summary.product_time:
        return ""
    share = summary.tensor_yes / summary.product_time
    unknown = summary.tensor_unknown / summary.product_time
    of_all = summary.tensor_yes / summary.kernel_time if summary.kernel_time else 0.0
    doubt = f", of {unknown:.0%} it is not known" if unknown >= 0.005 else ""
    return (
        f"<h3>Tensor Cores<b>{share:.0%} of matrix products{doubt}; {of_all:.0%} of all kernels' time</b></h3>"
        f'<div class="meter"><i style="width:{100 * share:.1f}%"></i></div>'
    )


def _kernels(summary: ProfileSummary) -> str:
    longest = summary.kernels[0].time
    steps = len(summary.steps) or 1
    head = (
        '<table class="kernels"><thead><tr><th>kernel</th><th>time, each step</th><th>calls</th><th>grid, block</th>'
        "<th>registers, shared</th><th>Tensor Cores</th></tr></thead><tbody>"
    )

    def rows(kernels: Iterable[ProfiledKernel]) -> str:
        return "".join(_kernel(kernel, longest, steps) for kernel in kernels)

    rest = summary.kernels[_SHOWN:]
    more = _folded(len(rest), head, rows(rest))
    half = milliseconds(summary.median_kernel / 1e3)
    per_step = f"{summary.launched // steps:,} a step, half of them shorter than {half}"
    return f"<h3>Kernels<b>{per_step}</b></h3>{head}{rows(summary.kernels[:_SHOWN])}</tbody></table>{more}"


def _folded(count: int, head: str, rows: str) -> str:
    if not count:
        return ""
    return f"<details><summary>{count} more</summary>{head}{rows}</tbody></table></details>"


def _kernel(kernel: ProfiledKernel, longest: float, steps: int) -> str:
    talks = " talks" if kernel.name.lower().startswith("nccl") else ""
    shapes = f"<small>and {kernel.shapes} other launches</small>" if kernel.shapes else ""
    occupancy = "" if kernel.occupancy is None else f"<small>{kernel.occupancy:.0f}% occupied</small>"
    how = f"<small>{escaped(kernel.how)}</small>" if kernel.how and kernel.tensor_cores == "yes" else ""
    times = "&times;"
    return (
        f'<tr><td><code title="{escaped(kernel.name)}">{escaped(_short(kernel.name))}</code>'
        f"<small>{escaped(kernel.op)}</small></td>"
        f'<td><div class="bar{talks}"><i style="width:{100 * kernel.time / longest:.1f}%"></i>'
        f"<span>{milliseconds(kernel.time / steps / 1e3)}</span></div><small>{kernel.share:.1%}</small></td>"
        f'<td data-name="calls">{kernel.calls / steps:,.4g}</td>'
        f'<td data-name="grid, block">{times.join(map(str, kernel.grid))}'
        f"<small>{times.join(map(str, kernel.block))}</small>{shapes}</td>"
        f'<td data-name="registers, shared">{kernel.registers}<small>{bytes_of(kernel.shared)}</small>{occupancy}</td>'
        f'<td data-name="Tensor Cores"><span class="{kernel.tensor_cores}">{kernel.tensor_cores}</span>{how}</td></tr>'
    )


def _operators(summary: ProfileSummary) -> str:
    longest = summary.operators[0].own
    steps = len(summary.steps) or 1
    head = (
        '<table class="kernels"><thead><tr><th>operator</th><th>own time, each step</th><th>with what it calls</th>'
        "<th>calls</th></tr></thead><tbody>"
    )

    def rows(operators: Iterable[ProfiledOperator]) -> str:
        return "".join(
            f"<tr><td><code>{escaped(_short(each.name))}</code><small>{escaped(each.dims)}</small></td>"
            f'<td><div class="bar"><i style="width:{100 * each.own / longest:.1f}%"></i>'
            f"<span>{milliseconds(each.own / steps / 1e3)}</span></div><small>{each.share:.1%}</small></td>"
            f'<td data-name="with what it calls">{milliseconds(each.total / steps / 1e3)}</td>'
            f'<td data-name="calls">{each.calls / steps:,.4g}</td></tr>'
            for each in operators
        )

    rest = summary.operators[_SHOWN:]
    more = _folded(len(rest), head, rows(rest))
    where = "the host's time" if summary.device == "cuda" else "the time of the threads that train"
    return f"<h3>Operators<b>{where}</b></h3>{head}{rows(summary.operators[:_SHOWN])}</tbody></table>{more}"


def _small(title: str, rows: Iterable[tuple[str, int, float]], steps: int) -> str:
    listed = "".join(
        f"<tr><td><code>{escaped(_short(name))}</code></td><td>{milliseconds(time / steps / 1e3)}</td>"
        f"<td>{calls / steps:,.4g}</td></tr>"
        for name, calls, time in rows
    )
    if not listed:
        return ""
    return (
        f'<div><h3>{title}</h3><table class="plain"><thead><tr><th></th><th>each step</th><th>calls</th></tr></thead>'
        f"<tbody>{listed}</tbody></table></div>"
    )


def _short(name: str) -> str:
    """A C++ kernel's name without what it was made of: namespaces, return type, arguments."""
    plain = name.removeprefix("void ").replace("at::native::", "").replace("(anonymous namespace)::", "")
    plain = re.sub(r"(?<=[\w>])\(.*", "", plain, flags=re.DOTALL)
    return plain if len(plain) <= 96 else f"{plain[:95]}…"


# --- the job's life ----------------------------------------------------------------------------------------


def _life(report: TrainingReport) -> str:
    parts = ["<h2>The job</h2>"]
    total = sum(stage.end - stage.start for stage in report.stages)
    if total > 0:
        cells = "".join(
            f'<i class="{_STAGE_KINDS.get(stage.state, "")}" style="width:{(stage.end - stage.start) / total:.2%}" '
            f'title="{escaped(stage.state)}: {seconds(stage.end - stage.start)}"></i>'
            for stage in report.stages
        )
        spent: dict[str, float] = {}
        for stage in report.stages:
            spent[stage.state] = spent.get(stage.state, 0.0) + stage.end - stage.start
        key = "".join(
            f'<span class="key"><i class="{_STAGE_KINDS.get(state, "")}"></i>{escaped(state)} {seconds(time)}</span>'
            for state, time in spent.items()
        )
        parts.append(f'<div class="stages">{cells}</div>{key}')
    parts += [part for part in (_starts(report), _compiles(report), _checkpoints(report.checkpoints)) if part]
    parts += [part for part in (_restarts(report), _notes(report)) if part]
    if report.traces:
        files = "".join(f"<li><code>{escaped(name)}</code></li>" for name in report.traces[:_LISTED])
        parts.append(
            f'<h3>Traces</h3><ul>{files}</ul><p class="quiet">Open one in ui.perfetto.dev or chrome://tracing: '
            f"<code>torchrelay train get {escaped(report.job.id)} {escaped(report.traces[0])}</code></p>"
        )
    return "<section>\n" + "\n".join(parts) + "\n</section>"


def _starts(report: TrainingReport) -> str:
    if not report.first_steps:
        return ""
    rows = "".join(
        f"<tr><td>{'first' if attempt == 0 else f'restart {attempt}'}</td><td>{len(times)}</td>"
        f"<td>{seconds(min(times.values()))}</td><td>{seconds(max(times.values()))}</td></tr>"
        for attempt, times in sorted(report.first_steps.items())
    )
    return (
        '<h3>From a rank\'s start to the end of its first step</h3><table class="plain"><thead><tr><th>start</th>'
        f"<th>ranks</th><th>fastest</th><th>slowest</th></tr></thead><tbody>{rows}</tbody></table>"
    )


def _compiles(report: TrainingReport) -> str:
    if not report.compiles:
        return ""
    rows = "".join(
        f"<tr><td>rank {rank}</td><td>{each.hits}</td><td>{each.misses}</td><td>{each.fallbacks}"
        f"{'<small>' + escaped(', '.join(each.reasons)[:300]) + '</small>' if each.reasons else ''}</td></tr>"
        for rank, each in list(report.compiles.items())[:_LISTED]
    )
    skipped = "".join(f"<li>{escaped(text[:300])}</li>" for text in report.job.skipped[:_LISTED])
    left = f'<p class="quiet">Not captured:</p><ul>{skipped}</ul>' if skipped else ""
    return (
        '<h3>Compiles, of each rank\'s last start</h3><table class="plain"><thead><tr><th></th><th>hits</th>'
        f"<th>misses</th><th>fallbacks</th></tr></thead><tbody>{rows}</tbody></table>{left}"
    )


def _checkpoints(checkpoints: Sequence[CheckpointEvent]) -> str:
    if not checkpoints:
        return ""
    rows = "".join(
        f"<tr><td>{each.step:,}</td><td>{'kept' if each.kept else '<b class=error>failed</b>'}</td>"
        f"<td>{seconds(each.seconds)}</td><td>{bytes_of(each.bytes)}</td><td>{escaped(each.name)}"
        f"<small>{escaped(each.detail[:300])}</small></td></tr>"
        for each in checkpoints[-_LISTED:]
    )
    older = len(checkpoints) - _LISTED
    more = f'<p class="quiet">and {older} before</p>' if older > 0 else ""
    return (
        '<h3>Checkpoints</h3><table class="plain wide"><thead><tr><th>step</th><th></th><th>took</th><th>size</th>'
        f"<th>name</th></tr></thead><tbody>{rows}</tbody></table>{more}"
    )


def _restarts(report: TrainingReport) -> str:
    if not report.restarts:
        return ""
    rows = "".join(
        f"<li>after step {step:,}{f', of {ranks} ranks' if ranks else ''}<small>{escaped(why[:500])}</small></li>"
        for step, ranks, why in report.restarts[-_LISTED:]
    )
    return f'<h3>Ranks started again</h3><ul class="changes">{rows}</ul>'


def _notes(report: TrainingReport) -> str:
    if not report.notes:
        return ""
    rows = "".join(
        f'<li><span class="{note.level}">{note.level}</span> {escaped(note.text[:1000])}'
        f"{f'<small>rank {note.rank}</small>' if note.rank >= 0 else ''}</li>"
        for note in report.notes[-_LISTED:]
    )
    return f'<h3>Notes</h3><ul class="changes">{rows}</ul>'


_OF_PROFILES = (
    "Computation and communication are the spans of kernels, on a CPU those of operators and of gloo's calls; the "
    "profiler makes a step longer. Tensor Cores are found by a kernel's name (the lists of NVIDIA's and PyTorch's own "
    "tools), for Triton's kernels by the instructions in their PTX or binary. Activations are what was there before a "
    "backward pass and still is when it begins. "
)


def _foot(report: TrainingReport) -> str:
    profiled = _OF_PROFILES if report.profiles else ""
    return (
        f'<footer class="quiet"><p>{profiled}Between two messages a rank tells the mean of its steps. A step that was '
        "taken again after a restart counts once.</p></footer>"
    )
