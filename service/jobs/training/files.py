"""Training jobs' data in the blob store: packed working directories, files that jobs made, and metrics and logs that
are too long for Redis. Each namespace has a folder of its own, next to those of artifacts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from datetime import timedelta
from typing import IO

import obstore
from obstore.exceptions import BaseError as StoreError
from obstore.store import ObjectStore

from ...base.http_bodies import UploadedFile
from ...storage.blobs import UPLOAD_PARTS, open_stream
from ...storage.digests import checked, sha256
from ...storage.installation import Installation

FOLDER = "trains"
_UNUSED = timedelta(days=1)
"""How long unused packages, replaced files, and files of deleted jobs stay; and a day more."""


class TrainingFiles:
    """The files of one namespace. Every method raises Unavailable; BlobStoreDown where a later call may succeed."""

    def __init__(self, store: ObjectStore, namespace: str, installation: Installation) -> None:
        self._store = store
        self._installation = installation
        self._outages = installation.outages
        self._folder = f"{FOLDER}/{namespace}"

    async def put_package(self, upload: UploadedFile) -> None:
        await self._put(f"packages/{upload.digest}", upload.file, upload.size)

    async def has_package(self, digest: str) -> bool:
        with self._outages.as_unavailable("read"):
            await obstore.head_async(self._store, f"{self._folder}/packages/{digest}")
            return True
        return False

    async def package(self, digest: str) -> bytes | None:
        """None where it is missing or damaged."""
        data = await self._get(f"packages/{digest}")
        return data if data is not None and await sha256(data) == digest else None

    async def put_file(self, job: str, upload: UploadedFile) -> None:
        await self._put(f"jobs/{job}/files/{upload.digest}", upload.file, upload.size)

    async def file(self, job: str, digest: str) -> AsyncGenerator[bytes] | None:
        """Its pieces; a damaged file raises DamagedStream in place of the last. None where it is missing."""
        stream = await open_stream(self._store, f"{self._folder}/jobs/{job}/files/{digest}", self._outages)
        return checked(stream, digest) if stream is not None else None

    async def put_segment(self, job: str, what: str, first: int, last: int, data: bytes) -> None:
        """Metrics, logs or history from number `first` to `last`."""
        await self._put(f"jobs/{job}/{what}/{first}-{last}", data, len(data))

    async def segment(self, job: str, what: str, first: int, last: int) -> bytes | None:
        return await self._get(f"jobs/{job}/{what}/{first}-{last}")

    async def sweep(self, jobs: dict[str, set[str]], packages: set[str], *, marks: str) -> int:
        """Delete what belongs to none of `jobs` (files by job), and packages not in `packages`. Returns how many.

        marks: see Installation.sweep.
        """

        async def used(paths: list[str]) -> list[bool]:
            parts = [path.removeprefix(f"{self._folder}/").split("/") for path in paths]
            return [_known(path, jobs, packages) for path in parts]

        return await self._installation.sweep(self._folder, marks, _UNUSED, used)

    async def _put(self, path: str, data: bytes | IO[bytes], size: int) -> None:
        await self._installation.check_store()
        try:
            await obstore.put_async(self._store, f"{self._folder}/{path}", data, max_concurrency=UPLOAD_PARTS)
        except (StoreError, OSError) as error:
            refused = f"the blob store refused {size} bytes"
            raise self._outages.unavailable("write", error, refused) from error

    async def _get(self, path: str) -> bytes | None:
        with self._outages.as_unavailable("read"):
            found = await obstore.get_async(self._store, f"{self._folder}/{path}")
            return bytes(await found.bytes_async())
        return None


def _known(path: list[str], jobs: dict[str, set[str]], packages: set[str]) -> bool:
    match path:
        case ["packages", digest]:
            return digest in packages
        case ["jobs", job, "files", digest]:
            return digest in jobs.get(job, ())
        case ["jobs", job, *_]:
            return job in jobs
    return False
