"""`torchrelay tune`: batch jobs, started, listed, shown, followed, cancelled, resumed; lock files; reports."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ....compiler.api.tuning.jobs import (
    ENDED,
    GraphTuneItem,
    KernelTuneItem,
    TuneItem,
    TuneJob,
    TuneProgress,
    TuneRequest,
)
from ....compiler.errors import BadTuneJob, SettingsError
from ....compiler.tuning.records import TuningEntry
from ...atomic_file import file_errors, write_atomically
from ...gateway.admin_client import AdminClient
from ...gateway.compile_client import GatewayClient
from ...gateway.jobs import TuningJobsClient, TuningJobStateChange
from ...jobfiles import captured_graphs, tune_file, tuning_lock
from ...reports.html_page import PAGE, write_files
from ...reports.tuning import page, plots, summary
from ...settings import load_settings
from .. import output
from ..output import Detach, Follow, JobName, Json, Namespace, OutputFolder
from .watch import JobGroup, watch_job

app = typer.Typer(
    cls=JobGroup,
    no_args_is_help=True,
    help="Search kernels for a file of problems (`torchrelay tune job.yaml`); write the team's winners to a lock file, "
    "take them from one, compare two.",
)

_HEADINGS = ("id", "name", "state", "begun (UTC)", "by", "device", "done", "known", "failed", "left")
_ITEMS = ("line", "kind", "state", "problem", "result")


@app.command()
def run(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The job: YAML, as docs/tuning/jobs.md describes it.")
    ],
    detach: Detach = False,
    json: Json = False,
    namespace: Namespace = "",
) -> None:
    """Search kernels for the problems in a file while workers are idle (`torchrelay tune FILE`)."""
    spec = tune_file.load(file)
    with output.connect(TuningJobsClient, namespace) as tunes:
        job = tunes.begin(_request(spec, file, tunes))
        if detach:
            output.print_answer(job, job.id, json=json)
        else:
            _follow(tunes, job, json=json)


@app.command("ls")
def list_jobs(namespace: Namespace = "", json: Json = False) -> None:
    """List tuning jobs, the newest first."""
    with output.connect(TuningJobsClient, namespace) as tunes:
        found = tunes.jobs()
    output.print_rows(found, _HEADINGS, [_row(job) for job in found], right=4, json=json)


@app.command()
def show(job: JobName, namespace: Namespace = "", json: Json = False) -> None:
    """Show a tuning job and the state of each item."""
    with output.connect(TuningJobsClient, namespace) as tunes:
        found = tunes.job(tunes.find(job).id)
    if json:
        output.print_json(found)
        return
    of = found.job
    device = of.target.name or f"cpu, {of.threads} threads"
    rows = [
        ("id", of.id),
        ("name", of.name),
        ("state", f"{of.state}{of.detail and ': ' + of.detail}"),
        ("begun", f"{output.moment(of.created)} UTC by {of.by}"),
        ("for", f"{device}, torch {of.toolchain.torch}, {of.toolchain.python}"),
        ("searched", f"{of.spent:.0f} s, {of.trials} candidates"),
    ]
    output.print_table(("", ""), rows)
    output.print_table(_ITEMS, [_item_row(item) for item in found.progress])


@app.command()
def logs(job: JobName, follow: Follow = False, namespace: Namespace = "") -> None:
    """Print the finished items of a tuning job, one per line; with -f the exit status is the job's."""
    with output.connect(TuningJobsClient, namespace) as tunes:
        found = tunes.find(job)
        if follow:
            _follow(tunes, found, json=False, plain=True)
            return
        for item in tunes.job(found.id).progress:
            if item.state != "waiting":
                print(_line(item))


@app.command()
def cancel(job: JobName, namespace: Namespace = "") -> None:
    """Cancel a tuning job; the winners that it has found stay."""
    with output.connect(TuningJobsClient, namespace) as tunes:
        found = tunes.cancel(tunes.find(job).id)
    print(f"{found.id} is {found.state}")


@app.command()
def resume(
    job: JobName,
    detach: Detach = False,
    namespace: Namespace = "",
) -> None:
    """Continue a tuning job with the items that failed, were skipped or were cancelled."""
    with output.connect(TuningJobsClient, namespace) as tunes:
        before = tunes.job(tunes.find(job).id)
        found = tunes.resume(before.job.id)
        if detach or found.state in ("done", "cancelled"):
            print(f"{found.id} is {found.state}")
            return
        _follow(tunes, found, json=False, earlier=before.progress)


@app.command("report")
def write_report(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job's id or name, or a lock file.")],
    directory: OutputFolder = Path("tune-report"),
    lock: Annotated[
        Path | None, typer.Option(help="An older lock file to compare with; slowdowns are shown first.")
    ] = None,
    pictures: Annotated[bool, typer.Option("--pictures/--no-pictures", help="Also write a PNG file.")] = True,
    namespace: Namespace = "",
) -> None:
    """Write an HTML page and a picture of a tuning job or lock file: gains, rooflines, candidates, slowdowns."""
    if pictures:
        plots.require()
    old = None if lock is None else tuning_lock.load(lock)
    against = "" if lock is None else lock.name
    report = _report(job, old, against, namespace)
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


# --- winners in lock files ------------------------------------------------------------------------------------


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
    new: Annotated[Path, typer.Argument(help="A newer lock file.")],
) -> None:
    """Show what changed between two lock files, the largest slowdown first; needs no service."""
    found = summary.tuning_changes(tuning_lock.load(old), tuning_lock.load(new))
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


