"""/v1/trains: training jobs, begun, listed, followed, cancelled and resumed; what they measure, print and make."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Annotated, Any

import msgspec
import structlog
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from redis.exceptions import RedisError

from .....compiler.api.training.events import LogLines, NumberedEvent, StateChanged
from .....compiler.api.training.jobs import (
    TRAIN_ENDED,
    TRAIN_ID,
    PackageStored,
    TrainFilesReply,
    TrainJob,
    TrainRequest,
    TrainsReply,
)
from .....compiler.errors import BadTrainJob, Forbidden, MalformedRequest
from ....access.audit import AuditAction, AuditEvent
from ....access.tokens import Grant
from ....jobs.training.records import Series, notification_name
from ....jobs.training.run import token_name
from ...http.authentication import requires
from ...http.errors import documented
from ...http.json_body import decode_json
from ...http.json_reply import json_answer, json_reply, json_request
from ...wiring.gateway import GatewayParts, gateway_of
from ...wiring.tenants import TenantParts

log = structlog.get_logger(__name__)

router = APIRouter(tags=["training"])

_BODY_BYTES = 4 << 20
_CANCEL_SECONDS = 8.0
_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_LINES = "application/x-ndjson"
_BYTES = "application/octet-stream"
_BINARY = {"schema": {"type": "string", "format": "binary"}}
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
GatewayHere = Annotated[GatewayParts, Depends(gateway_of)]
Reader = Annotated[Grant, Depends(requires("read"))]
Trainer = Annotated[Grant, Depends(requires("train"))]


async def _putter(request: Request, grant: Reader) -> Grant:
    """The job's own ranks, or who may begin jobs. Raises Forbidden."""
    if not grant.allows("train") and grant.name != token_name(request.path_params["job"]):
        raise Forbidden(f"the token of {grant.name!r} is neither this job's nor has the role 'train'")
    return grant


Putter = Annotated[Grant, Depends(_putter)]


@router.post(
    "/v1/trains/packages",
    summary="Keep a packed working directory, so that a training job may name it",
    responses={**documented(413), **json_reply("PackageStored")},
    response_class=Response,
    openapi_extra={"requestBody": {"required": True, "content": {_BYTES: _BINARY}}},
)
async def keep_package(request: Request, gateway: GatewayHere, trainer: Trainer) -> Response:
    tenant = await gateway.tenants.of(trainer.namespace)
    data = await gateway.intake.read(request, gateway.settings.train_package_bytes)
    return json_answer(PackageStored(await tenant.train_store.put_package(data), len(data)))


@router.post(
    "/v1/trains",
    summary="Begin a training job, which runs the submitter's code on the nodes",
    responses={**documented(413), **json_reply("TrainJob", status=202)},
    response_class=Response,
    openapi_extra=json_request("TrainRequest"),
)
async def begin(request: Request, gateway: GatewayHere, trainer: Trainer) -> Response:
    tenant = await gateway.tenants.of(trainer.namespace)
    asked = decode_json(await gateway.intake.read(request, _BODY_BYTES), TrainRequest)
    loaded = await tenant.train_intake.admit(asked, trainer)
    await _log(tenant, trainer, "train_begun", loaded.job)
    await tenant.trains.create(loaded)
    await _look(tenant)
    return json_answer(await tenant.trains.job(loaded.job.id), 202)


@router.get(
    "/v1/trains",
    summary="Training jobs, the newest first",
    responses={**documented(), **json_reply("TrainsReply")},
    response_class=Response,
)
async def jobs(gateway: GatewayHere, reader: Reader) -> Response:
    tenant = await gateway.tenants.of(reader.namespace)
    return json_answer(TrainsReply(await tenant.trains.jobs()))


@router.get(
    "/v1/trains/{job}",
    summary="A training job and how far it is",
    responses={**documented(), **json_reply("TrainJob")},
    response_class=Response,
)
async def show(job: Job, gateway: GatewayHere, reader: Reader) -> Response:
    tenant = await gateway.tenants.of(reader.namespace)
    return json_answer(await tenant.trains.job(job))


