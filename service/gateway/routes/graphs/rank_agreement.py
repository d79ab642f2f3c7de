"""PUT /v1/jobs/{job}/{key}: what the processes of a job without a store of its own agree on for a key."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request

from .....compiler.api.compiles import AgreedOutcome
from .....compiler.errors import MalformedRequest
from ...http.json_body import read_json
from ...http.json_routes import JsonRouter
from ..parameters import CacheKey, Compiler, Gateway

router = JsonRouter("jobs")

Job = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="A digest of the job's name, 64 hex digits")]


@router.json(
    "PUT",
    "/v1/jobs/{job}/{key}",
    "Agree on a key: the first process of a job to tell decides for all",
    body=AgreedOutcome,
)
async def decide(
    job: Job, key: CacheKey, request: Request, gateway: Gateway, grant: Compiler
) -> AgreedOutcome:
    verdict = await read_json(request, AgreedOutcome)
    if bool(verdict.digest) == (verdict.error is not None):
        raise MalformedRequest("a verdict has either a digest or an error", hint="See /docs")
    tenant = await gateway.tenants.of(grant.namespace)
    return await tenant.rank_verdicts.decide(job, key, verdict)
