"""The quotas of namespaces: each one's own, the one in force, and what it uses now.

The settings give every namespace the same quota; an administrator of all can give one another quota. Quotas
are stored here; acquire.lua and evict.lua enforce them.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET
from redis.asyncio.client import Pipeline

from ...compiler import decoding
from ...compiler.api.admin import NamespaceReply, Quota, QuotaChange
from ..base.settings import ServiceSettings
from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import Keys
from .audit import AuditEvent, AuditLog
from .tokens import Grant


class Quotas:
    def __init__(self, redis: RedisClient, keys: Keys, audit: AuditLog, settings: ServiceSettings) -> None:
        self._redis = redis
        self._keys = keys
        self._audit = audit
        self._default = Quota(
            compiles=settings.namespace_compiles,
            compile_seconds=settings.namespace_compile_seconds,
            bytes=settings.namespace_bytes,
        )

    async def read(self, namespace: str) -> NamespaceReply:
        keys = self._keys.of(namespace)
        seconds, micros = await self._redis.time()
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hget(keys.namespaces, namespace)
            pipe.zcount(keys.active, f"({seconds * 1000 + micros // 1000}", "+inf")
            pipe.get(keys.spent)
            pipe.pttl(keys.spent)
            pipe.zscore(keys.namespace_bytes, keys.lru)
            pipe.hlen(keys.sizes)
            record, compiles, spent, left, total, artifacts = await pipe.execute()
        own = _quota(record)
        return NamespaceReply(
            name=namespace,
            own=own,
            quota=_merged(self._default, own),
            compiles=compiles,
            compile_seconds=int(spent or 0) / 1000,
            period_ends_seconds=max(left, 0) / 1000,
            bytes=int(total or 0),
            artifacts=artifacts,
        )

    async def change(self, namespace: str, change: QuotaChange, *, by: Grant) -> None:
        """Changes the quota of a namespace, and creates the namespace if need be. Raises RedisError."""
        changed = {
            name: value for name in change.__struct_fields__ if (value := getattr(change, name)) is not UNSET
        }
        event = AuditEvent(
            action="quota_changed",
            name=by.name,
            token=by.id,
            detail=", ".join(
                f"{name} {'default' if value is None else value}" for name, value in changed.items()
            ),
        )

        async def write(transaction: Pipeline) -> None:
            record = await transaction.hget(self._keys.namespaces, namespace)
            quota = msgspec.structs.replace(_quota(record), **changed)
            transaction.multi()  # type: ignore[no-untyped-call]  # of redis-py
            transaction.hset(self._keys.namespaces, namespace, msgspec.json.encode(quota))
            transaction.hdel(self._keys.deleted, namespace)
            await self._audit.of(namespace).append(event, within=transaction)

        await self._redis.transaction(write, self._keys.namespaces)


def _quota(record: bytes | str | None) -> Quota:
    return decoding.from_json(record, type=Quota) if record else Quota()


def _merged(default: Quota, own: Quota) -> Quota:
    set_here = {name: value for name, value in msgspec.structs.asdict(own).items() if value is not None}
    return msgspec.structs.replace(default, **set_here)
