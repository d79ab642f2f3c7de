"""What the cache holds, for people: list, show, pin and remove entries. artifact_cache.py serves and publishes them.

Nothing here counts as a use. A pinned entry is never evicted, however full the cache is. It goes only when it is
removed, or when its blob is lost or damaged.
"""

from __future__ import annotations

import asyncio
from typing import Literal, TypeVar

import msgspec

from ...compiler import decoding
from ...compiler.api import lowered
from ...compiler.api.admin import ArtifactCode, ArtifactReply, CacheEntry, ListedLevel, Listing
from ...compiler.artifact import container
from ...compiler.errors import ArtifactError, NotFound
from ..access.audit import AuditEvent, AuditLog
from ..access.tokens import Grant
from ..storage.blobs import BlobStore
from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import Keys
from ..storage.redis.scripts import Scripts
from .components import EntryComponents
from .found_artifact import GONE, read_head

_HINT = "`torchrelay cache ls` lists what there is"
_AGAIN = "It is compiled again at the next request"
LISTED = 100
_READ_BYTES = 64 << 20
"""How far into a file a member may lie that is shown."""
_SHOWN_BYTES = 8 << 20
"""A member that is shown, unpacked."""
_FIELDS = ("digest", "size", "place", "seconds", "created")

T = TypeVar("T")