# --- a job's request and report ------------------------------------------------------------------------------


def _report(job: str, old: list[TuningEntry] | None, against: str, namespace: str) -> summary.TuningReport:
    path = Path(job)
    if path.is_file() or path.suffix or len(path.parts) > 1:
        entries = tuning_lock.load(path)
        return summary.report(path.name, summary.of_lock(entries), old=old, against=against)
    with output.connect(TuningJobsClient, namespace) as client:
        found = client.job(client.find(job).id)
        results = list(client.results(found.job.id))
    return summary.report(
        found.job.name, results, job=found.job, progress=found.progress, old=old, against=against
    )


def _request(spec: tune_file.TuneFile, path: Path, tunes: TuningJobsClient) -> TuneRequest:
    """Sends the file's captured graphs and returns the job's request. path: of the file. Raises BadTuneJob, with the
    line."""
    items: list[TuneItem] = [*spec.operators, *spec.graphs]
    for file in spec.files:
        try:
            bodies = captured_graphs.read_graphs(path.parent / file.path)
        except SettingsError as error:
            raise BadTuneJob(f"{spec.file}, line {file.line}: {error.message}", hint=error.advice) from None
        named = Path(file.path).name[-200:]
        for n, key in enumerate(map(tunes.store_graph, bodies), 1):
            which = f"{named}, {n} of {len(bodies)}" if len(bodies) > 1 else named
            items.append(GraphTuneItem(file.line, key, file.mode, which))
    if spec.kernels:
        from ...jobfiles.imported_kernels import resolve_kernel

        for item in spec.kernels:
            kernel = resolve_kernel(item, path.parent.absolute())
            items.append(KernelTuneItem(item.line, item.text, kernel))
    return TuneRequest(
        name=spec.name or path.stem[:200],
        items=items,
        device=spec.device,
        torch=spec.torch,
        threads=spec.threads or _threads(spec),
        budget=spec.budget,
        file=spec.file[-300:],
        lines=spec.lines,
    )


# --- following ---------------------------------------------------------------------------------------------


def _follow(
    tunes: TuningJobsClient,
    job: TuneJob,
    *,
    json: bool,
    plain: bool = False,
    earlier: Sequence[TuneProgress] = (),
) -> None:
    """Show the job until its end. Exits with 1 if an item of its file failed or it was cancelled, 130 after Ctrl-C.

    earlier: the progress of its items before it was resumed, which is not printed again."""
    total = sum(job.items.values())
    if not json:
        print(f"job {job.id}: {total} items", file=sys.stderr)
    watch_job(tunes, job.id, _TuneDisplay(job, total, earlier), json=json, plain=plain)
    reply = tunes.job(job.id)
    output.print_answer(reply, _summary(reply.job), json=json)
    # a ceiling that cannot be measured is not a failure: the report shows one line less
    if reply.job.state != "done" or any(
        item.state == "failed" and item.kind != "ceiling" for item in reply.progress
    ):
        raise typer.Exit(1)


class _TuneDisplay:
    def __init__(self, job: TuneJob, total: int, earlier: Sequence[TuneProgress]) -> None:
        self._job = job
        self._total = total
        self._earlier = earlier
        self._latest: dict[int, TuneProgress] = {}

    def take(self, event: TuneProgress | TuningJobStateChange) -> Iterator[str]:
        if isinstance(event, TuneProgress):
            self._latest[event.item] = event
            if event.state in ENDED and event not in self._earlier:
                yield _line(event)
        elif event.state == "cancelled" and not self._earlier:
            yield "cancelled"

    def line(self) -> str:
        searching = [item.text for item in self._latest.values() if item.state not in ENDED]
        more = f" and {len(searching) - 1} more" if len(searching) > 1 else ""
        now = f" · {searching[0][:60]}{more}" if searching else ""
        ended = len(self._latest) - len(searching)
        return f"{self._job.name[:40]}: {ended} of {self._total} items ended{now}"


def _line(item: TuneProgress) -> str:
    where = f"line {item.line}: " if item.line else ""
    seconds = f" ({item.seconds:.1f} s)" if item.seconds else ""
    return output.shown(f"{item.state:<9} {where}{item.text}{item.detail and ': ' + item.detail}{seconds}")


def _summary(job: TuneJob) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in job.items.items() if count)
    return f"{job.id} is {job.state}: {counts}; {job.spent:.0f} s searched, {job.trials} candidates"


def _row(job: TuneJob) -> tuple[str, ...]:
    counts: Counter[str] = Counter({str(state): count for state, count in job.items.items()})
    left = sum(counts.values()) - sum(counts[state] for state in ENDED)
    numbers = (counts["done"], counts["known"], counts["failed"], left + counts["skipped"])
    device = job.target.name or job.target.kind
    begun = output.moment(job.created)
    return (job.id, job.name, job.state, begun, job.by, device, *map(str, numbers))


def _item_row(item: TuneProgress) -> tuple[str, ...]:
    return (str(item.line or ""), item.kind, item.state, item.text, item.detail)


def _threads(spec: tune_file.TuneFile) -> int:
    """The threads of kernels on a CPU, if the file does not say: as many as graphs that are compiled from here have.
    0 if the job is not for a CPU."""
    if spec.threads or not (spec.operators or spec.kernels) or spec.device not in ("", "cpu"):
        return 0
    if not spec.device:
        with GatewayClient(load_settings()) as gateway:
            if not any(worker.target.kind == "cpu" for worker in gateway.workers()):
                return 0
    from ....compiler.torch_internals.inductor import config

    return config.codegen_threads()
