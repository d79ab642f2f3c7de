"""GET /livez, /readyz and /metrics, for orchestrators and Prometheus. They need no token; the last two accept one."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fastapi import Request, Response
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST
from redis.exceptions import RedisError

from ....compiler.errors import Forbidden, Unavailable
from ....compiler.request import codec
from ...access.namespaces import EVERY
from ...base.counters import Counters
from ...compile.registry import STARTING
from ...storage.redis.counter_store import read_sum
from ..http.authentication import address_of
from ..http.errors import documented
from ..http.json_routes import JsonRouter
from ..parts import GatewayParts
from .parameters import Gateway

router = JsonRouter("health")

_READY_SECONDS = 2.0


class ReadyReply(Struct, frozen=True):
    """Answer of `GET /readyz`: each part with "ok" or its problem.

    failing: background tasks that failed last, and the kind of error; the gateway is ready all the same.
    """

    ready: bool
    parts: dict[str, str]
    failing: dict[str, str] = {}


_READY = router.json_content(ReadyReply)


@router.get("/livez", summary="The process answers")
async def livez() -> Response:
    return Response(b"ok\n", media_type="text/plain")


@router.get(
    "/readyz",
    summary="A compile would be accepted, and a worker is warm",
    description="The owner's token also shows the errors of Redis and Ray. For a load balancer: `workers=false` asks "
    "whether hits can be answered: they need no warm worker, and while Redis fails over, one of its replicas.",
    responses={
        200: {"description": "Ready", "content": _READY},
        503: {"description": "Not ready, and which part", "content": _READY},
    },
)
async def readyz(request: Request, gateway: Gateway, workers: bool = True) -> Response:
    token = request.headers.get("authorization", "").removeprefix("Bearer ")
    parts = await ready_parts(gateway, details=gateway.tokens.is_owner(token))
    needless = set() if workers else {"workers"}
    replicas = None if workers or parts["redis"] == "ok" else gateway.replicas
    if replicas is not None and not await gateway.redis_problem(replicas):
        needless.add("redis")
    ready = all(state == "ok" or name in needless for name, state in parts.items())
    ready = ready and not gateway.stopping
    headers = {"Cache-Control": "no-store"}
    if not ready:
        headers["Retry-After"] = str(gateway.settings.retry_after_seconds)
    return Response(
        codec.to_json(ReadyReply(ready, parts, gateway.supervisor.failing())),
        200 if ready else 503,
        headers,
        "application/json",
    )


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    description="Without a token, all namespaces together. A token for all namespaces shows each.",
    responses=documented(),
)
async def metrics(request: Request, gateway: Gateway) -> Response:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    try:
        async with asyncio.timeout(_READY_SECONDS):
            if scheme:
                await _check(request, gateway, token if scheme.lower() == "bearer" else "")
                shared = await gateway.counters(await gateway.namespaces.names())
            else:
                shared = await gateway.counters_for_anyone.get(lambda: _counters_together(gateway))
    except (RedisError, TimeoutError):
        shared = None  # only torchrelay_shared_* are missing then
    return Response(await gateway.render_metrics(shared), media_type=CONTENT_TYPE_LATEST)


async def ready_parts(gateway: GatewayParts, *, details: bool) -> dict[str, str]:
    """Each part that a compile needs, with "ok" or its problem. details: with the errors of Redis and Ray, which name
    addresses and paths."""
    problem = await gateway.redis_problem()
    if problem:
        problem = f"cannot be reached: {problem}" if details else "cannot be reached"
    parts = {"redis": problem or "ok", "workers": await _workers(gateway, details)}
    with suppress(RedisError, Unavailable):
        if problem := await gateway.installation.problem():
            parts["store"] = problem
    return parts


async def _counters_together(gateway: GatewayParts) -> dict[str, Counters]:
    """The counters of all namespaces. Raises RedisError."""
    return {EVERY: await read_sum(gateway.redis, gateway.keys, gateway.namespaces.names)}


async def _check(request: Request, gateway: GatewayParts, token: str) -> None:
    """Raises Unauthenticated, RateLimited, Forbidden, RedisError."""
    grant = await gateway.tokens.check(token, address_of(request))
    if not grant.everywhere:
        raise Forbidden(
            f"the token of {grant.name!r} is for namespace {grant.namespace} alone",
            hint="Send no token, or one for all namespaces",
        )


async def _workers(gateway: GatewayParts, details: bool) -> str:
    if gateway.stopping:
        return "stopping"
    try:
        async with asyncio.timeout(_READY_SECONDS):
            dispatchers = await gateway.registry.dispatchers()
    except (RedisError, TimeoutError):
        return "not known while Redis cannot be reached"
    if any(each.ready for each in dispatchers):
        return "ok"
    if not dispatchers:
        return "no dispatcher runs"
    problem = next((each.problem for each in dispatchers if each.problem), "")
    if problem and problem != STARTING:
        return problem if details else "cannot be started"
    return problem or "no worker is warm yet"
