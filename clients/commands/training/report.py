"""`torchrelay train report`: what a training job did, as one page to read; its traces for Perfetto beside it."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec
import typer

from ....compiler import decoding
from ....compiler.errors import SettingsError
from ...atomic_file import write_atomically
from ...gateway.training_jobs import TrainingJobsClient
from ...reports.profiling.summary import ProfileSummary
from ...reports.training import page
from ...reports.training import summary as training_summary
from ...settings import load_settings
from .. import output
from ..output import Namespace

PAGE = "index.html"
_FOLDER = "profile/"


def write_report(
    job: Annotated[
        str,
        typer.Argument(metavar="JOB", help="A job's id, the name of the newest, or its id's first digits."),
    ],
    directory: Annotated[
        Path, typer.Option("--output", "-o", help="The folder to write to; made if it is not there.")
    ] = Path("train-report"),
    traces: Annotated[
        bool, typer.Option("--traces/--no-traces", help="The profiler's traces beside the page.")
    ] = True,
    namespace: Namespace = "",
) -> None:
    """Write an HTML page of what a job did: its curves, checkpoints, restarts, profile, and what to change."""
    with TrainingJobsClient(load_settings(), namespace=output.checked_namespace(namespace)) as trains:
        found = trains.job(trains.find(job).id)
        names = [file.name for file in trains.files(found.id)]
        kept = [name for name in names if name.startswith(_FOLDER) and name.endswith(".trace.json.gz")]
        profiles = [
            summary
            for name in names
            if name.startswith(_FOLDER) and name.endswith(".summary.json")
            for summary in _summary(trains.file(found.id, name), name)
        ]
        events = [*trains.history(found.id), *(event for _, event in trains.metrics(found.id))]
        report = training_summary.report(found, events, profiles, kept)
        files = {PAGE: page.page(report).encode()}
        if traces:
            files |= {PurePosixPath(name).name: trains.file(found.id, name) for name in kept}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_atomically(directory / name, data, mode=0o644)
    except OSError as error:
        raise SettingsError(
            f"{directory} cannot be written: {error.strerror}", hint="Name another one: -o DIR"
        ) from None
    for each in report.advice:
        print(output.shown(f"{each.text}."))
    print(f"{found.state}, step {found.step}: {directory / PAGE}")
    for name in sorted(set(files) - {PAGE}):
        print(output.shown(f"  {directory / name}"))


def _summary(data: bytes, name: str) -> list[ProfileSummary]:
    """A file that a script put there in a summary's place is left out, and said."""
    try:
        return [decoding.from_json(data, type=ProfileSummary)]
    except msgspec.MsgspecError as error:
        print(output.shown(f"{name} is no profile's summary: {error}"))
        return []
