"""Stage 9: GET /v1/artifacts/{key} answers with a published artifact's bytes, as they were signed.

Its answers say how long a cache may hand them to whoever shows the same token (deploy/edge/nginx.conf).
"""

from __future__ import annotations

import asyncio
import re

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .....compiler.api.compiles import USE_HEADER
from .....compiler.api.protocols import PROTOCOL_HEADER
from .....compiler.artifact import manifest
from .....compiler.errors import NotFound
from ....cache.artifact_cache import LookupUse
from ....cache.found_artifact import FoundArtifact
from ....storage.blobs import PIECE_BYTES
from ...http.errors import documented
from ...http.json_routes import JsonRouter, binary_content
from ..parameters import CacheKey, Gateway, ReaderTenant

_REFERRED_BYTES = 1 << 20
_CACHING = {
    "Cache-Control": "private, max-age=5, must-revalidate",
    "Vary": f"Authorization, {PROTOCOL_HEADER}",
}
"""Caches that know nothing of tokens store nothing. Whoever shows the same token may be given what was removed or
revoked for these seconds (docs/connections.md); a client verifies what it gets all the same."""

_TAG = re.compile(r'"([0-9a-f]{64})\.([0-9]+)"')

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
        304: {"description": "If-None-Match names this artifact's ETag"},
    },
)
async def artifact(request: Request, key: CacheKey, gateway: Gateway, tenant: ReaderTenant) -> Response:
    # With the serial of /v1/trust, so that no cache goes on to say an old one (X-Torchrelay-Trust).
    serial = str(gateway.keyring.ring.serial)
    known = [
        digest
        for digest, known_serial in _TAG.findall(request.headers.get("if-none-match", ""))
        if known_serial == serial
    ]
    use: LookupUse = "hit" if request.headers.get(USE_HEADER) == "hit" else "fetch"
    found = await tenant.cache.lookup(key, use, known=known)
    if found is None:
        raise NotFound(f"there is no artifact {key}")
    headers = {"X-Torchrelay-Key": key, "ETag": f'"{found.digest}.{serial}"', **_CACHING}
    return (
        Response(status_code=304, headers=headers) if found.unchanged else artifact_response(found, headers)
    )


class _ArtifactInMemory(Response):
    """Bytes of memory, in pieces, since a connection holds a copy of what its client has not yet taken. uvloop's
    without TLS refers to it instead, so that its pieces may be large."""

    media_type = manifest.ARTIFACT_MEDIA_TYPE

    def __init__(self, artifact: FoundArtifact, headers: dict[str, str]) -> None:
        super().__init__(artifact.data, headers=headers)
        self._artifact = artifact
        """Until its last piece is sent, memory counts it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.body) <= PIECE_BYTES:
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        refers = scope["scheme"] == "http" and type(asyncio.get_running_loop()).__module__ == "uvloop"
        step = _REFERRED_BYTES if refers else PIECE_BYTES
        data = memoryview(self.body)
        for start in range(0, len(data), step):
            await send({"type": "http.response.body", "body": data[start : start + step], "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def artifact_response(artifact: FoundArtifact, headers: dict[str, str]) -> Response:
    """The artifact's bytes. A stream that fails breaks off before its declared length."""
    if artifact.data is not None:
        return _ArtifactInMemory(artifact, headers)
    return StreamingResponse(
        artifact.pieces(),
        media_type=manifest.ARTIFACT_MEDIA_TYPE,
        headers={**headers, "Content-Length": str(artifact.size)},
    )
