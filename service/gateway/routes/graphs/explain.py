"""GET /v1/explain/{key}: the entry nearest to a request that missed, and what differs, in words."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Response

from .....compiler.request import codec
from ....access.tokens import Grant
from ...http.authentication import requires
from ...http.errors import documented
from ...wiring.gateway import GatewayParts, gateway_of
from ..parameters import CacheKey

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
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/MissExplanation"}}},
        },
    },
    response_class=Response,
)
async def explain(
    key: CacheKey,
    gateway: Annotated[GatewayParts, Depends(gateway_of)],
    grant: Annotated[Grant, Depends(requires("read"))],
) -> Response:
    tenant = await gateway.tenants.of(grant.namespace)
    body = codec.to_json(await tenant.misses.explain(key))
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})
