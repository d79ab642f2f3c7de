"""What a service does at the moment, from all its parts."""

from __future__ import annotations

import time

from fastapi import Request
from msgspec.structs import replace

from ....compiler.api.now import CurrentJob, Now
from ...access.tokens import Grant
from ...base.async_tasks import Recent
from .. import live_pages
from ..http.event_stream import ServerEvent
from ..parts import NOW_SECONDS, GatewayParts, GatewayTenant
from ..routes.health import ready_parts
from . import views


async def read_now(gateway: GatewayParts, grant: Grant, tenant: GatewayTenant) -> Now:
    """What the holder of `grant` may see of it. Raises RedisError."""
    found = await tenant.now.get(lambda: _read(gateway, tenant))
    if grant.everywhere:
        return found
    return replace(found, workers=[replace(each, host="") for each in found.workers])


async def part_of_now(
    request: Request, gateway: GatewayParts, grant: Grant, tenant: GatewayTenant
) -> ServerEvent:
    """The part of the page that changes, made once for all who look at the same within a second. Raises RedisError."""

    async def make() -> ServerEvent:
        current = await read_now(gateway, grant, tenant)
        return await live_pages.part(lambda: views.now_part(request, current))

    seen = (grant.everywhere, request.query_params.get("namespace", ""))
    return await tenant.parts_of_now.setdefault(seen, Recent(NOW_SECONDS)).get(make)


async def _read(gateway: GatewayParts, tenant: GatewayTenant) -> Now:
    compiles, more = await tenant.current_compiles.read()
    parts = await ready_parts(gateway, details=False)
    return Now(
        compiles=compiles,
        more=more,
        jobs=await _open_jobs(tenant),
        workers=await gateway.registry.workers(),
        warnings=[f"{name}: {problem}" for name, problem in parts.items() if problem != "ok"],
    )


async def _open_jobs(tenant: GatewayTenant) -> list[CurrentJob]:
    jobs, at = [], time.time()
    for train in await tenant.training_jobs.readable_jobs(open_only=True):
        name, progress = train.spec.name, f"step {train.step:,}" if train.step else ""
        about = (train.id, name, train.state, train.by, at - train.created, progress, train.detail)
        jobs.append(CurrentJob("train", *about))
    for tune in await tenant.tuning_jobs.readable_jobs(open_only=True):
        progress = ", ".join(f"{count:,} {state}" for state, count in tune.items.items())
        about = (tune.id, tune.name, tune.state, tune.by, at - tune.created, progress, tune.detail)
        jobs.append(CurrentJob("tune", *about))
    return jobs
