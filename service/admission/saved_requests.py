"""Requests that tuning jobs can name by key. A body is saved when its compile begins, or when it is sent for a job.

The oldest go once those of all namespaces have more than BYTES together. A job copies the requests that it names.
"""

from __future__ import annotations

from ...compiler.errors import LimitExceeded
from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import Keys
from ..storage.redis.retry import redis_errors_logged
from ..storage.redis.scripts import Scripts

BYTES = 256 << 20
"""All saved requests of all namespaces."""
_NOTED_BYTES = 256 << 10
"""A request that is saved because it is compiled; one of a transformer of 12 layers has 20 KiB."""
SENT_BYTES = 8 << 20


class SavedRequests:
    def __init__(self, redis: RedisClient, keys: Keys, scripts: Scripts) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = scripts

    async def note(self, key: str, body: bytes) -> None:
        """Saves the request of a compile that begins, if it is small: Redis has its body. A failure of Redis is only
        logged."""
        if len(body) > _NOTED_BYTES:
            return
        with redis_errors_logged("request_not_saved", key=key):
            if not await self._save(key, b""):  # the compile was over at once
                await self._save(key, body)

    async def save(self, key: str, body: bytes) -> None:
        """Raises LimitExceeded, RedisError."""
        if len(body) > SENT_BYTES:
            raise LimitExceeded(
                f"the graph has {len(body)} bytes, limit {SENT_BYTES}",
                hint="Tune a smaller part of the model",
            )
        await self._save(key, body)

    async def get(self, key: str) -> bytes | None:
        """Raises RedisError."""
        body: bytes | None = await self._redis.get(self._keys.saved_request(key))
        return body

    async def _save(self, key: str, body: bytes) -> int:
        keys = self._keys
        saved: int = await self._scripts.save_request(
            keys=[
                *(keys.saved, keys.saved_sizes, keys.saved_total),
                *(keys.saved_request(key), keys.request(key)),
            ],
            args=[body, BYTES],
        )
        return saved
