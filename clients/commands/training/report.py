"""`torchrelay train report` writes an HTML page of what a training job did, and its traces for Perfetto."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec
import typer

from ....compiler import decoding
from ...gateway.jobs import TrainingJobsClient
from ...reports.html_page import PAGE, write_files
from ...reports.profiling.summary import ProfileSummary
from ...reports.training import page
from ...reports.training import summary as training_summary
from .. import output
from ..output import JobName, Namespace, OutputFolder

_FOLDER = "profile/"


def write_report(
    job: JobName,
    directory: OutputFolder = Path("train-report"),
    traces: Annotated[
        bool, typer.Option("--traces/--no-traces", help="The profiler's traces beside the page.")
    ] = True,
    namespace: Namespace = "",
) -> None:
    """Write an HTML page about a job: curves, checkpoints, restarts, profile, advice."""
    with output.connect(TrainingJobsClient, namespace) as client:
        found = client.job(client.find(job).id)
        names = [file.name for file in client.files(found.id)]
        trace_names = [name for name in names if name.startswith(_FOLDER) and name.endswith(".trace.json.gz")]
        profiles = [
            summary
            for name in names
            if name.startswith(_FOLDER) and name.endswith(".summary.json")
            for summary in _summary(client.file(found.id, name), name)
        ]
        events = [*client.history(found.id), *(event for _, event in client.metrics(found.id))]
        report = training_summary.report(found, events, profiles, trace_names)
        files = {PAGE: page.page(report).encode()}
        if traces:
            files |= {PurePosixPath(name).name: client.file(found.id, name) for name in trace_names}
    write_files(directory, files)
    for each in report.advice:
        print(output.shown(f"{each.text}."))
    print(f"{found.state}, step {found.step}: {directory / PAGE}")
    for name in sorted(set(files) - {PAGE}):
        print(output.shown(f"  {directory / name}"))


def _summary(data: bytes, name: str) -> list[ProfileSummary]:
    """The summary in the file; none, and a message, if it is something else that a script wrote."""
    try:
        return [decoding.from_json(data, type=ProfileSummary)]
    except msgspec.MsgspecError as error:
        print(output.shown(f"{name} is not a profile's summary: {error}"))
        return []
