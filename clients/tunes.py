"""Batch jobs from the client's side: a job's file in; the job at the service, its events and results, out."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx2
import msgspec
from msgspec import Struct

from ..compiler import tune_kernels, wire
from ..compiler.errors import (
    BadTuneJob,
    NotFound,
    RelayError,
    SettingsError,
)
from ..compiler.records import (
    GraphItem,
    GraphKept,
    KernelItem,
    TuneItem,
    TuneJob,
    TuneProgress,
    TuneReply,
    TuneRequest,
    TuneResult,
    TuneResultsReply,
    TunesReply,
    TuneState,
)
from ..compiler.tune_spec import Spec
from . import graphs_file
from .connection import JSON_BYTES, Clock, Connection, decode
from .following import followed
from .settings import ClientSettings
from .sse import Event

T = TypeVar("T")

_QUICK_SECONDS = 10.0
_SLOW_SECONDS = 120.0
_RESULTS_BYTES = 256 << 20


class JobChange(Struct, frozen=True):
    """A job has another state."""

    state: TuneState


class Tunes:
    """The batch jobs of one gateway, in `namespace` (default: the token's own). `transport` replaces the network, for
    tests."""

    def __init__(
        self, settings: ClientSettings, transport: httpx2.BaseTransport | None = None, *, namespace: str = ""
    ) -> None:
        self._namespace = namespace
        self._connection = Connection(settings, transport)

    def __enter__(self) -> Tunes:
        return self

    def __exit__(self, *exc: object) -> None:
        self._connection.close()

    def begin(self, request: TuneRequest) -> TuneJob:
        """Begun once, however often it has to be sent. Raises BadTuneJob, NoWorker, Overloaded ..."""
        if not request.id:
            request = msgspec.structs.replace(request, id=secrets.token_hex(8))
        return self._ask("POST", "/v1/tunes", TuneJob, request, seconds=_SLOW_SECONDS)

    def keep_graph(self, body: bytes) -> str:
        """The key by which jobs may name the graph from now on."""
        answer = self._connection.request(
            "POST",
            self._within("/v1/tunes/graphs"),
            Clock(_SLOW_SECONDS),
            content=body,
            headers={"Content-Type": wire.GRAPH_MEDIA_TYPE},
        )
        return decode(answer.body, GraphKept).key

    def jobs(self) -> list[TuneJob]:
        """The newest first."""
        return self._ask("GET", "/v1/tunes", TunesReply).jobs

    def find(self, text: str) -> TuneJob:
        """A job by its id, the first digits of it, or its name (the newest of that name). Raises NotFound."""
        jobs = self.jobs()
        found = [job for job in jobs if job.id.startswith(text)] if text else []
        named = [job for job in jobs if job.name == text]
        if len(found) == 1 or (found and found[0].id == text):
            return found[0]
        if named:
            return named[0]
        if found:
            raise NotFound(f"{text} begins the ids of {len(found)} jobs", hint="Give more digits")
        raise NotFound(f"there is no batch job {text[:80]}", hint="`torchrelay tune ls` lists them")

    def job(self, job: str) -> TuneReply:
        """Raises NotFound."""
        return self._ask("GET", f"/v1/tunes/{job}", TuneReply)

    def cancel(self, job: str) -> TuneJob:
        """Raises NotFound."""
        return self._ask("POST", f"/v1/tunes/{job}/cancel", TuneJob)

    def resume(self, job: str) -> TuneJob:
        """Raises NotFound."""
        return self._ask("POST", f"/v1/tunes/{job}/resume", TuneJob)

    def results(self, job: str) -> Iterator[TuneResult]:
        """What it has found so far. Raises NotFound."""
        cursor = ""
        while True:
            page = self._ask(
                "GET",
                f"/v1/tunes/{job}/results?cursor={cursor}",
                TuneResultsReply,
                seconds=_SLOW_SECONDS,
                limit=_RESULTS_BYTES,
            )
            yield from page.results
            cursor = page.next
            if not cursor:
                return

    def follow(
        self, job: str, *, on_trouble: Callable[[RelayError], None] | None = None
    ) -> Iterator[TuneProgress | JobChange]:
        """A job's events from its beginning to its end. A stream that breaks is taken up where it broke; on_trouble
        hears why. Raises NotFound, GatewayUnreachable after two minutes without a gateway."""
        path = self._within(f"/v1/tunes/{job}/events")

        def ended() -> bool:
            return self.job(job).job.state in ("done", "cancelled")

        return followed(self._connection, path, _told, ended, on_trouble=on_trouble)

    def _ask(
        self,
        method: str,
        path: str,
        type: type[T],
        body: object = None,
        *,
        seconds: float = _QUICK_SECONDS,
        limit: int = JSON_BYTES,
    ) -> T:
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        answer = self._connection.request(
            method, self._within(path), Clock(seconds), content=content, headers=headers, limit=limit
        )
        return decode(answer.body, type)

    def _within(self, path: str) -> str:
        if not self._namespace:
            return path
        return f"{path}{'&' if '?' in path else '?'}namespace={self._namespace}"


def request_of(spec: Spec, path: Path, tunes: Tunes, *, threads: int) -> TuneRequest:
    """A job's file as it is sent: its captured graphs are sent before, its kernels' source is looked up. path: the
    file's. threads: of a CPU's kernels, if the file does not say. Raises BadTuneJob, with the line."""
    items: list[TuneItem] = [*spec.operators, *spec.graphs]
    for file in spec.files:
        try:
            bodies = graphs_file.read(path.parent / file.path)
        except SettingsError as error:
            raise BadTuneJob(f"{spec.file}, line {file.line}: {error.message}", hint=error.advice) from None
        named = Path(file.path).name[-200:]
        for n, key in enumerate(map(tunes.keep_graph, bodies), 1):
            which = f"{named}, {n} of {len(bodies)}" if len(bodies) > 1 else named
            items.append(GraphItem(file.line, key, file.mode, which))
    if spec.kernels:
        from .tune_kernels import resolve

        for item in spec.kernels:
            try:
                items.append(KernelItem(item.line, item.text, resolve(item, path.parent.absolute())))
            except tune_kernels.BadEntry as error:
                raise BadTuneJob(f"{spec.file}, line {error.line}: {error.message}") from None
    return TuneRequest(
        name=spec.name or path.stem[:200],
        items=items,
        device=spec.device,
        torch=spec.torch,
        threads=spec.threads or threads,
        budget=spec.budget,
        file=spec.file[-300:],
        lines=spec.lines,
    )


def _told(event: Event) -> TuneProgress | JobChange | None:
    match event.name:
        case "item":
            return decode(event.data.encode(), TuneProgress)
        case "job":
            return decode(event.data.encode(), JobChange)
    return None
