"""The base of all clients of the gateway's HTTP API: JSON calls with a deadline, namespaces, pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, Self, TypeVar

import httpx2
import msgspec

from ..settings import ClientSettings
from .connection import JSON_BYTES, Connection, decode
from .deadline import Deadline

QUICK_SECONDS = 10.0
"""Deadline of a call that the gateway answers at once."""
SLOW_SECONDS = 120.0


class Page(Protocol):
    """One part of a long response. next: the cursor of the next page; '' after the last."""

    @property
    def next(self) -> str: ...


T = TypeVar("T")
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
