"""A stream of server-sent events that outlives its connections: a path in; events, each once, out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import httpx2

from ...compiler.errors import GatewayUnreachable, Overloaded, RelayError, Unavailable
from .connection import JSON_BYTES, Connection, backoff, error_of, read_body
from .deadline import Deadline
from .server_sent_events import EventParser, ServerSentEvent

T = TypeVar("T")

_FOLLOW_SECONDS = 366 * 86400.0
UNREACHABLE_SECONDS = 120.0
"""A gateway that is away for so long is given up; its job is not."""


def follow_events(
    connection: Connection,
    path: str,
    told: Callable[[ServerSentEvent], T | None],
    ended: Callable[[], bool],
    *,
    after: str = "",
    on_trouble: Callable[[RelayError], None] | None = None,
) -> Iterator[T]:
    """What `told` makes of each event behind `after` (None: nothing), until the stream ends and `ended` says that it
    was the end. A stream that breaks is taken up where it broke; on_trouble hears why. Raises NotFound;
    GatewayUnreachable after two minutes without a gateway."""
    attempt, heard = 0, time.monotonic()
    clock = Deadline(_FOLLOW_SECONDS)
    while True:
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": after} if after else {})}
        parser = EventParser()
        trouble: RelayError | None = None
        try:
            with connection.open("GET", path, clock, headers=headers) as response:
                if response.status_code != 200:
                    raise error_of(response.status_code, read_body(response, JSON_BYTES, clock))
                for chunk in response.iter_bytes():
                    heard, attempt = time.monotonic(), 0
                    for event in parser.feed(chunk):
                        after = event.id or after
                        found = told(event)
                        if found is not None:
                            yield found
            if ended():
                return
        except httpx2.TransportError as error:
            trouble = connection.unreachable(error, clock)
        except (GatewayUnreachable, Overloaded, Unavailable) as error:
            trouble = error
        if trouble is not None:
            if time.monotonic() - heard > UNREACHABLE_SECONDS:
                raise trouble
            if on_trouble is not None and attempt == 0:
                on_trouble(trouble)
        attempt += 1
        time.sleep(backoff(attempt))
