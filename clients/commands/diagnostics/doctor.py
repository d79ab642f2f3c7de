"""`torchrelay doctor`: checks everything between a training script and a compiled graph, in that order.

Each line says `pass`, or `FAIL` and what to do; a check that needs a failed one is skipped. The exit status is 1 unless
every check passes.
"""

from __future__ import annotations

import typer
from rich.console import Console
from rich.text import Text

from .. import output
from ..output import Json
from . import checks

_STYLES = {"pass": "green", "fail": "bold red", "skip": "yellow"}


def doctor(
    json: Json = False,
) -> None:
    """Check versions, gateway, Redis, workers, signature and a round trip."""
    console = Console(highlight=False)
    results: list[checks.CheckResult] = []
    for result in checks.run():
        results.append(result)
        if not json:
            console.print(_line(result), soft_wrap=True)
    ok = all(result.status == "pass" for result in results)
    if json:
        output.print_json({"ok": ok, "checks": results})
    if not ok:
        raise typer.Exit(1)


def _line(result: checks.CheckResult) -> Text:
    status = result.status if result.status != "fail" else "FAIL"
    line = Text.assemble((f"{status:<5}", _STYLES[result.status]), f"{result.name:<12}{result.finding}")
    if result.advice:
        line.append(f". {result.advice}")
    return line
