"""Stage 9: GET /v1/compiles/{key} and its events say how far a compile is, once or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Literal

from fastapi import Request, Response

from .....compiler.api import compiles
from .....compiler.errors import NotFound, Unavailable
from .....compiler.request import codec
from ....storage.redis.streams import STREAM_START
from ...http.event_stream import EventBatch, ServerEvent, event_stream_responses
from ...http.json_routes import JsonRouter
from ...parts import GatewayTenant
from ..parameters import CacheKey, Gateway, LastEventId, ReaderTenant

router = JsonRouter("compile")


async def status_of(tenant: GatewayTenant, key: str) -> compiles.CompileStatus:
    """The compile's state and history. Raises NotFound for a key without a recent request."""
    snapshot = await tenant.events.snapshot(key)
    history = [event.progress for event in snapshot.events]
    if not history:
        if not snapshot.cached:
            raise NotFound(f"there is no compile {key}")
        history = [compiles.CompileProgress("done", 0.0, "from the cache")]
    return compiles.CompileStatus(
        key=key,
        stage=history[-1].stage,
        seconds=history[-1].seconds,
        events=f"/v1/compiles/{key}/events",
        artifact=f"/v1/artifacts/{key}",
        error=snapshot.events[-1].error if snapshot.events else None,
        history=history,
    )


@router.json("GET", "/v1/compiles/{key}", "How far a compile is", reply="Its stage and history")
async def compile_status(key: CacheKey, tenant: ReaderTenant) -> compiles.CompileStatus:
    return await status_of(tenant, key)


@router.get(
    "/v1/compiles/{key}/events",
    summary="Follow a compile",
    description="Server-sent events: the event's name is the stage, its data a Progress (with `error` once "
    "failed). The stream ends after `done` or `failed`. Comments are sent to keep it alive.",
    responses=event_stream_responses(),
)
async def compile_events(
    request: Request, key: CacheKey, gateway: Gateway, tenant: ReaderTenant, last_event_id: LastEventId = ""
) -> Response:
    first = await tenant.events.snapshot(key)
    if not (first.events or first.cached or first.leased or first.pending):
        raise NotFound(f"there is no compile {key}")
    return gateway.event_streams.response(request, _batches(tenant, key, last_event_id or STREAM_START))


async def _batches(tenant: GatewayTenant, key: str, after: str) -> AsyncGenerator[EventBatch]:
    """The events after `after`, until the last one, which is sent again to a client that has it already."""
    async with tenant.followers.watch(key) as watch:
        while True:
            changed, ending, found = watch.changed, watch.ending, watch.after(after)
            if ending == "finished" and not found:
                found = watch.events[-1:]
            events = [_event(each.id, each.progress, each.error) for each in found]
            if events:
                after = events[-1].id
            if ending == "cached" or ending == "lost":
                events.append(_end(ending, after))
            yield EventBatch(events, bool(ending), changed)


def _end(ending: Literal["cached", "lost"], after: str) -> ServerEvent:
    """The last event of a compile whose own last event is not stored any more."""
    if ending == "cached":
        return _event(after, compiles.CompileProgress("done", 0.0, "from the cache"), None)
    error = Unavailable("the service has lost this compile", hint="Send the request again")
    body = compiles.ErrorBody(error.code, error.message, error.advice)
    return _event(after, compiles.CompileProgress("failed", 0.0, error.message), body)


def _event(
    event_id: str, progress: compiles.CompileProgress, error: compiles.ErrorBody | None
) -> ServerEvent:
    fields: dict[str, object] = {
        "stage": progress.stage,
        "seconds": progress.seconds,
        "detail": progress.detail,
    }
    if error is not None:
        fields["error"] = error
    return ServerEvent(progress.stage, event_id, codec.to_json(fields))
