"""Training jobs through the gateway's HTTP API: requests in; jobs, their events, logs, metrics and files out."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import TypeVar, get_args
from urllib.parse import quote

import httpx2
import msgspec

from ...compiler.api.training.events import LogLines, NumberedEvent, StepMetrics, TrainEvent
from ...compiler.api.training.jobs import (
    TRAIN_ENDED,
    PackageStored,
    TrainFile,
    TrainFilesReply,
    TrainJob,
    TrainRequest,
    TrainsReply,
)
from ...compiler.errors import NotFound, RelayError
from ..settings import ClientSettings
from .connection import JSON_BYTES, Connection, decode
from .deadline import Deadline
from .event_stream import follow_events
from .server_sent_events import ServerSentEvent

T = TypeVar("T")


FILE_BYTES = 8 << 30
"""Of a file of a job, the most that is fetched."""


_QUICK_SECONDS = 10.0


_SLOW_SECONDS = 120.0


_FILE_SECONDS = 3600.0


_PAGE = 1000


_PAGE_BYTES = 256 << 20


class TrainingJobsClient:
    """The training jobs of one gateway, in `namespace` (default: the token's own). `transport` replaces the network,
    for tests."""

    def __init__(
        self, settings: ClientSettings, transport: httpx2.BaseTransport | None = None, *, namespace: str = ""
    ) -> None:
        self._namespace = namespace
        self._connection = Connection(settings, transport)

    def __enter__(self) -> TrainingJobsClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self._connection.close()

    def keep_package(self, data: bytes) -> str:
        """The name (SHA-256) by which jobs may have a packed working directory. Raises LimitExceeded."""
        path = self._within("/v1/trains/packages")
        headers = {"Content-Type": "application/octet-stream"}
        clock = Deadline(_FILE_SECONDS)
        answer = self._connection.request("POST", path, clock, content=data, headers=headers)
        return decode(answer.body, PackageStored).package

    def begin(self, request: TrainRequest) -> TrainJob:
        """Begun once, however often it has to be sent. Raises BadTrainJob, Forbidden, Overloaded ..."""
        if not request.id:
            request = msgspec.structs.replace(request, id=secrets.token_hex(8))
        return self._ask("POST", "/v1/trains", TrainJob, request, seconds=_SLOW_SECONDS)

    def jobs(self) -> list[TrainJob]:
        """The newest first."""
        return self._ask("GET", "/v1/trains", TrainsReply).jobs

    def find(self, text: str) -> TrainJob:
        """A job by its id, its name (the newest of that name), or the first digits of its id. Raises NotFound."""
        jobs = self.jobs()
        for job in (
            *(job for job in jobs if job.id == text),
            *(job for job in jobs if job.spec.name == text),
        ):
            return job
        found = [job for job in jobs if job.id.startswith(text)] if text else []
        if len(found) == 1:
            return found[0]
        if found:
            raise NotFound(f"{text} begins the ids of {len(found)} jobs", hint="Give more digits")
        raise NotFound(f"there is no training job {text[:80]}", hint="`torchrelay train ls` lists them")

    def job(self, job: str) -> TrainJob:
        """Raises NotFound."""
        return self._ask("GET", f"/v1/trains/{job}", TrainJob)

    def cancel(self, job: str) -> TrainJob:
        """Raises NotFound."""
        return self._ask("POST", f"/v1/trains/{job}/cancel", TrainJob, seconds=_SLOW_SECONDS)

    def resume(self, job: str) -> TrainJob:
        """One that still runs is left as it is. Raises NotFound; BadTrainJob for one that is done."""
        return self._ask("POST", f"/v1/trains/{job}/resume", TrainJob, seconds=_SLOW_SECONDS)

    # --- what it tells -------------------------------------------------------------------------------------

    def follow(
        self, job: str, *, after: int = 0, on_trouble: Callable[[RelayError], None] | None = None
    ) -> Iterator[NumberedEvent]:
        """A job's events behind number `after`, to its end; the service keeps about the newest 10,000. A stream that
        breaks is taken up where it broke; on_trouble hears why. Raises NotFound, GatewayUnreachable after two minutes
        without a gateway."""

        def ended() -> bool:
            return self.job(job).state in TRAIN_ENDED

        path = self._within(f"/v1/trains/{job}/events")
        start = str(after) if after else ""
        return follow_events(self._connection, path, _decode_event, ended, after=start, on_trouble=on_trouble)

    def metrics(self, job: str, *, after: int = 0) -> Iterator[tuple[int, StepMetrics]]:
        """Each with its number: all behind `after` that are there now. Raises NotFound."""
        for news in self._pages(f"/v1/trains/{job}/metrics", after):
            if isinstance(news.event, StepMetrics):
                yield news.number, news.event

    def logs(self, job: str, *, rank: int = -1, after: int = 0) -> Iterator[tuple[int, LogLines]]:
        """Of one rank, or (-1) all: each with its number, all behind `after` that are there now. Raises NotFound."""
        for news in self._pages(f"/v1/trains/{job}/logs?rank={rank}", after):
            if isinstance(news.event, LogLines):
                yield news.number, news.event

    def history(self, job: str) -> Iterator[TrainEvent]:
        """What became of it: all that it told so far that is neither a metric nor a log. Raises NotFound."""
        return (news.event for news in self._pages(f"/v1/trains/{job}/history", 0))

    def _pages(self, path: str, after: int) -> Iterator[NumberedEvent]:
        """Lines of JSON, a News each; a page without any is the end."""
        mark = "&" if "?" in path else "?"
        while True:
            page = self._within(f"{path}{mark}after={after}&limit={_PAGE}")
            clock = Deadline(_SLOW_SECONDS)
            body = self._connection.request("GET", page, clock, limit=_PAGE_BYTES).body
            lines = [line for line in body.split(b"\n") if line.strip()]
            for line in lines:
                news = decode(line, NumberedEvent)
                after = max(after, news.number)
                yield news
            if not lines:
                return

    # --- files ---------------------------------------------------------------------------------------------

    def files(self, job: str) -> list[TrainFile]:
        """What the job has made. Raises NotFound."""
        return self._ask("GET", f"/v1/trains/{job}/files", TrainFilesReply).files

    def file(self, job: str, name: str) -> bytes:
        """Raises NotFound."""
        path = self._within(f"/v1/trains/{job}/files/{quote(name)}")
        return self._connection.request("GET", path, Deadline(_FILE_SECONDS), limit=FILE_BYTES).body

    def put_file(self, job: str, name: str, data: bytes) -> TrainFile:
        """Over the last one of that name. For the job's own token, or one with the role train."""
        path = self._within(f"/v1/trains/{job}/files/{quote(name)}")
        headers = {"Content-Type": "application/octet-stream"}
        answer = self._connection.request("PUT", path, Deadline(_FILE_SECONDS), content=data, headers=headers)
        return decode(answer.body, TrainFile)

    # --- requests ------------------------------------------------------------------------------------------

    def _ask(
        self, method: str, path: str, type: type[T], body: object = None, *, seconds: float = _QUICK_SECONDS
    ) -> T:
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        answer = self._connection.request(
            method, self._within(path), Deadline(seconds), content=content, headers=headers, limit=JSON_BYTES
        )
        return decode(answer.body, type)

    def _within(self, path: str) -> str:
        if not self._namespace:
            return path
        return f"{path}{'&' if '?' in path else '?'}namespace={self._namespace}"


def _decode_event(event: ServerSentEvent) -> NumberedEvent | None:
    """An event that this version does not know is left out."""
    if not event.id.isdecimal() or event.name not in _TAGS:
        return None
    return decode(
        msgspec.json.encode({"number": int(event.id), "event": msgspec.Raw(event.data.encode())}),
        NumberedEvent,
    )


_TAGS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(TrainEvent))
