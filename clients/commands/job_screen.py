"""What `train` and `tune` share: the short form that starts a job, and the screen that shows its events and state."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ...compiler.errors import RelayError
from .output import shown

YAML = (".yaml", ".yml")


class JobGroup(typer.core.TyperGroup):
    """`torchrelay train TARGET` is `torchrelay train run TARGET`, with options before or after the target."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        own = {name for option in self.get_params(ctx) for name in option.opts}
        is_target = first not in self.commands and (Path(first).suffix in (".py", *YAML) or ":" in first)
        if (first.startswith("-") and first not in own) or is_target:
            args = ["run", *args]
        return super().parse_args(ctx, args)


class JobScreen:
    """Prints lines to standard output. With `live` they go to its terminal, above a line with the job's state."""

    def __init__(self, live: Live | None, *, quiet: bool) -> None:
        self._live = live
        self._quiet = quiet

    def line(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(Text(shown(text)), soft_wrap=True)
        elif not self._quiet:
            print(shown(text), flush=True)

    def trouble(self, error: RelayError) -> None:
        """The service does not answer; the follower asks again."""
        text = shown(f"{error.message}; waiting")
        if self._live is not None:
            self._live.console.print(Text(text), soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def state(self, text: str) -> None:
        if self._live is not None:
            self._live.update(Text(shown(text), style="bold", no_wrap=True, overflow="ellipsis"))


@contextmanager
def job_screen(command: str, job: str, *, json: bool, plain: bool = False) -> Iterator[JobScreen]:
    """For the time that a job is followed. plain: without the state. Ctrl-C exits with 130. After it and after errors
    the job continues, and a message says how to follow or cancel it."""
    try:
        if json or plain or not sys.stderr.isatty():
            yield JobScreen(None, quiet=json)
        else:
            with Live(console=Console(stderr=True), transient=True, refresh_per_second=8) as live:
                yield JobScreen(live, quiet=False)
    except KeyboardInterrupt:
        print(
            f"\nthe job continues: `torchrelay {command} logs -f {job}`, `torchrelay {command} cancel {job}`",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    except RelayError:
        print(f"the job continues: `torchrelay {command} logs -f {job}`", file=sys.stderr)
        raise
