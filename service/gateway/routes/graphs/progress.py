"""Stage 9: GET /v1/compiles/{key} and its events say how far a compile is, once or as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import msgspec
from fastapi import Request, Response

from .....compiler.api import compiles
from .....compiler.errors import NotFound, Unavailable
from .....compiler.request import codec
from ....compile.events import CompileEvent
from ....storage.redis.streams import STREAM_START
from ...http.event_stream import ReadEvents, ServerEvent, event_stream_responses
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
    reader = _reader(tenant, key)
    return gateway.event_streams.response(request, reader, tenant.followers.notification(key), last_event_id)


@asynccontextmanager
async def _reader(tenant: GatewayTenant, key: str) -> AsyncIterator[ReadEvents]:
    """Reads events until the last one, which is sent again to a client that has it already."""
    async with tenant.followers.watch(key) as watch:
        told = 0

        async def read(after: str) -> tuple[list[ServerEvent], bool]:
            nonlocal told
            after = after or STREAM_START
            new = watch.after(after)
            if watch.ending == "finished" and not new:
                new = watch.events[-1:]
            events = [_event(event.id, event.progress, event.error) for event in new]
            if not new and watch.events and watch.position not in (0, told):
                told = watch.position
                events.append(_position(told, watch.events[-1]))
            if watch.ending == "cached" or watch.ending == "lost":
                events.append(_end(watch.ending, events[-1].id if events else after))
            return events, bool(watch.ending)

        yield read


def _end(ending: Literal["cached", "lost"], after: str) -> ServerEvent:
    """The last event of a compile whose own last event is not stored any more."""
    if ending == "cached":
        return _event(after, compiles.CompileProgress("done", 0.0, "from the cache"), None)
    error = Unavailable("the service has lost this compile", hint="Send the request again")
    body = compiles.ErrorBody(error.code, error.message, error.advice)
    return _event(after, compiles.CompileProgress("failed", 0.0, error.message), body)


def _position(position: int, last: CompileEvent) -> ServerEvent:
    """Tells of the queue. The id is that of the last event: this one is not stored."""
    detail = f"{position - 1} ahead of it in the queue" if position > 1 else "the next in the queue"
    return _event(last.id, msgspec.structs.replace(last.progress, detail=detail), None)


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
