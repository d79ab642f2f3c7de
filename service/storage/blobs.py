"""Stage 9: artifacts' bytes. Small ones are stored in Redis, large ones by obstore in a folder, S3, GCS or Azure."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError as StoreError
from obstore.store import LocalStore, ObjectStore, from_url

from ...compiler.artifact.container import ArtifactFile, pieces
from ..base.settings import ServiceSettings
from .installation import Installation
from .outages import StoreOutages
from .redis.connections import RedisClient
from .redis.keys import DEFAULT_NAMESPACE, Keys

if TYPE_CHECKING:
    from obstore import BytesStream

StorageTier = Literal["redis", "store"]
_FOLDER = "artifacts"
FOLDERS = "namespaces"
"""The folder that has those of all namespaces but the default one."""
ORPHAN_AGE = timedelta(hours=1)
"""A blob that nothing published lives this long, and a day more in the store."""
_TRANSFER = timedelta(minutes=30)
"""One request; large artifacts go up in parts, and come down in one."""
_RETRIES = 3
UPLOAD_PARTS = 2
"""So many parts of 5 MiB are in memory while a large file goes to the store."""
PIECE_BYTES = 64 << 10
"""What is sent at a time: a connection whose client is slow holds no more than a few of them."""


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

    def __init__(
        self,
        redis: RedisClient,
        keys: Keys,
        store: ObjectStore,
        installation: Installation,
        settings: ServiceSettings,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._store = store
        self._installation = installation
        self._outages = installation.outages
        self._settings = settings
        self._folder = _folder(keys.namespace)

    def of(self, namespace: str) -> BlobStore:
        if namespace == self._keys.namespace:
            return self
        return BlobStore(
            self._redis, self._keys.of(namespace), self._store, self._installation, self._settings
        )

    async def put(self, key: str, digest: str, data: ArtifactFile) -> StorageTier:
        """Store, before the index offers it. Raises BlobStoreDown when the same call may succeed later (no connection,
        disk full), Unavailable when it will not (no such bucket, no permission)."""
        if len(data) <= self._settings.blob_inline_bytes and await self._room(len(data)):
            await self._redis.set(self._keys.blob(digest), data[:], px=ORPHAN_AGE)
            return "redis"
        await self._installation.check_store()
        try:
            if isinstance(data, bytes):
                await obstore.put_async(self._store, self._path(key, digest), data)
            else:
                await obstore.put_async(
                    self._store, self._path(key, digest), pieces(data), max_concurrency=UPLOAD_PARTS
                )
        except (StoreError, OSError) as error:
            refused = f"the blob store refused an artifact of {len(data)} bytes"
            raise self._outages.unavailable("write", error, refused) from error
        return "store"

    async def _room(self, size: int) -> bool:
        held = int(await self._redis.get(self._keys.inline) or 0)
        return held + size <= self._settings.redis_blob_limit_bytes

    async def get(self, key: str, digest: str) -> bytes | None:
        """The bytes from the store, unchecked; None when they are gone. Raises Unavailable."""
        with self._outages.as_unavailable("read"):
            found = await obstore.get_async(self._store, self._path(key, digest))
            return bytes(await found.bytes_async())
        await self._installation.check_store()
        return None

    async def beginning(self, key: str, digest: str, length: int) -> bytes | None:
        """Does the same as `get` for the first bytes alone."""
        path = self._path(key, digest)
        with self._outages.as_unavailable("read"):
            there = await obstore.head_async(self._store, path)
            if not there["size"]:
                return b""  # of which no range can be had
            return bytes(await obstore.get_range_async(self._store, path, start=0, length=length))
        await self._installation.check_store()
        return None

    async def stream(self, key: str, digest: str) -> AsyncGenerator[bytes] | None:
        """The same as `get`, in pieces of PIECE_BYTES or somewhat more, which raise Unavailable too."""
        stream = await open_stream(self._store, self._path(key, digest), self._outages)
        if stream is None:
            await self._installation.check_store()
        return stream

    async def delete(self, key: str, digest: str, tier: StorageTier) -> None:
        """Deletes a blob that the index no longer offers, if it is there. Raises Unavailable."""
        if tier == "redis":
            await self._redis.delete(self._keys.blob(digest))
            return
        with self._outages.as_unavailable("delete"):
            await obstore.delete_async(self._store, self._path(key, digest))

    async def discard(self, key: str, digest: str) -> None:
        """Deletes from the store what the index no longer offers, unless it offers it again by now (an import of the
        same artifact). Raises Unavailable, RedisError."""
        if await self._redis.hget(self._keys.index(key), "digest") != digest.encode():
            await self.delete(key, digest, "store")

    async def sweep(self) -> int:
        """Delete what crashes left in the store: old files that the index does not offer.

        Returns how many went. Raises Unavailable, RedisError.
        """

        async def used(paths: list[str]) -> list[bool]:
            parts = [path.removeprefix(f"{self._folder}/")[3:].partition("/") for path in paths]
            async with self._redis.pipeline(transaction=False) as pipe:
                for key, _, _ in parts:
                    pipe.hget(self._keys.index(key), "digest")
                found = await pipe.execute()
            return [offered == digest.encode() for offered, (_, _, digest) in zip(found, parts, strict=True)]

        return await self._installation.sweep(self._folder, self._keys.orphans, ORPHAN_AGE, used)

    async def stored(self, beginning: str) -> list[tuple[str, str]]:
        """Key and digest of each blob in the store whose key has this beginning of two digits, the newest first.
        Raises Unavailable."""
        found = []
        with self._outages.as_unavailable("read"):
            async for batch in obstore.list(self._store, f"{self._folder}/{beginning}"):
                for entry in batch:
                    key, _, digest = entry["path"].removeprefix(f"{self._folder}/")[3:].partition("/")
                    found.append((entry["last_modified"], key, digest))
        return [(key, digest) for _, key, digest in sorted(found, reverse=True)]

    def _path(self, key: str, digest: str) -> str:
        return blob_path(self._keys.namespace, key, digest)


def blob_path(namespace: str, key: str, digest: str) -> str:
    return f"{_folder(namespace)}/{key[:2]}/{key}/{digest}"


def _folder(namespace: str) -> str:
    return _FOLDER if namespace == DEFAULT_NAMESPACE else f"{FOLDERS}/{namespace}"


async def open_stream(store: ObjectStore, path: str, outages: StoreOutages) -> AsyncGenerator[bytes] | None:
    """An object's bytes, in pieces of PIECE_BYTES or somewhat more; None if there is none. Both steps raise
    Unavailable."""
    with outages.as_unavailable("read"):
        found = await obstore.get_async(store, path)
        return _pieces(found.stream(min_chunk_size=PIECE_BYTES), outages)
    return None


async def _pieces(stream: BytesStream, outages: StoreOutages) -> AsyncGenerator[bytes]:
    with outages.as_unavailable("read"):
        async for piece in stream:
            yield bytes(piece)
