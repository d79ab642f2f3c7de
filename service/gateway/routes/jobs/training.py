"""/v1/trains: training jobs: start, list, follow, cancel and resume them; read their metrics, logs and files."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import msgspec
from fastapi import Depends, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from .....compiler.api.training.events import AFTER_HEADER, NumberedEvent
from .....compiler.api.training.jobs import (
    TRAIN_ENDED,
    TRAIN_ID,
    PackageStored,
    TrainFile,
    TrainFilesReply,
    TrainJob,
    TrainRequest,
    TrainsReply,
)
from .....compiler.errors import BadTrainJob, Forbidden
from ....access.audit import AuditAction, AuditEvent
from ....access.tokens import Grant, rank_token_name
from ....jobs.training.records import Series
from ...http.errors import documented
from ...http.event_stream import event_stream_responses
from ...http.json_routes import JsonRouter, binary_content
from ...http.page_bodies import for_browsers
from ...parts import GatewayTenant, gateway_of
from ..parameters import Gateway, Reader, ReaderTenant, Trainer, TrainerTenant, TrainingOn
from .durable_jobs import LastEventNumber, job_events

router = JsonRouter("training")
router.structs.append(NumberedEvent)  # a line of metrics, logs and history

_CANCEL_SECONDS = 8.0
_POLL_SECONDS = 0.1
_LINES = "application/x-ndjson"
_BYTES = "application/octet-stream"
_PAGE: dict[int | str, dict[str, Any]] = {
    **documented(),
    200: {
        "description": "Events, one a line, as JSON",
        "headers": {
            AFTER_HEADER: {
                "description": "`after` of the next page; missing: nothing follows for now",
                "schema": {"type": "integer"},
            }
        },
        "content": {_LINES: {"schema": {"type": "string"}}},
    },
}

Job = Annotated[str, Path(pattern=TRAIN_ID, description="A training job")]
FileName = Annotated[
    str,
    Path(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,100}(/[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,100}){0,7}$",
        max_length=300,
        description="A file of the job; / separates folders",
    ),
]


async def _writer(job: str, grant: Reader) -> Grant:
    """The job's own ranks, or the holder of a token that may start jobs. Raises Forbidden."""
    if not grant.allows("train") and grant.name != rank_token_name(job):
        raise Forbidden(f"the token of {grant.name!r} is neither this job's nor has the role 'train'")
    return grant


@router.json(
    "POST",
    "/v1/trains/packages",
    "Store a packed working directory, so that a training job can name it",
    body_type=_BYTES,
)
async def store_package(request: Request, gateway: Gateway, tenant: TrainerTenant) -> PackageStored:
    async with gateway.admission.read_file(request, gateway.settings.train_package_bytes) as upload:
        await tenant.training_files.put_package(upload)
        return PackageStored(upload.digest, upload.size)


@router.json(
    "POST",
    "/v1/trains",
    "Start a training job, which runs the submitter's code on the nodes",
    body_bytes=4 << 20,
    status=202,
    dependencies=[TrainingOn],
)
async def begin(body: TrainRequest, trainer: Trainer, tenant: TrainerTenant) -> TrainJob:
    record = await tenant.training_admission.admit(body, trainer)
    await _log(tenant, trainer, "train_begun", record.job)
    await tenant.training_jobs.create(record)
    return await tenant.training_jobs.job(record.job.id)


@router.json("GET", "/v1/trains", "Training jobs, the newest first")
async def jobs(tenant: ReaderTenant) -> TrainsReply:
    return TrainsReply(await tenant.training_jobs.readable_jobs())


@router.json("GET", "/v1/trains/{job}", "A training job and how far it is")
async def show(job: Job, tenant: ReaderTenant) -> TrainJob:
    return await tenant.training_jobs.job(job)


@router.json(
    "POST",
    "/v1/trains/{job}/cancel",
    "End a training job's ranks; they may save a checkpoint before",
    description="Answers once the job has ended, or after 8 s with what it is then.",
)
async def cancel(job: Job, gateway: Gateway, trainer: Trainer, tenant: TrainerTenant) -> TrainJob:
    found = await tenant.training_jobs.job(job)
    if found.state in TRAIN_ENDED:
        return found
    await _log(tenant, trainer, "train_cancelled", found)
    await tenant.training_jobs.cancel(job, f"cancelled by {trainer.name}")
    until = time.monotonic() + _CANCEL_SECONDS
    while found.state not in TRAIN_ENDED and time.monotonic() < until and not gateway.stopping:
        await asyncio.sleep(_POLL_SECONDS)
        found = await tenant.training_jobs.job(job)
    return found


