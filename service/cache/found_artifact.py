"""Stage 9: an artifact that the cache has found: its bytes from memory, or a stream of them from the blob store."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from msgspec import Struct

from ...compiler.artifact import container
from ...compiler.errors import ArtifactError
from ..storage.blobs import PIECE_BYTES, BlobStore
from ..storage.byte_cache import SharedBytes

GONE = "its bytes are gone"
_FIRST_BYTES = 64 << 10
"""Most heads are shorter, and are read at once."""


class FoundArtifact(Struct, frozen=True):
    """An artifact that may be served: `data`, or `stream` where memory has no room for it, or neither for a caller who
    has it.

    `shared`: where `data` is from; while anything refers to it, the memory cache counts it.
    """

    key: str
    digest: str
    size: int
    data: bytes | None = None
    shared: SharedBytes | None = None
    stream: AsyncGenerator[bytes] | None = None

    @property
    def unchanged(self) -> bool:
        return self.data is None and self.stream is None

    async def pieces(self) -> AsyncGenerator[bytes]:
        """All bytes, once. Raises what the stream raises: Unavailable, or DamagedStream instead of the last piece."""
        if self.stream is not None:
            async for piece in self.stream:
                yield piece
        elif self.data is not None:
            for start in range(0, self.size, PIECE_BYTES):
                yield self.data[start : start + PIECE_BYTES]


async def read_head(blobs: BlobStore, key: str, digest: str) -> bytes:
    """What stands before the members of an artifact in the store, unchecked. Raises ArtifactError, Unavailable."""
    head = await blobs.beginning(key, digest, _FIRST_BYTES)
    if head is not None and (length := container.head_bytes(head)) > len(head):
        head = await blobs.beginning(key, digest, length)
    if head is None:
        raise ArtifactError(GONE)
    return head
