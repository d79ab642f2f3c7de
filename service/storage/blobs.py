"""Stage 9: artifacts' bytes. Small ones are stored in Redis, large ones by obstore in a folder, S3, GCS or Azure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError as StoreError
from obstore.exceptions import GenericError
from obstore.store import LocalStore, ObjectStore, from_url
from redis.asyncio import Redis

from ...compiler.errors import Unavailable
from ..settings import ServiceSettings
from .redis.keys import DEFAULT_NAMESPACE, Keys

StorageTier = Literal["redis", "store"]


_FOLDER = "artifacts"
_FOLDERS = "namespaces"
"""Of all namespaces but the default one."""
_ORPHAN_AGE = timedelta(hours=1)
"""A blob that nothing published lives this long."""
_TRANSFER = timedelta(minutes=30)
"""One request; large artifacts go up in parts, and come down in one."""
_RETRIES = 3
_OUTAGES = (GenericError, OSError)
"""How obstore reports a store that cannot be reached, is silent, answers 5xx or has no room."""


class BlobStoreDown(Unavailable):
    """The blob store did not take an artifact now, and may take it later. A client gets Unavailable."""


def open_store(location: str, *, timeout_seconds: float, allow_http: bool) -> ObjectStore:
    """The store at a URL. A local folder is made if needed, with mode 0700.

    A remote store that is silent for `timeout_seconds` is given up; one that is slow is not. obstore reads the rest
    (credentials, region, endpoint) from the environment as the cloud's own tools do, e.g. AWS_ENDPOINT_URL.
    Raises ValueError or StoreError for a URL that names no store.
    """
    parts = urlsplit(location)
    if parts.scheme != "file":
        silence = timedelta(seconds=timeout_seconds)
        return from_url(
            location,
            client_options={
                "allow_http": allow_http,
                "connect_timeout": silence,
                "read_timeout": silence,
                "timeout": _TRANSFER,
            },
            retry_config={"max_retries": _RETRIES, "retry_timeout": silence},
        )
    folder = Path(unquote(parts.path))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return LocalStore(folder)


class BlobStore:
    """One namespace's bytes by (key, digest). A blob is written whole or not at all, and is checked when it is read."""

    def __init__(self, redis: Redis, keys: Keys, store: ObjectStore, settings: ServiceSettings) -> None:
        self._redis = redis
        self._keys = keys
        self._store = store
        self._settings = settings
        self._folder = _FOLDER if keys.namespace == DEFAULT_NAMESPACE else f"{_FOLDERS}/{keys.namespace}"

    def of(self, namespace: str) -> BlobStore:
        """Another namespace's."""
        if namespace == self._keys.namespace:
            return self
        return BlobStore(self._redis, self._keys.of(namespace), self._store, self._settings)

    async def put(self, key: str, digest: str, data: bytes) -> StorageTier:
        """Store, before the index offers it. Raises BlobStoreDown when the same call may succeed later (no connection,
        disk full), Unavailable when it will not (no such bucket, no permission)."""
        if len(data) <= self._settings.blob_inline_bytes and await self._room(len(data)):
            await self._redis.set(self._keys.blob(digest), data, px=_ORPHAN_AGE)
            return "redis"
        try:
            await obstore.put_async(self._store, self._path(key, digest), data)
        except (StoreError, OSError) as error:
            passing = isinstance(error, _OUTAGES) and not isinstance(error, FileNotFoundError)
            what = f"the blob store refused an artifact of {len(data)} bytes"
            raise _unavailable(what, error, BlobStoreDown if passing else Unavailable) from error
        return "store"

    async def _room(self, size: int) -> bool:
        held = int(await self._redis.get(self._keys.inline) or 0)
        return held + size <= self._settings.redis_blob_limit_bytes

    async def get(self, key: str, digest: str) -> bytes | None:
        """The bytes from the store, unchecked; None when they are gone. Raises Unavailable."""
        with _outages_as_unavailable("the blob store cannot be read"):
            found = await obstore.get_async(self._store, self._path(key, digest))
            return bytes(await found.bytes_async())
        return None

    async def delete(self, key: str, digest: str, place: StorageTier) -> None:
        """Deletes a blob that the index no longer offers, if it is there. Raises Unavailable."""
        if place == "redis":
            await self._redis.delete(self._keys.blob(digest))
            return
        with _outages_as_unavailable("the blob store cannot delete"):
            await obstore.delete_async(self._store, self._path(key, digest))

    async def discard(self, key: str, digest: str) -> None:
        """Deletes from the store what the index no longer offers, unless it offers it again by now (an import of the
        same artifact). Raises Unavailable, RedisError."""
        if await self._redis.hget(self._keys.index(key), "digest") != digest.encode():
            await self.delete(key, digest, "store")

    async def sweep(self, offered: Callable[[str], Awaitable[str | None]]) -> int:
        """Delete what crashes left in the store: old files that are not what `offered` (key to digest) names.

        Returns how many went. Raises Unavailable.
        """
        gone = 0
        before = datetime.now(UTC) - _ORPHAN_AGE
        with _outages_as_unavailable("the blob store cannot be swept"):  # another gateway may sweep too
            async for batch in obstore.list(self._store, self._folder):
                for entry in batch:
                    key, _, digest = entry["path"].removeprefix(f"{self._folder}/")[3:].partition("/")
                    if entry["last_modified"] < before and await offered(key) != digest:
                        await obstore.delete_async(self._store, entry["path"])
                        gone += 1
        return gone

    def _path(self, key: str, digest: str) -> str:
        return f"{self._folder}/{key[:2]}/{key}/{digest}"


@contextmanager
def _outages_as_unavailable(what: str) -> Iterator[None]:
    """Ends the block at a blob that is not there. Raises Unavailable if the store fails."""
    try:
        yield
    except FileNotFoundError:
        return
    except (StoreError, OSError) as error:
        raise _unavailable(what, error) from error


def _unavailable(what: str, error: Exception, kind: type[Unavailable] = Unavailable) -> Unavailable:
    """With the first line of obstore's error; the others are about its source code."""
    return kind(
        f"{what}: {str(error).partition(chr(10))[0].strip()}", hint="See to the store, then ask again"
    )
