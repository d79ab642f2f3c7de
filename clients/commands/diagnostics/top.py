"""`torchrelay top`: what the service does now, renewed every two seconds, as the page /now shows it."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ....compiler.api.html.page import plural, seconds
from ....compiler.api.now import Now
from ....compiler.errors import DeadlineExceeded, GatewayUnreachable, ServiceError
from ...gateway.admin_client import AdminClient
from .. import output
from ..output import Json, Namespace

_RENEWED_SECONDS = 2.0
_SHOWN = 20
"""Compiles."""


def top(
    namespace: Namespace = "",
    once: Annotated[
        bool, typer.Option("--once", help="Print it once, as without a terminal, and end.")
    ] = False,
    json: Json = False,
) -> None:
    """Show compiles that run or wait, open jobs, workers and warnings. Ctrl-C ends it."""
    with output.connect(AdminClient, namespace) as service:
        if json:
            output.print_json(service.now())
        elif once or not sys.stdout.isatty():
            output.console().print(_shown(service.now()), soft_wrap=True)
        else:
            _follow(service)


def _follow(service: AdminClient) -> None:
    """While the service is away, what was last known stays, with the reason below."""
    known: RenderableType = Text("asking the service")
    with suppress(KeyboardInterrupt), Live(known, console=Console(), screen=True, auto_refresh=False) as live:
        while True:
            try:
                known = _shown(service.now())
                live.update(known, refresh=True)
            except (ServiceError, GatewayUnreachable, DeadlineExceeded) as error:
                trouble = Text(output.shown(f"{error.message}; it is asked again. {error.advice}"), "red")
                live.update(Group(known, trouble), refresh=True)
            time.sleep(_RENEWED_SECONDS)


def _shown(now: Now) -> RenderableType:
    running = sum(not each.position for each in now.compiles)
    waiting = len(now.compiles) - running + now.more
    parts = [
        f"{running} compiling",
        f"{waiting} waiting",
        plural(len(now.jobs), "job"),
        plural(len(now.workers), "worker"),
    ]
    blocks: list[RenderableType] = [Text(" · ".join(parts), style="bold")]
    blocks += [Text(output.shown(f"warning: {text}"), style="red") for text in now.warnings]
    compiles = [
        (
            each.key[:12],
            each.target,
            f"{each.stage} {each.detail}".strip(),
            seconds(each.seconds),
            str(each.position or ""),
        )
        for each in now.compiles[:_SHOWN]
    ]
    jobs = [
        (each.kind, each.name, each.state, each.progress, seconds(each.seconds), each.by) for each in now.jobs
    ]
    workers = [
        (
            each.id,
            each.host,
            each.state,
            each.target.name or each.target.kind,
            each.toolchain.torch,
            str(each.jobs_done),
        )
        for each in now.workers
    ]
    for headings, rows in (
        (("compile", "target", "stage", "age", "place"), compiles),
        (("job", "name", "state", "progress", "age", "by"), jobs),
        (("worker", "host", "state", "for", "PyTorch", "jobs done"), workers),
    ):
        if rows:
            blocks += [Text(), output.table(headings, rows)]
    return Group(*blocks)
