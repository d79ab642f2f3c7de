"""The namespaces of teams, and which of them exist. storage/redis/keys.py lists what Redis stores for each.

A tenant's tokens, artifacts, compiles, counters and audit log are those of its namespace. `default` is always
there. Others come with the first token that is issued for them, or when an administrator of all sets their quota; or
with the first JWT that a rule admits to them, but not once they were deleted.
"""

from __future__ import annotations

from redis.asyncio.client import Pipeline

from ...compiler.errors import NotFound
from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import DEFAULT_NAMESPACE, Keys
from ..storage.redis.scripts import Scripts

PATTERN = "^[a-z0-9][a-z0-9-]{0,62}$"
"""What a namespace may be called."""
NAMED = "^([a-z0-9][a-z0-9-]{0,62})?$"
"""How a request names a namespace: '' is the token's own."""
EVERY = "*"
"""Stands for a namespace in the record of a token that administers all of them."""
_NEW = b"{}"


class Namespaces:
    def __init__(self, redis: RedisClient, keys: Keys, scripts: Scripts) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = scripts

    async def check(self, name: str) -> None:
        """Raises NotFound for a namespace that does not exist, RedisError."""
        if name == DEFAULT_NAMESPACE:
            return
        if not await self._scripts.namespace_exists(keys=[self._keys.namespaces], args=[name]):
            raise NotFound(f"there is no namespace {name}", hint="`torchrelay namespace ls` lists them")

    async def names(self) -> list[str]:
        found = await self._redis.hkeys(self._keys.namespaces)
        return sorted({DEFAULT_NAMESPACE, *(name.decode() for name in found)})

    def add(self, name: str, *, within: Pipeline) -> None:
        """Have it exist once the transaction has run, with the quota that the settings give everyone."""
        within.hsetnx(self._keys.namespaces, name, _NEW)
        within.hdel(self._keys.deleted, name)
