"""HTTP requests to one gateway, over a pool of connections, and the base of all clients of its API.

Redirects are never followed. Proxies from the environment are used, except for a gateway on this machine. A token may
be sent over plain http:// to another machine (as in a cluster's private network); that raises a warning.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import ssl
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol, Self, TypeVar

import httpx2
import msgspec
from msgspec import Struct

from ...compiler import VERSION, decoding, errors
from ...compiler.api import compiles
from ...compiler.api.protocols import CLIENTS, PROTOCOL_HEADER, number_in
from ...compiler.process.fork_safe_lock import ForkSafeLock
from ..settings import ClientSettings, CredentialsWarning
from .sign_in.bearer import Bearer

JSON_BYTES = 16 << 20
"""Limit of a response that is no artifact."""
QUICK_SECONDS = 10.0
"""Deadline of a call that the gateway answers at once."""
SLOW_SECONDS = 120.0
_TRIES = 3
"""Tries of a request that the service answers with Overloaded or Unavailable."""
BLACKHOLE_SECONDS = 15.0
"""After a connect timeout, calls fail at once for so long, so that a model of twenty graphs waits for one timeout."""
_STALE = (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError, httpx2.CloseError)
"""Raised if the server has closed a connection between two requests."""
_SERIAL_DIGITS = 15
_BY_STATUS: Mapping[int, type[errors.RelayError]] = {
    401: errors.Unauthenticated,
    403: errors.Forbidden,
    404: errors.NotFound,
    413: errors.LimitExceeded,
    429: errors.Overloaded,
    502: errors.Unavailable,
    503: errors.Unavailable,
    504: errors.Unavailable,
}
T = TypeVar("T")


class Deadline:
    """Begins when it is made, and ends `seconds` later."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds left, above 0. Raises DeadlineExceeded."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise errors.DeadlineExceeded(f"no artifact within {self._seconds:g} s")
        return left

    def sleep(self, seconds: float) -> None:
        """Raises DeadlineExceeded at once if the deadline would pass meanwhile."""
        if seconds >= self.remaining():
            raise errors.DeadlineExceeded(f"no artifact within {self._seconds:g} s")
        time.sleep(seconds)


