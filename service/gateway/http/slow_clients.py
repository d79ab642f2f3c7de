"""The HTTP protocol under the gateway: uvicorn's, with a limit on how long a request's head may take.

Uvicorn has no limit on the wait for a connection's first byte or for the end of a head, so a few thousand silent
sockets would use up a gateway's descriptors. Bodies have their own limit (admission/admit.py).
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol


class HeadTimeoutProtocol(AutoHTTPProtocol):
    """Closes a connection on which no request has begun `head_seconds` after it opened, after the first byte that
    follows an answer, or after the answer to a request whose body has not come. (Silence between whole requests is
    uvicorn's own keep-alive limit.)"""

    def __init__(self, *arguments: Any, head_seconds: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_seconds = head_seconds
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answering():
            self._stop_timer()
        elif self._timer is None:
            self._start_timer()

    def on_response_complete(self) -> None:
        cut = self.cycle is not None and self.cycle.more_body
        super().on_response_complete()
        if cut and self._timer is None:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
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
