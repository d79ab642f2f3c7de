"""POST /v1/prefetch, GET /v1/prefetch/{script}: what a script used; at its next start, what to fetch ahead."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from .....compiler.api import compiles
from ....access.tokens import Grant
from ...http.authentication import requires
from ...http.errors import documented
from ...http.json_body import read_json
from ...http.json_reply import json_answer, json_reply, json_request
from ...wiring.gateway import GatewayParts, gateway_of

router = APIRouter(tags=["prefetch"])

_BODY_BYTES = 64 << 10

Script = Annotated[
    str, Path(pattern="^[0-9a-f]{64}$", description="A digest of the script's name, code and options")
]


@router.post(
    "/v1/prefetch",
    summary="Tell which artifacts a script used",
    responses={**documented(413)},
    response_class=Response,
    status_code=204,
    openapi_extra=json_request("ScriptUse"),
)
async def remember(
    request: Request,
    gateway: Annotated[GatewayParts, Depends(gateway_of)],
    grant: Annotated[Grant, Depends(requires("compile"))],
) -> Response:
    used = await read_json(request, compiles.ScriptUse, limit=_BODY_BYTES)
    tenant = await gateway.tenants.of(grant.namespace)
    for script in used.scripts:
        await tenant.used.remember(script, used.keys)
    if used.prefetched:
        await tenant.used.count(used.prefetched)
    return Response(status_code=204)


@router.get(
    "/v1/prefetch/{script}",
    summary="What a script used and the cache still offers",
    responses={**documented(), **json_reply("ScriptArtifacts")},
    response_class=Response,
)
async def recall(
    script: Script,
    gateway: Annotated[GatewayParts, Depends(gateway_of)],
    grant: Annotated[Grant, Depends(requires("read"))],
) -> Response:
    tenant = await gateway.tenants.of(grant.namespace)
    return json_answer(await tenant.used.recall(script))
