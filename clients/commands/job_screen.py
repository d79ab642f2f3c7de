"""Shows a job that `train` or `tune` follows: its events as lines, on a terminal also its state."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ...compiler.errors import RelayError
from .output import shown


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
