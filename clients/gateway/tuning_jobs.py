"""Tuning jobs through the gateway's HTTP API: requests in; jobs, their events and results out."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import TypeVar

import httpx2
import msgspec
from msgspec import Struct

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
from ...compiler.errors import NotFound, RelayError
from ...compiler.request import codec
from ..settings import ClientSettings
from .connection import JSON_BYTES, Connection, decode
from .deadline import Deadline
from .event_stream import follow_events
from .server_sent_events import ServerSentEvent

T = TypeVar("T")


_QUICK_SECONDS = 10.0


_SLOW_SECONDS = 120.0


_RESULTS_BYTES = 256 << 20


class TuningJobStateChange(Struct, frozen=True):
    """A job has another state."""

    state: TuneState


class TuningJobsClient:
    """The batch jobs of one gateway, in `namespace` (default: the token's own). `transport` replaces the network, for
    tests."""

    def __init__(
        self, settings: ClientSettings, transport: httpx2.BaseTransport | None = None, *, namespace: str = ""
    ) -> None:
        self._namespace = namespace
        self._connection = Connection(settings, transport)

    def __enter__(self) -> TuningJobsClient:
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
            Deadline(_SLOW_SECONDS),
            content=body,
            headers={"Content-Type": codec.GRAPH_MEDIA_TYPE},
        )
        return decode(answer.body, GraphStored).key

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
    ) -> Iterator[TuneProgress | TuningJobStateChange]:
        """A job's events from its beginning to its end. A stream that breaks is taken up where it broke; on_trouble
        hears why. Raises NotFound, GatewayUnreachable after two minutes without a gateway."""
        path = self._within(f"/v1/tunes/{job}/events")

        def ended() -> bool:
            return self.job(job).job.state in ("done", "cancelled")

        return follow_events(self._connection, path, _decode_event, ended, on_trouble=on_trouble)

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
            method, self._within(path), Deadline(seconds), content=content, headers=headers, limit=limit
        )
        return decode(answer.body, type)

    def _within(self, path: str) -> str:
        if not self._namespace:
            return path
        return f"{path}{'&' if '?' in path else '?'}namespace={self._namespace}"


def _decode_event(event: ServerSentEvent) -> TuneProgress | TuningJobStateChange | None:
    match event.name:
        case "item":
            return decode(event.data.encode(), TuneProgress)
        case "job":
            return decode(event.data.encode(), TuningJobStateChange)
    return None
