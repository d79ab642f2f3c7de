"""The audit log: who did what and when, in a Redis stream that is only ever appended to.

Entries name tokens by name and public id, never by their secret. A change of Redis and its entry are made in one
step (MULTI, or the same Lua script), so that there is never one without the other.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from redis.asyncio.client import Pipeline
from redis.typing import EncodableT, FieldT

from ...compiler.api.admin import AuditEntry
from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import Keys
from ..storage.redis.streams import stream_order

AuditAction = Literal[
    "compile",
    "published",
    "imported",
    "program_stored",
    "pinned",
    "unpinned",
    "deleted",
    "token_created",
    "token_revoked",
    "quota_changed",
    "namespace_deleted",
    "tunings_imported",
    "tune_begun",
    "tune_cancelled",
    "tune_resumed",
    "tune_forgotten",
    "train_begun",
    "train_cancelled",
    "train_resumed",
    "train_forgotten",
    "quarantined",
    "key_rotated",
    "key_revoked",
    "all_disowned",
]
"""compile: `name` caused the compile of `key`. published: the service offers what `worker` built, signed by `signer`.
imported: an artifact that `signer` had signed elsewhere. program_stored: `name` gave a program to the namespace.
tunings_imported: `detail` says how many. namespace_deleted: `detail` names it. tune_*, train_*: `detail` names the
job; forgotten: it made room for a newer one. quarantined: the service offers an artifact no longer; `detail` says why.
key_rotated, key_revoked, all_disowned: changes of signing/keyring.py."""

_SERVICE = "service"
_BATCH = 100


class AuditEvent(Struct, frozen=True, kw_only=True):
    """`name`, `token`: name and public id of the token that did it; the service itself has no id."""

    action: AuditAction
    name: str = _SERVICE
    token: str = ""
    key: str = ""
    digest: str = ""
    worker: str = ""
    signer: str = ""
    """Id of the key that signed."""
    detail: str = ""

    def fields(self) -> list[str]:
        """Name, value, name, value ... of what is not empty, as XADD takes them."""
        pairs = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return [part for name, value in pairs if value for part in (name, value)]


class AuditLog:
    """The log of one namespace: about the newest `entries`."""

    def __init__(self, redis: RedisClient, keys: Keys, *, entries: int) -> None:
        self._redis = redis
        self._keys = keys
        self.key = keys.audit
        self.entries = entries

    def of(self, namespace: str) -> AuditLog:
        return AuditLog(self._redis, self._keys.of(namespace), entries=self.entries)

    async def append(self, event: AuditEvent, *, within: Pipeline | None = None) -> None:
        """Log an event now, or when the transaction `within` runs. Raises RedisError."""
        flat = event.fields()
        fields: dict[FieldT, EncodableT] = dict(zip(flat[::2], flat[1::2], strict=True))
        await (within or self._redis).xadd(self._keys.audit, fields, maxlen=self.entries, approximate=True)

    async def page(self, *, before: str, limit: int) -> list[AuditEntry]:
        """At most `limit` entries, newest first, older than the entry `before` ('': from the newest)."""
        if before and stream_order(before) == (0, 0):
            return []  # Redis takes an interval that ends before its first id for an error
        found = await self._redis.xrevrange(
            self._keys.audit, f"({before}" if before else "+", "-", count=limit
        )
        return [_entry(name, fields, self._keys.namespace) for name, fields in found]


async def trim(redis: RedisClient, keys: list[Keys], *, entries: int) -> None:
    """Drops the oldest entries of the longest logs until all of them together have about `entries`. keys: those of each
    namespace. Raises RedisError."""
    lengths: dict[str, int] = {}
    for first in range(0, len(keys), _BATCH):
        some = [each.audit for each in keys[first : first + _BATCH]]
        async with redis.pipeline(transaction=False) as pipe:
            for name in some:
                pipe.xlen(name)
            lengths |= zip(some, await pipe.execute(), strict=True)
    left, most = entries, entries
    for number, length in enumerate(sorted(lengths.values())):
        most = left // (len(lengths) - number)  # an equal share of what the shorter ones leave
        if length > most:
            break
        left -= length
    for name, length in lengths.items():
        if length > most:
            await redis.xtrim(name, maxlen=most, approximate=True)


async def page(logs: list[AuditLog], *, before: str, limit: int) -> list[AuditEntry]:
    """`AuditLog.page` of several logs as one: about `limit`, since entries with one id stay together."""
    found = [entry for log in logs for entry in await log.page(before=before, limit=limit)]
    found.sort(key=lambda entry: stream_order(entry.id), reverse=True)
    end = min(limit, len(found))
    while end and end < len(found) and found[end].id == found[end - 1].id:
        end += 1
    return found[:end]


def _entry(name: bytes, fields: dict[bytes, bytes], namespace: str) -> AuditEntry:
    known = {
        field.decode(): value.decode()
        for field, value in fields.items()
        if field.decode() in AuditEvent.__struct_fields__
    }
    return AuditEntry(id=name.decode(), at=int(name.split(b"-")[0]) / 1000, namespace=namespace, **known)
