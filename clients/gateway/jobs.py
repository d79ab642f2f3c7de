"""Training and tuning jobs through the gateway's HTTP API: start, list, cancel, resume and follow them; results."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx2
import msgspec
from msgspec import Struct

from ...compiler import decoding, errors
from ...compiler.api.training.events import (
    AFTER_HEADER,
    LogLines,
    NumberedEvent,
    StepMetrics,
    TrainEvent,
    read_events,
)
from ...compiler.api.training.jobs import (
    TRAIN_ENDED,
    PackageStored,
    TrainFile,
    TrainFilesReply,
    TrainJob,
    TrainRequest,
    TrainsReply,
)
from ...compiler.api.tuning.jobs import (
    GraphStored,
    TuneJob,
    TuneProgress,
    TuneReply,
    TuneRequest,
    TuneResult,
    TuneResultsReply,
    TunesReply,
    TuneState,
)
from ...compiler.request import codec
from .connection import SLOW_SECONDS, Deadline, HttpApi, backoff, decode, with_query
from .event_stream import EventStream

FILE_BYTES = 8 << 30
"""Limit of a job's file that is downloaded."""
UNREACHABLE_SECONDS = 120.0
"""Following a job ends after so long without a gateway. The job goes on."""
_FOLLOW_SECONDS = 366 * 86400.0
_FILE_SECONDS = 3600.0
_PAGE = 1000
_ANSWER_BYTES = 256 << 20

Request = TypeVar("Request", bound=TrainRequest | TuneRequest)
Job = TypeVar("Job", bound=TrainJob | TuneJob)
Event = TypeVar("Event")


class JobsClient(HttpApi, ABC, Generic[Request, Job, Event]):
    """What both kinds of jobs have in common."""

    command: str
    """Its name on the command line: `torchrelay COMMAND`."""
    _path: str
    _job: type[Job]
    _reply: type[Any]

    def jobs(self) -> list[Job]:
        """The newest first."""
        listed: list[Job] = self._call("GET", self._path, self._reply).jobs
        return listed

    @abstractmethod
    def _has_ended(self, job: str) -> bool:
        """Whether the job has ended."""

    @abstractmethod
    def _decode_event(self, event: httpx2.ServerSentEvent) -> Event | None:
        """None for what is no event of a job."""

    def begin(self, request: Request) -> Job:
        """Start a job. Safe to send again. Raises BadTrainJob, BadTuneJob, NoWorker, Forbidden, Overloaded ..."""
        if not request.id:
            request = msgspec.structs.replace(request, id=secrets.token_hex(8))
        return self._call("POST", self._path, self._job, request, seconds=SLOW_SECONDS)

    def find(self, text: str) -> Job:
        """A job by its id, its name (the newest of that name), or the first digits of its id. Raises NotFound."""
        jobs = self.jobs()
        same = [job for job in jobs if job.id == text] or [job for job in jobs if _name_of(job) == text]
        if same:
            return same[0]
        begun = [job for job in jobs if text and job.id.startswith(text)]
        if len(begun) == 1:
            return begun[0]
        if begun:
            raise errors.NotFound(f"{text} begins the ids of {len(begun)} jobs", hint="Give more digits")
        kind = "training" if self.command == "train" else "batch"
        raise errors.NotFound(
            f"there is no {kind} job {text[:80]}", hint=f"`torchrelay {self.command} ls` lists them"
        )

    def cancel(self, job: str) -> Job:
        """Raises NotFound."""
        return self._call("POST", f"{self._path}/{job}/cancel", self._job, seconds=SLOW_SECONDS)

    def resume(self, job: str) -> Job:
        """No effect on a job that still runs. Raises NotFound; BadTrainJob for a training job that is done."""
        return self._call("POST", f"{self._path}/{job}/resume", self._job, seconds=SLOW_SECONDS)

    def follow(
        self, job: str, *, after: int = 0, on_trouble: Callable[[errors.RelayError], None] | None = None
    ) -> Iterator[Event]:
        """A job's events after number `after`, to its end. A stream that breaks is resumed, and on_trouble is called
        with the reason. Raises NotFound; GatewayUnreachable after two minutes without a gateway."""
        clock = Deadline(_FOLLOW_SECONDS)
        path = self._scoped(f"{self._path}/{job}/events")
        stream = EventStream(self._connection, path, clock, after=str(after) if after else "")
        attempt = 0
        while True:
            before = stream.last_read
            trouble: errors.RelayError | None = None
            try:
                for event in stream.read():
                    decoded = self._decode_event(event)
                    if decoded is not None:
                        yield decoded
                if self._has_ended(job):
                    return
            except httpx2.TransportError as error:
                trouble = self._connection.unreachable(error, clock)
            except (errors.GatewayUnreachable, errors.Overloaded, errors.Unavailable) as error:
                trouble = error
            if stream.last_read != before:
                attempt = 0
            if trouble is not None:
                if time.monotonic() - stream.last_read > UNREACHABLE_SECONDS:
                    raise trouble
                if on_trouble is not None and attempt == 0:
                    on_trouble(trouble)
            attempt += 1
            time.sleep(backoff(attempt))


class TuningJobStateChange(Struct, frozen=True):
    """A job's state has changed."""

    state: TuneState