class CacheAdmin:
    def __init__(
        self,
        redis: RedisClient,
        keys: Keys,
        scripts: Scripts,
        blobs: BlobStore,
        audit: AuditLog,
        components: EntryComponents,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = scripts
        self._blobs = blobs
        self._audit = audit
        self._components = components

    async def page(self, *, cursor: int, limit: int) -> tuple[list[CacheEntry], int]:
        """About `limit` entries in no order, and the cursor of the next page, 0 after the last.

        What is there from first page to last comes at least once, perhaps twice.
        """
        following, found = await self._redis.hscan(self._keys.sizes, cursor, count=limit)
        entries = await self._entries([key.decode() for key in found])
        return [entry for entry in entries if entry is not None], int(following)

    async def last_used(self, first: int) -> tuple[list[CacheEntry], int]:
        """LISTED entries, the last used first, from position `first` on; and where the next begin, 0 after the last.
        Without the pinned ones."""
        keys = await self._redis.zrevrange(self._keys.lru, first, first + LISTED)
        return await self._existing(keys[:LISTED]), first + LISTED if len(keys) > LISTED else 0

    async def pinned(self) -> list[CacheEntry]:
        """At most LISTED."""
        return await self._existing(await self._redis.zrevrange(self._keys.pinned, 0, LISTED - 1))

    async def _existing(self, keys: list[bytes]) -> list[CacheEntry]:
        return [each for each in await self._entries([key.decode() for key in keys]) if each is not None]

    async def entry(self, key: str) -> CacheEntry:
        """Raises NotFound."""
        (found,) = await self._entries([key])
        if found is None:
            raise NotFound(f"there is no artifact {key}", hint=_HINT)
        return found

    async def _head(self, entry: CacheEntry) -> bytes:
        """What stands before the members, and maybe more, unchecked. Raises ArtifactError, Unavailable."""
        if entry.place != "redis":
            return await read_head(self._blobs, entry.key, entry.digest)
        data = await self._redis.get(self._keys.blob(entry.digest))
        if data is None:
            raise ArtifactError(GONE)
        return bytes(data)

    async def show(self, key: str) -> ArtifactReply:
        """The entry, its unverified manifest, the ids of the keys that signed it, and what its key was made of (nothing
        for an imported artifact, or one of long ago). Raises NotFound, Unavailable."""
        entry = await self.entry(key)
        components = await self._components.get(key)
        try:
            head = await self._head(entry)
            manifest = await asyncio.to_thread(container.read_manifest, head)
            signers = ", ".join(statement.key_id for statement in container.statements(head))
        except ArtifactError as error:
            raise NotFound(f"{key} cannot be shown: {error.message}", hint=_AGAIN) from None
        return ArtifactReply(entry, signers, manifest, components)

    async def code(self, key: str) -> ArtifactCode:
        """What can be read of the artifact, unverified. Raises NotFound, Unavailable."""
        libraries = await self._member(key, container.LIBRARIES, list[tuple[list[str], str, str]])
        lowering = await self.lowering(key)
        return ArtifactCode(
            key,
            [Listing(name, source) for _, source, name in libraries or []],
            [
                ListedLevel(
                    level.name,
                    [Listing(part.name, part.text, bool(part.inputs)) for part in level.parts],
                    level.missing,
                )
                for level in (lowering.levels if lowering else [])
            ],
        )

    async def lowering(self, key: str) -> lowered.Lowering | None:
        """None if the artifact is none, or too large to be shown. Raises NotFound, Unavailable."""
        return await self._member(key, lowered.MEMBER, lowered.Lowering)

    async def _member(self, key: str, name: str, type: type[T]) -> T | None:
        """None if there is no such member, or it is too large to be shown. Raises NotFound, Unavailable."""
        entry = await self.entry(key)
        try:
            return await self._read_member(entry, name, type)
        except ArtifactError as error:
            raise NotFound(f"{key} cannot be shown: {error.message}", hint=_AGAIN) from None

    async def _read_member(self, entry: CacheEntry, name: str, type: type[T]) -> T | None:
        head = await self._head(entry)
        listed = await asyncio.to_thread(container.find_member, head, name)
        if listed is None or listed[0].size > _SHOWN_BYTES or listed[2] > _READ_BYTES:
            return None
        member, start, stop = listed
        data = head if len(head) >= stop else await self._blobs.beginning(entry.key, entry.digest, stop)
        if data is None:
            raise ArtifactError(GONE)

        def decoded() -> T:
            return decoding.from_msgpack(container.unpack_member(member, data[start:stop]), type=type)

        try:
            return await asyncio.to_thread(decoded)
        except msgspec.MsgspecError as error:
            raise ArtifactError(f"member {name} cannot be read: {error}") from None

    async def pin(self, key: str, *, pinned: bool, by: Grant) -> CacheEntry:
        """Pins the entry, or unpins it. Raises NotFound."""
        action: Literal["pinned", "unpinned"] = "pinned" if pinned else "unpinned"
        event = AuditEvent(action=action, name=by.name, token=by.id, key=key)
        if not await self._scripts.pin(
            keys=self._keys.entry_keys(key), args=[key, self._audit.entries, action, *event.fields()]
        ):
            raise NotFound(f"there is no artifact {key}", hint=_HINT)
        return await self.entry(key)

    async def remove(self, key: str, *, by: Grant) -> CacheEntry:
        """Removes the entry, pinned or not, then its bytes. The entry as it was. Raises NotFound, Unavailable."""
        was = await self.entry(key)
        event = AuditEvent(action="deleted", name=by.name, token=by.id, key=key)
        removed = await self._scripts.remove(
            keys=self._keys.entry_keys(key),
            args=[key, self._audit.entries, self._keys.blob_prefix, *event.fields()],
        )
        if removed is None:
            raise NotFound(f"there is no artifact {key}", hint=_HINT)
        digest, place = removed
        if place != b"redis":
            await self._blobs.discard(key, digest.decode())
        return was

    async def _entries(self, names: list[str]) -> list[CacheEntry | None]:
        keys = self._keys
        async with self._redis.pipeline(transaction=False) as pipe:
            for key in names:
                pipe.hmget(keys.index(key), *_FIELDS)
                pipe.zscore(keys.lru, key)
                pipe.zscore(keys.pinned, key)
            answers = await pipe.execute()
        return [_entry(key, *answers[3 * position : 3 * position + 3]) for position, key in enumerate(names)]


def _entry(
    key: str, fields: list[bytes | None], used: float | None, pinned: float | None
) -> CacheEntry | None:
    """None for one that is gone, or damaged."""
    digest, size, place, seconds, created = fields
    if digest is None or size is None or place is None or seconds is None or created is None:
        return None
    try:
        last = next((time for time in (pinned, used) if time is not None), int(created))
        return CacheEntry(
            key=key,
            digest=digest.decode(),
            bytes=int(size),
            place=place.decode(),
            created=int(created) / 1000,
            used=last / 1000,
            pinned=pinned is not None,
            seconds=float(seconds),
        )
    except ValueError:
        return None
