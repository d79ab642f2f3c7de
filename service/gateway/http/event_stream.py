"""Server-sent events: frames, keep-alive comments, and the end of a stream when the gateway stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import StreamingResponse
from prometheus_client import Gauge

from ...base.async_tasks import is_set_within
from ...base.budgets import HELD, Held
from .errors import documented

_MEDIA_TYPE = "text/event-stream"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class ServerEvent(NamedTuple):
    name: str
    id: str
    data: bytes


class EventBatch(NamedTuple):
    """What is new in a stream. `ended`: nothing follows. `changed` is set when there may be more."""

    events: list[ServerEvent]
    ended: bool
    changed: asyncio.Event


def event_stream_responses() -> dict[int | str, dict[str, Any]]:
    """`responses=` of a route that answers with an event stream."""
    content = {_MEDIA_TYPE: {"schema": {"type": "string"}}}
    return {**documented(), 200: {"description": "Events", "content": content}}


@dataclass(frozen=True)
class EventStreams:
    """Answers with event streams. `count`: how many are open. `stopping`: whether the gateway stops."""

    count: Gauge
    keepalive_seconds: float
    stopping: Callable[[], bool]

    def response(self, request: Request, batches: AsyncGenerator[EventBatch]) -> StreamingResponse:
        """Sends `batches` until one has ended or the gateway stops, with comments during silence. Raises Overloaded."""
        held: Held = request.scope[HELD]
        held.stream()
        return StreamingResponse(self._frames(batches), headers=_HEADERS, media_type=_MEDIA_TYPE)

    async def _frames(self, batches: AsyncGenerator[EventBatch]) -> AsyncIterator[bytes]:
        with self.count.track_inprogress():
            async with aclosing(batches):
                yield b"retry: 1000\n\n"
                async for events, ended, changed in batches:
                    for name, event_id, data in events:
                        yield b"event: %s\nid: %s\ndata: %s\n\n" % (name.encode(), event_id.encode(), data)
                    if ended or self.stopping():
                        return
                    if not events and not await is_set_within(changed, self.keepalive_seconds):
                        yield b": keep-alive\n\n"
                    if self.stopping():
                        return