class TuningJobsClient(JobsClient[TuneRequest, TuneJob, TuneProgress | TuningJobStateChange]):
    """The batch tuning jobs of one gateway."""

    _path = "/v1/tunes"
    command = "tune"
    _job = TuneJob
    _reply = TunesReply

    def job(self, job: str) -> TuneReply:
        """Raises NotFound."""
        return self._call("GET", f"{self._path}/{job}", TuneReply)

    def store_graph(self, body: bytes) -> str:
        """Store a graph; returns the key by which jobs may name it."""
        answer = self._send("POST", "/v1/tunes/graphs", body, codec.GRAPH_MEDIA_TYPE, seconds=SLOW_SECONDS)
        return decode(answer, GraphStored).key

    def results(self, job: str) -> Iterator[TuneResult]:
        """The results so far. Raises NotFound."""
        path = f"{self._path}/{job}/results"
        for page in self._pages(path, TuneResultsReply, seconds=SLOW_SECONDS, limit=_ANSWER_BYTES):
            yield from page.results

    def _has_ended(self, job: str) -> bool:
        return self.job(job).job.state in ("done", "cancelled")

    def _decode_event(self, event: httpx2.ServerSentEvent) -> TuneProgress | TuningJobStateChange | None:
        match event.event:
            case "item":
                return decode(event.data.encode(), TuneProgress)
            case "job":
                return decode(event.data.encode(), TuningJobStateChange)
        return None


class TrainingJobsClient(JobsClient[TrainRequest, TrainJob, NumberedEvent]):
    """The training jobs of one gateway; of a job's events the service has about the newest 10,000."""

    _path = "/v1/trains"
    command = "train"
    _job = TrainJob
    _reply = TrainsReply

    def job(self, job: str) -> TrainJob:
        """Raises NotFound."""
        return self._call("GET", f"{self._path}/{job}", TrainJob)

    def store_package(self, data: bytes) -> str:
        """Store a packed working directory; returns the name (SHA-256) by which jobs may use it. Raises
        LimitExceeded."""
        answer = self._send("POST", "/v1/trains/packages", data, seconds=_FILE_SECONDS)
        return decode(answer, PackageStored).package

    def _has_ended(self, job: str) -> bool:
        return self.job(job).state in TRAIN_ENDED

    def _decode_event(self, event: httpx2.ServerSentEvent) -> NumberedEvent | None:
        if not event.id.isdecimal():
            return None
        (numbered,) = _decode_events(f'[{{"number":{int(event.id)},"event":{event.data}}}]'.encode())
        return numbered

    # --- pages of events ------------------------------------------------------------------------------------

    def metrics(self, job: str, *, after: int = 0) -> Iterator[tuple[int, StepMetrics]]:
        """(number, metrics): all after `after` that the service has now. Raises NotFound."""
        for numbered in self._numbered(f"{self._path}/{job}/metrics", after):
            if isinstance(numbered.event, StepMetrics):
                yield numbered.number, numbered.event

    def logs(self, job: str, *, rank: int = -1, after: int = 0) -> Iterator[tuple[int, LogLines]]:
        """(number, lines) of one rank, or of all (-1): all after `after` that the service has now. Raises NotFound."""
        for numbered in self._numbered(f"{self._path}/{job}/logs?rank={rank}", after):
            if isinstance(numbered.event, LogLines):
                yield numbered.number, numbered.event

    def history(self, job: str) -> Iterator[TrainEvent]:
        """All events so far that are neither metrics nor logs. Raises NotFound."""
        return (numbered.event for numbered in self._numbered(f"{self._path}/{job}/history", 0))

    def _numbered(self, path: str, after: int) -> Iterator[NumberedEvent]:
        """Pages of events as lines of JSON, until nothing follows. One may be empty before, where other ranks' are."""
        while True:
            page = self._scoped(with_query(path, f"after={after}&limit={_PAGE}"))
            answer = self._connection.request("GET", page, Deadline(SLOW_SECONDS), limit=_ANSWER_BYTES)
            told = answer.headers.get(AFTER_HEADER, "")
            following = int(told) if told.isdecimal() else after
            for line in filter(bytes.strip, answer.body.split(b"\n")):
                for numbered in _decode_events(b"[" + line + b"]"):
                    following = max(following, numbered.number)
                    yield numbered
            if following == after:
                return
            after = following

    # --- files ---------------------------------------------------------------------------------------------

    def files(self, job: str) -> list[TrainFile]:
        """The job's files. Raises NotFound."""
        return self._call("GET", f"{self._path}/{job}/files", TrainFilesReply).files

    def file(self, job: str, name: str) -> bytes:
        """Raises NotFound."""
        path = f"{self._path}/{job}/files/{quote(name)}"
        return self._send("GET", path, seconds=_FILE_SECONDS, limit=FILE_BYTES)

    def put_file(self, job: str, name: str, data: bytes) -> TrainFile:
        """Store a file, or replace it. Needs the job's own token, or the role train."""
        path = f"{self._path}/{job}/files/{quote(name)}"
        return decode(self._send("PUT", path, data, seconds=_FILE_SECONDS), TrainFile)


def _name_of(job: TrainJob | TuneJob) -> str:
    return job.spec.name if isinstance(job, TrainJob) else job.name


def _decode_events(data: bytes) -> list[NumberedEvent]:
    try:
        return read_events(data, decoding.from_json)
    except msgspec.MsgspecError as error:
        raise errors.SchemaMismatch(f"the gateway's answer cannot be read: {error}") from None
