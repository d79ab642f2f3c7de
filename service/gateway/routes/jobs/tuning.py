"""/v1/tunes: tuning jobs: start, list, follow, cancel and resume them, and read their results."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request, Response

from .....compiler.api.tuning.jobs import (
    TUNE_ID,
    GraphStored,
    TuneJob,
    TuneReply,
    TuneRequest,
    TuneResultsReply,
    TunesReply,
)
from .....compiler.errors import SourceForbidden
from .....compiler.request import codec
from ....access.audit import AuditAction, AuditEvent
from ....access.tokens import Grant
from ...http.event_stream import event_stream_responses
from ...http.json_routes import JsonRouter
from ...parts import GatewayTenant
from ..parameters import Gateway, ReaderTenant, Tuner, TunerTenant
from .durable_jobs import LastEventNumber, job_events

router = JsonRouter("batch tuning")

Job = Annotated[str, Path(pattern=TUNE_ID, description="A batch job")]


@router.json(
    "POST",
    "/v1/tunes",
    "Start a batch job, which searches kernels while workers are idle",
    body_bytes=16 << 20,
    status=202,
)
async def begin(body: TuneRequest, tuner: Tuner, tenant: TunerTenant) -> TuneJob:
    record = await tenant.tuning_admission.admit(body, tuner)
    await _log(tenant, tuner, "tune_begun", record.job)
    await tenant.tuning_jobs.create(record)
    return await tenant.tuning_jobs.job(record.job.id)


@router.json(
    "POST",
    "/v1/tunes/graphs",
    "Store a graph's request, so that a batch job can name it by key",
    body_type=codec.GRAPH_MEDIA_TYPE,
)
async def store_graph(request: Request, gateway: Gateway, tenant: TunerTenant) -> GraphStored:
    body = await gateway.admission.read(request)
    parsed = await gateway.admission.parse(body, namespace=tenant.namespace)
    await tenant.saved_requests.save(parsed.key, body)
    return GraphStored(parsed.key)


@router.json("GET", "/v1/tunes", "Batch jobs, the newest first")
async def jobs(tenant: ReaderTenant) -> TunesReply:
    return TunesReply(await tenant.tuning_jobs.readable_jobs())


@router.json("GET", "/v1/tunes/{job}", "A batch job and how far each of its items is")
async def show(job: Job, tenant: ReaderTenant) -> TuneReply:
    found = await tenant.tuning_jobs.job(job)
    return TuneReply(found, await tenant.tuning_jobs.progress(job))


@router.json(
    "GET",
    "/v1/tunes/{job}/results",
    "What a batch job has found so far, a page at a time, in the order of its items",
)
async def results(
    job: Job,
    tenant: ReaderTenant,
    cursor: Annotated[
        str, Query(pattern="^([0-9]{1,9})?$", description="`next` of the page before; '' begins")
    ] = "",
) -> TuneResultsReply:
    found, following = await tenant.tuning_jobs.results(job, int(cursor or 0))
    return TuneResultsReply(found, str(following) if following else "")


@router.json("POST", "/v1/tunes/{job}/cancel", "Search no more of a batch job; its results stay")
async def cancel(job: Job, tuner: Tuner, tenant: TunerTenant) -> TuneJob:
    await _log(tenant, tuner, "tune_cancelled", await tenant.tuning_jobs.job(job))
    await tenant.tuning_jobs.cancel(job, f"cancelled by {tuner.name}")
    return await tenant.tuning_jobs.job(job)


@router.json(
    "POST",
    "/v1/tunes/{job}/resume",
    "Continue a batch job that was cancelled, or has items that failed or that its budget left out",
    description="What it has found is not searched again. Its budget counts from now on.",
)
async def resume(job: Job, tuner: Tuner, tenant: TunerTenant) -> TuneJob:
    found = await tenant.tuning_jobs.job(job)
    if found.sources and not tuner.source:
        raise SourceForbidden(
            f"the token of {tuner.name!r} may not have source compiled: the user-written Triton kernel "
            f"{found.sources[0]!r} of this job"
        )
    await _log(tenant, tuner, "tune_resumed", found)
    await tenant.tuning_jobs.resume(job, "", source=tuner.source)
    return await tenant.tuning_jobs.job(job)


@router.get(
    "/v1/tunes/{job}/events",
    summary="Follow a batch job",
    description="Server-sent events. `item`: a TuneProgress, when an item's search begins and when it ends. `job`: "
    "`{state}`, when it changes. Ids are numbers from 1. The stream ends once the job is done or cancelled. Comments "
    "keep it alive.",
    responses=event_stream_responses(),
)
async def events(
    request: Request, job: Job, gateway: Gateway, tenant: ReaderTenant, last_event_id: LastEventNumber = ""
) -> Response:
    return await job_events(request, gateway, tenant.tuning_jobs, job, last_event_id)


async def _log(tenant: GatewayTenant, tuner: Grant, action: AuditAction, job: TuneJob) -> None:
    """Call it before the change: no job starts without an entry, whatever fails afterwards."""
    source = f"; source: {', '.join(job.sources)}" if job.sources else ""
    detail = f"{job.id} {job.name[:60]}, {sum(job.items.values())} items{source}"[:200]
    await tenant.audit.append(AuditEvent(action=action, name=tuner.name, token=tuner.id, detail=detail))
