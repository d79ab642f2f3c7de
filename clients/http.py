"""Stage 4, the client's side: a request's bytes in, the artifact's bytes out, through the gateway's HTTP API.

POST /v1/compile answers with the artifact, or with 202; then the server-sent events are followed until the
compile is done, and the artifact is fetched. A stream that breaks is resumed with Last-Event-ID; one that
stays silent is replaced by polling; a service that forgot the compile is asked again. Every call has a total
deadline, may overrun it by one idle timeout at the very most, and never follows a redirect.

Proxies from the environment are used for a gateway elsewhere, never for one on this machine. A token sent
over plain http:// to another machine is allowed (a cluster's private network is common) and warned about.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import httpx2
import msgspec
from msgspec import Struct

from .. import __version__
from ..compiler import errors, wire
from ..compiler.errors import (
    ArtifactError,
    DeadlineExceeded,
    Forbidden,
    GatewayUnreachable,
    LimitExceeded,
    NotCached,
    NotFound,
    Overloaded,
    RelayError,
    SchemaMismatch,
    ServiceError,
    Unauthenticated,
    Unavailable,
)
from .settings import ClientSettings, CredentialsWarning
from .sse import EventParser

_TRIES = 3
"""Of a request that the service answers with Overloaded or Unavailable."""
_SUBMISSIONS = 3
"""Of one graph, when the service forgets a compile it had accepted."""
_RECONNECT_SECONDS = 10.0
"""A gateway that was there and answers nothing for this long is gone."""
_BLACKHOLE_SECONDS = 15.0
"""After a connect that timed out, further calls fail at once for this long: a model of twenty graphs must not
wait twenty connect timeouts."""
_QUICK_SECONDS = 10.0
"""Deadline of the small informational calls."""
_POLL_SECONDS = 5.0
"""A status that takes longer than this to arrive comes from a gateway that hangs."""
_JSON_BYTES = 16 << 20
_STALE = (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError, httpx2.CloseError)
"""What a kept-alive connection raises when the server closed it between two requests."""

_BY_STATUS: Mapping[int, type[RelayError]] = {
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    413: LimitExceeded,
    429: Overloaded,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}

T = TypeVar("T")
OnProgress = Callable[[wire.Progress], None]


class FetchResult(Struct, frozen=True, kw_only=True):
    """An artifact's bytes, not yet verified, and how they were had."""

    data: bytes
    hit: bool
    """It was there already; no compile ran for this request."""
    coalesced: bool
    """Waited for a compile that another request had started."""
    wait_seconds: float
    """From the service's acceptance to the end of the compile; 0 for a hit."""
    fetch_seconds: float
    """The rest: sending the request and receiving the artifact."""


class Readiness(Struct, frozen=True, kw_only=True):
    """Answer of /readyz. `body`: the gateway's own account of Redis and workers."""

    ready: bool
    body: dict[str, Any]


class _Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class _EventData(Struct):
    """A progress event's JSON. Lenient: a later gateway may say more."""

    stage: wire.Stage
    seconds: float
    detail: str = ""
    error: wire.ErrorBody | None = None


class _ErrorAnswer(Struct):
    error: wire.ErrorBody