@router.json(
    "POST",
    "/v1/trains/{job}/resume",
    "Continue a training job that failed or was cancelled from its last checkpoint",
    dependencies=[TrainingOn],
)
async def resume(job: Job, trainer: Trainer, tenant: TrainerTenant) -> TrainJob:
    found = await tenant.training_jobs.job(job)
    if found.state == "done":
        raise BadTrainJob(f"training job {job} is done: there is nothing to go on with", hint="Begin another")
    if found.state in TRAIN_ENDED:
        await _log(tenant, trainer, "train_resumed", found)
        await tenant.training_jobs.resume(job, f"resumed by {trainer.name}", source=trainer.source)
    return await tenant.training_jobs.job(job)


# --- files -------------------------------------------------------------------------------------------------


@router.json(
    "GET", "/v1/trains/{job}/files", "Files that a training job made: traces, reports, exported models"
)
async def files(job: Job, tenant: ReaderTenant) -> TrainFilesReply:
    return TrainFilesReply(await tenant.training_jobs.files(job))


@router.get(
    "/v1/trains/{job}/files/{name:path}",
    summary="One of a training job's files",
    responses={**documented(), 200: {"description": "Its bytes", "content": binary_content(_BYTES)}},
)
@for_browsers
async def file(job: Job, name: FileName, tenant: ReaderTenant) -> Response:
    found, pieces = await tenant.training_jobs.file(job, name)
    headers = {
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "ETag": f'"{found.digest}"',
        "Content-Length": str(found.bytes),
    }
    return StreamingResponse(pieces, media_type=_BYTES, headers=headers)


@router.json(
    "PUT",
    "/v1/trains/{job}/files/{name:path}",
    "Store a file of a training job, in place of one of that name",
    description="For the job's own ranks, and for tokens with the role train.",
    body_type=_BYTES,
    dependencies=[Depends(_writer)],
)
async def put_file(
    job: Job, name: FileName, request: Request, gateway: Gateway, tenant: ReaderTenant
) -> TrainFile:
    await tenant.training_jobs.job(job)
    async with gateway.admission.read_file(request, gateway.settings.train_file_bytes) as upload:
        return await tenant.training_jobs.put_file(job, name, upload)


# --- events ------------------------------------------------------------------------------------------------


@router.get(
    "/v1/trains/{job}/events",
    summary="Follow a training job",
    description="Server-sent events, named by the tag of their data: metrics, log, checkpoint, note, rank_started, "
    "first_step, compiles, rank_ended, state. Ids are numbers from 1; about the newest 10,000 are there. The stream "
    "ends once the job has. Comments keep it alive.",
    responses=event_stream_responses(),
)
async def events(
    request: Request,
    job: Job,
    gateway: Gateway,
    tenant: ReaderTenant,
    last_event_id: LastEventNumber = "",
) -> Response:
    return await job_events(request, gateway, tenant.training_jobs, job, last_event_id)


# --- metrics, logs and history -----------------------------------------------------------------------------


@router.get(  # the last of GET /v1/trains/{job}/...
    "/v1/trains/{job}/{series}",
    summary="What a training job's ranks measured or printed, or what became of the job, a page at a time",
    description="A page may be empty before the end, where entries are other ranks'.",
    responses=_PAGE,
)
async def entries(
    request: Request,
    job: Job,
    series: Annotated[Series, Path(description="history: all that is neither a metric nor a log")],
    tenant: ReaderTenant,
    rank: Annotated[int, Query(ge=-1, lt=1 << 20, description="Logs of this rank alone; -1: of all")] = -1,
    after: Annotated[int, Query(ge=0, lt=1 << 53, description="Number of the last one known; 0 begins")] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000, description="At most so many")] = 1000,
) -> Response:
    work = gateway_of(request).budgets.work
    async with work.turn(tenant.namespace):
        found, following = await tenant.training_jobs.entries(
            job, series, after, limit, rank=rank, gone=request.is_disconnected
        )
    lines = b"".join(msgspec.json.encode(each) + b"\n" for each in found)
    headers = {"Cache-Control": "no-store"}
    if following is not None:
        headers[AFTER_HEADER] = str(following)
    return Response(lines, media_type=_LINES, headers=headers)


async def _log(tenant: GatewayTenant, trainer: Grant, action: AuditAction, job: TrainJob) -> None:
    """Call it before the change: no job starts without an entry, whatever fails afterwards."""
    runs = job.spec.script or job.spec.function
    where = f"{job.spec.workers} x {job.spec.device}"
    detail = f"{job.id} {job.spec.name[:60]}: {runs[:60]} on {where}, package {job.spec.package[:16]}"[:200]
    await tenant.audit.append(AuditEvent(action=action, name=trainer.name, token=trainer.id, detail=detail))
