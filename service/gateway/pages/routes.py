"""GET /overview, /overview.csv, /now, /runs, /runs/{run} and /misses/{key}: pages, and JSON; POST /v1/runs, by which a
process tells of its run."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from msgspec.structs import replace

from ....compiler.api import runs
from ....compiler.api.compiles import MissExplanation
from ....compiler.api.now import Now
from ....compiler.api.usage import Overview, Period, SlowMiss
from ....compiler.errors import NotFound, meanings
from ...cache.runs import RECORD_BYTES, compare
from ...storage.redis.keys import DEFAULT_NAMESPACE
from .. import live_pages
from ..http.errors import documented
from ..http.json_routes import JsonRouter
from ..http.page_bodies import STATIC, TEMPLATES, for_browsers, page_response, rendered
from ..parts import GatewayParts, GatewayTenant
from ..routes.parameters import CacheKey, Compiler, Gateway, LastEventId, Reader, ReaderTenant
from . import views
from .now import part_of_now, read_now

router = JsonRouter("runs")

RunId = Annotated[str, Path(pattern="^[0-9a-f]{16}$", description="A run's id")]
_YEAR_SECONDS = 365 * 86400
_SHOWN = 10
"""Latest runs, and slowest misses, of the overview."""


@router.json("POST", "/v1/runs", "Tell of a process's run", body_bytes=RECORD_BYTES)
async def record(body: runs.RunRecord, gateway: Gateway, grant: Compiler) -> runs.RunReply:
    tenant = await gateway.tenants.of(grant.namespace)
    reply = await tenant.runs.record(body, by=grant)
    if grant.namespace != DEFAULT_NAMESPACE:  # who may see all namespaces finds it too
        reply = replace(reply, path=f"{reply.path}?namespace={grant.namespace}")
    return reply


@router.json("GET", "/overview", "What was asked for over time, and what it saved", page=views.overview)
async def overview(
    gateway: Gateway,
    tenant: ReaderTenant,
    period: Annotated[Period, Query(description="Until now")] = "week",
) -> Overview:
    return await tenant.overviews[period].get(lambda: _overview(gateway, tenant, period))


async def _overview(gateway: GatewayParts, tenant: GatewayTenant, period: Period) -> Overview:
    now = (await gateway.counters([tenant.namespace]))[tenant.namespace]
    seconds, total, intervals = await tenant.usage.read(period)
    latest = (await tenant.runs.latest()).runs
    slowest = [
        SlowMiss(each.slowest, each.slowest_seconds, each.run, each.program)
        for each in latest
        if each.slowest
    ]
    slowest.sort(key=lambda each: -each.seconds)
    return Overview(
        *(period, seconds, total, intervals, now.compiling, now.entries, now.bytes_stored),
        *(latest[:_SHOWN], slowest[:_SHOWN]),
    )


@router.get(
    "/overview.csv",
    summary="Each hour of a year in which something was counted, as CSV",
    response_class=StreamingResponse,
    responses={**documented(), 200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
)
@for_browsers
async def hours(tenant: ReaderTenant) -> StreamingResponse:
    headers = {
        "Cache-Control": "no-store",
        "Content-Disposition": 'attachment; filename="torchrelay-hours.csv"',
    }
    return StreamingResponse(tenant.usage.hours_as_csv(), 200, headers, "text/csv; charset=utf-8")


@router.json("GET", "/now", "What runs and what waits", page=views.now, live=True)
async def now(gateway: Gateway, grant: Reader, tenant: ReaderTenant) -> Now:
    return await read_now(gateway, grant, tenant)


@router.get("/now/events", include_in_schema=False)
@for_browsers
async def now_events(
    request: Request, gateway: Gateway, grant: Reader, tenant: ReaderTenant, last_event_id: LastEventId = ""
) -> Response:
    """The part of the page that changes, as often as it does."""
    return live_pages.parts(
        request, gateway, lambda: part_of_now(request, gateway, grant, tenant), last_event_id
    )


@router.json("GET", "/runs", "The latest runs", page=views.latest)
async def latest(
    tenant: ReaderTenant,
    before: Annotated[float, Query(ge=0, le=1e11, description="Only those that ended before, s")] = 0.0,
) -> runs.RunList:
    return await tenant.runs.latest(before)


@router.json("GET", "/runs/{run}", "A run: its graphs, and the functions that were traced", page=views.run)
async def run(
    run: RunId,
    tenant: ReaderTenant,
    rank: Annotated[int, Query(ge=0, lt=runs.RANKS, description="Which process to show")] = 0,
    other: Annotated[
        str, Query(alias="with", pattern="^([0-9a-f]{16})?$", description="Compare with it")
    ] = "",
) -> runs.Run:
    found = await tenant.runs.get(run, rank)
    compared = await asyncio.to_thread(compare, found, await tenant.runs.get(other)) if other else None
    return replace(found, earlier=await tenant.runs.earlier(found.summary), compared=compared)


@router.json(
    "GET",
    "/misses/{key}",
    "Why a request missed",
    description="The nearest of the entries that the cache offered when the request missed, and the "
    "differences: request against entry. `nearest` is null when there was none.",
    page=views.miss,
)
async def miss(request: Request, key: CacheKey, tenant: ReaderTenant) -> MissExplanation:
    return await tenant.misses.explain(key, gone=request.is_disconnected)


@router.get("/llms.txt", include_in_schema=False)
async def llms() -> Response:
    text = (TEMPLATES / "llms.txt").read_bytes()
    return Response(text, 200, {"Cache-Control": "no-store"}, "text/plain; charset=utf-8")


@router.get("/errors", include_in_schema=False)
async def error_codes(request: Request) -> Response:
    """All error codes, for everyone: clients' warnings lead here."""
    return page_response(
        rendered("reference/errors.html", request, title="Error codes", tiles=(), meanings=meanings())
    )


@router.get("/static/{name}", include_in_schema=False)
async def static(name: str) -> Response:
    if (data := STATIC.get(f"static/{name}")) is None:
        raise NotFound(f"there is no {name}")
    headers = {
        "Cache-Control": f"public, max-age={_YEAR_SECONDS}, immutable",
        "X-Content-Type-Options": "nosniff",
    }
    kind = "text/css" if name.endswith(".css") else "text/javascript"
    return Response(data, 200, headers, f"{kind}; charset=utf-8")