class HttpResponse(NamedTuple):
    """A whole response."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _ErrorResponse(Struct):
    error: compiles.ErrorBody


class Connection:
    """Requests to one gateway. Safe for threads. Connections are reused; a forked child opens its own. `transport`
    replaces the network, for tests."""

    def __init__(self, settings: ClientSettings, transport: httpx2.BaseTransport | None = None) -> None:
        self._settings = settings
        self._transport = transport
        file = settings.token_file
        self._bearer = None if file is None else Bearer(settings, file)
        self._lock = ForkSafeLock()
        self._client: httpx2.Client | None = None
        self._owner = 0
        self._dead_until = 0.0
        self.trust_serial = 0
        """Serial of the gateway's trust document, from the latest response; 0 if there was none."""
        self.behind_edge = False
        """Whether the latest response came through an edge, which answers hits by key from its memory."""
        if (
            (settings.token or file is not None)
            and settings.url.startswith("http://")
            and not settings.loopback
        ):
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

    def request(
        self,
        method: str,
        path: str,
        clock: Deadline,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        limit: int = JSON_BYTES,
    ) -> HttpResponse:
        """One idempotent request and its whole response. Retried if the service is busy. Raises the typed error of a
        response that is not 2xx."""
        for attempt in range(_TRIES):
            answer = self.exchange(method, path, clock, content=content, headers=headers, limit=limit)
            if 200 <= answer.status < 300:
                return answer
            error = error_of(answer.status, answer.body)
            if attempt + 1 == _TRIES or not isinstance(error, errors.Overloaded | errors.Unavailable):
                raise error
            delay = max(_retry_after(answer.headers), backoff(attempt))
            if delay >= clock.remaining():
                raise error
            time.sleep(delay)
        raise AssertionError("the loop returns or raises")

    def exchange(
        self,
        method: str,
        path: str,
        clock: Deadline,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        limit: int = JSON_BYTES,
    ) -> HttpResponse:
        """One request and its whole response, of whatever status. Sent again once if the server had closed the
        reused connection. Raises GatewayUnreachable, DeadlineExceeded."""
        tries = 0
        while True:
            try:
                with self.open(method, path, clock, content=content, headers=headers or {}) as response:
                    body = read_body(response, limit, clock)
                    return HttpResponse(response.status_code, response.headers, body)
            except httpx2.TransportError as error:
                tries += 1
                if tries > 1 or not isinstance(error, _STALE):
                    raise self.unreachable(error, clock) from error

    @contextlib.contextmanager
    def open(
        self,
        method: str,
        path: str,
        clock: Deadline,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str],
        idle: float | None = None,
    ) -> Iterator[httpx2.Response]:
        """A response whose body is still to be read. idle: seconds without a byte before a ReadTimeout (default and
        maximum: the settings'). Raises httpx2.TransportError; Unauthenticated where a sign-in has ended;
        ProtocolMismatch where the gateway is too old for this client."""
        client = self._connected()
        token = self._settings.token if self._bearer is None else self._bearer.token()
        sent = {**headers, "Authorization": f"Bearer {token}"} if token else dict(headers)
        left = clock.remaining()
        idle = min(idle or self._settings.idle_timeout, self._settings.idle_timeout, left)
        timeout = httpx2.Timeout(idle, connect=min(self._settings.connect_timeout, left), pool=left)
        url = self._settings.url + path
        with client.stream(method, url, content=content, headers=sent, timeout=timeout) as response:
            if response.is_redirect:
                raise errors.GatewayUnreachable(
                    f"{self._settings.url} redirects elsewhere; redirects are not followed, so that the "
                    "token goes to no other host",
                    hint="Set TORCHRELAY_URL to the gateway's final address",
                )
            if response.headers.get("content-encoding", "identity") != "identity":
                # A proxy compresses, unasked. A small body could expand without bounds.
                raise errors.GatewayUnreachable(
                    f"something before {self._settings.url} compresses its answers",
                    hint="Have the proxy pass them on as they are",
                )
            self._check_protocol(response.headers.get(PROTOCOL_HEADER))
            serial = response.headers.get("x-torchrelay-trust", "")
            if serial.isdecimal() and len(serial) <= _SERIAL_DIGITS:
                self.trust_serial = int(serial)
            self.behind_edge = compiles.EDGE_HEADER in response.headers
            yield response

    def _check_protocol(self, header: str | None) -> None:
        try:
            number = number_in(header)
        except ValueError as error:
            raise errors.ProtocolMismatch(f"{self._settings.url} answered {error}") from None
        CLIENTS.check(number, own="this client", other=f"the gateway at {self._settings.url}")

    def _connected(self) -> httpx2.Client:
        if not self._settings.url:
            raise errors.GatewayUnreachable("no gateway is known")
        if time.monotonic() < self._dead_until:
            raise errors.GatewayUnreachable(f"{self._settings.url} did not answer a moment ago")
        with self._lock:
            # A forked child must not use its parent's sockets, nor close them.
            if self._client is None or self._owner != os.getpid():
                self._owner = os.getpid()
                self._client = self._new_client()
            return self._client

    def _new_client(self) -> httpx2.Client:
        _quiet()
        headers = {
            "User-Agent": f"torchrelay/{VERSION}",
            "Accept-Encoding": "identity",
            PROTOCOL_HEADER: str(CLIENTS.number),
        }
        return httpx2.Client(
            headers=headers,
            follow_redirects=False,
            trust_env=not self._settings.loopback,
            verify=self._certificates(),
            transport=self._transport,
        )

    def _certificates(self) -> ssl.SSLContext | bool:
        """The authorities that may sign the gateway's certificate. Raises SettingsError."""
        if self._settings.loopback and self._settings.url.startswith("http://"):
            return False  # there is no certificate to check, and reading the authorities takes 20 ms
        file = self._settings.ca_file
        if file is None:
            return httpx2.create_ssl_context()  # with SSL_CERT_FILE, for a gateway on this machine too
        try:
            return ssl.create_default_context(cafile=str(file))
        except OSError as error:
            raise errors.SettingsError(
                f"the certificates in {file} cannot be read: {error.strerror or error}",
                hint="Correct TORCHRELAY_CA_FILE: certificates in PEM",
            ) from None

    def unreachable(self, error: httpx2.TransportError, clock: Deadline) -> errors.GatewayUnreachable:
        """The typed error for a transport's failure. Raises DeadlineExceeded if the deadline has passed."""
        clock.remaining()
        if isinstance(error, httpx2.ConnectTimeout):
            self._dead_until = time.monotonic() + BLACKHOLE_SECONDS
        reason = str(error) or type(error).__name__
        return errors.GatewayUnreachable(f"{self._settings.url} cannot be reached: {reason}")


