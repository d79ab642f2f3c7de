"""`torchrelay tune`: writes, imports and compares tuning locks. jobs.py has the commands for tuning jobs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from ....compiler.errors import SettingsError
from ....compiler.tuning.records import TuningEntry
from ...atomic_file import file_errors, write_atomically
from ...gateway.admin_client import AdminClient
from ...jobfiles import tuning_lock
from ...jobfiles.tuning_diff import tuning_changes
from .. import output
from ..output import Namespace
from . import jobs, report

app = jobs.app

app.command("report")(report.write_report)


@app.command("export")
def export_entries(
    file: Annotated[
        Path | None,
        typer.Argument(help="The file to write; an existing one is replaced. Default: standard output."),
    ] = None,
    device: Annotated[str, typer.Option(help="Only winners of this device, by its full name.")] = "",
    torch: Annotated[str, typer.Option(help="Only winners of this torch, like 2.13.0+cu130.")] = "",
    namespace: Namespace = "",
) -> None:
    """Write the namespace's winners into a lock file, for review and version control."""
    with output.connect(AdminClient, namespace) as administration:
        every = administration.tunings()
    chosen = [
        entry for entry in every if device in ("", entry.place.device) and torch in ("", entry.place.torch)
    ]
    if every and not chosen:
        raise SettingsError(f"none of {len(every)} winners matches", hint=f"There are {_places(every)}")
    text = tuning_lock.write(chosen)
    if file is None:
        print(text, end="")
        return
    with file_errors(file, "written", hint="Check the folder and its permissions"):
        write_atomically(file, text.encode(), mode=0o644)
    print(f"exported {len(chosen)} winners to {file}")


@app.command("import")
def import_entries(
    file: Annotated[Path, typer.Argument(help="What `tune export` wrote.")],
    replace: Annotated[bool, typer.Option("--replace", help="Also replace other winners.")] = False,
    namespace: Namespace = "",
) -> None:
    """Import a lock file's winners into the service: compiles use them instead of measuring."""
    entries = tuning_lock.load(file)
    with output.connect(AdminClient, namespace) as administration:
        taken = administration.import_tunings(entries, replace=replace)
    left = "" if replace or not taken.exists else " (--replace takes the file's)"
    print(f"imported {taken.new} winners, replaced {taken.replaced}; {taken.exists} exist already{left}")


@app.command()
def diff(
    old: Annotated[Path, typer.Argument(help="A lock file.")],
    new: Annotated[Path, typer.Argument(help="A later one.")],
) -> None:
    """Show what changed between two lock files, the largest slowdown first; needs no service."""
    found = tuning_changes(tuning_lock.load(old), tuning_lock.load(new))
    for change in found:
        entry = change.new or change.old
        assert entry is not None
        share = f" {change.share:+.1%}" if change.old is not None and change.new is not None else ""
        winners = [_winner(side) for side in (change.old, change.new) if side is not None]
        print(output.shown(f"{change.kind}{share} {entry.problem.text()}"))
        print(output.shown(f"    {entry.place.device}: {' -> '.join(winners)}"))
    kinds = Counter(change.kind for change in found)
    print(", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "nothing changed")


def _winner(entry: TuningEntry) -> str:
    return f"{entry.winner.candidate} {entry.winner.milliseconds:.4g} ms"


def _places(entries: list[TuningEntry]) -> str:
    found = sorted({f"{entry.place.device!r} with torch {entry.place.torch!r}" for entry in entries})
    return "; ".join(found[:10])
