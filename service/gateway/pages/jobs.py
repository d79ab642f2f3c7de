"""GET /jobs and /jobs/{id}: training jobs, as pages and JSON; the form that stops and resumes one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import Query, Request, Response
from msgspec.structs import replace

from ....compiler.api.training.events import LogLines, StepMetrics
from ....compiler.api.training.jobs import TRAIN_ENDED, TrainsReply
from ....compiler.api.training.series import series_of, values_of
from ....compiler.api.training.shown import JOB_ACTIONS, JobAction, ShownJob
from ....compiler.errors import MalformedRequest
from ...access.tokens import Grant
from ...base.async_tasks import Recent
from ...base.http_bodies import read_body
from .. import live_pages
from ..http.event_stream import ServerEvent
from ..http.json_routes import JsonRouter
from ..http.page_bodies import for_browsers
from ..parts import GatewayParts, GatewayTenant
from ..routes.jobs.training import Job, cancel, resume
from ..routes.parameters import (
    Gateway,
    LastEventId,
    Reader,
    ReaderTenant,
    Trainer,
    TrainerTenant,
    check_training,
)
from . import job_views as views

router = JsonRouter("training")

_REPORTS = 4000
_HISTORY = 300
_LOGS = 2000
"""Entries that a page reads, the latest."""
_LINES = 300
"""Lines that it shows."""
_PARTS = 64
"""Parts of live pages that a gateway remembers for a namespace."""
_PART_SECONDS = 2.0
_FORM_BYTES = 1 << 10
_FORM_SECONDS = 10.0

Rank = Annotated[int, Query(ge=-1, lt=1 << 20, description="Logs of this rank alone; -1: of all")]
Search = Annotated[str, Query(max_length=200, description="Only lines of logs that have this text")]


@router.json("GET", "/jobs", "Training jobs, the newest first", page=views.listed)
async def jobs(tenant: ReaderTenant) -> TrainsReply:
    return TrainsReply(await tenant.training_jobs.readable_jobs())


@router.json("GET", "/jobs/{job}", "A training job: series, history, latest logs", page=views.job, live=True)
async def show(
    job: Job, gateway: Gateway, grant: Reader, tenant: ReaderTenant, rank: Rank = -1, search: Search = ""
) -> ShownJob:
    async with gateway.budgets.work.turn(tenant.namespace):
        return await _read(job, grant, tenant, rank, search)


@router.get("/jobs/{job}/part", include_in_schema=False)
@for_browsers
async def part(
    request: Request,
    job: Job,
    gateway: Gateway,
    grant: Reader,
    tenant: ReaderTenant,
    rank: Rank = -1,
    search: Search = "",
    last_event_id: LastEventId = "",
) -> Response:
    """The part of the page that changes, as often as it does."""
    await tenant.training_jobs.job(job)

    async def made() -> ServerEvent:
        async with gateway.budgets.work.turn(tenant.namespace):
            shown = await _read(job, grant, tenant, rank, search)
        return await live_pages.part(lambda: views.job_part(request, shown))

    async def latest() -> ServerEvent:
        known = tenant.parts_of_jobs
        key = job, rank, search, request.query_params.get("namespace", "")
        if key not in known and len(known) >= _PARTS:
            known.clear()
        return await known.setdefault(key, Recent(_PART_SECONDS)).get(made)

    return live_pages.parts(request, gateway, latest, last_event_id)


@router.post("/jobs/{job}", include_in_schema=False)
@for_browsers
async def act(
    request: Request, job: Job, gateway: Gateway, trainer: Trainer, tenant: TrainerTenant
) -> Response:
    """Do what the buttons of a job's page say."""
    body = await read_body(request, _FORM_BYTES, seconds=_FORM_SECONDS)
    action = parse_qs(body.decode("ascii", "replace")).get("action", [""])[0]
    if action not in JOB_ACTIONS:
        raise MalformedRequest(f"action is {action[:40]!r}", hint=f"Allowed: {', '.join(JOB_ACTIONS)}")
    await _do(action, job, gateway, trainer, tenant)
    query = f"?{request.url.query}" if request.url.query else ""
    return Response(status_code=303, headers={"Location": f"{job}{query}", "Cache-Control": "no-store"})


async def _do(action: str, job: str, gateway: GatewayParts, trainer: Grant, tenant: GatewayTenant) -> None:
    if action == "stop":
        await cancel(job, gateway, trainer, tenant)
    else:
        check_training(gateway)
        await resume(job, trainer, tenant)


async def _read(job: str, grant: Grant, tenant: GatewayTenant, rank: int, search: str) -> ShownJob:
    known = tenant.training_jobs
    about = await known.job(job)
    reports = [each.event for each in await known.latest(job, "metrics", _REPORTS)]
    logs = [each.event for each in await known.latest(job, "logs", _LOGS)]
    actions: list[JobAction] = [] if about.state == "done" else ["stop"]
    if about.state in TRAIN_ENDED and actions:
        actions = ["resume"]
    return ShownJob(
        job=about,
        series=series_of(values_of(each for each in reports if isinstance(each, StepMetrics))),
        history=await known.latest(job, "history", _HISTORY),
        logs=_lines((each for each in logs if isinstance(each, LogLines)), rank, search),
        files=await known.files(job),
        actions=actions if grant.allows("train") else [],
    )


def _lines(logs: Iterable[LogLines], rank: int, search: str) -> list[LogLines]:
    """The latest _LINES lines of these."""
    chosen: list[LogLines] = []
    left = _LINES
    for each in reversed([*logs]):
        lines = [line for line in each.lines if search.lower() in line.lower()][-left:]
        if lines and left and rank in (-1, each.rank):
            chosen.insert(0, replace(each, lines=lines))
            left -= len(lines)
    return chosen