def error_of(status: int, body: bytes) -> errors.RelayError:
    """The typed error of a response that is not 2xx; by its status, if the body is not the gateway's."""
    try:
        return rebuild(decoding.from_json(body, type=_ErrorResponse).error)
    except msgspec.MsgspecError:
        kind = _BY_STATUS.get(status, errors.ServiceError)
        return kind(f"the gateway answered HTTP {status}")


def rebuild(error: compiles.ErrorBody) -> errors.RelayError:
    return errors.from_code(error.code, error.message, error.hint)


def read_body(response: httpx2.Response, limit: int, clock: Deadline) -> bytes:
    """A whole body of at most `limit` bytes."""
    parts: list[bytes] = []
    size = 0
    for part in response.iter_bytes():
        size += len(part)
        if size > limit:
            raise errors.ArtifactError(
                f"the gateway's answer has more than {limit} bytes",
                hint="Raise TORCHRELAY_MAX_RESPONSE_BYTES",
            )
        parts.append(part)
        clock.remaining()
    return b"".join(parts)


def decode(body: bytes, type: type[T]) -> T:
    try:
        return decoding.from_json(body, type=type)
    except msgspec.MsgspecError as error:
        raise errors.SchemaMismatch(f"the gateway's answer cannot be read: {error}") from None


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds of a Retry-After header; 0 for none, or for one that is a date."""
    text = headers.get("retry-after", "")
    return float(text) if text.isdecimal() else 0.0


def backoff(attempt: int) -> float:
    """Seconds before the next try: doubles from 0.1 to 2, with jitter so that clients spread out."""
    return min(0.1 * 2.0**attempt, 2.0) * random.uniform(0.5, 1.0)


def _quiet() -> None:
    """Do not log each request in a program that logs at INFO, unless it has set these loggers' levels."""
    for name in ("httpx2", "httpcore2"):
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.WARNING)


# --- JSON calls, pages, jobs -----------------------------------------------------------------------------


class Page(Protocol):
    """One part of a long response. next: the cursor of the next page; '' after the last."""

    @property
    def next(self) -> str: ...


P = TypeVar("P", bound=Page)


class HttpApi:
    """Calls to one gateway, in `namespace` (default: the token's own). Safe for threads. `transport` replaces the
    network, for tests."""

    def __init__(
        self, settings: ClientSettings, transport: httpx2.BaseTransport | None = None, *, namespace: str = ""
    ) -> None:
        self._settings = settings
        self._namespace = namespace
        self._connection = Connection(settings, transport)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _call(
        self,
        method: str,
        path: str,
        type: type[T],
        body: object = None,
        *,
        seconds: float = QUICK_SECONDS,
        limit: int = JSON_BYTES,
    ) -> T:
        """The response as a `type`; `body` is sent as JSON unless it is None. Raises the typed error that the gateway
        answers, GatewayUnreachable or DeadlineExceeded."""
        content = None if body is None else msgspec.json.encode(body)
        response = self._send(method, path, content, "application/json", seconds=seconds, limit=limit)
        return decode(response, type)

    def _send(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        media_type: str = "application/octet-stream",
        *,
        seconds: float,
        limit: int = JSON_BYTES,
    ) -> bytes:
        """The response's body. Raises as `_call`."""
        headers = {} if content is None else {"Content-Type": media_type}
        clock = Deadline(seconds)
        return self._connection.request(
            method, self._scoped(path), clock, content=content, headers=headers, limit=limit
        ).body

    def _pages(
        self, path: str, type: type[P], *, seconds: float = QUICK_SECONDS, limit: int = JSON_BYTES
    ) -> Iterator[P]:
        """Each page of a long response."""
        cursor = ""
        while True:
            part = with_query(path, f"cursor={cursor}")
            page = self._call("GET", part, type, seconds=seconds, limit=limit)
            yield page
            cursor = page.next
            if not cursor:
                return

    def _scoped(self, path: str) -> str:
        return with_query(path, f"namespace={self._namespace}") if self._namespace else path


def with_query(path: str, query: str) -> str:
    return f"{path}{'&' if '?' in path else '?'}{query}"
