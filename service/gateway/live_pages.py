"""Parts of pages that renew themselves: a stream of HTML, whenever it has changed."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from fastapi import Request, Response

from .http.event_stream import ReadEvents, ServerEvent
from .parts import GatewayParts

_LOOK_SECONDS = 2.0
"""How often a live page looks whether anything has changed."""
_STREAM_SECONDS = 60.0


async def part(render: Callable[[], str]) -> ServerEvent:
    """The event that brings what `render` returns, called in a thread."""
    data = (await asyncio.to_thread(render)).replace("\n", "\ndata: ").encode()
    return ServerEvent("", f"{zlib.crc32(data)}-0", data)


def parts(
    request: Request, gateway: GatewayParts, make: Callable[[], Awaitable[ServerEvent]], last_event_id: str
) -> Response:
    """What `make` returns, as often as it changes. The stream ends after _STREAM_SECONDS: the browser asks again, and
    its token is checked again."""
    ends = time.monotonic() + _STREAM_SECONDS

    @asynccontextmanager
    async def reader() -> AsyncIterator[ReadEvents]:
        async def read(after: str) -> tuple[list[ServerEvent], bool]:
            made = await make()
            return [made] if made.id != after else [], time.monotonic() > ends

        yield read

    streams = replace(gateway.event_streams, keepalive_seconds=_LOOK_SECONDS)
    return streams.response(request, reader(), "", last_event_id)
