"""Backup and restore: what of an installation cannot be made again, in a folder or an object store.

A backup is `backups/<UTC time>.tar`: `redis`, a MessagePack array for each key; `keys/`, the signing keys if they were
asked for; and, last, `manifest.json` with the digests of the others. Beside it is `blobs/`, which all backups share:
artifacts that only Redis held and, on request, everything in the blob store, under the store's own paths.

Redis' part of the cache is left out: `torchrelay cache reindex` makes it again from the store, and until then a
restored installation deletes nothing. So is what lives for minutes, such as leases and the tokens of ranks.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import IO, BinaryIO

import msgspec
import obstore
from msgspec import Struct
from obstore.store import ObjectStore

from ...compiler import VERSION, decoding
from ...compiler.api.admin import TokenRecord
from ...compiler.errors import MalformedRequest, NotFound, SettingsError
from ..access.tokens import rank_token_name
from ..storage.blobs import blob_path
from ..storage.installation import IDENTITY, StoreIdentity
from ..storage.private_files import write_private
from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import DEFAULT_NAMESPACE, Keys

FORMAT = 1
_CACHE = {
    *("index", "lru", "pinned", "sizes", "total", "inline", "bytes", "held", "blob", "recount", "recounted"),
    *("components", "described", "described_bytes", "installation"),
}
_RUNNING = {"pending", "fence", "active", "lease", "events", "request", "run", "waiters", "failed", "kills"}
_MADE_AGAIN = {"changed", "sums", "summed", "summing", "swept", "open_jobs"}
_LEFT_OUT = frozenset(
    _CACHE
    | _RUNNING
    | _MADE_AGAIN
    | {"dispatchers", "dispatcher", "slots", "bucket", "orphans", "train_orphans"}
    | {"asks", "asked", "graphs", "alike", "jobs", "job"}
    | {"saved", "saved_sizes", "saved_total", "kept", "kept_sizes", "kept_total"}
)
"""Keys by the first word of their name (storage/redis/keys.py): the cache, what runs now, what helps to explain, and
requests that tuning jobs may name, which have copies of those that they do."""
_JOBS = ("tune", "train")
_OTHER = "Name another one with --backup"
_PAGE = 500
_PIECE = 1 << 20
_BACKUPS, _BLOBS = "backups", "blobs"


class BackupManifest(Struct, frozen=True):
    """created: Unix seconds. installation: its id. members: SHA-256 by name."""

    format: int
    version: str
    created: int
    installation: str
    keys: int
    members: dict[str, str]


class SavedKey(Struct, frozen=True, array_like=True):
    """A key of Redis, without the installation's prefix. expires: Unix ms; 0: never. data: as DUMP gives it, or the
    fields of the hash of tokens."""

    name: bytes
    expires: int
    data: bytes | dict[bytes, bytes]


class Backups:
    """Of one installation, in `target`. Methods raise RedisError, StoreError, OSError."""

    def __init__(self, redis: RedisClient, keys: Keys, store: ObjectStore, target: ObjectStore) -> None:
        self._redis = redis
        self._keys = keys
        self._prefix = keys.installation.encode()
        self._store = store
        self._target = target

    async def make(
        self, *, signing_keys: Path | None = None, whole_store: bool = False
    ) -> tuple[str, BackupManifest]:
        """Makes one while the service runs; returns its name. signing_keys: their folder, if they are to be in it."""
        identity = await self._redis.hget(self._keys.identity, "id")
        if identity is None:
            raise NotFound(
                "there is no installation in this Redis", hint="Give its --redis, and TORCHRELAY_SERVICE_*"
            )
        created = datetime.now(UTC)
        name = f"{_BACKUPS}/{created:%Y%m%dT%H%M%S.%fZ}.tar"
        with tempfile.TemporaryFile() as saved, tempfile.NamedTemporaryFile(suffix=".tar") as packed:
            count = await self._save_redis(saved)
            members: dict[str, str] = {}
            with tarfile.open(fileobj=packed, mode="w") as tar:
                _add(tar, members, "redis", saved)
                for file in _files(signing_keys):
                    _add(tar, members, f"keys/{file.name}", io.BytesIO(file.read_bytes()))
                manifest = BackupManifest(
                    FORMAT, VERSION, int(created.timestamp()), identity.decode(), count, members
                )
                _add(tar, {}, "manifest.json", io.BytesIO(msgspec.json.encode(manifest)))
            packed.flush()
            await self._save_inline_blobs()
            if whole_store:
                await _copy(self._store, "", self._target, f"{_BLOBS}/")
            await obstore.put_async(self._target, name, Path(packed.name))
        return name, manifest

    async def restore(
        self, name: str = "", *, signing_keys: Path | None = None
    ) -> tuple[str, BackupManifest]:
        """Restores one, by default the newest; returns its name. Nothing of the service may run.

        signing_keys: where to put those that are in it. Raises SettingsError where something is already; NotFound,
        MalformedRequest for a backup that is none or is damaged.
        """
        name = name or await self._newest()
        with tempfile.TemporaryFile() as packed:
            try:
                found = await obstore.get_async(self._target, name)
            except FileNotFoundError:
                raise NotFound(f"there is no {name}") from None
            async for piece in found.stream():
                packed.write(bytes(piece))
            packed.seek(0)
            try:
                with tarfile.open(fileobj=packed, mode="r:") as tar:
                    manifest = _verified(tar, name)
                    await self._check_empty(manifest, tar, signing_keys)
                    await _copy(self._target, f"{_BLOBS}/", self._store, "")
                    await self._restore_identity(manifest)
                    for member in manifest.members:
                        if member.startswith("keys/") and signing_keys is not None:
                            write_private(signing_keys / Path(member).name, _opened(tar, member).read())
                    await self._restore_redis(_opened(tar, "redis"))
            except (tarfile.TarError, msgspec.MsgspecError) as error:
                raise MalformedRequest(f"{name} is no backup, or is damaged: {error}", hint=_OTHER) from None
        return name, manifest

    # --- Redis -----------------------------------------------------------------------------------------------

    async def _save_redis(self, file: IO[bytes]) -> int:
        """All keys of a namespace as of one moment, but for jobs: each as of one moment, after the list that names it.
        Returns how many keys."""
        count = 0
        for jobs in (False, True):
            names = sorted([name async for name in self._names() if (len(_words(name)) > 1) == jobs])
            for _, together in groupby(names, key=_moment):
                for saved in await self._dump(list(together)):
                    data = msgspec.msgpack.encode(saved)
                    file.write(len(data).to_bytes(8, "big") + data)
                    count += 1
        return count

    async def _names(self) -> AsyncIterator[bytes]:
        """What is saved, without the prefix."""
        seen = set()
        async for key in self._redis.scan_iter(match=self._prefix + b"*", count=_PAGE):
            name = key.removeprefix(self._prefix)
            words = _words(name)
            if (
                words[0] not in _LEFT_OUT
                and not (words[0] in _JOBS and words[-1] == "lease")
                and name not in seen
            ):
                seen.add(name)
                yield name

    async def _dump(self, names: list[bytes]) -> list[SavedKey]:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.time()
            for name in names:
                pipe.pttl(self._prefix + name)
                if name == b"tokens":
                    pipe.hgetall(self._keys.tokens)
                else:
                    pipe.dump(self._prefix + name)
            (seconds, micros), *found = await pipe.execute()
        now = seconds * 1000 + micros // 1000
        return [
            SavedKey(name, now + left if left >= 0 else 0, _lasting(data) if name == b"tokens" else data)
            for name, left, data in zip(names, found[::2], found[1::2], strict=True)
            if data
        ]

    async def _restore_redis(self, file: IO[bytes]) -> None:
        now = time.time() * 1000
        async with self._redis.pipeline(transaction=False) as pipe:
            while size := int.from_bytes(file.read(8), "big"):
                saved = decoding.from_msgpack(file.read(size), type=SavedKey)
                key = self._prefix + saved.name
                if isinstance(saved.data, dict):
                    pipe.hset(key, mapping=saved.data)  # type: ignore[arg-type]
                elif not saved.expires or saved.expires > now:
                    pipe.restore(key, saved.expires, saved.data, absttl=bool(saved.expires))
                if len(pipe) >= _PAGE or size > _PIECE:
                    await pipe.execute()
            await pipe.execute()

    # --- the store -------------------------------------------------------------------------------------------

    async def _save_inline_blobs(self) -> None:
        """The artifacts that are in Redis alone, as the blob store would have them."""
        async for key in self._redis.scan_iter(match=self._prefix + b"*index:*", count=_PAGE):
            words = _words(key.removeprefix(self._prefix))
            if words[0] != "index":
                continue
            digest, place = await self._redis.hmget(key, "digest", "place")
            if digest is None or place != b"redis":
                continue
            namespace = _namespace(key.removeprefix(self._prefix))
            path = f"{_BLOBS}/{blob_path(namespace, words[1], digest.decode())}"
            data = await self._redis.get(self._keys.of(namespace).blob(digest.decode()))
            if data is not None and not await _has(self._target, path, len(data)):
                await obstore.put_async(self._target, path, data)

    async def _check_empty(
        self, manifest: BackupManifest, tar: tarfile.TarFile, signing_keys: Path | None
    ) -> None:
        async for key in self._redis.scan_iter(match=self._prefix + b"*", count=_PAGE):
            raise SettingsError(
                f"Redis holds an installation: {key.decode(errors='replace')}",
                hint="Stop gateways and dispatchers, and give an empty Redis",
            )
        identity = await _identity(self._store)
        if identity is not None and identity.id != manifest.installation:
            raise SettingsError(
                "the blob store is another installation's than the backup",
                hint="Give the store of this backup, or an empty one, as TORCHRELAY_SERVICE_BLOB_URL",
            )
        for member in manifest.members:
            if member.startswith("keys/") and signing_keys is not None:
                file = signing_keys / Path(member).name
                if file.exists() and file.read_bytes() != _opened(tar, member).read():
                    raise SettingsError(
                        f"{signing_keys} holds other signing keys", hint="Move them away first"
                    )

    async def _restore_identity(self, manifest: BackupManifest) -> None:
        """Redis gets no id: until a reindex it knows nothing of the store, and nothing there is deleted."""
        if await _identity(self._store) is None:
            identity = msgspec.json.encode(StoreIdentity(manifest.installation))
            await obstore.put_async(self._store, IDENTITY, identity)

    async def _newest(self) -> str:
        found = await obstore.list_with_delimiter_async(self._target, _BACKUPS)
        names = sorted(entry["path"] for entry in found["objects"])
        if not names:
            raise NotFound("there is no backup")
        return names[-1]


def _words(name: bytes) -> list[str]:
    """Of a key's name within its namespace."""
    words = name.decode(errors="replace").split(":")
    return words[2:] if words[0] == "ns" and len(words) > 2 else words


