"""Stage 9: GET /v1/artifacts/{key} answers with a published artifact's bytes, as they were signed."""

from __future__ import annotations

from fastapi import Response
from fastapi.responses import StreamingResponse

from .....compiler.artifact import manifest
from .....compiler.errors import NotFound
from ....cache.found_artifact import FoundArtifact
from ....storage.blobs import PIECE_BYTES
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
    found = await tenant.cache.lookup(key, "fetch")
    if found is None:
        raise NotFound(f"there is no artifact {key}")
    return artifact_response(found, {"X-Torchrelay-Key": key})


def artifact_response(found: FoundArtifact, headers: dict[str, str]) -> Response:
    """The artifact's bytes. Large ones go in pieces, since a connection holds a copy of what its client has not yet
    taken. A stream that fails breaks off before its declared length."""
    if found.data is not None and found.size <= PIECE_BYTES:
        return Response(found.data, media_type=manifest.ARTIFACT_MEDIA_TYPE, headers=headers)
    return StreamingResponse(
        found.pieces(),
        media_type=manifest.ARTIFACT_MEDIA_TYPE,
        headers={**headers, "Content-Length": str(found.size)},
    )
