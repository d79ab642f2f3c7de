"""Requests that batch jobs may name by key: a body in as its compile begins, or sent for a job; out again for one.

Those kept longest ago go, once all of a namespace have more than BYTES together. A job takes its requests along.
"""

from __future__ import annotations

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from ...compiler.errors import LimitExceeded
from ..storage.redis.keys import Keys
from ..storage.redis.scripts import Scripts

log = structlog.get_logger(__name__)

BYTES = 64 << 20
"""Of a namespace's kept requests."""
_NOTED_BYTES = 256 << 10
"""Of a request that is kept because it was compiled; one of a transformer of 12 layers has 20 KiB."""
_SENT_BYTES = 8 << 20


class SavedRequests:
    """The kept requests of one namespace."""

    def __init__(self, redis: Redis, keys: Keys, scripts: Scripts) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = scripts

    async def note(self, key: str, body: bytes) -> None:
        """Keep what is compiled now, if it is small. A failure of Redis is logged, no more."""
        if len(body) > _NOTED_BYTES:
            return
        try:
            await self._keep(key, body)
        except RedisError as error:
            log.warning("request_not_kept", key=key, error=str(error))

    async def keep(self, key: str, body: bytes) -> None:
        """Raises LimitExceeded, RedisError."""
        if len(body) > _SENT_BYTES:
            raise LimitExceeded(
                f"the graph has {len(body)} bytes, limit {_SENT_BYTES}",
                hint="Tune a smaller part of the model",
            )
        await self._keep(key, body)

    async def get(self, key: str) -> bytes | None:
        """Raises RedisError."""
        body: bytes | None = await self._redis.get(self._keys.kept_request(key))
        return body

    async def _keep(self, key: str, body: bytes) -> None:
        keys = self._keys
        await self._scripts.save_request(
            keys=[keys.kept, keys.kept_sizes, keys.kept_total, keys.kept_request(key)],
            args=[key, body, BYTES, keys.kept_prefix],
        )
