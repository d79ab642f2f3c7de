"""PUT /v1/jobs/{job}/{key}: what the processes of a job without a store of its own agree on for a key."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from .....compiler.api import compiles
from .....compiler.errors import MalformedRequest
from ....access.tokens import Grant
from ...http.authentication import requires
from ...http.errors import documented
from ...http.json_body import read_json
from ...http.json_reply import json_answer, json_reply, json_request
from ...wiring.gateway import GatewayParts, gateway_of
from ..parameters import CacheKey

router = APIRouter(tags=["jobs"])

Job = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="A digest of the job's name, 64 hex digits")]


@router.put(
    "/v1/jobs/{job}/{key}",
    summary="Agree on a key: the first process of a job to tell decides for all",
    responses={**documented(413), **json_reply("AgreedOutcome")},
    response_class=Response,
    openapi_extra=json_request("AgreedOutcome"),
)
async def decide(
    job: Job,
    key: CacheKey,
    request: Request,
    gateway: Annotated[GatewayParts, Depends(gateway_of)],
    grant: Annotated[Grant, Depends(requires("compile"))],
) -> Response:
    verdict = await read_json(request, compiles.AgreedOutcome)
    if bool(verdict.digest) == (verdict.error is not None):
        raise MalformedRequest("a verdict has either a digest or an error", hint="See /docs")
    tenant = await gateway.tenants.of(grant.namespace)
    return json_answer(await tenant.jobs.decide(job, key, verdict))
