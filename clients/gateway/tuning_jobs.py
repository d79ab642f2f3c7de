"""Tuning jobs through the gateway's HTTP API: start, list, cancel, resume and follow them; results."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

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
from ...compiler.errors import RelayError
from ...compiler.request import codec
from .connection import decode
from .event_stream import follow_events
from .http_api import SLOW_SECONDS, HttpApi, find_job

_RESULTS_BYTES = 256 << 20


class TuningJobStateChange(Struct, frozen=True):
    """A job's state has changed."""

    state: TuneState


class TuningJobsClient(HttpApi):
    """The batch tuning jobs of one gateway."""

    def begin(self, request: TuneRequest) -> TuneJob:
        """Start a job. Safe to send again. Raises BadTuneJob, NoWorker, Overloaded ..."""
        if not request.id:
            request = msgspec.structs.replace(request, id=secrets.token_hex(8))
        return self._call("POST", "/v1/tunes", TuneJob, request, seconds=SLOW_SECONDS)

    def store_graph(self, body: bytes) -> str:
        """Store a graph; returns the key by which jobs may name it."""
        answer = self._send("POST", "/v1/tunes/graphs", body, codec.GRAPH_MEDIA_TYPE, seconds=SLOW_SECONDS)
        return decode(answer, GraphStored).key

    def jobs(self) -> list[TuneJob]:
        """The newest first."""
        return self._call("GET", "/v1/tunes", TunesReply).jobs

    def find(self, text: str) -> TuneJob:
        """A job by its id, its name (the newest of that name), or the first digits of its id. Raises NotFound."""
        return find_job([(job.id, job.name, job) for job in self.jobs()], text, kind="batch", verb="tune")

    def job(self, job: str) -> TuneReply:
        """Raises NotFound."""
        return self._call("GET", f"/v1/tunes/{job}", TuneReply)

    def cancel(self, job: str) -> TuneJob:
        """Raises NotFound."""
        return self._call("POST", f"/v1/tunes/{job}/cancel", TuneJob)

    def resume(self, job: str) -> TuneJob:
        """Raises NotFound."""
        return self._call("POST", f"/v1/tunes/{job}/resume", TuneJob)

    def results(self, job: str) -> Iterator[TuneResult]:
        """The results so far. Raises NotFound."""
        path = f"/v1/tunes/{job}/results"
        for page in self._pages(path, TuneResultsReply, seconds=SLOW_SECONDS, limit=_RESULTS_BYTES):
            yield from page.results

    def follow(
        self, job: str, *, on_trouble: Callable[[RelayError], None] | None = None
    ) -> Iterator[TuneProgress | TuningJobStateChange]:
        """A job's events from its beginning to its end. Raises and calls on_trouble as follow_events does."""
        path = self._scoped(f"/v1/tunes/{job}/events")

        def ended() -> bool:
            return self.job(job).job.state in ("done", "cancelled")

        return follow_events(self._connection, path, _decode_event, ended, on_trouble=on_trouble)


def _decode_event(event: httpx2.ServerSentEvent) -> TuneProgress | TuningJobStateChange | None:
    match event.event:
        case "item":
            return decode(event.data.encode(), TuneProgress)
        case "job":
            return decode(event.data.encode(), TuningJobStateChange)
    return None
