"""The values of the pages' templates: texts, tiles, and the picture of when each graph was ready."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, get_args

from fastapi import Request
from msgspec import Struct

from ....compiler.api import runs
from ....compiler.api.compiles import MissExplanation
from ....compiler.api.html import svg
from ....compiler.api.html.page import Tile, bytes_of, plural, seconds
from ....compiler.api.html.svg import Axis, Picture, shape
from ....compiler.api.now import Now
from ....compiler.api.usage import Overview, Period
from ..http.page_bodies import rendered
from .usage_charts import charts

_DRAWN = 60
"""Graphs in the picture, those that took longest."""
_LISTED = 200
"""Rows before a table is folded."""
_WIDTH, _ROW, _LEFT, _RIGHT, _BOTTOM = 960, 18, 116, 940, 34
"""Pixels of the picture."""
_COLORS: dict[runs.Stage, str] = {"wait": "kind1", "fetch": "kind0", "verify": "kind3", "load": "kind2"}
_OTHER_COLOR = "kind5"
_MISSED = ("miss", "coalesced", "background", "fallback", "raised")


class GraphRow(Struct, frozen=True):
    """A line of the table of graphs. number: from 1, in the order in which they were ready."""

    number: int
    graph: runs.GraphRecord
    outcome: str
    missed: bool
    stages: str


def overview(request: Request, whole: Overview) -> str:
    total = whole.total
    local = sum(total.fallbacks.values())
    rate = f"{total.hits / total.requests:.0%}" if total.requests else "none"
    tiles = [
        ("hit rate", rate, f"{total.hits:,} of {total.requests:,} requests"),
        (
            "compile time saved",
            seconds(total.seconds_saved),
            f"{seconds(total.seconds_spent)} spent by workers",
        ),
        ("compiled", f"{total.compiles:,}", plural(total.failures, "failure")),
        ("compiled locally", f"{local:,}", "by clients, in place of the service"),
        ("runs", f"{total.runs:,}", _percentiles(total.ready_seconds)),
        (
            "artifacts now",
            f"{whole.entries:,}",
            f"{bytes_of(whole.bytes_stored)}, {whole.compiling} compiling",
        ),
    ]
    return rendered(
        "runs/overview.html",
        request,
        title="Overview",
        about=[f"the last {whole.period}", f"{bytes_of(total.bytes_served)} served"],
        tiles=tiles,
        whole=whole,
        periods=get_args(Period),
        charts=charts(whole),
        when=when,
        hit_rate=hit_rate,
        namespace=namespace_of(request),
    )


def now(request: Request, current: Now) -> str:
    return _now("now/now.html", request, current)


def now_part(request: Request, current: Now) -> str:
    """The part of the page that changes."""
    return _now("now/now_part.html", request, current)


def _now(template: str, request: Request, current: Now) -> str:
    return rendered(
        *(template, request),
        title="Now",
        about=["renewed as it changes; without scripts, load it again"],
        tiles=(),
        now=current,
        namespace=namespace_of(request),
    )


def latest(request: Request, listed: runs.RunList) -> str:
    return rendered(
        "runs/runs.html",
        request,
        title="Runs",
        about=["the latest first", "kept for a month"],
        tiles=(),
        listed=listed,
        when=when,
        hit_rate=hit_rate,
        namespace=namespace_of(request),
    )


def run(request: Request, whole: runs.Run) -> str:
    summary, shown = whole.summary, whole.process
    about = [f"by {summary.by}", when(summary.ended), f"PyTorch {summary.torch}" if summary.torch else ""]
    if summary.ranks > 1:
        about.append(
            f"rank {shown.record.rank or 0} of {summary.ranks}" if shown else plural(summary.ranks, "rank")
        )
    graphs = list(shown.record.graphs) if shown else []
    return rendered(
        "runs/run.html",
        request,
        title=summary.program or "python",
        about=[text for text in about if text],
        tiles=_tiles(shown) if shown else (),
        whole=whole,
        shown=shown,
        rows=[_row(number, graph) for number, graph in enumerate(graphs, 1)],
        timeline=_timeline(graphs),
        stages=_stages(shown.record.seconds) if shown else "",
        colors=[*((color, stage) for stage, color in _COLORS.items()), (_OTHER_COLOR, "the rest")],
        listed=_LISTED,
        outcome=_outcome,
        when=when,
        namespace=namespace_of(request),
    )


def miss(request: Request, explained: MissExplanation) -> str:
    about = ["in the cache by now"] if explained.published else []
    if explained.asked is not None:
        about.insert(0, f"missed {when(explained.asked)}")
    return rendered(
        "runs/miss.html",
        request,
        title=f"Why {explained.key[:12]} missed",
        about=about,
        tiles=(),
        explained=explained,
        when=when,
    )


def described(request: Request, document: Mapping[str, Any]) -> str:
    """The OpenAPI document for people."""
    groups: dict[str, list[tuple[str, str, Any]]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            groups.setdefault(operation["tags"][0], []).append((method, path, operation))
    about = [f"HTTP of torchrelay {document['info']['version']}"]
    return rendered(
        "reference/docs.html",
        request,
        title="HTTP API",
        about=about,
        tiles=(),
        document=document,
        groups=groups,
    )


def when(moment: float) -> str:
    """A time and how long ago it was; clients' clocks may be wrong."""
    try:
        text = datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return "at a time that is none"
    past = time.time() - moment
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if past >= size:
            return f"{text}, {plural(int(past // size), unit)} ago"
    return f"{text}, just now" if past > -60 else text


