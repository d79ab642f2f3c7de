"""Parameters that several routes share: the gateway's parts, the caller's grant for a role, keys."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, Path

from ...access.tokens import Grant
from ..http.authentication import requires
from ..http.event_stream import EventStreams
from ..wiring.gateway import GatewayParts, gateway_of

Gateway = Annotated[GatewayParts, Depends(gateway_of)]

Reader = Annotated[Grant, Depends(requires("read"))]
Compiler = Annotated[Grant, Depends(requires("compile"))]
Tuner = Annotated[Grant, Depends(requires("tune"))]
Trainer = Annotated[Grant, Depends(requires("train"))]
Admin = Annotated[Grant, Depends(requires("admin"))]
Owner = Annotated[Grant, Depends(requires("admin", everywhere=True))]
"""An administrator of all namespaces."""


def _event_streams(gateway: Gateway) -> EventStreams:
    return EventStreams(
        gateway.metrics.streams, gateway.settings.keepalive_seconds, lambda: gateway.state.stopping
    )


Streams = Annotated[EventStreams, Depends(_event_streams)]

CacheKey = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="A request's cache key, 64 hex digits")]
LastEventId = Annotated[str, Header(description="Go on after this event of an earlier stream", max_length=64)]
