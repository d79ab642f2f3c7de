"""`torchrelay train`: training jobs, listed, shown, followed, cancelled, resumed, reported. run.py starts them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, TypeVar

import msgspec
import typer

from ....compiler import decoding
from ....compiler.api.html.page import bytes_of
from ....compiler.api.training.events import LogLines, StepMetrics
from ....compiler.api.training.jobs import TRAIN_ENDED, TrainJob
from ....compiler.errors import SettingsError
from ...atomic_file import file_errors, write_atomically
from ...gateway.jobs import TrainingJobsClient
from ...reports.html_page import PAGE, write_files
from ...reports.profiling.summary import ProfileSummary
from ...reports.training import page as training_page
from ...reports.training import summary as training_summary
from .. import output
from ..output import Detach, Follow, JobName, Json, Namespace, OutputFolder
from . import run
from .progress import compiles_text, log_lines, metrics_line
from .watch import JobGroup

app = typer.Typer(
    cls=JobGroup,
    no_args_is_help=True,
    help="Train on the cluster (`torchrelay train job.yaml`, `torchrelay train script.py --workers 8 -- ARGUMENTS`): "
    "graphs are compiled before the ranks have their devices.",
)
T = TypeVar("T", LogLines, StepMetrics)

_HEADINGS = ("id", "name", "state", "begun (UTC)", "by", "ranks", "step", "restarts", "checkpoint")
_POLL_SECONDS = 1.0
_PROFILES = "profile/"
"""The folder of profiles among a job's files."""

app.command("run")(run.run)


@app.command("ls")
def list_jobs(namespace: Namespace = "", json: Json = False) -> None:
    """List training jobs, the newest first."""
    with output.connect(TrainingJobsClient, namespace) as trains:
        found = trains.jobs()
    output.print_rows(found, _HEADINGS, [_row(job) for job in found], right=4, json=json)


@app.command()
def show(job: JobName, namespace: Namespace = "", json: Json = False) -> None:
    """Show a training job: its state, ranks, checkpoints and compiles."""
    with output.connect(TrainingJobsClient, namespace) as trains:
        found = trains.job(trains.find(job).id)
    if json:
        output.print_json(found)
        return
    output.print_table(("", ""), _about(found))
    for skipped in found.skipped:
        print(output.shown(f"compiled by each rank for itself: {skipped}"))


@app.command()
def logs(
    job: JobName,
    follow: Follow = False,
    rank: Annotated[int, typer.Option(min=-1, help="Only this rank; default: all.")] = -1,
    namespace: Namespace = "",
) -> None:
    """Print the output of a training job's ranks; with -f the exit status is the job's."""

    def print_one(event: LogLines) -> None:
        out = sys.stderr if event.stream == "stderr" else sys.stdout
        for line in log_lines(event, named=rank < 0):
            print(output.shown(line), file=out)

    with output.connect(TrainingJobsClient, namespace) as trains:
        found = _with_rank(trains.find(job), rank)
        _print_events(
            trains,
            found,
            lambda after: trains.logs(found.id, rank=rank, after=after),
            print_one,
            follow=follow,
        )


@app.command()
def metrics(
    job: JobName,
    follow: Follow = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per line, for programs.")] = False,
    rank: Annotated[int, typer.Option(min=-1, help="Only this rank; default: all.")] = -1,
    namespace: Namespace = "",
) -> None:
    """Print a training job's metrics, step by step; with -f the exit status is the job's."""

    def print_one(event: StepMetrics) -> None:
        if rank in (-1, event.rank):
            print(msgspec.json.encode(event).decode() if json else output.shown(metrics_line(event)))

    with output.connect(TrainingJobsClient, namespace) as trains:
        found = _with_rank(trains.find(job), rank)
        _print_events(
            trains, found, lambda after: trains.metrics(found.id, after=after), print_one, follow=follow
        )


def _with_rank(job: TrainJob, rank: int) -> TrainJob:
    """The job. Raises SettingsError if it has no such rank; else its empty output would look like a silent rank's."""
    if rank >= job.spec.workers:
        raise SettingsError(
            f"training job {job.id} has no rank {rank}", hint=f"Its ranks are 0 to {job.spec.workers - 1}"
        )
    return job


@app.command()
def cancel(job: JobName, namespace: Namespace = "") -> None:
    """Stop a training job and free its devices; its checkpoints and files stay."""
    with output.connect(TrainingJobsClient, namespace) as trains:
        found = trains.cancel(trains.find(job).id)
    print(output.shown(f"{found.id} is {found.state}{found.detail and ': ' + found.detail}"))


