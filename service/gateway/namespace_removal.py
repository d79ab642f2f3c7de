"""Deletes a namespace: its tokens, what the blob store has of it, and all of its Redis keys.

Each request does a part, so that none takes long; whoever asks repeats it until it is done. One that is broken off can
be begun again: the namespace itself goes last. The folders of training jobs on worker nodes go as those of other jobs
do, by their age.
"""

from __future__ import annotations

import math
import re

import obstore

from ...compiler.api.admin import NamespaceRemoval
from ...compiler.errors import MalformedRequest, Unavailable
from ..access.audit import AuditEvent, AuditLog
from ..access.tokens import Grant
from ..jobs.open_jobs import OpenJobs
from ..jobs.training.files import FOLDER
from ..parts.shared import SharedParts
from ..storage.blobs import FOLDERS
from ..storage.redis.keys import DEFAULT_NAMESPACE, Keys

_OBJECTS = 1000
"""How many objects of the blob store one request deletes, at most."""
_PAGE = 1000


class NamespaceRemover:
    def __init__(self, shared: SharedParts, audit: AuditLog) -> None:
        """audit: of the default namespace, since the log of one that is deleted goes with it."""
        self._shared = shared
        self._redis = shared.redis
        self._audit = audit
        self._open_jobs = OpenJobs(shared.redis, shared.keys)

    async def remove(self, name: str, *, by: Grant) -> NamespaceRemoval:
        """One part of it. Nothing is deleted while jobs of the namespace are open, nor while its graphs compile, nor
        as long as a request may still be sent whose token was accepted before.

        Raises MalformedRequest for the default namespace, NotFound; Unavailable if Redis and the blob store do not
        belong together; RedisError.
        """
        if name == DEFAULT_NAMESPACE:
            raise MalformedRequest("the namespace default is always there", hint="`torchrelay cache rm`")
        await self._shared.namespaces.check(name)
        keys = self._shared.keys.of(name)
        if jobs := sum(job.namespace == name for job in await self._open_jobs.read()):
            return NamespaceRemoval("jobs", jobs)
        seconds, _ = await self._redis.time()
        await self._redis.hsetnx(keys.deleted, name, str(seconds))
        await self._shared.tokens.revoke_all(name, by=by)
        if compiles := await self._redis.zcount(keys.active, seconds * 1000, "+inf"):
            return NamespaceRemoval("compiles", compiles)
        began = int(await self._redis.hget(keys.deleted, name) or 0)
        if (left := math.ceil(began + self._shared.settings.body_timeout_seconds - seconds)) > 0:
            return NamespaceRemoval("requests", left)
        if await self._shared.installation.look() != "same":
            raise Unavailable(
                "Redis and the blob store do not belong together", hint="`torchrelay cache reindex`"
            )
        if deleted := await self._delete_objects(name):
            return NamespaceRemoval("deleting", deleted)
        await self._shared.uses.write()
        stored, inline = await self._shared.recount.count(keys)
        await self._delete_keys(keys)
        event = AuditEvent(action="namespace_deleted", name=by.name, token=by.id, detail=name)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.zrem(keys.namespace_bytes, keys.lru)
            pipe.decrby(keys.bytes, stored)
            pipe.decrby(keys.inline, inline)
            pipe.delete(keys.summed)
            pipe.hdel(keys.namespaces, name)
            await self._audit.append(event, within=pipe)
            await pipe.execute()
        return NamespaceRemoval("done", 0)

    async def _delete_objects(self, name: str) -> int:
        """At most _OBJECTS. Returns how many there were."""
        with self._shared.installation.outages.as_unavailable("delete"):
            for folder in (f"{FOLDERS}/{name}/", f"{FOLDER}/{name}/"):
                async for batch in obstore.list(self._shared.store, folder, chunk_size=_OBJECTS):
                    # a store compares names by parts or by letters; another namespace may begin as this one does
                    paths = [entry["path"] for entry in batch if entry["path"].startswith(folder)]
                    if paths:
                        await obstore.delete_async(self._shared.store, paths)
                        return len(paths)
        return 0

    async def _delete_keys(self, keys: Keys) -> None:
        pattern = re.sub(r"([\\*?\[\]])", r"\\\1", keys.prefix) + "*"
        found: list[bytes] = []
        async for key in self._redis.scan_iter(match=pattern.encode(), count=_PAGE):
            found.append(key)
            if len(found) == _PAGE:
                await self._redis.unlink(*found)
                found.clear()
        if found:
            await self._redis.unlink(*found)
