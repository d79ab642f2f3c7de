"""A tuning report as one HTML page: a Report in; text out, that loads nothing and runs nothing.

What users wrote (names, problems, candidates, errors) is shown as text: everything goes through `escaped`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from ....compiler.api.tuning.jobs import TuneProgress
from ....compiler.tuning.records import CandidateFailure, DeviceEnvironment, Timing, TuningEntry
from ...jobfiles.tuning_diff import TuningChange
from .. import roofline
from ..html_page import digits, document, escaped, milliseconds, seconds, tiles_of
from .summary import TunedDevice, TunedGraph, TuningReport, TuningRow

_LISTED = 40
"""Candidates, failures or graphs that are listed of one problem."""
_MISSING = 200
_DOTS = 300
_KINDS = 6
"""Colors that there are for dtypes."""


def page(report: TuningReport) -> str:
    """The whole page."""
    parts = [_head(report)]
    if report.changes is not None:
        parts.append(_changes(report.changes, report.against))
    if report.graphs:
        parts.append(_graphs(report.graphs))
    parts += [_device(device) for device in report.devices]
    if report.missing:
        parts.append(_missing(report.missing))
    if not report.devices:
        parts.append('<p class="quiet">Nothing has been found yet.</p>')
    parts.append(_FOOT)
    return document(report.title, parts)


# --- head --------------------------------------------------------------------------------------------------


def _head(report: TuningReport) -> str:
    job = report.job
    about = " &middot; ".join(
        [escaped(device) for device in dict.fromkeys(found.place.device for found in report.devices)]
        + (
            [f"job {escaped(job.id)}, {escaped(job.state)}", f"started by {escaped(job.by)}"]
            if job is not None
            else []
        )
    )
    tiles = [("problems", str(report.problems), f"{report.known} known before" if report.known else "")]
    if report.of_default is not None:
        tiles.append(
            (
                "faster than Inductor's default",
                f"{report.of_default:.2f}&times;",
                "geometric mean, each alone",
            )
        )
    if report.of_aten is not None:
        tiles.append(("faster than ATen", f"{report.of_aten:.2f}&times;", "cuBLAS, cuDNN or oneDNN"))
    if report.graphs:
        best = report.graphs[0]
        tiles.append(
            (f"saved a step of {escaped(best.key[:8])}", milliseconds(best.saved), "of its tuned products")
        )
    tried = f"{_candidates(report.candidates)}, {report.failed} failed"
    tiles.append(("of searching", seconds(report.seconds), tried))
    title = f'<h1>{escaped(report.title)}</h1>\n<p class="quiet">{about}</p>'
    return f"<header>\n{title}\n{tiles_of(tiles)}\n</header>"


# --- what changed ------------------------------------------------------------------------------------------

_SAID = {
    "slower": "slower than before",
    "other": "another winner, about as fast",
    "faster": "faster than before",
    "new": "new",
    "gone": "gone",
}


def _changes(changes: Sequence[TuningChange], against: str) -> str:
    slower = [change for change in changes if change.kind == "slower"]
    rest = [change for change in changes if change.kind != "slower"]
    name = f"<code>{escaped(against)}</code>" if against else "the last lock"
    if slower:
        head = f'<h2 class="bad">{len(slower)} slower than in {name}</h2>{_change_list(slower)}'
    else:
        head = f"<h2>Nothing is slower than in {name}</h2>"
    others = ""
    if rest:
        counts = ", ".join(
            f"{sum(change.kind == kind for change in rest)} {said}"
            for kind, said in _SAID.items()
            if any(change.kind == kind for change in rest)
        )
        others = f"<details><summary>{counts}</summary>{_change_list(rest)}</details>"
    return f"<section>\n{head}\n{others}\n</section>"


def _change_list(changes: Iterable[TuningChange]) -> str:
    return f'<ul class="changes">{"".join(map(_change, changes))}</ul>'


def _change(change: TuningChange) -> str:
    entry = change.new or change.old
    assert entry is not None
    share = f" {change.share:+.1%}" if change.old is not None and change.new is not None else ""
    sides = " &rarr; ".join(
        f"{_brief(side.winner.candidate)} {milliseconds(side.winner.milliseconds)}"
        for side in (change.old, change.new)
        if side is not None
    )
    return (
        f'<li><span class="tag {change.kind}">{escaped(change.kind)}{share}</span> {_problem(entry)}'
        f"<small>{escaped(entry.place.device)}: {sides}</small></li>"
    )


# --- graphs ------------------------------------------------------------------------------------------------


def _graphs(graphs: Sequence[TunedGraph]) -> str:
    rows = "".join(
        f"<tr><td><code>{escaped(graph.key[:16])}</code></td><td>{graph.problems}</td>"
        f"<td>{milliseconds(graph.default)}</td><td>{milliseconds(graph.winners)}</td>"
        f"<td><strong>{milliseconds(graph.saved)}</strong></td></tr>"
        for graph in graphs[:_LISTED]
    )
    return (
        "<section>\n<h2>What it saves a step</h2>\n"
        '<p class="quiet">The time of what each graph has tuned, as often as it has it; '
        "every kernel was measured alone, with cold caches.</p>\n"
        '<table class="plain"><thead><tr><th>graph</th><th>problems</th><th>Inductor\'s default</th>'
        f"<th>winners</th><th>saved</th></tr></thead><tbody>{rows}</tbody></table>\n</section>"
    )


def _missing(items: Sequence[TuneProgress]) -> str:
    rows = "".join(
        f'<li><span class="tag {item.state}">{escaped(item.state)}</span> <code>{escaped(item.text)}</code>'
        f"<small>{f'line {item.line} &middot; ' * bool(item.line)}{escaped(item.detail[:500])}</small></li>"
        for item in items[:_MISSING]
    )
    more = f"<p>and {len(items) - _MISSING} more</p>" if len(items) > _MISSING else ""
    return f'<section>\n<h2>Without a result</h2>\n<ul class="changes">{rows}</ul>{more}\n</section>'


# --- a device ----------------------------------------------------------------------------------------------


def _device(device: TunedDevice) -> str:
    rows = "\n".join(_row(row) for row in device.rows)
    plot = _plot(device) if device.ceilings.flops or device.ceilings.bytes else _NO_CEILINGS
    return (
        f"<section>\n<h2>{escaped(device.place.device)}</h2>\n{_place(device.place, device.clock)}\n{plot}\n"
        '<table class="problems"><thead><tr><th>problem</th><th>time, and as a multiple of the winner\'s</th>'
        "<th>of the roofline</th><th>candidates</th><th>search</th></tr></thead>\n"
        f"<tbody>\n{rows}\n</tbody></table>\n</section>"
    )


_NO_CEILINGS = '<p class="quiet">No ceilings were measured here, so there are no shares of a roofline.</p>'


def _place(place: DeviceEnvironment, clock: str) -> str:
    facts = [
        ("", f"capability {place.capability}"),
        ("driver ", place.driver),
        ("torch ", place.torch),
        ("Triton ", place.triton),
        ("CUDA ", place.cuda),
        ("threads ", str(place.threads) if place.threads else ""),
        ("clock ", clock),
    ]
    return f'<p class="quiet">{" &middot; ".join(f"{name}{escaped(value)}" for name, value in facts if value)}</p>'


def _row(row: TuningRow) -> str:
    entry, result = row.entry, row.result
    item = (
        "" if result.item.startswith(f"{entry.problem.op}(") else result.item
    )  # says no more than the problem
    where = [escaped(text) for text in (item, f"line {result.line}" if result.line else "") if text]
    if row.saved:
        graphs = len(result.graphs)
        where.append(f"saves {milliseconds(row.saved)} a step in {graphs} graph{'s' * (graphs != 1)}")
    search = "known before" if result.known else seconds(entry.seconds)
    samples = f"{entry.winner.samples} samples of the winner"
    error = ""
    if entry.error is not None:
        error = f"off by {entry.error:.1e}" if entry.error else "equal to the reference"
    notes = "".join(f"<small>{note}</small>" for note in (samples, error) if note)
    return (
        f"<tr>\n<td>{_problem(entry)}<small>{' &middot; '.join(where)}</small></td>\n<td>{_times(entry)}</td>\n"
        f"<td>{_share(row)}</td>\n<td>{_spread(row)}{_listed(result.timings, result.failures)}</td>\n"
        f"<td>{search}{notes}</td>\n</tr>"
    )


def _problem(entry: TuningEntry) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in entry.problem.telling())
    shape = entry.problem.shape()
    op, _, rest = shape.partition("(")
    operands, _, result = rest.rpartition(" -> ")
    text = f'<code class="problem"><b>{escaped(op)}</b>({escaped(operands)} &rarr; {escaped(result)}</code>'
    return f"{text}<small><code>{escaped(settings)}</code></small>" if settings else text


def _times(entry: TuningEntry) -> str:
    """The winner beside what would have been taken without a search."""
    sides = [("winner", entry.winner), ("default", entry.default), ("ATen", entry.aten)]
    shown = [(name, timing) for name, timing in sides if timing is not None]
    longest = max(timing.milliseconds for _, timing in shown)
    bars = []
    for name, timing in shown:
        width = 100 * timing.milliseconds / longest
        multiple = timing.milliseconds / entry.winner.milliseconds
        beside = f"<b>{multiple:.2f}&times;</b>" if name != "winner" else ""
        bars.append(
            f'<div class="time {name.lower()}" title="{escaped(_interval(timing))}"><span>{name}</span>'
            f'<i style="width:{width:.1f}%"></i><em>{milliseconds(timing.milliseconds)} {beside}</em></div>'
        )
    return f'{"".join(bars)}<small class="candidate">{_brief(entry.winner.candidate)}</small>'


def _share(row: TuningRow) -> str:
    if row.share is None:
        rate = f"<small>{_rate(row.rate)}</small>" if row.rate else ""
        return f'<span class="quiet">&ndash;</span>{rate}'
    share = row.share.share
    rate = f"{_rate(row.rate)}, " if row.rate else ""
    return (
        f'<div class="meter {row.share.bound}"><i style="width:{min(100 * share, 100):.1f}%"></i></div>'
        f"<b>{share:.0%}</b><small>{rate}bound by {row.share.bound}</small>"
    )


def _spread(row: TuningRow) -> str:
    """Each candidate that ran as a dot, the fastest at the left, on a logarithmic scale."""
    timings, entry = row.result.timings, row.entry
    failed = f", {entry.failed} failed" if entry.failed else ""
    said = f"<small>{_candidates(entry.candidates)}{failed}</small>"
    if len(timings) < 2:
        return said
    fastest = min(timing.milliseconds for timing in timings)
    slowest = max(timing.milliseconds for timing in timings)
    width = math.log(slowest / fastest) or 1.0
    dots = []
    for timing in sorted(timings, key=lambda each: each.milliseconds)[:_DOTS]:
        x = 6 + 168 * math.log(timing.milliseconds / fastest) / width
        won = timing.candidate == entry.winner.candidate
        kind = "dot won" if won else "dot aten" if timing.candidate.startswith("aten ") else "dot"
        dots.append(
            f'<circle class="{kind}" cx="{x:.1f}" cy="10" r="{4.5 if won else 3.5}">'
            f"<title>{escaped(timing.candidate)}: {escaped(_interval(timing))}</title></circle>"
        )
    dots.sort(key=lambda dot: "won" in dot)  # on top
    return (
        f'<svg class="spread" viewBox="0 0 180 20" role="img" aria-label="times of {len(timings)} candidates">'
        f'<line x1="6" x2="174" y1="10" y2="10"/>{"".join(dots)}</svg>'
        f'<small class="ends"><span>{milliseconds(fastest)}</span>'
        f"<span>{slowest / fastest:.1f}&times;</span></small>{said}"
    )


def _listed(timings: Sequence[Timing], failures: Sequence[CandidateFailure]) -> str:
    if not timings and not failures:
        return ""
    fastest = min((timing.milliseconds for timing in timings), default=1.0)
    ran = "".join(
        f"<li><code>{escaped(timing.candidate)}</code> <b>{milliseconds(timing.milliseconds)}</b> "
        f"{timing.milliseconds / fastest:.2f}&times;</li>"
        for timing in timings[:_LISTED]
    )
    not_run = "".join(
        f"<li><code>{escaped(failure.candidate)}</code> <em>{escaped(failure.why[:300])}</em></li>"
        for failure in failures[:_LISTED]
    )
    left = max(len(timings) - _LISTED, 0) + max(len(failures) - _LISTED, 0)
    more = f"<p>and {left} more</p>" if left else ""
    return f"<details><summary>all</summary><ol>{ran}</ol>" + (
        f'<ul class="failed">{not_run}</ul>{more}</details>' if not_run or more else "</details>"
    )


# --- the roofline ------------------------------------------------------------------------------------------


def _plot(device: TunedDevice) -> str:
    """Flops a second over flops a byte, both logarithmic: what was reached below what can be."""
    told = device.ceilings
    ceilings = " &middot; ".join(
        [f"memory {told.bytes / 1e9:,.0f} GB/s"] * bool(told.bytes)
        + [f"{escaped(kind)} {_rate(flops)}" for kind, flops in sorted(told.flops.items())]
    )
    intro = f'<p class="quiet">Measured ceilings: {ceilings}</p>'
    points = [
        (row.intensity, row.rate, row)
        for row in device.rows
        if row.intensity is not None and row.rate is not None
    ]
    if not points or not told.flops or not told.bytes:
        return intro
    kinds = sorted({roofline.kind(row.entry) for _, _, row in points} | set(told.flops))
    top = max([*told.flops.values(), *(rate for _, rate, _ in points)]) * 1.6
    ridge = max(told.flops.values()) / told.bytes
    right = max([ridge, *(x for x, _, _ in points)]) * 2
    left = min([ridge / 8, *(x for x, _, _ in points)]) / 2
    bottom = min([told.bytes * left, *(rate for _, rate, _ in points)]) / 1.6
    scale = _Scale(left, right, bottom, top)
    lines = [scale.grid()]
    said = float("inf")
    for kind, flops in sorted(told.flops.items(), key=lambda item: item[1]):
        corner = flops / told.bytes
        start = max(left, bottom / told.bytes)
        color = f"kind{kinds.index(kind) % _KINDS}"
        path = f"M{scale.at(start, told.bytes * start)} L{scale.at(corner, flops)} L{scale.at(right, flops)}"
        lines.append(f'<path class="ceiling {color}" d="{path}"/>')
        said = min(scale.y(flops) + 4, said - 15)  # labels stand above each other
        lines.append(
            f'<text class="{color}" x="{scale.x(right) + 6:.1f}" y="{said:.1f}">{escaped(kind)}</text>'
        )
    for x, rate, row in points:
        color = f"kind{kinds.index(roofline.kind(row.entry)) % _KINDS}"
        share = "" if row.share is None else f", {row.share.share:.0%} of the roofline"
        lines.append(
            f'<circle class="point {color}" {scale.center(x, rate)} r="4.5">'
            f"<title>{escaped(row.entry.problem.shape())}: {_rate(rate)}{share}</title></circle>"
        )
    return (
        f'{intro}\n<div class="wide"><svg class="roofline" viewBox="0 0 {_Scale.WIDTH} {_Scale.HEIGHT}" role="img" '
        f'aria-label="roofline of {len(points)} problems">{"".join(lines)}</svg></div>'
    )


class _Scale:
    WIDTH, HEIGHT = 960, 340
    _LEFT, _RIGHT, _TOP, _BOTTOM = 104, 110, 14, 40

    def __init__(self, left: float, right: float, bottom: float, top: float) -> None:
        self._left, self._right, self._bottom, self._top = left, right, bottom, top

    def x(self, value: float) -> float:
        share = math.log(value / self._left) / math.log(self._right / self._left)
        return self._LEFT + share * (self.WIDTH - self._LEFT - self._RIGHT)

    def y(self, value: float) -> float:
        share = math.log(value / self._bottom) / math.log(self._top / self._bottom)
        return self.HEIGHT - self._BOTTOM - share * (self.HEIGHT - self._TOP - self._BOTTOM)

    def at(self, x: float, y: float) -> str:
        return f"{self.x(x):.1f} {self.y(y):.1f}"

    def center(self, x: float, y: float) -> str:
        return f'cx="{self.x(x):.1f}" cy="{self.y(y):.1f}"'

    def grid(self) -> str:
        parts = []
        for tenth in range(math.ceil(math.log10(self._left)), math.floor(math.log10(self._right)) + 1):
            x = self.x(10.0**tenth)
            bottom = self.HEIGHT - self._BOTTOM
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{self._TOP}" y2="{bottom}"/>')
            parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16}">{10.0**tenth:g}</text>')
        for tenth in range(math.ceil(math.log10(self._bottom)), math.floor(math.log10(self._top)) + 1):
            y, end = self.y(10.0**tenth), self.WIDTH - self._RIGHT
            parts.append(f'<line class="grid" x1="{self._LEFT}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(
                f'<text class="tick side" x="{self._LEFT - 8}" y="{y + 4:.1f}">{_rate(10.0**tenth)}</text>'
            )
        middle = (self._LEFT + self.WIDTH - self._RIGHT) / 2
        parts.append(f'<text class="tick" x="{middle:.0f}" y="{self.HEIGHT - 4}">flops for each byte</text>')
        return "".join(parts)


# --- texts -------------------------------------------------------------------------------------------------

_FOOT = (
    '<footer class="quiet"><p>Times are medians of interleaved samples with cold caches; hover for 95% intervals. '
    "<b>default</b>: what Inductor takes without max-autotune. <b>ATen</b>: PyTorch's own kernel. "
    "<b>of the roofline</b>: the shortest time that the device's measured ceilings allow, of the winner's.</p></footer>"
)


def _brief(candidate: str) -> str:
    """A template's candidate by its tile, warps and stages; the whole text when the mouse is over it."""
    name, _, rest = candidate.partition(" ")
    given = dict(re.findall(r"(\w+)=([^,\s]+)", rest))
    tile = [given[f"BLOCK_{side}"] for side in "MNK" if f"BLOCK_{side}" in given]
    told = [
        "&times;".join(map(escaped, tile)),
        *(
            f"{escaped(given[f'num_{part}'])} {part}"
            for part in ("warps", "stages")
            if f"num_{part}" in given
        ),
    ]
    short = (
        f"{escaped(name)} {', '.join(part for part in told if part)}" if tile else escaped(candidate[:160])
    )
    return f'<span title="{escaped(candidate)}">{short}</span>'


def _candidates(count: int) -> str:
    return f"{count} candidate{'s' * (count != 1)}"


def _interval(timing: Timing) -> str:
    return f"{timing.milliseconds:g} ms, {timing.low:g} to {timing.high:g}, {timing.samples} samples"


def _rate(flops: float | None) -> str:
    if flops is None:
        return ""
    for limit, unit in ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"), (1e3, "kFLOP/s")):
        if flops >= limit:
            return f"{digits(flops / limit) if flops / limit < 100 else f'{flops / limit:,.0f}'} {unit}"
    return f"{flops:.0f} FLOP/s"
