"""/v1/trains: training jobs, begun, listed, followed, cancelled and resumed; what they measure, print and make."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
import structlog
from fastapi import Depends, Path, Query, Request, Response
from redis.exceptions import RedisError

from .....compiler.api.training.events import LogLines, NumberedEvent, StateChanged
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
from .....compiler.errors import BadTrainJob, Forbidden, MalformedRequest
from ....access.audit import AuditAction, AuditEvent
from ....access.tokens import Grant
from ....base.async_tasks import is_set_within
from ....jobs.training.records import Series, notification_name
from ....jobs.training.run import token_name
from ...http.errors import documented
from ...http.event_stream import ServerEvent, event_stream_responses, follow_job
from ...http.json_body import decode_json
from ...http.json_routes import JsonRouter, binary_content
from ...wiring.gateway import TenantParts
from ..parameters import Gateway, LastEventId, Reader, Streams, Trainer

log = structlog.get_logger(__name__)

router = JsonRouter("training")
router.structs.append(NumberedEvent)  # a line of metrics, logs and history

_BODY_BYTES = 4 << 20
_CANCEL_SECONDS = 8.0
_LINES = "application/x-ndjson"
_BYTES = "application/octet-stream"
_NEWS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "News, one a line, as JSON; nothing: no more for now",
        "content": {_LINES: {"schema": {"type": "string"}}},
    }
}

Job = Annotated[str, Path(pattern=TRAIN_ID, description="A training job")]
FileName = Annotated[
    str,
    Path(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,100}(/[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,100}){0,7}$",
        max_length=300,
        description="A file of the job; / parts folders",
    ),
]
After = Annotated[int, Query(ge=0, lt=1 << 53, description="Number of the last one that is known; 0 begins")]
Limit = Annotated[int, Query(ge=1, le=10_000, description="At most so many")]


async def _putter(request: Request, grant: Reader) -> Grant:
    """The job's own ranks, or who may begin jobs. Raises Forbidden."""
    if not grant.allows("train") and grant.name != token_name(request.path_params["job"]):
        raise Forbidden(f"the token of {grant.name!r} is neither this job's nor has the role 'train'")
    return grant


Putter = Annotated[Grant, Depends(_putter)]


@router.json(
    "POST",
    "/v1/trains/packages",
    "Keep a packed working directory, so that a training job may name it",
    body=_BYTES,
)
async def keep_package(request: Request, gateway: Gateway, trainer: Trainer) -> PackageStored:
    tenant = await gateway.tenants.of(trainer.namespace)
    data = await gateway.admission.read(request, gateway.settings.train_package_bytes)
    return PackageStored(await tenant.training_files.put_package(data), len(data))


@router.json(
    "POST",
    "/v1/trains",
    "Begin a training job, which runs the submitter's code on the nodes",
    body=TrainRequest,
    status=202,
)
async def begin(request: Request, gateway: Gateway, trainer: Trainer) -> TrainJob:
    tenant = await gateway.tenants.of(trainer.namespace)
    asked = decode_json(await gateway.admission.read(request, _BODY_BYTES), TrainRequest)
    loaded = await tenant.training_admission.admit(asked, trainer)
    await _log(tenant, trainer, "train_begun", loaded.job)
    await tenant.training_jobs.create(loaded)
    await _look(tenant)
    return await tenant.training_jobs.job(loaded.job.id)


@router.json("GET", "/v1/trains", "Training jobs, the newest first")
async def jobs(gateway: Gateway, reader: Reader) -> TrainsReply:
    tenant = await gateway.tenants.of(reader.namespace)
    return TrainsReply(await tenant.training_jobs.jobs())


@router.json("GET", "/v1/trains/{job}", "A training job and how far it is")
async def show(job: Job, gateway: Gateway, reader: Reader) -> TrainJob:
    tenant = await gateway.tenants.of(reader.namespace)
    return await tenant.training_jobs.job(job)


@router.json(
    "POST",
    "/v1/trains/{job}/cancel",
    "End a training job's ranks; they may save a checkpoint before",
    description="Answers once the job has ended, or after 8 s with what it is then.",
)
async def cancel(job: Job, gateway: Gateway, trainer: Trainer) -> TrainJob:
    tenant = await gateway.tenants.of(trainer.namespace)
    found = await tenant.training_jobs.job(job)
    if found.state not in TRAIN_ENDED:
        await _log(tenant, trainer, "train_cancelled", found)
        async with gateway.notifications.woken(notification_name(job)) as wake:
            await tenant.training_jobs.cancel(job, f"cancelled by {trainer.name}")
            await _look(tenant)
            until = time.monotonic() + _CANCEL_SECONDS
            while found.state not in TRAIN_ENDED and time.monotonic() < until and not gateway.state.stopping:
                wake.clear()
                found = await tenant.training_jobs.job(job)
                if found.state not in TRAIN_ENDED:
                    await is_set_within(wake, min(1.0, gateway.settings.keepalive_seconds))
    return await tenant.training_jobs.job(job)


@router.json(
    "POST",
    "/v1/trains/{job}/resume",
    "Go on from its last checkpoint with a training job that failed or was cancelled",
)
async def resume(job: Job, gateway: Gateway, trainer: Trainer) -> TrainJob:
    tenant = await gateway.tenants.of(trainer.namespace)
    found = await tenant.training_jobs.job(job)
    if found.state == "done":
        raise BadTrainJob(f"training job {job} is done: there is nothing to go on with", hint="Begin another")
    if found.state in TRAIN_ENDED:
        await _log(tenant, trainer, "train_resumed", found)
        detail = f"resumed by {trainer.name}"
        waits = StateChanged(state="waiting", at=time.time(), detail=detail)
        await tenant.training_jobs.resume(job, waits, source=trainer.source)
        await _look(tenant)
    return await tenant.training_jobs.job(job)