@router.post(
    "/v1/trains/{job}/cancel",
    summary="End a training job's ranks; they may save a checkpoint before",
    description="Answers once the job has ended, or after 8 s with what it is then.",
    responses={**documented(), **json_reply("TrainJob")},
    response_class=Response,
)
async def cancel(job: Job, gateway: GatewayHere, trainer: Trainer) -> Response:
    tenant = await gateway.tenants.of(trainer.namespace)
    found = await tenant.trains.job(job)
    if found.state not in TRAIN_ENDED:
        await _log(tenant, trainer, "train_cancelled", found)
        async with gateway.wakes.woken(notification_name(job)) as wake:
            await tenant.trains.cancel(job, f"cancelled by {trainer.name}")
            await _look(tenant)
            until = time.monotonic() + _CANCEL_SECONDS
            while found.state not in TRAIN_ENDED and time.monotonic() < until and not gateway.state.stopping:
                wake.clear()
                found = await tenant.trains.job(job)
                if found.state not in TRAIN_ENDED:
                    await _nap(wake, min(1.0, gateway.settings.keepalive_seconds))
    return json_answer(await tenant.trains.job(job))


@router.post(
    "/v1/trains/{job}/resume",
    summary="Go on from its last checkpoint with a training job that failed or was cancelled",
    responses={**documented(), **json_reply("TrainJob")},
    response_class=Response,
)
async def resume(job: Job, gateway: GatewayHere, trainer: Trainer) -> Response:
    tenant = await gateway.tenants.of(trainer.namespace)
    found = await tenant.trains.job(job)
    if found.state == "done":
        raise BadTrainJob(f"training job {job} is done: there is nothing to go on with", hint="Begin another")
    if found.state in TRAIN_ENDED:
        await _log(tenant, trainer, "train_resumed", found)
        detail = f"resumed by {trainer.name}"
        waits = StateChanged(state="waiting", at=time.time(), detail=detail)
        await tenant.trains.resume(job, waits, source=trainer.source)
        await _look(tenant)
    return json_answer(await tenant.trains.job(job))


@router.get(
    "/v1/trains/{job}/metrics",
    summary="What a training job's ranks measured, a page at a time",
    responses={**documented(), **_NEWS},
    response_class=Response,
)
async def metrics(
    job: Job, gateway: GatewayHere, reader: Reader, after: After = 0, limit: Limit = 1000
) -> Response:
    return await _entries(gateway, reader, job, "metrics", after, limit, -1)


@router.get(
    "/v1/trains/{job}/logs",
    summary="What a training job's ranks printed, a page at a time",
    responses={**documented(), **_NEWS},
    response_class=Response,
)
async def logs(
    job: Job,
    gateway: GatewayHere,
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
    response_class=Response,
)
async def history(
    job: Job, gateway: GatewayHere, reader: Reader, after: After = 0, limit: Limit = 1000
) -> Response:
    return await _entries(gateway, reader, job, "history", after, limit, -1)


async def _entries(
    gateway: GatewayParts, reader: Grant, job: str, what: Series, after: int, limit: int, rank: int
) -> Response:
    """A page that is not empty while there is more, also where most of it is other ranks'."""
    tenant = await gateway.tenants.of(reader.namespace)
    found: list[NumberedEvent] = []
    while True:
        part = await tenant.trains.entries(job, what, after, limit)
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


@router.get(
    "/v1/trains/{job}/files",
    summary="Files that a training job made: traces, reports, exported models",
    responses={**documented(), **json_reply("TrainFilesReply")},
    response_class=Response,
)
async def files(job: Job, gateway: GatewayHere, reader: Reader) -> Response:
    tenant = await gateway.tenants.of(reader.namespace)
    return json_answer(TrainFilesReply(await tenant.trains.files(job)))


