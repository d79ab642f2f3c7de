"""GET /overview, /overview.csv, /now, /runs, /runs/{run} and /misses/{key}: pages, and JSON; POST /v1/runs, by which a
process tells of its run; the form by which a browser signs in.

A browser's token is in a cookie that scripts cannot read and other sites cannot send with a form; it opens pages alone.
"""

from __future__ import annotations

import asyncio
import re
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from msgspec.structs import replace

from ....compiler.api import runs
from ....compiler.api.compiles import MissExplanation
from ....compiler.api.now import Now
from ....compiler.api.usage import Overview, Period, SlowMiss
from ....compiler.errors import NotFound, RelayError, Unauthenticated
from ...access.page_tickets import TICKET_SECONDS
from ...base.http_bodies import read_body
from ...cache.runs import RECORD_BYTES, compare
from ...storage.redis.keys import DEFAULT_NAMESPACE
from ..http.authentication import authenticated
from ..http.errors import documented, error_response
from ..http.json_routes import JsonRouter
from ..http.page_bodies import COOKIE, STATIC, TEMPLATES, check_own_form, for_browsers, sign_in_page
from ..parts import GatewayParts, GatewayTenant
from ..routes.parameters import CacheKey, Compiler, Gateway, LastEventId, Reader, ReaderTenant
from . import live, views
from .now import part_of_now, read_now

router = JsonRouter("runs")

RunId = Annotated[str, Path(pattern="^[0-9a-f]{16}$", description="A run's id")]
_FORM_BYTES = 16 << 10
_FORM_SECONDS = 10.0
_PAGE = re.compile(
    r"(overview|now|runs|misses|artifacts|kernels|jobs|administration)(/[0-9a-f]{1,64}(/code|/graph)?)?(\?[A-Za-z0-9=&._-]{0,200})?"
)
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
    return live.parts(request, gateway, lambda: part_of_now(request, gateway, grant, tenant), last_event_id)


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


# --- the sign-in of a browser ------------------------------------------------------------------------------


@router.json("POST", "/v1/page-tickets", "A link that signs a browser in, once", status=201)
async def page_ticket(request: Request, gateway: Gateway, grant: Reader) -> runs.PageTicket:
    ticket = await gateway.page_tickets.issue(request.headers["authorization"].partition(" ")[2])
    return runs.PageTicket(f"/sign-in?ticket={ticket}", TICKET_SECONDS)


@router.get("/sign-in", include_in_schema=False)
async def sign_in_form(
    request: Request, gateway: Gateway, ticket: str = "", then: str = "overview"
) -> Response:
    """The form; or, with a ticket, what the form would do."""
    then = then if _PAGE.fullmatch(then) else "overview"
    if not ticket:
        return sign_in_page(request, then)
    token = await gateway.page_tickets.redeem(ticket)
    if not token:
        error = Unauthenticated(f"the link was used, or is older than {TICKET_SECONDS} s")
        return sign_in_page(request, then, error, 401)
    return await _signed_in(request, gateway, token, then)


@router.post("/sign-in", include_in_schema=False)
async def sign_in(request: Request, gateway: Gateway) -> Response:
    """Checks the form's token, and gives it to the browser in a cookie."""
    check_own_form(request)
    body = await read_body(request, _FORM_BYTES, seconds=_FORM_SECONDS)
    form = {name: values[0] for name, values in parse_qs(body.decode("ascii", "replace")).items()}
    then = form.get("then", "")
    then = then if _PAGE.fullmatch(then) else "overview"
    return await _signed_in(request, gateway, form.get("token", "").strip(), then)


async def _signed_in(request: Request, gateway: GatewayParts, token: str, then: str) -> Response:
    """To the page `then`, with the token in a cookie; or the form again, which says why not."""
    try:
        if not token.isascii() or not token.isprintable() or {" ", ";"} & set(token):
            raise Unauthenticated("the token is not known")
        await authenticated(request, token, "read")
    except Unauthenticated as error:
        return sign_in_page(request, then, error, 401)
    except RelayError as error:
        return error_response(request, error, gateway.settings.retry_after_seconds)
    response = Response(status_code=303, headers={"Location": then, "Cache-Control": "no-store"})
    secure = request.url.scheme == "https"
    response.set_cookie(COOKIE, token, 30 * 86400, secure=secure, httponly=True, samesite="lax")
    return response


@router.post("/sign-out", include_in_schema=False)
async def sign_out(request: Request) -> Response:
    check_own_form(request)
    response = Response(status_code=303, headers={"Location": "sign-in"})
    response.delete_cookie(COOKIE, httponly=True, samesite="lax")
    return response


@router.get("/llms.txt", include_in_schema=False)
async def llms() -> Response:
    text = (TEMPLATES / "llms.txt").read_bytes()
    return Response(text, 200, {"Cache-Control": "no-store"}, "text/plain; charset=utf-8")


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
