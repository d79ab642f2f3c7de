"""The HTTP protocol under every server of the service: uvicorn's, with limits on connections and on a request's head:
seconds, bytes. It parses with httptools, or where that is missing, slower, with h11.

Uvicorn has no limit on the wait for a connection's first byte or for the end of a head, so a few thousand silent
sockets would use up a gateway's descriptors. httptools has none on a head's bytes. Bodies have their own limits
(admission/admit.py).
"""

from __future__ import annotations

import asyncio
import functools
import socket
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ...base.budgets import Connections, most_connections
from ...base.settings import ServiceSettings

_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: %d\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
)
_HEAD_BYTES = 64 << 10
_SHUTDOWN_SECONDS = 5
"""How long answers in progress may take once the server stops."""
_IDLE_SECONDS = 75
"""An idle connection is closed after this time. Clients (httpx: 5 s) and load balancers (60 s) close theirs earlier, so
they do not send a request into a connection that is being closed."""


def server_options(settings: ServiceSettings) -> dict[str, Any]:
    """uvicorn.Config's, of any server: its clients may be slow, or many."""
    protocol = functools.partial(
        HeadLimitsProtocol,
        head_seconds=settings.body_timeout_seconds,
        connections=Connections(most_connections(settings)),
        retry_after=settings.retry_after_seconds,
    )
    return {
        "http": protocol,
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "forwarded_allow_ips": settings.forwarded_allow_ips,
        "timeout_keep_alive": _IDLE_SECONDS,
        "timeout_graceful_shutdown": _SHUTDOWN_SECONDS,
    }


class HeadLimitsProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Refuses a connection past the most that there may be. Closes one whose next head, or what follows a request, has
    more than 64 KiB. Closes one on which no request has begun `head_seconds` after it opened, after the first byte that
    follows an answer, or after the answer to a request whose body has not come. (Silence between whole requests is
    uvicorn's own keep-alive limit.)"""

    def __init__(
        self,
        *arguments: Any,
        head_seconds: float,
        connections: Connections,
        retry_after: int,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._head_seconds = head_seconds
        self._connections = connections
        self._retry_after = retry_after
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        """Bytes that have come since the last request began."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        _send_at_once(transport)
        if not self._connections.add(self):
            transport.write(_FULL % self._retry_after)
            transport.close()
            return
        self._start_timer()

    def give_way(self) -> None:
        self._stop_timer()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answering():
            self._connections.works(self)
            self._head_bytes = 0
            self._stop_timer()
            return
        self._head_bytes += len(data)
        if self._head_bytes > _HEAD_BYTES:
            self.transport.close()
        if self._timer is None:
            self._start_timer()

    def on_response_complete(self) -> None:
        cut = self.cycle is not None and self.cycle.more_body
        super().on_response_complete()
        if not self._answering():
            self._connections.rests(self)
        if cut and self._timer is None:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._connections.remove(self)
        super().connection_lost(exc)

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._head_seconds, self._close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        self._timer = None
        if not self._answering():
            self.transport.close()


def _send_at_once(transport: asyncio.Transport) -> None:
    """Head and body are two writes; the kernel would hold the second until the client has acknowledged the first, which
    it does after 40 ms. asyncio sees to that for sockets that it has made, not for a listener that is given."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
