"""How commands show what the service answered: tables for people, JSON for programs, times and sizes in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...compiler.errors import SettingsError

_UNITS = {"m": 60, "h": 3600, "d": 86400}


def print_json(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value)).decode())


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Text is shown as it is: what others wrote cannot style, link or hide anything."""
    table = Table(*headings, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text("".join(c if c.isprintable() else "?" for c in cell)) for cell in row))
    Console().print(table, soft_wrap=True)


def lifetime(option: str, text: str) -> int | None:
    """Seconds of a text like 45m, 12h or 30d; None for `never`. Raises SettingsError, which names the option."""
    if text == "never":
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,6})([mhd])", text)
    if found is None:
        raise SettingsError(f"{option} is {text!r}"[:80], hint="Allowed: 45m, 12h, 30d, never")
    return int(found[1]) * _UNITS[found[2]]


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
