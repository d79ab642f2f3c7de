"""`torchrelay stats`: the service's counters since it was set up, as a table or as JSON."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ...gateway.compile_client import GatewayClient
from ...settings import load_settings
from .. import output
from ..output import Json


def stats(
    namespace: Annotated[
        str, typer.Option(help="The namespace; default: the token's own, for the owner's token all of them.")
    ] = "",
    json: Json = False,
) -> None:
    """Print the hit rate, requests, hits, misses, compiles, shared compiles, failures, seconds saved and spent."""
    with GatewayClient(load_settings()) as gateway:
        found = gateway.stats(output.checked_namespace(namespace))
    if json:
        output.print_json(found)
        return
    each: dict[str, dict[str, Any]] = found.pop("namespaces", {})
    if len(each) < 2:
        output.print_table(("", "/".join(each)), _rows([found]), right=1)
    else:
        output.print_table(("", "all", *each), _rows([found, *each.values()]), right=len(each) + 1)


def _rows(columns: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The counters in the gateway's order. A counter with parts (fallbacks by reason) has a row for each part."""
    rows: list[tuple[str, ...]] = [("hit rate", *map(_hit_rate, columns))]
    for name, value in columns[0].items():
        label = name.replace("_", " ")
        if isinstance(value, dict):
            rows += [
                (f"{label}: {part}", *(_shown(column[name].get(part, 0)) for column in columns))
                for part in value
            ]
        else:
            rows.append((label, *(_shown(column.get(name, 0)) for column in columns)))
    return rows


def _hit_rate(counters: dict[str, Any]) -> str:
    """Hits as a share of the requests that were served."""
    asked = counters["hits"] + counters["misses"] + counters["coalesced"]
    return f"{counters['hits'] / asked:.1%}" if asked else "-"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
