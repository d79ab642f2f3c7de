"""SHA-256 of bytes and of streams, without holding the event loop."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator

from ...compiler.artifact.container import ArtifactFile, pieces

_INLINE_HASH_BYTES = 1 << 20
"""Longer blobs are hashed in a thread: about a millisecond of the event loop."""


async def sha256(data: ArtifactFile) -> str:
    """Hex digest, without holding the event loop for long."""
    if len(data) <= _INLINE_HASH_BYTES:
        return hashlib.sha256(data[:]).hexdigest()
    return await asyncio.to_thread(_sha256, data)


def _sha256(data: ArtifactFile) -> str:
    hashed = hashlib.sha256()
    for piece in pieces(data):
        hashed.update(piece)
    return hashed.hexdigest()


class DamagedStream(Exception):
    """A stream's bytes are not those of its digest."""


async def checked(stream: AsyncGenerator[bytes], digest: str) -> AsyncGenerator[bytes]:
    """The stream's pieces. The last comes only if all have this digest: nobody gets the whole of another thing.

    Raises DamagedStream, and what the stream raises.
    """
    hashed, last = hashlib.sha256(), b""
    async for piece in stream:
        hashed.update(piece)
        if last:
            yield last
        last = piece
    if hashed.hexdigest() != digest:
        raise DamagedStream
    yield last
