"""Waits for the end of a compile that the gateway accepted.

The event stream is followed, and resumed when it breaks. If the stream delivers nothing, the status is polled instead.
If the gateway answers nothing for ten seconds, waiting ends with an error.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

import httpx2
from msgspec import Struct

from ...compiler.api import compiles
from ...compiler.errors import Overloaded, ServiceError, Unavailable
from .connection import JSON_BYTES, Connection, backoff, decode, error_of, read_body, rebuild
from .deadline import Deadline
from .event_stream import EventStream

_RECONNECT_SECONDS = 10.0
"""The longest time without an answer before the gateway counts as gone."""
_POLL_SECONDS = 5.0
"""The longest that one status request may take."""


class _ProgressEvent(Struct):
    """What an event and a status have in common. A later gateway may add fields."""

    stage: compiles.Stage
    detail: str = ""
    error: compiles.ErrorBody | None = None


class CompileWait:
    """The wait for one accepted compile."""

    def __init__(self, connection: Connection, key: str, clock: Deadline, headers: Mapping[str, str]) -> None:
        """headers: of each of its requests."""
        self._connection = connection
        self._path = f"/v1/compiles/{key}"
        self._clock = clock
        self._headers = headers
        self._stream = EventStream(connection, f"{self._path}/events", clock, headers=headers)
        self._streaming = True

    def run(self) -> None:
        """Return once the compile is done. Raises its error, NotFound if the service does not know it,
        GatewayUnreachable, DeadlineExceeded."""
        attempt = 0
        while True:
            before = self._stream.last_id
            end = self._end()
            if end is not None and end.stage == "done":
                return
            if end is not None:
                raise rebuild(end.error) if end.error else ServiceError(end.detail or "the compile failed")
            attempt = attempt + 1 if self._stream.last_id == before else 0
            self._clock.sleep(backoff(attempt))

    def _end(self) -> _ProgressEvent | None:
        """The compile's last event, if it has ended: from the stream until it breaks, then from one status request."""
        try:
            return self._follow() or self._poll()
        except httpx2.TransportError as error:
            if isinstance(error, httpx2.ReadTimeout):
                self._streaming = False  # a proxy may hold the stream back
            self._clock.remaining()
            if self._silent():
                raise self._connection.unreachable(error, self._clock) from error
        except (Overloaded, Unavailable):
            if self._silent():
                raise
        return None

    def _follow(self) -> _ProgressEvent | None:
        with (
            contextlib.suppress(Overloaded),  # its token has as many streams as it may: it polls
            contextlib.closing(self._stream.read()) as events,
        ):
            for event in events if self._streaming else ():
                if (end := _end_of(event.data.encode())) is not None:
                    return end
        return None

    def _poll(self) -> _ProgressEvent | None:
        with self._connection.open(
            "GET", self._path, self._clock, headers=self._headers, idle=_POLL_SECONDS
        ) as response:
            body = read_body(response, JSON_BYTES, self._clock)
            if response.status_code != 200:
                raise error_of(response.status_code, body)
        self._stream.last_read = time.monotonic()
        return _end_of(body)

    def _silent(self) -> bool:
        return time.monotonic() - self._stream.last_read > _RECONNECT_SECONDS


def _end_of(body: bytes) -> _ProgressEvent | None:
    """An event or a status that says that the compile has ended."""
    event = decode(body, _ProgressEvent)
    return event if event.stage in ("done", "failed") else None
