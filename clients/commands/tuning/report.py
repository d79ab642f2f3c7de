"""`torchrelay tune report`: a job's results, or a lock file, as a page to read and pictures to show."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ....compiler.errors import SettingsError
from ....compiler.tuning.records import TuningEntry
from ...atomic_file import write_atomically
from ...gateway.tuning_jobs import TuningJobsClient
from ...jobfiles import tuning_lock
from ...reports.tuning import page, plots, summary
from ...settings import load_settings
from .. import output
from ..output import Namespace

PAGE = "index.html"


def write_report(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job's id or name, or a lock file.")],
    directory: Annotated[
        Path, typer.Option("--output", "-o", help="The folder to write to; made if it is not there.")
    ] = Path("tune-report"),
    lock: Annotated[
        Path | None, typer.Option(help="An older lock file: what is slower than there stands at the top.")
    ] = None,
    pictures: Annotated[
        bool, typer.Option("--pictures/--no-pictures", help="PNG files beside the page.")
    ] = True,
    namespace: Namespace = "",
) -> None:
    """Write an HTML page, and pictures, of what a job found: gains, rooflines, candidates, regressions."""
    if pictures:
        plots.require()
    old = None if lock is None else tuning_lock.load(lock)
    against = "" if lock is None else lock.name
    report = _report(job, old, against, output.checked_namespace(namespace))
    files = {PAGE: page.page(report).encode()}
    if pictures:
        files |= plots.pictures(report)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_atomically(directory / name, data, mode=0o644)
    except OSError as error:
        raise SettingsError(
            f"{directory} cannot be written: {error.strerror}", hint="Name another one: --output DIR"
        ) from None
    slower = sum(change.kind == "slower" for change in report.changes or [])
    told = f", {slower} slower than in {against}" if report.changes is not None else ""
    print(f"{report.problems} problems{told}: {directory / PAGE}")
    for name in sorted(set(files) - {PAGE}):
        print(f"  {directory / name}")


def _report(job: str, old: list[TuningEntry] | None, against: str, namespace: str) -> summary.TuningReport:
    path = Path(job)
    if path.is_file() or path.suffix or len(path.parts) > 1:
        entries = tuning_lock.load(path)
        return summary.report(path.name, summary.of_lock(entries), old=old, against=against)
    with TuningJobsClient(load_settings(), namespace=namespace) as tunes:
        told = tunes.job(tunes.find(job).id)
        results = list(tunes.results(told.job.id))
    return summary.report(
        told.job.name, results, job=told.job, progress=told.progress, old=old, against=against
    )