@router.get(
    "/v1/trains/{job}/metrics",
    summary="What a training job's ranks measured, a page at a time",
    responses={**documented(), **_NEWS},
)
async def metrics(
    job: Job, gateway: Gateway, reader: Reader, after: After = 0, limit: Limit = 1000
) -> Response:
    return await _entries(gateway, reader, job, "metrics", after, limit, -1)


@router.get(
    "/v1/trains/{job}/logs",
    summary="What a training job's ranks printed, a page at a time",
    responses={**documented(), **_NEWS},
)
async def logs(
    job: Job,
    gateway: Gateway,
    reader: Reader,
    rank: Annotated[int, Query(ge=-1, lt=1 << 20, description="Of this rank alone; -1: of all")] = -1,
    after: After = 0,
    limit: Limit = 1000,
) -> Response:
    return await _entries(gateway, reader, job, "logs", after, limit, rank)


@router.get(
    "/v1/trains/{job}/history",
    summary="What became of a training job, a page at a time: all that is neither a metric nor a log",
    responses={**documented(), **_NEWS},
)
async def history(
    job: Job, gateway: Gateway, reader: Reader, after: After = 0, limit: Limit = 1000
) -> Response:
    return await _entries(gateway, reader, job, "history", after, limit, -1)


async def _entries(
    gateway: Gateway, reader: Grant, job: str, what: Series, after: int, limit: int, rank: int
) -> Response:
    """A page that is not empty while there is more, also where most of it is other ranks'."""
    tenant = await gateway.tenants.of(reader.namespace)
    found: list[NumberedEvent] = []
    while True:
        part = await tenant.training_jobs.entries(job, what, after, limit)
        found += [
            each
            for each in part
            if rank < 0 or not isinstance(each.event, LogLines) or each.event.rank == rank
        ]
        if found or not part:
            return Response(_lines(found[:limit]), media_type=_LINES, headers={"Cache-Control": "no-store"})
        after = part[-1].number


def _lines(found: Iterable[NumberedEvent]) -> bytes:
    return b"".join(msgspec.json.encode(each) + b"\n" for each in found)


# --- files -------------------------------------------------------------------------------------------------


@router.json(
    "GET", "/v1/trains/{job}/files", "Files that a training job made: traces, reports, exported models"
)
async def files(job: Job, gateway: Gateway, reader: Reader) -> TrainFilesReply:
    tenant = await gateway.tenants.of(reader.namespace)
    return TrainFilesReply(await tenant.training_jobs.files(job))


@router.get(
    "/v1/trains/{job}/files/{name:path}",
    summary="One of a training job's files",
    responses={**documented(), 200: {"description": "Its bytes", "content": binary_content(_BYTES)}},
)
async def file(job: Job, name: FileName, gateway: Gateway, reader: Reader) -> Response:
    tenant = await gateway.tenants.of(reader.namespace)
    found, data = await tenant.training_jobs.file(job, name)
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "ETag": f'"{found.digest}"'}
    return Response(data, media_type=_BYTES, headers=headers)


@router.json(
    "PUT",
    "/v1/trains/{job}/files/{name:path}",
    "Keep a file of a training job, in place of one of that name",
    description="For the job's own ranks, and for tokens with the role train.",
    body=_BYTES,
)
async def put_file(job: Job, name: FileName, request: Request, gateway: Gateway, grant: Putter) -> TrainFile:
    tenant = await gateway.tenants.of(grant.namespace)
    await tenant.training_jobs.job(job)
    data = await gateway.admission.read(request, gateway.settings.train_file_bytes)
    return await tenant.training_jobs.put_file(job, name, data)


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
    job: Job,
    gateway: Gateway,
    reader: Reader,
    streams: Streams,
    last_event_id: LastEventId = "",
) -> Response:
    if last_event_id and not (
        last_event_id.isascii() and last_event_id.isdecimal() and len(last_event_id) < 16
    ):
        raise MalformedRequest("Last-Event-ID is not the id of an event of this service")
    tenant = await gateway.tenants.of(reader.namespace)
    await tenant.training_jobs.job(job)

    async def read(after: str) -> tuple[list[ServerEvent], bool]:
        state = (await tenant.training_jobs.job(job)).state
        found = await tenant.training_jobs.events(job, int(after))
        return [ServerEvent(each.name, str(each.number), each.data) for each in found], state in TRAIN_ENDED

    woken = gateway.notifications.woken(notification_name(job))
    return streams.response(follow_job(woken, read, job=job, after=last_event_id or "0"))


async def _look(tenant: TenantParts) -> None:
    """Begin at once where this gateway can; else it, or another, does so soon."""
    try:
        await tenant.training_controller.take_over()
    except RedisError as error:
        log.warning("trains_not_looked_at", error=str(error))


async def _log(tenant: TenantParts, trainer: Grant, action: AuditAction, job: TrainJob) -> None:
    """Before it happens: no job begins without an entry, whatever fails after it."""
    runs = job.spec.script or job.spec.function
    where = f"{job.spec.workers} x {job.spec.device}"
    detail = f"{job.id} {job.spec.name[:60]}: {runs[:60]} on {where}, package {job.spec.package[:16]}"[:200]
    await tenant.audit.append(AuditEvent(action=action, name=trainer.name, token=trainer.id, detail=detail))
