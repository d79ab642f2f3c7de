"""GET /v1/artifacts/{key}: a published artifact's bytes, as they were signed."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Response

from .....compiler.artifact import manifest
from .....compiler.errors import NotFound
from ....access.tokens import Grant
from ...http.authentication import requires
from ...http.errors import documented
from ...wiring.gateway import GatewayParts, gateway_of
from ..parameters import CacheKey

router = APIRouter(tags=["artifacts"])


@router.get(
    "/v1/artifacts/{key}",
    summary="Fetch an artifact",
    responses={
        **documented(),
        200: {
            "description": "The signed artifact",
            "content": {manifest.ARTIFACT_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        },
    },
    response_class=Response,
)
async def artifact(
    key: CacheKey,
    gateway: Annotated[GatewayParts, Depends(gateway_of)],
    grant: Annotated[Grant, Depends(requires("read"))],
) -> Response:
    tenant = await gateway.tenants.of(grant.namespace)
    data = await tenant.cache.lookup(key, "fetch")
    if data is None:
        raise NotFound(f"there is no artifact {key}")
    return Response(data, media_type=manifest.ARTIFACT_MEDIA_TYPE, headers={"X-Torchrelay-Key": key})
