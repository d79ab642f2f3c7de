"""GET /v1/compiles/{key} and its events: how far a compile is, once or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Header, Response
from fastapi.responses import StreamingResponse

from .....compiler.api import compiles
from .....compiler.errors import MalformedRequest, NotFound, Unavailable
from .....compiler.request import codec
from ....access.tokens import Grant
from ....compile.events import CompileEvent
from ....storage.redis.streams import STREAM_START, is_stream_id
from ...http.authentication import requires
from ...http.errors import documented
from ...wiring.gateway import GatewayParts, gateway_of
from ...wiring.tenants import TenantParts
from ..parameters import CacheKey

router = APIRouter(tags=["compile"])

_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


async def status_of(tenant: TenantParts, key: str) -> compiles.CompileStatus:
    """The compile's state and history. Raises NotFound for a key that was not asked for lately."""
    glance = await tenant.events.glance(key)
    history = [event.progress for event in glance.events]
    if not history:
        if not glance.cached:
            raise NotFound(f"there is no compile {key}")
        history = [compiles.CompileProgress("done", 0.0, "from the cache")]
    return compiles.CompileStatus(
        key=key,
        stage=history[-1].stage,
        seconds=history[-1].seconds,
        events=f"/v1/compiles/{key}/events",
        artifact=f"/v1/artifacts/{key}",
        error=glance.events[-1].error if glance.events else None,
        history=history,
    )


@router.get(
    "/v1/compiles/{key}",
    summary="How far a compile is",
    responses={
        **documented(),
        200: {
            "description": "Its stage and history",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/CompileStatus"}}},
        },
    },
    response_class=Response,
)
async def compile_status(
    key: CacheKey,
    gateway: Annotated[GatewayParts, Depends(gateway_of)],
    grant: Annotated[Grant, Depends(requires("read"))],
) -> Response:
    tenant = await gateway.tenants.of(grant.namespace)
    body = codec.to_json(await status_of(tenant, key))
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})


@router.get(
    "/v1/compiles/{key}/events",
    summary="Follow a compile",
    description="Server-sent events: the event's name is the stage, its data a Progress (with `error` once "
    "failed). The stream ends after `done` or `failed`. Comments are sent to keep it alive.",
    responses={
        **documented(),
        200: {"description": "Events", "content": {"text/event-stream": {"schema": {"type": "string"}}}},
    },
    response_class=Response,
)
async def compile_events(
    key: CacheKey,
    gateway: Annotated[GatewayParts, Depends(gateway_of)],
    grant: Annotated[Grant, Depends(requires("read"))],
    last_event_id: Annotated[
        str, Header(description="Go on after this event of an earlier stream", max_length=64)
    ] = "",
) -> Response:
    if last_event_id and not is_stream_id(last_event_id):
        raise MalformedRequest("Last-Event-ID is not the id of an event of this service")
    tenant = await gateway.tenants.of(grant.namespace)
    first = await tenant.events.glance(key)
    if not (first.events or first.cached or first.leased or tenant.dispatcher.holds(key)):
        raise NotFound(f"there is no compile {key}")
    return StreamingResponse(
        _stream(gateway, tenant, key, last_event_id or STREAM_START),
        headers=_STREAM_HEADERS,
        media_type="text/event-stream",
    )


async def _stream(gateway: GatewayParts, tenant: TenantParts, key: str, after: str) -> AsyncIterator[bytes]:
    """The events after `after`, until the last one; it comes again for a client that had it already."""
    pause = gateway.settings.keepalive_seconds
    with gateway.metrics.streams.track_inprogress():
        async with tenant.watches.watch(key) as watch:
            yield b"retry: 1000\n\n"
            while not gateway.state.stopping:
                changed, ending, news = watch.changed, watch.ending, watch.after(after)
                if ending == "told" and not news:
                    news = watch.events[-1:]
                for event in news:
                    yield _frame(event)
                    after = event.id
                if ending == "cached" or ending == "lost":
                    yield _ending(ending, after)
                if ending:
                    return
                try:
                    async with asyncio.timeout(pause):
                        await changed.wait()
                except TimeoutError:
                    yield b": keep-alive\n\n"


def _ending(ending: Literal["cached", "lost"], after: str) -> bytes:
    """The last event of a compile whose own is gone."""
    if ending == "cached":
        return _data("done", after, compiles.CompileProgress("done", 0.0, "from the cache"), None)
    error = Unavailable("the service lost track of this compile", hint="Ask for it again")
    body = compiles.ErrorBody(error.code, error.message, error.advice)
    return _data("failed", after, compiles.CompileProgress("failed", 0.0, error.message), body)


def _frame(event: CompileEvent) -> bytes:
    return _data(event.progress.stage, event.id, event.progress, event.error)


def _data(
    stage: str, event_id: str, progress: compiles.CompileProgress, error: compiles.ErrorBody | None
) -> bytes:
    fields: dict[str, object] = {
        "stage": progress.stage,
        "seconds": progress.seconds,
        "detail": progress.detail,
    }
    if error is not None:
        fields["error"] = error
    return b"event: %s\nid: %s\ndata: %s\n\n" % (stage.encode(), event_id.encode(), codec.to_json(fields))
