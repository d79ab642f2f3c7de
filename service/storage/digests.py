"""SHA-256 of bytes, without holding the event loop."""

from __future__ import annotations

import asyncio
import hashlib

_INLINE_HASH_BYTES = 1 << 20
"""Longer blobs are hashed in a thread: about a millisecond of the event loop."""


async def sha256(data: bytes) -> str:
    """Hex digest, without holding the event loop for long."""
    if len(data) <= _INLINE_HASH_BYTES:
        return hashlib.sha256(data).hexdigest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