@app.command()
def resume(
    job: JobName,
    detach: Detach = False,
    namespace: Namespace = "",
) -> None:
    """Continue a training job that failed or was cancelled, from its last checkpoint."""
    with output.connect(TrainingJobsClient, namespace) as trains:
        found = trains.find(job)
        after = 0
        if found.state in TRAIN_ENDED and not detach:  # earlier events are not shown again
            after = max((numbered.number for numbered in trains.follow(found.id)), default=0)
        resumed = trains.resume(found.id)
        if detach:
            print(f"{resumed.id} is {resumed.state}")
            return
        run.watch(trains, resumed, after=after)


@app.command()
def files(job: JobName, namespace: Namespace = "", json: Json = False) -> None:
    """List the files that a training job made: what its script wrote, traces, exported models."""
    with output.connect(TrainingJobsClient, namespace) as trains:
        found = trains.files(trains.find(job).id)
    rows = [(each.name, bytes_of(each.bytes), each.digest[:12]) for each in found]
    output.print_rows(found, ("name", "size", "SHA-256"), rows, json=json)


@app.command()
def get(
    job: JobName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A file of the job: `torchrelay train files`.")],
    to: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Where to write it; default: the current folder.",
        ),
    ] = None,
    namespace: Namespace = "",
) -> None:
    """Fetch a file that a training job made."""
    target = to or Path(PurePosixPath(name).name)
    if target.is_dir():
        target = target / PurePosixPath(name).name
    with output.connect(TrainingJobsClient, namespace) as trains:
        data = trains.file(trains.find(job).id, name)
    with file_errors(target, "written", hint="Name another with -o"):
        write_atomically(target, data, mode=0o644)
    print(output.shown(f"wrote {target} ({bytes_of(len(data))})"))


@app.command("report")
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
        trace_names = [
            name for name in names if name.startswith(_PROFILES) and name.endswith(".trace.json.gz")
        ]
        profiles = [
            summary
            for name in names
            if name.startswith(_PROFILES) and name.endswith(".summary.json")
            for summary in _summary(client.file(found.id, name), name)
        ]
        events = [*client.history(found.id), *(event for _, event in client.metrics(found.id))]
        report = training_summary.report(found, events, profiles, trace_names)
        files = {PAGE: training_page.page(report).encode()}
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


def _print_events(
    trains: TrainingJobsClient,
    job: TrainJob,
    page: Callable[[int], Iterator[tuple[int, T]]],
    print_one: Callable[[T], None],
    *,
    follow: bool,
) -> None:
    """Print the events so far; with `follow` until the job's end, and exit with the job's status."""
    after, state = 0, job.state
    while True:
        for number, event in page(after):
            after = max(after, number)
            print_one(event)
        sys.stdout.flush()
        if not follow:
            return
        if state in TRAIN_ENDED:
            break
        time.sleep(_POLL_SECONDS)
        state = trains.job(job.id).state  # before the last page is read: nothing is missed
    raise typer.Exit(0 if state == "done" else 1)


def _row(job: TrainJob) -> tuple[str, ...]:
    ranks = f"{job.ranks} of {job.spec.workers}"
    begun = output.moment(job.created)
    numbers = (ranks, str(job.step), str(job.restarts), job.checkpoint or "-")
    return (job.id, job.spec.name, job.state, begun, job.by, *numbers)


def _about(job: TrainJob) -> list[tuple[str, str]]:
    spec = job.spec
    least = f", at least {spec.min_workers}" if spec.min_workers else ""
    cores = f"{spec.cpus:g} core{'' if spec.cpus == 1 else 's'}"
    each = f"{cores} each" if spec.device == "cpu" else f"a GPU and {cores} each"
    rows = [
        ("id", job.id),
        ("name", spec.name),
        ("state", f"{job.state}{job.detail and ': ' + job.detail}"),
        ("begun", f"{output.moment(job.created)} UTC by {job.by}"),
        ("runs", " ".join([spec.script or spec.function, *spec.arguments])[:500]),
        ("ranks", f"{job.ranks} of {spec.workers}{least}, {each}"),
        ("step", str(job.step)),
        ("restarts", f"{job.restarts} of {spec.retries}"),
        ("checkpoint", f"{job.checkpoint} at step {job.checkpoint_step}" if job.checkpoint else "none"),
        ("compiles", compiles_text(job.compiles)),
    ]
    if job.first_step_seconds:
        rows.append(("first step", f"{job.first_step_seconds:.1f} s after all ranks were there"))
    if job.ended:
        rows.append(("ended", f"{output.moment(job.ended)} UTC"))
    return rows
