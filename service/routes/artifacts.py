"""GET /v1/artifacts/{key}: a published artifact's bytes, as they were signed."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Response

from ...compiler import wire
from ...compiler.errors import NotFound
from ..auth import Grant, requires
from ..gateway import Gateway, gateway_of
from ..problems import documented

router = APIRouter(tags=["artifacts"])

Key = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="A request's cache key, 64 hex digits")]


@router.get(
    "/v1/artifacts/{key}",
    summary="Fetch an artifact",
    responses={
        **documented(),
        200: {
            "description": "The signed artifact",
            "content": {wire.ARTIFACT_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        },
    },
    response_class=Response,
)
async def artifact(
    key: Key,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    grant: Annotated[Grant, Depends(requires("read"))],
) -> Response:
    tenant = await gateway.tenants.of(grant.namespace)
    data = await tenant.cache.lookup(key, "fetch")
    if data is None:
        raise NotFound(f"there is no artifact {key}")
    return Response(data, media_type=wire.ARTIFACT_MEDIA_TYPE, headers={"X-Torchrelay-Key": key})
