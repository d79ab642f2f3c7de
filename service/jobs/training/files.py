"""Training jobs' data in the blob store: packed working directories, files that jobs made, and metrics and logs that
are too long for Redis. Each namespace has a folder of its own, next to those of artifacts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from datetime import timedelta
from typing import NoReturn

import obstore
from obstore.exceptions import BaseError as StoreError
from obstore.exceptions import GenericError
from obstore.store import ObjectStore

from ....compiler.errors import Unavailable
from ...storage.blobs import open_stream
from ...storage.digests import checked, sha256
from ...storage.installation import Installation
from ...storage.outages import BlobStoreDown

FOLDER = "trains"
_UNUSED = timedelta(days=1)
"""How long unused packages, replaced files, and files of deleted jobs stay; and a day more."""


class TrainingFiles:
    """The files of one namespace. Every method raises Unavailable; BlobStoreDown where a later call may succeed."""

    def __init__(self, store: ObjectStore, namespace: str, installation: Installation) -> None:
        self._store = store
        self._installation = installation
        self._folder = f"{FOLDER}/{namespace}"

    async def put_package(self, data: bytes) -> str:
        """Returns the SHA-256 of the package."""
        digest = await sha256(data)
        await self._put(f"packages/{digest}", data)
        return digest

    async def has_package(self, digest: str) -> bool:
        try:
            await obstore.head_async(self._store, f"{self._folder}/packages/{digest}")
        except FileNotFoundError:
            return False
        except (StoreError, OSError) as error:
            _refuse("cannot be read", error)
        return True

    async def package(self, digest: str) -> bytes | None:
        """None where it is missing or damaged."""
        data = await self._get(f"packages/{digest}")
        return data if data is not None and await sha256(data) == digest else None

    async def put_file(self, job: str, data: bytes) -> str:
        """Returns the SHA-256 of the file, which `file` needs."""
        digest = await sha256(data)
        await self._put(f"jobs/{job}/files/{digest}", data)
        return digest

    async def file(self, job: str, digest: str) -> AsyncGenerator[bytes] | None:
        """Its pieces; a damaged file raises DamagedStream in place of the last. None where it is missing."""
        stream = await open_stream(self._store, f"{self._folder}/jobs/{job}/files/{digest}")
        return checked(stream, digest) if stream is not None else None

    async def put_segment(self, job: str, what: str, first: int, last: int, data: bytes) -> None:
        """Metrics, logs or history from number `first` to `last`."""
        await self._put(f"jobs/{job}/{what}/{first}-{last}", data)

    async def segment(self, job: str, what: str, first: int, last: int) -> bytes | None:
        return await self._get(f"jobs/{job}/{what}/{first}-{last}")

    async def sweep(self, jobs: dict[str, set[str]], packages: set[str], *, marks: str) -> int:
        """Delete what belongs to none of `jobs` (files by job), and packages not in `packages`. Returns how many.

        marks: see Installation.sweep.
        """

        async def used(path: str) -> bool:
            return _known(path.removeprefix(f"{self._folder}/").split("/"), jobs, packages)

        return await self._installation.sweep(self._folder, marks, _UNUSED, used)

    async def _put(self, path: str, data: bytes) -> None:
        await self._installation.check_store()
        try:
            await obstore.put_async(self._store, f"{self._folder}/{path}", data)
        except (StoreError, OSError) as error:
            _refuse(f"refused {len(data)} bytes", error)

    async def _get(self, path: str) -> bytes | None:
        try:
            found = await obstore.get_async(self._store, f"{self._folder}/{path}")
            return bytes(await found.bytes_async())
        except FileNotFoundError:
            return None
        except (StoreError, OSError) as error:
            _refuse("cannot be read", error)


def _known(path: list[str], jobs: dict[str, set[str]], packages: set[str]) -> bool:
    match path:
        case ["packages", digest]:
            return digest in packages
        case ["jobs", job, "files", digest]:
            return digest in jobs.get(job, ())
        case ["jobs", job, *_]:
            return job in jobs
    return False


def _refuse(what: str, error: Exception) -> NoReturn:
    temporary = isinstance(error, (GenericError, OSError)) and not isinstance(error, FileNotFoundError)
    first = str(error).partition("\n")[0].strip()
    kind = BlobStoreDown if temporary else Unavailable
    raise kind(f"the blob store {what}: {first}", hint="Repair the store, then try again") from error
