"""How commands show what the service answered: tables for people, JSON for programs, times and sizes in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_json(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value)).decode())


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Text is shown as it is: what others wrote cannot style, link or hide anything."""
    table = Table(*headings, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text("".join(c if c.isprintable() else "?" for c in cell)) for cell in row))
    Console().print(table, soft_wrap=True)


def moment(seconds: float) -> str:
    """Minutes are enough for people; UTC, as the service counts."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
