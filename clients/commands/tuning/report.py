"""`torchrelay tune report` writes a job's results, or a lock file, as an HTML page with a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ....compiler.tuning.records import TuningEntry
from ...gateway.jobs import TuningJobsClient
from ...jobfiles import tuning_lock
from ...reports.html_page import PAGE, write_files
from ...reports.tuning import page, plots, summary
from ...settings import load_settings
from .. import output
from ..output import Namespace, OutputFolder


def write_report(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job's id or name, or a lock file.")],
    directory: OutputFolder = Path("tune-report"),
    lock: Annotated[
        Path | None, typer.Option(help="An older lock file; what has become slower is shown first.")
    ] = None,
    pictures: Annotated[bool, typer.Option("--pictures/--no-pictures", help="Also write a PNG file.")] = True,
    namespace: Namespace = "",
) -> None:
    """Write an HTML page and a picture of a tuning job or lock file: gains, rooflines, candidates, slowdowns."""
    if pictures:
        plots.require()
    old = None if lock is None else tuning_lock.load(lock)
    against = "" if lock is None else lock.name
    report = _report(job, old, against, output.checked_namespace(namespace))
    picture = plots.faster(report) if pictures else None
    files = {PAGE: page.page(report).encode()}
    if picture is not None:
        files[plots.PICTURE] = picture
    write_files(directory, files)
    slower = sum(change.kind == "slower" for change in report.changes or [])
    compared = f", {slower} slower than in {against}" if report.changes is not None else ""
    print(f"{report.problems} problems{compared}: {directory / PAGE}")
    if picture is not None:
        print(f"  {directory / plots.PICTURE}")


def _report(job: str, old: list[TuningEntry] | None, against: str, namespace: str) -> summary.TuningReport:
    path = Path(job)
    if path.is_file() or path.suffix or len(path.parts) > 1:
        entries = tuning_lock.load(path)
        return summary.report(path.name, summary.of_lock(entries), old=old, against=against)
    with TuningJobsClient(load_settings(), namespace=namespace) as client:
        found = client.job(client.find(job).id)
        results = list(client.results(found.job.id))
    return summary.report(
        found.job.name, results, job=found.job, progress=found.progress, old=old, against=against
    )
