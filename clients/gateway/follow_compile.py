"""Waits for the end of a compile that the gateway accepted.

The event stream is followed, and resumed when it breaks. A stream that stays silent is replaced by polling. A gateway
that answers nothing for ten seconds is given up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import httpx2
from msgspec import Struct

from ...compiler.api import compiles
from ...compiler.errors import Overloaded, RelayError, ServiceError, Unavailable
from .connection import JSON_BYTES, Connection, backoff, decode, error_of, read_body, rebuild
from .deadline import Deadline
from .event_stream import EventStream

_RECONNECT_SECONDS = 10.0
"""A gateway that was there and answers nothing for this long is gone."""
_POLL_SECONDS = 5.0
"""A status that takes longer than this to arrive comes from a gateway that hangs."""

OnProgress = Callable[[compiles.CompileProgress], None]


class _ProgressEvent(Struct):
    """A progress event's JSON. Lenient: a later gateway may say more."""

    stage: compiles.Stage
    seconds: float
    detail: str = ""
    error: compiles.ErrorBody | None = None


class _CompileEnd(Struct, frozen=True):
    """A compile is over: done, or failed with `error`."""

    error: RelayError | None


class CompileWait:
    """One accepted compile: follows its events, resumes, polls, gives up on a dead gateway."""

    def __init__(
        self, connection: Connection, key: str, clock: Deadline, on_progress: OnProgress | None
    ) -> None:
        self._connection = connection
        self._path = f"/v1/compiles/{key}"
        self._clock = clock
        self._stream = EventStream(connection, f"{self._path}/events", clock)
        self._on_progress = on_progress
        self._streaming = True
        self._last_stage = ""

    def run(self) -> None:
        """Return once the compile is done. Raises its error, NotFound when the service does not know it,
        GatewayUnreachable, DeadlineExceeded."""
        attempt = 0
        while True:
            before = self._stream.last_id, self._last_stage
            end = self._step()
            if end is not None:
                if end.error is not None:
                    raise end.error
                return
            attempt = attempt + 1 if (self._stream.last_id, self._last_stage) == before else 0
            self._clock.sleep(backoff(attempt))

    def _step(self) -> _CompileEnd | None:
        """Follow the stream until it breaks, then ask once for the compile's status."""
        try:
            if self._streaming and (end := self._follow()) is not None:
                return end
            return self._poll()
        except httpx2.TransportError as error:
            if isinstance(error, httpx2.ReadTimeout):
                self._streaming = False  # something on the way may hold the stream back: poll
            self._clock.remaining()
            if self._silent():
                raise self._connection.unreachable(error, self._clock) from error
        except (Overloaded, Unavailable):
            if self._silent():
                raise
        return None

    def _follow(self) -> _CompileEnd | None:
        with contextlib.closing(self._stream.read()) as events:
            for event in events:
                data = decode(event.data.encode(), _ProgressEvent)
                self._report(data)
                if (end := _end_of(data)) is not None:
                    return end
        return None

    def _poll(self) -> _CompileEnd | None:
        with self._connection.open(
            "GET", self._path, self._clock, headers={}, idle=_POLL_SECONDS
        ) as response:
            body = read_body(response, JSON_BYTES, self._clock)
            if response.status_code != 200:
                raise error_of(response.status_code, body)
        self._stream.last_read = time.monotonic()
        status = decode(body, compiles.CompileStatus)
        data = _ProgressEvent(stage=status.stage, seconds=status.seconds, error=status.error)
        if data.stage != self._last_stage:
            self._report(data)
        return _end_of(data)

    def _report(self, data: _ProgressEvent) -> None:
        self._last_stage = data.stage
        if self._on_progress is not None:
            self._on_progress(
                compiles.CompileProgress(stage=data.stage, seconds=data.seconds, detail=data.detail)
            )

    def _silent(self) -> bool:
        return time.monotonic() - self._stream.last_read > _RECONNECT_SECONDS


def _end_of(data: _ProgressEvent) -> _CompileEnd | None:
    if data.stage == "done":
        return _CompileEnd(None)
    if data.stage == "failed":
        return _CompileEnd(
            rebuild(data.error) if data.error else ServiceError(data.detail or "the compile failed")
        )
    return None
