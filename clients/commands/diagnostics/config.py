"""`torchrelay config show`: every setting of the client, its value, and where that comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from ....compiler.api.html.page import bytes_of
from ...settings import settings_and_origins
from .. import output
from ..output import Json

app = typer.Typer(no_args_is_help=True, help="Show this user's settings.")
_SECONDS = frozenset({"deadline", "connect_timeout", "idle_timeout"})


@app.callback()
def config() -> None:
    """Show this user's settings."""


@app.command()
def show(json: Json = False) -> None:
    """Show each setting, its value, and whether a variable, a file or the default says so. The token stays hidden."""
    settings, origins = settings_and_origins()
    values: dict[str, Any] = {name: getattr(settings, name) for name in origins}
    values["token"] = "(hidden)" if settings.token else ""
    if json:
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
        output.print_json({name: {"value": value, "from": origins[name]} for name, value in plain.items()})
        return
    rows = [(name, _text(name, value), origins[name]) for name, value in values.items()]
    output.print_table(("setting", "value", "from"), rows)


def _text(name: str, value: Any) -> str:
    if name in _SECONDS:
        return f"{value:g} s"
    if name.endswith("_bytes"):
        return bytes_of(value)
    if name == "programs":
        return {"own": "1", "off": "0"}.get(value, str(value))
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, tuple):
        return ", ".join(value) or "-"
    return str(value) if value or isinstance(value, int | Path) else "-"
