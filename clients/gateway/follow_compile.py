"""Waiting for one compile that the gateway accepted: its key in, its end or a typed error out.

The event stream is followed and resumed with Last-Event-ID when it breaks. A stream that stays silent is
replaced by polling. A gateway that answers nothing for ten seconds is given up.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx2
from msgspec import Struct

from ...compiler.api import compiles
from ...compiler.errors import Overloaded, RelayError, ServiceError, Unavailable
from .connection import JSON_BYTES, Connection, backoff, decode, error_of, read_body, rebuild
from .deadline import Deadline
from .server_sent_events import EventParser

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
    """Waiting for one accepted compile: follows its events, resumes, polls, gives up on a dead gateway."""

    def __init__(
        self, connection: Connection, key: str, clock: Deadline, on_progress: OnProgress | None
    ) -> None:
        self._connection = connection
        self._path = f"/v1/compiles/{key}"
        self._clock = clock
        self._on_progress = on_progress
        self._streaming = True
        self._last_id = ""
        self._last_stage = ""
        self._heard = time.monotonic()

    def run(self) -> None:
        """Return once the compile is done. Raises its error, NotFound when the service does not know it,
        GatewayUnreachable, DeadlineExceeded."""
        attempt = 0
        while True:
            before = self._last_id, self._last_stage
            end = self._step()
            if end is not None:
                if end.error is not None:
                    raise end.error
                return
            attempt = attempt + 1 if (self._last_id, self._last_stage) == before else 0
            self._clock.sleep(backoff(attempt))

    def _step(self) -> _CompileEnd | None:
        """Follow the stream until it breaks, then ask once how the compile stands."""
        try:
            if self._streaming and (end := self._follow()) is not None:
                return end
            return self._poll()
        except httpx2.ReadTimeout as error:
            # Connected but silent: something between may hold the stream back; polling will tell.
            self._streaming = False
            self._lose(error)
        except httpx2.TransportError as error:
            self._lose(error)
        except (Overloaded, Unavailable):
            if self._silent():
                raise
        return None

    def _follow(self) -> _CompileEnd | None:
        headers = {"Accept": "text/event-stream"}
        if self._last_id:
            headers["Last-Event-ID"] = self._last_id
        parser = EventParser()
        with self._connection.open("GET", f"{self._path}/events", self._clock, headers=headers) as response:
            if response.status_code != 200:
                raise error_of(response.status_code, read_body(response, JSON_BYTES, self._clock))
            for chunk in response.iter_bytes():
                self._heard = time.monotonic()
                for event in parser.feed(chunk):
                    self._last_id = event.id or self._last_id
                    data = decode(event.data.encode(), _ProgressEvent)
                    self._tell(data)
                    if (end := _end_of(data)) is not None:
                        return end
                self._clock.remaining()
        return None

    def _poll(self) -> _CompileEnd | None:
        with self._connection.open(
            "GET", self._path, self._clock, headers={}, idle=_POLL_SECONDS
        ) as response:
            body = read_body(response, JSON_BYTES, self._clock)
            if response.status_code != 200:
                raise error_of(response.status_code, body)
        self._heard = time.monotonic()
        status = decode(body, compiles.CompileStatus)
        data = _ProgressEvent(stage=status.stage, seconds=status.seconds, error=status.error)
        if data.stage != self._last_stage:
            self._tell(data)
        return _end_of(data)

    def _tell(self, data: _ProgressEvent) -> None:
        self._last_stage = data.stage
        if self._on_progress is not None:
            self._on_progress(
                compiles.CompileProgress(stage=data.stage, seconds=data.seconds, detail=data.detail)
            )

    def _lose(self, error: httpx2.TransportError) -> None:
        self._clock.remaining()
        if self._silent():
            raise self._connection.unreachable(error, self._clock) from error

    def _silent(self) -> bool:
        return time.monotonic() - self._heard > _RECONNECT_SECONDS


def _end_of(data: _ProgressEvent) -> _CompileEnd | None:
    if data.stage == "done":
        return _CompileEnd(None)
    if data.stage == "failed":
        return _CompileEnd(
            rebuild(data.error) if data.error else ServiceError(data.detail or "the compile failed")
        )
    return None