class _Clock:
    """What is left of a deadline in seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds left, above 0. Raises DeadlineExceeded."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"no artifact within {self._seconds:g} s")
        return left

    def sleep(self, seconds: float) -> None:
        """Sleep so long, or raise DeadlineExceeded at once when the deadline would pass meanwhile."""
        if seconds >= self.remaining():
            raise DeadlineExceeded(f"no artifact within {self._seconds:g} s")
        time.sleep(seconds)


class Gateway:
    """The one transport to a gateway. Safe for threads; connections are kept and reused; a forked child opens
    its own. `transport` replaces the network, for tests and for a gateway in the same process."""

    def __init__(self, settings: ClientSettings, transport: httpx2.BaseTransport | None = None) -> None:
        self._settings = settings
        self._transport = transport
        self._lock = threading.Lock()
        self._client: httpx2.Client | None = None
        self._owner = 0
        self._dead_until = 0.0
        if settings.token and settings.url.startswith("http://") and not settings.loopback:
            warnings.warn(
                f"torchrelay: the token travels unencrypted to {settings.url}. "
                "Use https:// outside a private network",
                CredentialsWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- compile -------------------------------------------------------------------------------------------

    def compile(
        self,
        body: bytes,
        key: str,
        *,
        cache_only: bool,
        deadline: float,
        on_progress: OnProgress | None = None,
    ) -> FetchResult:
        """The artifact for `body` (wire.pack_request) with key `key`, within `deadline` seconds from now.

        `cache_only` never starts a compile. Raises NotCached then; GatewayUnreachable, DeadlineExceeded,
        SchemaMismatch when the gateway computes another key, and whatever typed error the service answers.
        """
        clock = _Clock(deadline)
        start = time.monotonic()
        lost: NotFound | None = None
        for _ in range(_SUBMISSIONS):
            answer = self._submit(body, key, cache_only, clock)
            coalesced = answer.headers.get("x-torchrelay-cache", "") == "coalesced"
            if answer.status == 200:
                total = time.monotonic() - start
                return FetchResult(
                    data=answer.body, hit=True, coalesced=False, wait_seconds=0.0, fetch_seconds=total
                )
            accepted = time.monotonic()
            try:
                _Wait(self, key, clock, on_progress).run()
                waited = time.monotonic() - accepted
                data = self.request(
                    "GET", f"/v1/artifacts/{key}", clock, limit=self._settings.max_response_bytes
                )
            except NotFound as error:
                lost = error
                clock.sleep(_backoff(0))
                continue
            total = time.monotonic() - start
            return FetchResult(
                data=data.body,
                hit=False,
                coalesced=coalesced,
                wait_seconds=waited,
                fetch_seconds=total - waited,
            )
        raise ServiceError(f"the service accepted {key[:12]} and forgot it {_SUBMISSIONS} times: {lost}")

    def _submit(self, body: bytes, key: str, cache_only: bool, clock: _Clock) -> _Answer:
        path = "/v1/compile?wait=cache" if cache_only else "/v1/compile"
        headers = {"Content-Type": wire.GRAPH_MEDIA_TYPE}
        limit = self._settings.max_response_bytes
        try:
            answer = self.request("POST", path, clock, content=body, headers=headers, limit=limit)
        except NotFound:
            if cache_only:
                raise NotCached(f"nobody has compiled {key[:12]} yet") from None
            raise GatewayUnreachable(f"{self._settings.url} is no torchrelay gateway") from None
        theirs = answer.headers.get("x-torchrelay-key", key)
        if theirs != key:
            raise SchemaMismatch(f"the gateway computed key {theirs[:12]}, this client {key[:12]}")
        return answer

    # --- the small calls -----------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """{version, schema, key_ids, public_keys}."""
        return self._json("/v1/info", dict[str, Any])

    def stats(self) -> dict[str, Any]:
        """requests, hits, misses, compiles, coalesced, failures, seconds_saved, and more."""
        return self._json("/v1/stats", dict[str, Any])

    def workers(self) -> list[wire.WorkerInfo]:
        return self._json("/v1/workers", list[wire.WorkerInfo])

    def status(self, key: str, *, deadline: float = _QUICK_SECONDS) -> wire.CompileStatus:
        """Where a compile is. Raises NotFound."""
        return _decode(self.request("GET", f"/v1/compiles/{key}", _Clock(deadline)).body, wire.CompileStatus)

    def ready(self) -> Readiness:
        """Whether a compile would be accepted now. Raises GatewayUnreachable when nothing answers."""
        answer = self._exchange("GET", "/readyz", _Clock(_QUICK_SECONDS), None, {}, _JSON_BYTES)
        try:
            body = msgspec.json.decode(answer.body, type=dict[str, Any])
        except msgspec.MsgspecError:
            body = {}
        return Readiness(ready=answer.status == 200, body=body)

    def report(self, reason: str, count: int = 1) -> None:
        """Tell the service that this client compiled locally `count` times because of error code `reason`."""
        content = msgspec.json.encode({"reason": reason, "count": count})
        headers = {"Content-Type": "application/json"}
        answer = self._exchange("POST", "/v1/report", _Clock(_QUICK_SECONDS), content, headers, _JSON_BYTES)
        if answer.status >= 300:
            raise error_of(answer.status, answer.body)

    def _json(self, path: str, type: type[T]) -> T:
        return _decode(self.request("GET", path, _Clock(_QUICK_SECONDS)).body, type)

    # --- requests ------------------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        clock: _Clock,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        limit: int = _JSON_BYTES,
    ) -> _Answer:
        """One idempotent request and its whole answer. Retries when the service asks for it; raises the typed
        error of any answer that is not 2xx."""
        for attempt in range(_TRIES):
            answer = self._exchange(method, path, clock, content, headers or {}, limit)
            if 200 <= answer.status < 300:
                return answer
            error = error_of(answer.status, answer.body)
            if attempt + 1 == _TRIES or not isinstance(error, Overloaded | Unavailable):
                raise error
            delay = max(_retry_after(answer.headers), _backoff(attempt))
            if delay >= clock.remaining():
                raise error
            time.sleep(delay)
        raise AssertionError("the loop returns or raises")

    def _exchange(
        self,
        method: str,
        path: str,
        clock: _Clock,
        content: bytes | None,
        headers: Mapping[str, str],
        limit: int,
    ) -> _Answer:
        """One request, sent again once if its kept-alive connection turns out to be closed."""
        with self._reaching(clock):
            try:
                return self._once(method, path, clock, content, headers, limit)
            except _STALE:
                return self._once(method, path, clock, content, headers, limit)

    def _once(
        self,
        method: str,
        path: str,
        clock: _Clock,
        content: bytes | None,
        headers: Mapping[str, str],
        limit: int,
    ) -> _Answer:
        with self.open(method, path, clock, content=content, headers=headers) as response:
            return _Answer(response.status_code, response.headers, _read(response, limit, clock))

    @contextlib.contextmanager
    def open(
        self,
        method: str,
        path: str,
        clock: _Clock,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str],
        idle: float | None = None,
    ) -> Iterator[httpx2.Response]:
        """A response whose body is still to be read; `idle` seconds without a byte (the settings' if None)
        are a ReadTimeout. httpx2.TransportError passes through."""
        left = clock.remaining()
        idle = min(idle or self._settings.idle_timeout, self._settings.idle_timeout, left)
        timeout = httpx2.Timeout(idle, connect=min(self._settings.connect_timeout, left), pool=left)
        url = self._settings.url + path
        with self._connected().stream(
            method, url, content=content, headers=dict(headers), timeout=timeout
        ) as response:
            if response.is_redirect:
                raise GatewayUnreachable(
                    f"{self._settings.url} redirects elsewhere; redirects are not followed, so that the token "
                    "goes to no other host",
                    hint="Set TORCHRELAY_URL to the gateway's final address",
                )
            yield response

    def _connected(self) -> httpx2.Client:
        if not self._settings.url:
            raise GatewayUnreachable("no gateway is known")
        if time.monotonic() < self._dead_until:
            raise GatewayUnreachable(f"{self._settings.url} did not answer a moment ago")
        with self._lock:
            # A forked child must not share its parent's sockets; the parent's client is dropped unclosed.
            if self._client is None or self._owner != os.getpid():
                self._owner = os.getpid()
                self._client = self._new_client()
            return self._client

    def _new_client(self) -> httpx2.Client:
        headers = {"User-Agent": f"torchrelay/{__version__}", "Accept-Encoding": "identity"}
        if self._settings.token:
            headers["Authorization"] = f"Bearer {self._settings.token}"
        return httpx2.Client(
            headers=headers,
            follow_redirects=False,
            trust_env=not self._settings.loopback,
            transport=self._transport,
        )

    @contextlib.contextmanager
    def _reaching(self, clock: _Clock) -> Iterator[None]:
        """Turn a transport's failure into GatewayUnreachable, or DeadlineExceeded once time is up."""
        try:
            yield
        except httpx2.TransportError as error:
            raise self.unreachable(error, clock) from error

    def unreachable(self, error: httpx2.TransportError, clock: _Clock) -> GatewayUnreachable:
        """The typed error for a transport's failure. Raises DeadlineExceeded if that is what it was."""
        clock.remaining()
        if isinstance(error, httpx2.ConnectTimeout):
            self._dead_until = time.monotonic() + _BLACKHOLE_SECONDS
        reason = str(error) or type(error).__name__
        return GatewayUnreachable(f"{self._settings.url} cannot be reached: {reason}")


class _End(Struct, frozen=True):
    """A compile is over: done, or failed with `error`."""

    error: RelayError | None


class _Wait:
    """Waiting for one accepted compile: follows its events, resumes, polls, gives up on a dead gateway."""

    def __init__(self, gateway: Gateway, key: str, clock: _Clock, on_progress: OnProgress | None) -> None:
        self._gateway = gateway
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
            before = self._heard
            end = self._step()
            if end is not None:
                if end.error is not None:
                    raise end.error
                return
            attempt = 0 if self._heard > before else attempt + 1
            self._clock.sleep(_backoff(attempt))

    def _step(self) -> _End | None:
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

    def _follow(self) -> _End | None:
        headers = {"Accept": "text/event-stream"}
        if self._last_id:
            headers["Last-Event-ID"] = self._last_id
        parser = EventParser()
        with self._gateway.open("GET", f"{self._path}/events", self._clock, headers=headers) as response:
            if response.status_code != 200:
                raise error_of(response.status_code, _read(response, _JSON_BYTES, self._clock))
            for chunk in response.iter_raw():
                self._heard = time.monotonic()
                for event in parser.feed(chunk):
                    self._last_id = event.id or self._last_id
                    data = _decode(event.data.encode(), _EventData)
                    self._tell(data)
                    if (end := _end_of(data)) is not None:
                        return end
                self._clock.remaining()
        return None

    def _poll(self) -> _End | None:
        with self._gateway.open("GET", self._path, self._clock, headers={}, idle=_POLL_SECONDS) as response:
            body = _read(response, _JSON_BYTES, self._clock)
            if response.status_code != 200:
                raise error_of(response.status_code, body)
        self._heard = time.monotonic()
        status = _decode(body, wire.CompileStatus)
        data = _EventData(stage=status.stage, seconds=status.seconds, error=status.error)
        if data.stage != self._last_stage:
            self._tell(data)
        return _end_of(data)

    def _tell(self, data: _EventData) -> None:
        self._last_stage = data.stage
        if self._on_progress is not None:
            self._on_progress(wire.Progress(stage=data.stage, seconds=data.seconds, detail=data.detail))

    def _lose(self, error: httpx2.TransportError) -> None:
        self._clock.remaining()
        if self._silent():
            raise self._gateway.unreachable(error, self._clock) from error

    def _silent(self) -> bool:
        return time.monotonic() - self._heard > _RECONNECT_SECONDS


def error_of(status: int, body: bytes) -> RelayError:
    """The typed error of an answer that is not 2xx; a body that is not ours (a proxy's) goes by status."""
    try:
        return _rebuild(msgspec.json.decode(body, type=_ErrorAnswer).error)
    except msgspec.MsgspecError:
        kind = _BY_STATUS.get(status, ServiceError)
        return kind(f"the gateway answered HTTP {status}")


def _rebuild(error: wire.ErrorBody) -> RelayError:
    return errors.from_code(error.code, error.message, error.hint)


def _end_of(data: _EventData) -> _End | None:
    if data.stage == "done":
        return _End(None)
    if data.stage == "failed":
        return _End(_rebuild(data.error) if data.error else ServiceError(data.detail or "the compile failed"))
    return None


def _read(response: httpx2.Response, limit: int, clock: _Clock) -> bytes:
    """A whole body of at most `limit` bytes, as it came (no content encoding was asked for)."""
    parts: list[bytes] = []
    size = 0
    for part in response.iter_raw():
        size += len(part)
        if size > limit:
            raise ArtifactError(
                f"the gateway's answer has more than {limit} bytes",
                hint="Raise TORCHRELAY_MAX_RESPONSE_BYTES",
            )
        parts.append(part)
        clock.remaining()
    return b"".join(parts)


def _decode(body: bytes, type: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.MsgspecError as error:
        raise SchemaMismatch(f"the gateway's answer cannot be read: {error}") from None


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds of a Retry-After header; 0 for none, or for one that is a date."""
    text = headers.get("retry-after", "")
    return float(text) if text.isdecimal() else 0.0


def _backoff(attempt: int) -> float:
    """Seconds before the next try: doubles from 0.1 to 2, with jitter so that clients do not keep step."""
    return min(0.1 * 2.0**attempt, 2.0) * random.uniform(0.5, 1.0)
