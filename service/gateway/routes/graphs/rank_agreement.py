"""PUT /v1/jobs/{job}/{key}: the outcome on which the processes of a job without a store of its own agree."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from .....compiler.api.compiles import AgreedOutcome
from .....compiler.errors import MalformedRequest
from ...http.json_routes import JsonRouter
from ..parameters import CacheKey, CompilerTenant

router = JsonRouter("jobs")

Job = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="A digest of the job's name, 64 hex digits")]


@router.json("PUT", "/v1/jobs/{job}/{key}", "Agree on a key: the first process of a job decides for all")
async def decide(job: Job, key: CacheKey, body: AgreedOutcome, tenant: CompilerTenant) -> AgreedOutcome:
    if bool(body.digest) == (body.error is not None):
        raise MalformedRequest("a verdict has either a digest or an error", hint="See /docs")
    return await tenant.rank_verdicts.decide(job, key, body)
