"""Training jobs through the gateway's HTTP API: start, list, cancel, resume and follow them; logs, metrics, files."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import get_args
from urllib.parse import quote

import httpx2
import msgspec

from ...compiler import decoding
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
from ...compiler.errors import RelayError, SchemaMismatch
from .connection import decode
from .deadline import Deadline
from .event_stream import follow_events
from .http_api import SLOW_SECONDS, HttpApi, find_job, with_query

FILE_BYTES = 8 << 30
"""Limit of a job's file that is downloaded."""
_FILE_SECONDS = 3600.0
_PAGE = 1000
_PAGE_BYTES = 256 << 20


class TrainingJobsClient(HttpApi):
    """The training jobs of one gateway."""

    def store_package(self, data: bytes) -> str:
        """Store a packed working directory; returns the name (SHA-256) by which jobs may use it. Raises
        LimitExceeded."""
        answer = self._send("POST", "/v1/trains/packages", data, seconds=_FILE_SECONDS)
        return decode(answer, PackageStored).package

    def begin(self, request: TrainRequest) -> TrainJob:
        """Start a job. Safe to send again. Raises BadTrainJob, Forbidden, Overloaded ..."""
        if not request.id:
            request = msgspec.structs.replace(request, id=secrets.token_hex(8))
        return self._call("POST", "/v1/trains", TrainJob, request, seconds=SLOW_SECONDS)

    def jobs(self) -> list[TrainJob]:
        """The newest first."""
        return self._call("GET", "/v1/trains", TrainsReply).jobs

    def find(self, text: str) -> TrainJob:
        """A job by its id, its name (the newest of that name), or the first digits of its id. Raises NotFound."""
        jobs = [(job.id, job.spec.name, job) for job in self.jobs()]
        return find_job(jobs, text, kind="training", verb="train")

    def job(self, job: str) -> TrainJob:
        """Raises NotFound."""
        return self._call("GET", f"/v1/trains/{job}", TrainJob)

    def cancel(self, job: str) -> TrainJob:
        """Raises NotFound."""
        return self._call("POST", f"/v1/trains/{job}/cancel", TrainJob, seconds=SLOW_SECONDS)

    def resume(self, job: str) -> TrainJob:
        """No effect on a job that still runs. Raises NotFound; BadTrainJob for one that is done."""
        return self._call("POST", f"/v1/trains/{job}/resume", TrainJob, seconds=SLOW_SECONDS)

    # --- events ---------------------------------------------------------------------------------------------

    def follow(
        self, job: str, *, after: int = 0, on_trouble: Callable[[RelayError], None] | None = None
    ) -> Iterator[NumberedEvent]:
        """A job's events after number `after`, to its end; the service has about the newest 10,000. Raises and calls
        on_trouble as follow_events does."""

        def ended() -> bool:
            return self.job(job).state in TRAIN_ENDED

        path = self._scoped(f"/v1/trains/{job}/events")
        start = str(after) if after else ""
        return follow_events(self._connection, path, _decode_event, ended, after=start, on_trouble=on_trouble)

    def metrics(self, job: str, *, after: int = 0) -> Iterator[tuple[int, StepMetrics]]:
        """(number, metrics): all after `after` that the service has now. Raises NotFound."""
        for numbered in self._numbered(f"/v1/trains/{job}/metrics", after):
            if isinstance(numbered.event, StepMetrics):
                yield numbered.number, numbered.event

    def logs(self, job: str, *, rank: int = -1, after: int = 0) -> Iterator[tuple[int, LogLines]]:
        """(number, lines) of one rank, or of all (-1): all after `after` that the service has now. Raises NotFound."""
        for numbered in self._numbered(f"/v1/trains/{job}/logs?rank={rank}", after):
            if isinstance(numbered.event, LogLines):
                yield numbered.number, numbered.event

    def history(self, job: str) -> Iterator[TrainEvent]:
        """All events so far that are neither metrics nor logs. Raises NotFound."""
        return (numbered.event for numbered in self._numbered(f"/v1/trains/{job}/history", 0))

    def _numbered(self, path: str, after: int) -> Iterator[NumberedEvent]:
        """Pages of events as lines of JSON, until nothing follows. One may be empty before, where other ranks' are."""
        while True:
            page = self._scoped(with_query(path, f"after={after}&limit={_PAGE}"))
            answer = self._connection.request("GET", page, Deadline(SLOW_SECONDS), limit=_PAGE_BYTES)
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
        return self._call("GET", f"/v1/trains/{job}/files", TrainFilesReply).files

    def file(self, job: str, name: str) -> bytes:
        """Raises NotFound."""
        path = f"/v1/trains/{job}/files/{quote(name)}"
        return self._send("GET", path, seconds=_FILE_SECONDS, limit=FILE_BYTES)

    def put_file(self, job: str, name: str, data: bytes) -> TrainFile:
        """Store a file, or replace it. Needs the job's own token, or the role train."""
        path = f"/v1/trains/{job}/files/{quote(name)}"
        return decode(self._send("PUT", path, data, seconds=_FILE_SECONDS), TrainFile)


def _decode_event(event: httpx2.ServerSentEvent) -> NumberedEvent | None:
    """None for a kind of event that this version does not know."""
    if not event.id.isdecimal() or event.event not in _TAGS:
        return None
    return decode(
        msgspec.json.encode({"number": int(event.id), "event": msgspec.Raw(event.data.encode())}),
        NumberedEvent,
    )


def _decode_events(data: bytes) -> list[NumberedEvent]:
    try:
        return read_events(data, decoding.from_json)
    except msgspec.MsgspecError as error:
        raise SchemaMismatch(f"the gateway's answer cannot be read: {error}") from None


_TAGS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(TrainEvent))
