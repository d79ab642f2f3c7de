"""`torchrelay train report`: what a training job did, as one page to read; its traces for Perfetto beside it."""

from __future__ import annotations

import queue
import threading
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec
import typer

from ...compiler.errors import RelayError, SettingsError
from ...compiler.train_records import TRAIN_ENDED, Log, Metrics, News, TrainEvent, TrainJob
from .. import train_report, train_report_page
from ..profile_summary import Summary
from ..settings import load_settings
from ..trains import Trains
from ..whole_file import write_whole
from . import output
from .output import Namespace

PAGE = "index.html"
_FOLDER = "profile/"
_QUIET_SECONDS = 2.0
"""A job that still runs has told all that it has to tell, if it says nothing for so long."""
_ANSWER_SECONDS = 60.0


def write_report(
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="A job's id, its first digits, or the name of the newest.")
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
    with Trains(load_settings(), namespace=output.checked_namespace(namespace)) as trains:
        found = trains.job(trains.find(job).id)
        names = [file.name for file in trains.files(found.id)]
        kept = [name for name in names if name.startswith(_FOLDER) and name.endswith(".trace.json.gz")]
        profiles = [
            summary
            for name in names
            if name.startswith(_FOLDER) and name.endswith(".summary.json")
            for summary in _summary(trains.file(found.id, name), name)
        ]
        report = train_report.report(found, _events(trains, found), profiles, kept)
        files = {PAGE: train_report_page.page(report).encode()}
        if traces:
            files |= {PurePosixPath(name).name: trains.file(found.id, name) for name in kept}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_whole(directory / name, data, mode=0o644)
    except OSError as error:
        raise SettingsError(
            f"{directory} cannot be written: {error.strerror}", hint="Name another one: -o DIR"
        ) from None
    for each in report.advice:
        print(output.shown(f"{each.text}."))
    print(f"{found.state}, step {found.step}: {directory / PAGE}")
    for name in sorted(set(files) - {PAGE}):
        print(output.shown(f"  {directory / name}"))


def _summary(data: bytes, name: str) -> list[Summary]:
    """A file that a script put there in a summary's place is left out, and said."""
    try:
        return [msgspec.json.decode(data, type=Summary)]
    except msgspec.MsgspecError as error:
        print(output.shown(f"{name} is no profile's summary: {error}"))
        return []


def _events(trains: Trains, job: TrainJob) -> list[TrainEvent]:
    """All metrics; of the rest the newest, as far as the service has them."""
    metrics: list[TrainEvent] = [event for _, event in trains.metrics(job.id)]
    rest = [event for event in _told(trains, job) if not isinstance(event, Log | Metrics)]
    return [*rest, *metrics]


def _told(trains: Trains, job: TrainJob) -> list[TrainEvent]:
    """What a job has told so far. One that has not ended is listened to until it is quiet."""
    if job.state in TRAIN_ENDED:
        return [news.event for news in trains.follow(job.id)]
    heard: queue.SimpleQueue[News | RelayError | None] = queue.SimpleQueue()

    def listen() -> None:
        try:
            for news in trains.follow(job.id):
                heard.put(news)
            heard.put(None)
        except RelayError as error:
            heard.put(error)

    threading.Thread(target=listen, name="torchrelay-report", daemon=True).start()
    found: list[TrainEvent] = []
    while True:
        try:
            news = heard.get(timeout=_QUIET_SECONDS if found else _ANSWER_SECONDS)
        except queue.Empty:
            return found
        if isinstance(news, RelayError):
            raise news
        if news is None:
            return found
        found.append(news.event)
