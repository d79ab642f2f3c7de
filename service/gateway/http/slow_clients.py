"""The HTTP protocol under the gateway: uvicorn's, with a limit on how long a request's head may take.

Uvicorn waits for ever for the first byte of a connection and for the end of a head, so that a few thousand
silent sockets use up a gateway's descriptors. Bodies have their own limit (admission/admit.py).
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
        self._impatience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answering():
            self._stop_waiting()
        elif self._impatience is None:
            self._wait()

    def on_response_complete(self) -> None:
        cut = self.cycle is not None and self.cycle.more_body
        super().on_response_complete()
        if cut and self._impatience is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._impatience = asyncio.get_running_loop().call_later(self._head_seconds, self._give_up)

    def _stop_waiting(self) -> None:
        if self._impatience is not None:
            self._impatience.cancel()
            self._impatience = None

    def _give_up(self) -> None:
        self._impatience = None
        if not self._answering():
            self.transport.close()
