"""`torchrelay stats`: the service's counters since it was set up, as a table or as JSON."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..http import Gateway
from ..settings import load_settings


def stats(
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Requests, hits, misses, compiles, coalesced waits, failures and seconds saved."""
    with Gateway(load_settings()) as gateway:
        found = gateway.stats()
    if json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    table = Table("", "", show_header=False, box=None)
    for name, value in _rows(found):
        table.add_row(Text(name), Text(_shown(value), justify="right"))
    Console().print(table)


def _rows(found: dict[str, Any]) -> list[tuple[str, Any]]:
    """The counters in the gateway's order; a table of counters (fallbacks by reason) one row each."""
    rows: list[tuple[str, Any]] = []
    for name, value in found.items():
        label = name.replace("_", " ")
        if isinstance(value, dict):
            rows += [(f"{label}: {part}", count) for part, count in value.items()]
        else:
            rows.append((label, value))
    return rows


def _shown(value: Any) -> str:
    return (
        f"{value:,.1f}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )
