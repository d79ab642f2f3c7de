"""Stage 9: GET /v1/artifacts/{key} answers with a published artifact's bytes, as they were signed."""

from __future__ import annotations

from fastapi import Response

from .....compiler.artifact import manifest
from .....compiler.errors import NotFound
from ...http.errors import documented
from ...http.json_routes import JsonRouter, binary_content
from ..parameters import CacheKey, ReaderTenant

router = JsonRouter("artifacts")


@router.get(
    "/v1/artifacts/{key}",
    summary="Fetch an artifact",
    responses={
        **documented(),
        200: {
            "description": "The signed artifact",
            "content": binary_content(manifest.ARTIFACT_MEDIA_TYPE),
        },
    },
)
async def artifact(key: CacheKey, tenant: ReaderTenant) -> Response:
    data = await tenant.cache.lookup(key, "fetch")
    if data is None:
        raise NotFound(f"there is no artifact {key}")
    return Response(data, media_type=manifest.ARTIFACT_MEDIA_TYPE, headers={"X-Torchrelay-Key": key})
