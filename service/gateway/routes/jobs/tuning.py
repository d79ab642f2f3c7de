"""/v1/tunes: batch jobs, begun, listed, followed, cancelled and resumed; what they have found."""

from __future__ import annotations

from typing import Annotated

import structlog
from fastapi import Path, Query, Request, Response
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
from ...http.event_stream import ServerEvent, event_stream_responses, follow_job
from ...http.json_body import decode_json
from ...http.json_routes import JsonRouter
from ...wiring.gateway import TenantParts
from ..parameters import Gateway, LastEventId, Reader, Streams, Tuner

log = structlog.get_logger(__name__)

router = JsonRouter("batch tuning")

_BODY_BYTES = 16 << 20

Job = Annotated[str, Path(pattern=TUNE_ID, description="A batch job")]


@router.json(
    "POST",
    "/v1/tunes",
    "Begin a batch job, which searches kernels while workers have nothing else to do",
    body=TuneRequest,
    status=202,
)
async def begin(request: Request, gateway: Gateway, tuner: Tuner) -> TuneJob:
    tenant = await gateway.tenants.of(tuner.namespace)
    asked = decode_json(await gateway.admission.read(request, _BODY_BYTES), TuneRequest)
    loaded = await tenant.tuning_admission.admit(asked, tuner)
    await _log(tenant, tuner, "tune_begun", loaded.job)
    await tenant.tuning_jobs.create(loaded)
    await _look(tenant)
    return await tenant.tuning_jobs.job(loaded.job.id)


@router.json(
    "POST",
    "/v1/tunes/graphs",
    "Keep a graph's request, so that a batch job may name it by key",
    body=codec.GRAPH_MEDIA_TYPE,
)
async def keep_graph(request: Request, gateway: Gateway, tuner: Tuner) -> GraphStored:
    tenant = await gateway.tenants.of(tuner.namespace)
    body = await gateway.admission.read(request)
    ask = await gateway.admission.parse(body)
    await tenant.saved_requests.save(ask.key, body)
    return GraphStored(ask.key)


@router.json("GET", "/v1/tunes", "Batch jobs, the newest first")
async def jobs(gateway: Gateway, reader: Reader) -> TunesReply:
    tenant = await gateway.tenants.of(reader.namespace)
    return TunesReply(await tenant.tuning_jobs.jobs())


@router.json("GET", "/v1/tunes/{job}", "A batch job and how far each of its items is")
async def show(job: Job, gateway: Gateway, reader: Reader) -> TuneReply:
    tenant = await gateway.tenants.of(reader.namespace)
    found = await tenant.tuning_jobs.job(job)
    return TuneReply(found, await tenant.tuning_jobs.progress(job))


@router.json(
    "GET",
    "/v1/tunes/{job}/results",
    "What a batch job has found so far, a page at a time, in the order of its items",
)
async def results(
    job: Job,
    gateway: Gateway,
    reader: Reader,
    cursor: Annotated[
        str, Query(pattern="^([0-9]{1,9})?$", description="`next` of the page before; '' begins")
    ] = "",
) -> TuneResultsReply:
    tenant = await gateway.tenants.of(reader.namespace)
    found, following = await tenant.tuning_jobs.results(job, int(cursor or 0))
    return TuneResultsReply(found, str(following) if following else "")


@router.json("POST", "/v1/tunes/{job}/cancel", "Search no more of a batch job; what it has found stays")
async def cancel(job: Job, gateway: Gateway, tuner: Tuner) -> TuneJob:
    return await _turn(gateway, tuner, job, "cancel", "tune_cancelled")


@router.json(
    "POST",
    "/v1/tunes/{job}/resume",
    "Go on with a batch job that was cancelled, or has items that failed or that its budget left out",
    description="What it has found is not searched again. Its budget counts from now on.",
)
async def resume(job: Job, gateway: Gateway, tuner: Tuner) -> TuneJob:
    return await _turn(gateway, tuner, job, "resume", "tune_resumed")


async def _turn(
    gateway: Gateway, tuner: Grant, job: str, what: JobTransition, action: AuditAction
) -> TuneJob:
    tenant = await gateway.tenants.of(tuner.namespace)
    found = await tenant.tuning_jobs.job(job)
    if what == "resume" and found.sources and not tuner.source:
        raise SourceForbidden(
            f"the token of {tuner.name!r} may not have source compiled: the user-written Triton kernel "
            f"{found.sources[0]!r} of this job"
        )
    await _log(tenant, tuner, action, found)
    await tenant.tuning_jobs.change(job, what, detail=f"{what} by {tuner.name}" if what == "cancel" else "")
    await _look(tenant)
    return await tenant.tuning_jobs.job(job)


@router.get(
    "/v1/tunes/{job}/events",
    summary="Follow a batch job",
    description="Server-sent events. `item`: a TuneProgress, when an item's search begins and when it ends. `job`: "
    "`{state}`, when it changes. The stream ends once the job is done or cancelled. Comments keep it alive.",
    responses=event_stream_responses(),
)
async def events(
    job: Job,
    gateway: Gateway,
    reader: Reader,
    streams: Streams,
    last_event_id: LastEventId = "",
) -> Response:
    if last_event_id and not is_stream_id(last_event_id):
        raise MalformedRequest("Last-Event-ID is not the id of an event of this service")
    tenant = await gateway.tenants.of(reader.namespace)
    await tenant.tuning_jobs.job(job)

    async def read(after: str) -> tuple[list[ServerEvent], bool]:
        state = (await tenant.tuning_jobs.job(job)).state
        found = await tenant.tuning_jobs.events(job, after)
        return [ServerEvent(each.name, each.id, each.data) for each in found], state in ("done", "cancelled")

    woken = gateway.notifications.woken(notification_name(job))
    return streams.response(follow_job(woken, read, job=job, after=last_event_id or STREAM_START))


async def _look(tenant: TenantParts) -> None:
    """Begin at once where this gateway can; else it, or another, does so soon."""
    try:
        await tenant.tuning_controller.take_over()
    except RedisError as error:
        log.warning("tunes_not_looked_at", error=str(error))


async def _log(tenant: TenantParts, tuner: Grant, action: AuditAction, job: TuneJob) -> None:
    """Before it happens: no job begins without an entry, whatever fails after it."""
    source = f"; source: {', '.join(job.sources)}" if job.sources else ""
    detail = f"{job.id} {job.name[:60]}, {sum(job.items.values())} items{source}"[:200]
    await tenant.audit.append(AuditEvent(action=action, name=tuner.name, token=tuner.id, detail=detail))
