"""GET /v1/explain/{key}: the entry nearest to a request that missed, and what differs, in words."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Response

from ...compiler import wire
from ..auth import Grant, requires
from ..gateway import Gateway, gateway_of
from ..problems import documented
from .artifacts import Key

router = APIRouter(tags=["compile"])


@router.get(
    "/v1/explain/{key}",
    summary="Why a request missed",
    description="The nearest of the entries that the cache offered when the request missed, and the "
    "differences: request against entry. `nearest` is null when there was none.",
    responses={
        **documented(),
        200: {
            "description": "The nearest entry",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Explanation"}}},
        },
    },
    response_class=Response,
)
async def explain(
    key: Key,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    grant: Annotated[Grant, Depends(requires("read"))],
) -> Response:
    tenant = await gateway.tenants.of(grant.namespace)
    body = wire.to_json(await tenant.misses.explain(key))
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})
