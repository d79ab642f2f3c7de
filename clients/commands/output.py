"""What several commands use: options, the connection to the gateway, and output as tables, JSON, times and sizes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...compiler.errors import SettingsError
from ..gateway.connection import HttpApi
from ..settings import load_settings

Client = TypeVar("Client", bound=HttpApi)

Namespace = Annotated[
    str,
    typer.Option(
        "--namespace", help="The namespace; default: the token's own, for the owner's token `default`."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
JobName = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="A job's id, its first digits, or a name (of the newest job with it)."
    ),
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job ends.")]
Detach = Annotated[bool, typer.Option("--detach", help="Print the job's id, and do not wait for its end.")]
OutputFolder = Annotated[
    Path, typer.Option("--output", "-o", help="The folder to write to; created if it does not exist.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
_WIDE = 10_000
_UNITS = {"m": 60, "h": 3600, "d": 86400}


def print_json(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value)).decode())


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: int = 0) -> Table:
    """Markup and control characters in the cells have no effect. The last `right` columns are aligned to the right. A
    row is one line, unless a terminal is narrower."""
    made = Table(box=None, pad_edge=False)
    for position, heading in enumerate(headings):
        justify: Literal["right", "left"] = "right" if position >= len(headings) - right else "left"
        made.add_column(Text(heading), justify=justify, overflow="fold")
    for row in rows:
        made.add_row(*(Text(shown(cell)) for cell in row))
    return made


def console() -> Console:
    """Standard output, whose lines are not broken unless it is a terminal."""
    return Console(width=None if sys.stdout.isatty() else _WIDE)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: int = 0) -> None:
    console().print(table(headings, rows, right=right), soft_wrap=True)


def print_rows(
    value: object, headings: Sequence[str], rows: Iterable[Sequence[str]], *, json: bool, right: int = 0
) -> None:
    """`value` as JSON, or else `rows` as a table."""
    if json:
        print_json(value)
    else:
        print_table(headings, rows, right=right)


def print_answer(answer: object, text: str, *, json: bool) -> None:
    """`answer` as JSON, or else `text`."""
    if json:
        print_json(answer)
    else:
        print(text)


def shown(text: str) -> str:
    """The text on one line; characters that are not printable become `?`."""
    return "".join(c if c.isprintable() else "?" for c in text)


def lifetime(option: str, text: str) -> int | None:
    """Seconds of a text like 45m, 12h or 30d; None for `never`. Raises SettingsError, which names the option."""
    if text == "never":
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,6})([mhd])", text)
    if found is None:
        raise SettingsError(f"{option} is {text!r}"[:80], hint="Allowed: 45m, 12h, 30d, never")
    return int(found[1]) * _UNITS[found[2]]


def checked_namespace(text: str, *, every: bool = False) -> str:
    """Returns `text` if it can be a namespace's name or is ''; with `every` also `*`. Raises SettingsError."""
    if re.fullmatch("([a-z0-9][a-z0-9-]{0,62})?", text) or (every and text == "*"):
        return text
    raise SettingsError(
        "this is not a namespace",
        hint="Allowed: a to z, 0 to 9 and -, at most 63 of them, no - at the beginning",
    )


def connect(client: type[Client], namespace: str = "") -> Client:
    """A client of the gateway in the user's settings. Raises SettingsError if `namespace` cannot be one's name."""
    return client(load_settings(), namespace=checked_namespace(namespace))


def moment(seconds: float) -> str:
    """UTC, to the minute."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