def _namespace(name: bytes) -> str:
    words = name.decode().split(":")
    return words[1] if words[0] == "ns" else DEFAULT_NAMESPACE


def _moment(name: bytes) -> tuple[str, ...]:
    """Equal of names that are saved at one moment."""
    words = _words(name)
    return (_namespace(name), *words[:2]) if len(words) > 1 else (_namespace(name),)


def _lasting(tokens: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Without those of training jobs' ranks: a job that goes on gets new ones."""
    ranks = rank_token_name("")
    return {
        field: data
        for field, data in tokens.items()
        if not decoding.from_json(data, type=TokenRecord).name.startswith(ranks)
    }


def _files(folder: Path | None) -> list[Path]:
    if folder is None:
        return []
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def _add(tar: tarfile.TarFile, members: dict[str, str], name: str, file: BinaryIO | IO[bytes]) -> None:
    file.seek(0)
    members[name] = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = file.seek(0, io.SEEK_END), 0o600, int(time.time())
    file.seek(0)
    tar.addfile(entry, file)


def _opened(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    try:
        file = tar.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise tarfile.ReadError(f"it lacks {name}")
    return file


def _verified(tar: tarfile.TarFile, name: str) -> BackupManifest:
    """Raises MalformedRequest unless all that it names is there and whole."""
    raw = _opened(tar, "manifest.json").read()
    if (found := decoding.from_json(raw).get("format")) != FORMAT:
        raise MalformedRequest(
            f"{name} has format {found}, not {FORMAT}", hint="Restore it with its own version"
        )
    manifest = decoding.from_json(raw, type=BackupManifest)
    for member, digest in manifest.members.items():
        if hashlib.file_digest(_opened(tar, member), "sha256").hexdigest() != digest:  # type: ignore[arg-type]
            raise MalformedRequest(f"{name} is damaged: its {member} has another digest", hint=_OTHER)
    return manifest


async def _identity(store: ObjectStore) -> StoreIdentity | None:
    try:
        found = await obstore.get_async(store, IDENTITY)
    except FileNotFoundError:
        return None
    return decoding.from_json(bytes(await found.bytes_async()), type=StoreIdentity)


async def _has(store: ObjectStore, path: str, size: int) -> bool:
    try:
        return (await obstore.head_async(store, path))["size"] == size
    except FileNotFoundError:
        return False


async def _copy(source: ObjectStore, under: str, target: ObjectStore, to: str) -> None:
    """What of `source` lies `under` a folder and `target` lacks. Names are digests: what is there is the same."""
    async for batch in obstore.list(source, under or None):
        for entry in batch:
            path = to + entry["path"].removeprefix(under)
            if path.removeprefix(to) == IDENTITY or await _has(target, path, entry["size"]):
                continue
            try:
                found = await obstore.get_async(source, entry["path"])
            except FileNotFoundError:  # deleted meanwhile
                continue
            await obstore.put_async(target, path, found.stream(min_chunk_size=_PIECE))