@router.get(
    "/v1/trains/{job}/files/{name:path}",
    summary="One of a training job's files",
    responses={**documented(), 200: {"description": "Its bytes", "content": {_BYTES: _BINARY}}},
    response_class=Response,
)
async def file(job: Job, name: FileName, gateway: GatewayHere, reader: Reader) -> Response:
    tenant = await gateway.tenants.of(reader.namespace)
    found, data = await tenant.trains.file(job, name)
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "ETag": f'"{found.digest}"'}
    return Response(data, media_type=_BYTES, headers=headers)


@router.put(
    "/v1/trains/{job}/files/{name:path}",
    summary="Keep a file of a training job, in place of one of that name",
    description="For the job's own ranks, and for tokens with the role train.",
    responses={**documented(413), **json_reply("TrainFile")},
    response_class=Response,
    openapi_extra={"requestBody": {"required": True, "content": {_BYTES: _BINARY}}},
)
async def put_file(
    job: Job, name: FileName, request: Request, gateway: GatewayHere, grant: Putter
) -> Response:
    tenant = await gateway.tenants.of(grant.namespace)
    await tenant.trains.job(job)
    data = await gateway.intake.read(request, gateway.settings.train_file_bytes)
    return json_answer(await tenant.trains.put_file(job, name, data))


# --- events ------------------------------------------------------------------------------------------------


@router.get(
    "/v1/trains/{job}/events",
    summary="Follow a training job",
    description="Server-sent events, named by the tag of their data: metrics, log, checkpoint, note, rank_started, "
    "first_step, compiles, rank_ended, state. Ids are numbers from 1; about the newest 10,000 are there. The stream "
    "ends once the job has. Comments keep it alive.",
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
    if last_event_id and not (
        last_event_id.isascii() and last_event_id.isdecimal() and len(last_event_id) < 16
    ):
        raise MalformedRequest("Last-Event-ID is not the id of an event of this service")
    tenant = await gateway.tenants.of(reader.namespace)
    await tenant.trains.job(job)
    return StreamingResponse(
        _stream(gateway, tenant, job, int(last_event_id or 0)),
        headers=_STREAM_HEADERS,
        media_type="text/event-stream",
    )


async def _stream(gateway: GatewayParts, tenant: TenantParts, job: str, after: int) -> AsyncIterator[bytes]:
    """The events after `after`, until the job has ended and all are told."""
    with gateway.metrics.streams.track_inprogress():
        async with gateway.wakes.woken(notification_name(job)) as wake:
            yield b"retry: 1000\n\n"
            while not gateway.state.stopping:
                wake.clear()
                try:
                    state = (await tenant.trains.job(job)).state
                    news = await tenant.trains.events(job, after)
                except RedisError as error:
                    log.warning("events_delayed", job=job, error=str(error))
                    state, news = "running", []
                for event in news:
                    after = event.number
                    yield b"event: %s\nid: %d\ndata: %s\n\n" % (event.name.encode(), event.number, event.data)
                if news:
                    continue
                if state in TRAIN_ENDED:
                    return
                if not await _nap(wake, gateway.settings.keepalive_seconds):
                    yield b": keep-alive\n\n"


async def _nap(wake: asyncio.Event, seconds: float) -> bool:
    """Whether it was woken before."""
    try:
        async with asyncio.timeout(seconds):
            return await wake.wait()
    except TimeoutError:
        return False


async def _look(tenant: TenantParts) -> None:
    """Begin at once where this gateway can; else it, or another, does so soon."""
    try:
        await tenant.train_driver.take_over()
    except RedisError as error:
        log.warning("trains_not_looked_at", error=str(error))


async def _log(tenant: TenantParts, trainer: Grant, action: AuditAction, job: TrainJob) -> None:
    """Before it happens: no job begins without an entry, whatever fails after it."""
    runs = job.spec.script or job.spec.function
    where = f"{job.spec.workers} x {job.spec.device}"
    detail = f"{job.id} {job.spec.name[:60]}: {runs[:60]} on {where}, package {job.spec.package[:16]}"[:200]
    await tenant.audit.append(AuditEvent(action=action, name=trainer.name, token=trainer.id, detail=detail))
