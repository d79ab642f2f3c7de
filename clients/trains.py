"""Training jobs from the client's side: a job as written in; the job at the service, its events and files, out."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar, get_args
from urllib.parse import quote

import httpx2
import msgspec

from ..compiler.errors import BadTrainJob, NotFound, RelayError
from ..compiler.train_records import (
    TRAIN_ENDED,
    Log,
    Metrics,
    News,
    PackageKept,
    TrainEvent,
    TrainFile,
    TrainFilesReply,
    TrainJob,
    TrainRequest,
    TrainsReply,
)
from ..compiler.train_spec import Job
from .connection import JSON_BYTES, Clock, Connection, decode
from .following import followed
from .settings import ClientSettings
from .sse import Event
from .train_pack import IGNORE_FILE, packed

T = TypeVar("T")

FILE_BYTES = 8 << 30
"""Of a file of a job, the most that is fetched."""
_QUICK_SECONDS = 10.0
_SLOW_SECONDS = 120.0
_FILE_SECONDS = 3600.0
_PAGE = 1000
_PAGE_BYTES = 256 << 20


class Trains:
    """The training jobs of one gateway, in `namespace` (default: the token's own). `transport` replaces the network,
    for tests."""

    def __init__(
        self, settings: ClientSettings, transport: httpx2.BaseTransport | None = None, *, namespace: str = ""
    ) -> None:
        self._namespace = namespace
        self._connection = Connection(settings, transport)

    def __enter__(self) -> Trains:
        return self

    def __exit__(self, *exc: object) -> None:
        self._connection.close()

    def keep_package(self, data: bytes) -> str:
        """The name (SHA-256) by which jobs may have a packed working directory. Raises LimitExceeded."""
        path = self._within("/v1/trains/packages")
        headers = {"Content-Type": "application/octet-stream"}
        clock = Clock(_FILE_SECONDS)
        answer = self._connection.request("POST", path, clock, content=data, headers=headers)
        return decode(answer.body, PackageKept).package

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
    ) -> Iterator[News]:
        """A job's events behind number `after`, to its end; the service keeps about the newest 10,000. A stream that
        breaks is taken up where it broke; on_trouble hears why. Raises NotFound, GatewayUnreachable after two minutes
        without a gateway."""

        def ended() -> bool:
            return self.job(job).state in TRAIN_ENDED

        path = self._within(f"/v1/trains/{job}/events")
        start = str(after) if after else ""
        return followed(self._connection, path, _news, ended, after=start, on_trouble=on_trouble)

    def metrics(self, job: str, *, after: int = 0) -> Iterator[tuple[int, Metrics]]:
        """Each with its number: all behind `after` that are there now. Raises NotFound."""
        for news in self._pages(f"/v1/trains/{job}/metrics", after):
            if isinstance(news.event, Metrics):
                yield news.number, news.event

    def logs(self, job: str, *, rank: int = -1, after: int = 0) -> Iterator[tuple[int, Log]]:
        """Of one rank, or (-1) all: each with its number, all behind `after` that are there now. Raises NotFound."""
        for news in self._pages(f"/v1/trains/{job}/logs?rank={rank}", after):
            if isinstance(news.event, Log):
                yield news.number, news.event

    def history(self, job: str) -> Iterator[TrainEvent]:
        """What became of it: all that it told so far that is neither a metric nor a log. Raises NotFound."""
        return (news.event for news in self._pages(f"/v1/trains/{job}/history", 0))

    def _pages(self, path: str, after: int) -> Iterator[News]:
        """Lines of JSON, a News each; a page without any is the end."""
        mark = "&" if "?" in path else "?"
        while True:
            page = self._within(f"{path}{mark}after={after}&limit={_PAGE}")
            clock = Clock(_SLOW_SECONDS)
            body = self._connection.request("GET", page, clock, limit=_PAGE_BYTES).body
            lines = [line for line in body.split(b"\n") if line.strip()]
            for line in lines:
                news = decode(line, News)
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
        return self._connection.request("GET", path, Clock(_FILE_SECONDS), limit=FILE_BYTES).body

    def put_file(self, job: str, name: str, data: bytes) -> TrainFile:
        """Over the last one of that name. For the job's own token, or one with the role train."""
        path = self._within(f"/v1/trains/{job}/files/{quote(name)}")
        headers = {"Content-Type": "application/octet-stream"}
        answer = self._connection.request("PUT", path, Clock(_FILE_SECONDS), content=data, headers=headers)
        return decode(answer.body, TrainFile)

    # --- requests ------------------------------------------------------------------------------------------

    def _ask(
        self, method: str, path: str, type: type[T], body: object = None, *, seconds: float = _QUICK_SECONDS
    ) -> T:
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        answer = self._connection.request(
            method, self._within(path), Clock(seconds), content=content, headers=headers, limit=JSON_BYTES
        )
        return decode(answer.body, type)

    def _within(self, path: str) -> str:
        if not self._namespace:
            return path
        return f"{path}{'&' if '?' in path else '?'}namespace={self._namespace}"


def request_of(job: Job, folder: Path, trains: Trains) -> TrainRequest:
    """A job as it is sent: its working directory is packed and sent before. folder: what `directory` is relative to.
    Raises BadTrainJob, with the line; LimitExceeded for a directory that is too large."""
    where = folder / Path(job.directory).expanduser()
    if not where.is_dir():
        raise _wrong(job, "package", f"directory is {job.directory[:200]!r}, and {where} is no folder")
    script = job.spec.script
    if script and not (where / script).is_file():
        raise _wrong(job, "script", f"script is {script[:200]!r}, and {where} has no such file")
    package = packed(where)
    if script and script not in package.names:
        raise _wrong(job, "script", f"script is {script[:200]!r}, which {IGNORE_FILE} keeps from being sent")
    spec = msgspec.structs.replace(job.spec, package=trains.keep_package(package.data))
    return TrainRequest(spec=spec, file=job.file[-300:], lines=job.lines)


def _wrong(job: Job, field: str, message: str) -> BadTrainJob:
    line = job.lines.get(field, 0)
    at = f"{job.file}, line {line}" if line else job.file or "the command line"
    return BadTrainJob(f"{at}: {message}")


def _news(event: Event) -> News | None:
    """An event that this version does not know is left out."""
    if not event.id.isdecimal() or event.name not in _TAGS:
        return None
    return decode(
        msgspec.json.encode({"number": int(event.id), "event": msgspec.Raw(event.data.encode())}), News
    )


_TAGS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(TrainEvent))
