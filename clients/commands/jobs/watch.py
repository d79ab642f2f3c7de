"""What `train` and `tune` share: the short form that starts a job, and the loop that shows its events and state."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeVar

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ....compiler.errors import RelayError
from ...gateway.jobs import JobsClient
from ..output import shown

YAML = (".yaml", ".yml")
Event = TypeVar("Event", contravariant=True)


class JobGroup(typer.core.TyperGroup):
    """`torchrelay train TARGET` is `torchrelay train run TARGET`, with options before or after the target."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        own = {name for option in self.get_params(ctx) for name in option.opts}
        is_target = first not in self.commands and (Path(first).suffix in (".py", *YAML) or ":" in first)
        if (first.startswith("-") and first not in own) or is_target:
            args = ["run", *args]
        return super().parse_args(ctx, args)


class JobDisplay(Protocol[Event]):
    """Texts for the events of one job, which it is given in their order."""

    def take(self, event: Event, /) -> Iterable[str]:
        """The lines to print for the event."""

    def line(self) -> str:
        """The job's state."""


def watch_job(
    jobs: JobsClient[Any, Any, Event],
    job: str,
    display: JobDisplay[Event],
    *,
    after: int = 0,
    json: bool = False,
    plain: bool = False,
) -> None:
    """Follow a job to its end. The display's lines go to standard output, but with `json`; on a terminal its state is
    below them, but with `plain`. Ctrl-C exits with 130. After it and after errors the job continues, and a message says
    how to follow or cancel it."""
    live: Live | None = None
    if sys.stderr.isatty() and not (json or plain):
        live = Live(console=Console(stderr=True), transient=True, refresh_per_second=8)

    def say(text: str) -> None:
        if live is not None:
            live.console.print(Text(shown(text)), soft_wrap=True)
        elif not json:
            print(shown(text), flush=True)

    def say_trouble(error: RelayError) -> None:
        text = f"{error.message}; waiting"
        if live is not None:
            say(text)
        else:
            print(shown(text), file=sys.stderr, flush=True)

    try:
        with live or nullcontext():
            for event in jobs.follow(job, after=after, on_trouble=say_trouble):
                for line in display.take(event):
                    say(line)
                if live is not None:
                    state = Text(shown(display.line()), style="bold", no_wrap=True, overflow="ellipsis")
                    live.update(state)
    except KeyboardInterrupt:
        logs, cancel = (f"`torchrelay {jobs.command} {rest} {job}`" for rest in ("logs -f", "cancel"))
        print(f"\nthe job continues: {logs}, {cancel}", file=sys.stderr)
        raise typer.Exit(130) from None
    except RelayError:
        print(f"the job continues: `torchrelay {jobs.command} logs -f {job}`", file=sys.stderr)
        raise