def hit_rate(summary: runs.RunSummary) -> str:
    return f"{summary.hits / summary.graphs:.0%}" if summary.graphs else ""


def _percentiles(ready: list[float]) -> str:
    return f"graphs ready in {seconds(ready[0])}, 9 of 10 in {seconds(ready[1])}" if ready else ""


def namespace_of(request: Request) -> str:
    """The part of a link's query that keeps the namespace."""
    name = request.query_params.get("namespace", "")
    return f"namespace={name}" if name else ""


def _tiles(process: runs.RunProcess) -> list[Tile]:
    record = process.record
    graphs, local = len(record.graphs), runs.local_compiles(record)
    share = f"{runs.hits(record) / graphs:.0%} of the graphs" if graphs else ""
    tiles = [
        ("graphs", str(graphs), f"{sum(graph.nodes for graph in record.graphs):,} nodes"),
        ("hits", str(runs.hits(record)), share),
        ("misses", str(record.misses + record.coalesced), "compiled by the service"),
        ("compiled locally", str(local), ", ".join(record.fallbacks)),
        ("saved", seconds(process.saved_seconds), "what the hits took to compile"),
    ]
    if record.programs or record.traced:
        traced = len({each.function for each in record.traced})
        tiles.append(("started without tracing", str(record.programs), f"{traced} traced"))
    return tiles


def _row(number: int, graph: runs.GraphRecord) -> GraphRow:
    missed = bool(graph.key) and graph.outcome in _MISSED
    return GraphRow(number, graph, _outcome(graph), missed, _stages(graph.stages))


def _outcome(graph: runs.GraphRecord) -> str:
    text = runs.OUTCOMES[graph.outcome] + (f": {graph.reason}" if graph.reason else "")
    return f"{text}; {plural(graph.eager_calls, 'call')} eagerly" if graph.eager_calls else text


def _stages(spent: Mapping[runs.Stage, float] | Mapping[str, float]) -> str:
    """What took longest first; what took no time is left out."""
    ordered = sorted(spent.items(), key=lambda item: -item[1])
    return ", ".join(f"{stage} {seconds(taken)}" for stage, taken in ordered if taken >= 0.05)


def _timeline(graphs: list[runs.GraphRecord]) -> Picture | None:
    """A bar for each graph, from its request to the callable, in seconds after the start of the process."""
    numbered = [(number, graph) for number, graph in enumerate(graphs, 1) if graph.ended > 0]
    longest = sorted(numbered, key=lambda item: -item[1].seconds)[:_DRAWN]
    if not longest:
        return None
    longest.sort()
    end = max(graph.ended for _, graph in longest) or 1.0
    height = _ROW * len(longest) + _BOTTOM
    x, y = Axis(0, end, _LEFT, _RIGHT), Axis(0, len(longest), 0, height - _BOTTOM)
    shapes = []
    for tick in range(6):
        at = end * tick / 5
        shapes.append(shape("line", "grid", x1=x(at), x2=x(at), y1=0, y2=height - _BOTTOM))
        shapes.append(shape("text", "tick", x=x(at), y=height - 12, text=seconds(at)))
    for row, (number, graph) in enumerate(longest):
        top, began = y(row), max(graph.ended - graph.seconds, 0.0)
        shapes.append(
            shape("text", "side", x=_LEFT - 8, y=top + 13, text=f"{number} {graph.key[:8] or 'none'}")
        )
        title = f"graph {number}, {runs.OUTCOMES[graph.outcome]}, {seconds(graph.seconds)}"
        rest = "bad" if graph.outcome in ("fallback", "eager", "raised") else _OTHER_COLOR
        shapes.append(_bar(x, began, graph.ended, top, f"span {rest}", title))
        for stage, spent in graph.stages.items():
            if color := _COLORS.get(stage):
                until = min(began + spent, graph.ended)
                shapes.append(
                    _bar(x, began, until, top, f"span {color}", f"{title}: {stage} {seconds(spent)}")
                )
                began = until
    return Picture("timeline", f"when {plural(len(longest), 'graph')} were ready", _WIDTH, height, shapes)


def _bar(x: Axis, began: float, ended: float, top: float, kind: str, title: str) -> svg.Shape:
    return shape(
        "rect", kind, x=x(began), width=max(x(ended) - x(began), 1.5), y=top + 3, height=_ROW - 6, title=title
    )
