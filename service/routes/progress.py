"""GET /v1/compiles/{key} and its events: how far a compile is, once or as a stream."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated

import structlog
from fastapi import APIRouter, Depends, Header, Response
from fastapi.responses import StreamingResponse
from redis.exceptions import RedisError

from ...compiler import wire
from ...compiler.errors import MalformedRequest, NotFound, Unavailable
from ..auth import Grant, requires
from ..events import START, Event, Glance, is_event_id
from ..gateway import Gateway, gateway_of
from ..problems import documented
from .artifacts import Key

log = structlog.get_logger(__name__)
router = APIRouter(tags=["compile"])

_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_LOST_LEASE_PERIODS = 3
"""A compile without a lease for this many periods, that nobody can take over, is given up."""


async def status_of(gateway: Gateway, key: str) -> wire.CompileStatus:
    """The compile's state and history. Raises NotFound for a key that was not asked for lately."""
    glance = await gateway.events.glance(key)
    history = [event.progress for event in glance.events]
    if not history:
        if not glance.cached:
            raise NotFound(f"there is no compile {key}")
        history = [wire.Progress("done", 0.0, "from the cache")]
    return wire.CompileStatus(
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
        **documented(404, 422),
        200: {
            "description": "Its stage and history",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/CompileStatus"}}},
        },
    },
    response_class=Response,
)
async def compile_status(
    key: Key,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    _: Annotated[Grant, Depends(requires("read"))],
) -> Response:
    body = wire.to_json(await status_of(gateway, key))
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})


@router.get(
    "/v1/compiles/{key}/events",
    summary="Follow a compile",
    description="Server-sent events: the event's name is the stage, its data a Progress (with `error` once "
    "failed). The stream ends after `done` or `failed`. Comments are sent to keep it alive.",
    responses={
        **documented(404, 422),
        200: {"description": "Events", "content": {"text/event-stream": {"schema": {"type": "string"}}}},
    },
    response_class=Response,
)
async def compile_events(
    key: Key,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    _: Annotated[Grant, Depends(requires("read"))],
    last_event_id: Annotated[
        str, Header(description="Go on after this event of an earlier stream", max_length=64)
    ] = "",
) -> Response:
    if last_event_id and not is_event_id(last_event_id):
        raise MalformedRequest("Last-Event-ID is not the id of an event of this service")
    first = await gateway.events.glance(key)
    if not (first.events or first.cached or first.leased or gateway.dispatcher.holds(key)):
        raise NotFound(f"there is no compile {key}")
    return StreamingResponse(
        _stream(gateway, key, last_event_id or START), headers=_STREAM_HEADERS, media_type="text/event-stream"
    )


async def _stream(gateway: Gateway, key: str, after: str) -> AsyncIterator[bytes]:
    """The events after `after`, until the last one; takes a compile over when its holder is found dead."""
    settings, events = gateway.settings, gateway.events
    waiter = uuid.uuid4().hex
    patience = settings.lease_seconds * _LOST_LEASE_PERIODS
    pause = min(settings.keepalive_seconds, settings.lease_seconds / 2)
    well = time.monotonic()  # when the compile was last known to be on its way
    spoke = time.monotonic()
    with gateway.metrics.streams.track_inprogress():
        try:
            async with events.woken(key) as wake:
                yield b"retry: 1000\n\n"
                while not gateway.state.stopping:
                    wake.clear()
                    try:
                        glance = await events.glance(key, after)
                        for event in glance.events:
                            yield _frame(event)
                            after, spoke = event.id, time.monotonic()
                            if event.last:
                                return
                        if glance.cached:
                            yield _data("done", after, wire.Progress("done", 0.0, "from the cache"), None)
                            return
                        if await _on_its_way(gateway, key, glance):
                            well = time.monotonic()
                        await events.wait_here(key, waiter, settings.abandon_seconds)
                    except RedisError as error:
                        log.warning("events_delayed", key=key, error=str(error))
                    if time.monotonic() - well > patience:
                        yield _lost(after)
                        return
                    if time.monotonic() - spoke >= settings.keepalive_seconds:
                        yield b": keep-alive\n\n"
                        spoke = time.monotonic()
                    await _nap(wake, min(pause, settings.keepalive_seconds - (time.monotonic() - spoke)))
        finally:
            try:
                await events.leave(key, waiter)
            except RedisError as error:
                log.warning("waiter_not_removed", key=key, error=str(error))  # it expires by itself


async def _on_its_way(gateway: Gateway, key: str, glance: Glance) -> bool:
    if glance.leased or gateway.dispatcher.holds(key):
        return True
    return await gateway.dispatcher.take_over(key)


async def _nap(wake: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(max(seconds, 0.01)):
            await wake.wait()
    except TimeoutError:
        return


def _lost(after: str) -> bytes:
    error = Unavailable("the service lost track of this compile", hint="Ask for it again")
    body = wire.ErrorBody(error.code, error.message, error.advice)
    return _data("failed", after, wire.Progress("failed", 0.0, error.message), body)


def _frame(event: Event) -> bytes:
    return _data(event.progress.stage, event.id, event.progress, event.error)


def _data(stage: str, event_id: str, progress: wire.Progress, error: wire.ErrorBody | None) -> bytes:
    fields: dict[str, object] = {
        "stage": progress.stage,
        "seconds": progress.seconds,
        "detail": progress.detail,
    }
    if error is not None:
        fields["error"] = error
    return b"event: %s\nid: %s\ndata: %s\n\n" % (stage.encode(), event_id.encode(), wire.to_json(fields))
