"""`torchrelay explain`: each graph of the last run, hit or miss; for a miss the nearest entry and what differs; with
programs the functions that started without tracing, and why others were traced."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated

import typer
from msgspec import Struct

from ....compiler.api.compiles import MissExplanation
from ....compiler.api.runs import HITS, OUTCOMES, GraphRecord
from ....compiler.errors import ClientError, NotFound, RelayError
from ...gateway.compile_client import GatewayClient
from ...reports.run_report import LastRun, last_run
from ...settings import ClientSettings, load_settings
from .. import output
from ..output import Json

_KEY_DIGITS = 64
_SHOWN_DIGITS = 12


class KeyExplanation(Struct, frozen=True, kw_only=True):
    """The service's explanation of a key. error: why there is no explanation."""

    key: str
    explanation: MissExplanation | None = None
    error: str = ""


def explain(
    key: Annotated[
        str | None,
        typer.Argument(
            help="A key, or the first digits of one of the last run; default: all graphs of the run."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show the last run's graphs, for a miss the nearest entry of the cache and the differences, and which functions
    started without tracing or why they were traced."""
    settings = load_settings()
    run = last_run(settings.state_dir) if settings.state_dir is not None else None
    failure: RelayError | None = None
    if key is not None:
        full_key, run = _full_key(key, run), None
        with GatewayClient(settings) as gateway:
            misses = [KeyExplanation(key=full_key, explanation=gateway.explain(full_key))]
    elif run is None:
        raise ClientError(
            "no run has left a record on this machine",
            hint="Name a key, or run a script through torchrelay first",
        )
    else:
        misses, failure = _ask_all(settings, _missed(_graphs(run)))
    if json:
        output.print_json({"run": run, "misses": misses})
    else:
        _show(run, misses)
    if failure is not None:
        raise failure


def _full_key(key: str, run: LastRun | None) -> str:
    """The 64 digits that `key` begins. Raises BadParameter."""
    text = key.lower()
    if not text or set(text) - set("0123456789abcdef") or len(text) > _KEY_DIGITS:
        raise typer.BadParameter("a key has 64 hexadecimal digits", param_hint="KEY")
    if len(text) == _KEY_DIGITS:
        return text
    found = {graph.key for graph in _graphs(run) if graph.key.startswith(text)} if run else set()
    if len(found) != 1:
        raise typer.BadParameter(
            f"{len(found) or 'no'} graphs of the last run begin with {text}", param_hint="KEY"
        )
    return found.pop()


def _graphs(run: LastRun) -> list[GraphRecord]:
    return [graph for process in run.processes for graph in process.graphs]


def _missed(graphs: Iterable[GraphRecord]) -> list[str]:
    missed = (graph.key for graph in graphs if graph.key and graph.outcome not in HITS)
    return list(dict.fromkeys(missed))


def _ask_all(settings: ClientSettings, keys: list[str]) -> tuple[list[KeyExplanation], RelayError | None]:
    """The service's explanation of each key. An error other than NotFound ends the loop and is returned."""
    found: list[KeyExplanation] = []
    with GatewayClient(settings) as gateway:
        for key in keys:
            try:
                found.append(KeyExplanation(key=key, explanation=gateway.explain(key)))
            except NotFound as error:
                found.append(KeyExplanation(key=key, error=error.message))
            except RelayError as error:
                return found, error
    return found, None


# --- for people --------------------------------------------------------------------------------------------


def _show(run: LastRun | None, misses: list[KeyExplanation]) -> None:
    if run is not None:
        _show_run(run)
    for miss in misses:
        print()
        for line in _lines(miss):
            print(output.shown(line))


def _show_run(run: LastRun) -> None:
    for process in run.processes:
        rank = "" if process.rank is None else f"rank {process.rank}, "
        who = f"{process.program or 'python'}, {rank}process {process.pid}"
        print(output.shown(f"{who}, ended {_ago(process.ended)}"))
        rows = [
            (
                str(index),
                graph.key[:_SHOWN_DIGITS] or "none",
                _outcome(graph),
                f"{graph.nodes:,}",
                f"{graph.seconds:,.2f}",
            )
            for index, graph in enumerate(process.graphs)
        ]
        output.print_table(("graph", "key", "outcome", "nodes", "seconds"), rows)
        for refused in process.refused:
            at = f", first at {refused.line}" if refused.line else ""
            print(output.shown(f"  cannot be sent: {refused.operator} ({refused.graphs} graphs{at})"))
        if process.programs or process.programs_checked or process.traced:
            traced = len({each.function for each in process.traced})
            print(f"Functions that started without tracing: {process.programs}; traced: {traced}")
        if process.programs_checked:
            stale = f"{process.programs_stale} were stale and are dropped"
            print(f"Programs compared with a new trace: {process.programs_checked}; {stale}")
        for function, times in process.started.items():
            again = f" ({times} times)" if times > 1 else ""
            print(output.shown(f"  {function}: started without tracing{again}"))
        for each in process.traced:
            print(output.shown(f"  {each.function}: traced; {each.reason}"))


def _outcome(graph: GraphRecord) -> str:
    """What became of a graph, and what it ran as before that."""
    text = OUTCOMES[graph.outcome] + (f": {graph.reason}" if graph.reason else "")
    return f"{text}; {graph.eager_calls:,} calls eagerly" if graph.eager_calls else text


def _lines(miss: KeyExplanation) -> list[str]:
    name = miss.key[:_SHOWN_DIGITS]
    if miss.explanation is None:
        return [f"{name}: the service has no record of it: it never arrived there, or the record has expired"]
    nearest, compared = miss.explanation.nearest, miss.explanation.compared
    offered = "; it is in the cache by now" if miss.explanation.published else ""
    if nearest is None:
        return [f"{name}: there was no entry to compare with{offered}"]
    entries = "the only entry" if compared == 1 else f"the nearest of {compared} entries"
    entry = f"{nearest.key[:_SHOWN_DIGITS]}, compiled {_ago(nearest.created)} in {nearest.seconds:.1f} s"
    differences = [difference.text for difference in nearest.differences]
    differences = differences or ["what is recorded of the two is equal"]
    advice = [f"  {nearest.advice}"] if nearest.advice else []
    return [f"{name}: {entries} was {entry}{offered}", *(f"  {text}" for text in differences), *advice]


def _ago(moment: float) -> str:
    seconds = max(time.time() - moment, 0.0)
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{seconds:.0f} seconds ago" if seconds >= 2 else "just now"
