"""Prints a table: a title, column names and rows of text.

With rich where it is installed (the `cli` extra), in plain columns elsewhere.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column is a label and goes left; the others are figures and go right."""
    if importlib.util.find_spec("rich") is not None:
        _print_rich(title, columns, rows)
    else:
        _print_plain(title, columns, rows)


def _print_rich(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a log keeps every column whole
    console.print(table)


def _print_plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[i]) for line in (columns, *rows)) for i in range(len(columns))]
    print(f"\n{title}")
    for line in (columns, ["-" * width for width in widths], *rows):
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells))
    print()
