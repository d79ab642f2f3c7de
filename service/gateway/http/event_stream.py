"""Server-sent events: read from the client's last one on, with keep-alive comments, until the gateway stops."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import StreamingResponse
from prometheus_client import Gauge

from ...base.async_tasks import is_set_within
from ...base.budgets import HELD, Held
from ...storage.redis.notifications import Notifications
from .errors import documented

_MEDIA_TYPE = "text/event-stream"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class ServerEvent(NamedTuple):
    name: str
    id: str
    data: bytes


ReadEvents = Callable[[str], Awaitable[tuple[list[ServerEvent], bool]]]
"""Reads the events after one with this id ('': all); also whether none will follow these."""


def event_stream_responses() -> dict[int | str, dict[str, Any]]:
    """`responses=` of a route that answers with an event stream."""
    content = {_MEDIA_TYPE: {"schema": {"type": "string"}}}
    return {**documented(), 200: {"description": "Events", "content": content}}


@dataclass(frozen=True)
class EventStreams:
    """Answers with event streams, for compiles and jobs alike. `count`: how many are open. `stopping`: whether the
    gateway stops."""

    count: Gauge
    keepalive_seconds: float
    notifications: Notifications
    stopping: Callable[[], bool]

    def response(
        self,
        request: Request,
        reader: AbstractAsyncContextManager[ReadEvents],
        notification: str,
        last_event_id: str,
    ) -> StreamingResponse:
        """Sends the events after the client's last one until none follow or the gateway stops, with comments during
        silence. They are read at each notification of this name. Raises Overloaded."""
        held: Held = request.scope[HELD]
        held.stream()
        frames = self._frames(reader, notification, last_event_id)
        return StreamingResponse(frames, headers=_HEADERS, media_type=_MEDIA_TYPE)

    async def _frames(
        self, reader: AbstractAsyncContextManager[ReadEvents], notification: str, after: str
    ) -> AsyncIterator[bytes]:
        with self.count.track_inprogress():
            async with reader as read, self.notifications.woken(notification) as changed:
                yield b"retry: 1000\n\n"
                while not self.stopping():
                    changed.clear()
                    events, ended = await read(after)
                    for name, event_id, data in events:
                        after = event_id
                        yield b"event: %s\nid: %s\ndata: %s\n\n" % (name.encode(), event_id.encode(), data)
                    if ended:
                        return
                    if not events and not await is_set_within(changed, self.keepalive_seconds):
                        yield b": keep-alive\n\n"
