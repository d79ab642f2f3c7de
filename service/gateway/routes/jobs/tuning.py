"""/v1/tunes: batch jobs, begun, listed, followed, cancelled and resumed; what they have found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

import structlog
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from redis.exceptions import RedisError

from .....compiler.api.tuning.jobs import (
    TUNE_ID,
    GraphStored,
    TuneJob,
    TuneReply,
    TuneRequest,
    TuneResultsReply,
    TunesReply,
)
from .....compiler.errors import MalformedRequest, SourceForbidden
from .....compiler.request import codec
from ....access.audit import AuditAction, AuditEvent
from ....access.tokens import Grant
from ....jobs.records import JobTransition
from ....jobs.tuning.records import notification_name
from ....storage.redis.streams import STREAM_START, is_stream_id
from ...http.authentication import requires
from ...http.errors import documented
from ...http.json_body import decode_json
from ...http.json_reply import json_answer, json_reply, json_request
from ...wiring.gateway import GatewayParts, gateway_of
from ...wiring.tenants import TenantParts

log = structlog.get_logger(__name__)

router = APIRouter(tags=["batch tuning"])

_BODY_BYTES = 16 << 20
_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_BINARY = {"schema": {"type": "string", "format": "binary"}}

Job = Annotated[str, Path(pattern=TUNE_ID, description="A batch job")]
GatewayHere = Annotated[GatewayParts, Depends(gateway_of)]
Reader = Annotated[Grant, Depends(requires("read"))]
Tuner = Annotated[Grant, Depends(requires("tune"))]


@router.post(
    "/v1/tunes",
    summary="Begin a batch job, which searches kernels while workers have nothing else to do",
    responses={**documented(413), **json_reply("TuneJob", status=202)},
    response_class=Response,
    openapi_extra=json_request("TuneRequest"),
)
async def begin(request: Request, gateway: GatewayHere, tuner: Tuner) -> Response:
    tenant = await gateway.tenants.of(tuner.namespace)
    asked = decode_json(await gateway.intake.read(request, _BODY_BYTES), TuneRequest)
    loaded = await tenant.tune_intake.admit(asked, tuner)
    await _log(tenant, tuner, "tune_begun", loaded.job)
    await tenant.tunes.create(loaded)
    await _look(tenant)
    return json_answer(await tenant.tunes.job(loaded.job.id), 202)


@router.post(
    "/v1/tunes/graphs",
    summary="Keep a graph's request, so that a batch job may name it by key",
    responses={**documented(413), **json_reply("GraphStored")},
    response_class=Response,
    openapi_extra={"requestBody": {"required": True, "content": {codec.GRAPH_MEDIA_TYPE: _BINARY}}},
)
async def keep_graph(request: Request, gateway: GatewayHere, tuner: Tuner) -> Response:
    tenant = await gateway.tenants.of(tuner.namespace)
    body = await gateway.intake.read(request)
    ask = await gateway.intake.parse(body)
    await tenant.kept.keep(ask.key, body)
    return json_answer(GraphStored(ask.key))


@router.get(
    "/v1/tunes",
    summary="Batch jobs, the newest first",
    responses={**documented(), **json_reply("TunesReply")},
    response_class=Response,
)
async def jobs(gateway: GatewayHere, reader: Reader) -> Response:
    tenant = await gateway.tenants.of(reader.namespace)
    return json_answer(TunesReply(await tenant.tunes.jobs()))


@router.get(
    "/v1/tunes/{job}",
    summary="A batch job and how far each of its items is",
    responses={**documented(), **json_reply("TuneReply")},
    response_class=Response,
)
async def show(job: Job, gateway: GatewayHere, reader: Reader) -> Response:
    tenant = await gateway.tenants.of(reader.namespace)
    found = await tenant.tunes.job(job)
    return json_answer(TuneReply(found, await tenant.tunes.progress(job)))


@router.get(
    "/v1/tunes/{job}/results",
    summary="What a batch job has found so far, a page at a time, in the order of its items",
    responses={**documented(), **json_reply("TuneResultsReply")},
    response_class=Response,
)
async def results(
    job: Job,
    gateway: GatewayHere,
    reader: Reader,
    cursor: Annotated[
        str, Query(pattern="^([0-9]{1,9})?$", description="`next` of the page before; '' begins")
    ] = "",
) -> Response:
    tenant = await gateway.tenants.of(reader.namespace)
    found, following = await tenant.tunes.results(job, int(cursor or 0))
    return json_answer(TuneResultsReply(found, str(following) if following else ""))


@router.post(
    "/v1/tunes/{job}/cancel",
    summary="Search no more of a batch job; what it has found stays",
    responses={**documented(), **json_reply("TuneJob")},
    response_class=Response,
)
async def cancel(job: Job, gateway: GatewayHere, tuner: Tuner) -> Response:
    return await _turn(gateway, tuner, job, "cancel", "tune_cancelled")


@router.post(
    "/v1/tunes/{job}/resume",
    summary="Go on with a batch job that was cancelled, or has items that failed or that its budget left out",
    description="What it has found is not searched again. Its budget counts from now on.",
    responses={**documented(), **json_reply("TuneJob")},
    response_class=Response,
)
async def resume(job: Job, gateway: GatewayHere, tuner: Tuner) -> Response:
    return await _turn(gateway, tuner, job, "resume", "tune_resumed")


async def _turn(
    gateway: GatewayParts, tuner: Grant, job: str, what: JobTransition, action: AuditAction
) -> Response:
    tenant = await gateway.tenants.of(tuner.namespace)
    found = await tenant.tunes.job(job)
    if what == "resume" and found.sources and not tuner.source:
        raise SourceForbidden(
            f"the token of {tuner.name!r} may not have source compiled: the user-written Triton kernel "
            f"{found.sources[0]!r} of this job"
        )
    await _log(tenant, tuner, action, found)
    await tenant.tunes.change(job, what, detail=f"{what} by {tuner.name}" if what == "cancel" else "")
    await _look(tenant)
    return json_answer(await tenant.tunes.job(job))


@router.get(
    "/v1/tunes/{job}/events",
    summary="Follow a batch job",
    description="Server-sent events. `item`: a TuneProgress, when an item's search begins and when it ends. `job`: "
    "`{state}`, when it changes. The stream ends once the job is done or cancelled. Comments keep it alive.",
    responses={
        **documented(),
        200: {"description": "Events", "content": {"text/event-stream": {"schema": {"type": "string"}}}},
    },
    response_class=Response,
)
async def events(
    job: Job,
    gateway: GatewayHere,
    reader: Reader,
    last_event_id: Annotated[
        str, Header(description="Go on after this event of an earlier stream", max_length=64)
    ] = "",
) -> Response:
    if last_event_id and not is_stream_id(last_event_id):
        raise MalformedRequest("Last-Event-ID is not the id of an event of this service")
    tenant = await gateway.tenants.of(reader.namespace)
    await tenant.tunes.job(job)
    return StreamingResponse(
        _stream(gateway, tenant, job, last_event_id or STREAM_START),
        headers=_STREAM_HEADERS,
        media_type="text/event-stream",
    )


async def _stream(gateway: GatewayParts, tenant: TenantParts, job: str, after: str) -> AsyncIterator[bytes]:
    """The events after `after`, until the job has ended and all are told."""
    with gateway.metrics.streams.track_inprogress():
        async with gateway.wakes.woken(notification_name(job)) as wake:
            yield b"retry: 1000\n\n"
            while not gateway.state.stopping:
                wake.clear()
                try:
                    state = (await tenant.tunes.job(job)).state
                    news = await tenant.tunes.events(job, after)
                except RedisError as error:
                    log.warning("events_delayed", job=job, error=str(error))
                    state, news = "", []
                for event in news:
                    after = event.id
                    yield b"event: %s\nid: %s\ndata: %s\n\n" % (
                        event.name.encode(),
                        event.id.encode(),
                        event.data,
                    )
                if news:
                    continue
                if state in ("done", "cancelled"):
                    return
                try:
                    async with asyncio.timeout(gateway.settings.keepalive_seconds):
                        await wake.wait()
                except TimeoutError:
                    yield b": keep-alive\n\n"


async def _look(tenant: TenantParts) -> None:
    """Begin at once where this gateway can; else it, or another, does so soon."""
    try:
        await tenant.driver.take_over()
    except RedisError as error:
        log.warning("tunes_not_looked_at", error=str(error))


async def _log(tenant: TenantParts, tuner: Grant, action: AuditAction, job: TuneJob) -> None:
    """Before it happens: no job begins without an entry, whatever fails after it."""
    source = f"; source: {', '.join(job.sources)}" if job.sources else ""
    detail = f"{job.id} {job.name[:60]}, {sum(job.items.values())} items{source}"[:200]
    await tenant.audit.append(AuditEvent(action=action, name=tuner.name, token=tuner.id, detail=detail))
