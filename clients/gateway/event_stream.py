"""A stream of server-sent events that is resumed with Last-Event-ID when its connection breaks."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping

import httpx2

from ...compiler.errors import MalformedRequest
from .connection import JSON_BYTES, Connection, Deadline, error_of, read_body

_EVENT_BYTES = 1 << 20
"""The most that one event may hold."""


class EventStream:
    """The events at one path, over as many connections as needed.

    last_id: id of the latest event; the next connection resumes after it. last_read: when the latest bytes came
    (monotonic time).
    """

    def __init__(
        self,
        connection: Connection,
        path: str,
        clock: Deadline,
        *,
        after: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._connection = connection
        self._path = path
        self._clock = clock
        self._headers = headers or {}
        self.last_id = after
        self.last_read = time.monotonic()

    def read(self) -> Generator[httpx2.ServerSentEvent, None, None]:
        """The events of one connection, until it ends. Raises the typed error of a response that is not 200,
        MalformedRequest, DeadlineExceeded, httpx2.TransportError."""
        headers = {**self._headers, "Accept": "text/event-stream"}
        if self.last_id:
            headers["Last-Event-ID"] = self.last_id
        with self._connection.open("GET", self._path, self._clock, headers=headers) as response:
            if response.status_code != 200:
                raise error_of(response.status_code, read_body(response, JSON_BYTES, self._clock))
            assert isinstance(response.stream, httpx2.SyncByteStream)
            response.stream = _ObservedBody(response.stream, self._received)
            try:
                for event in httpx2.EventSource(response, max_event_size=_EVENT_BYTES):
                    self.last_id = event.id or self.last_id
                    if event.data:
                        yield event
            except httpx2.SSEError as error:
                raise MalformedRequest(f"the gateway's event stream cannot be read: {error}") from None

    def _received(self) -> None:
        self.last_read = time.monotonic()
        self._clock.remaining()


class _ObservedBody(httpx2.SyncByteStream):
    """A response's body; `received` is called after each chunk, also for comments, which are no events."""

    def __init__(self, body: httpx2.SyncByteStream, received: Callable[[], None]) -> None:
        self._body = body
        self._received = received

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._body:
            self._received()
            yield chunk

    def close(self) -> None:
        self._body.close()
