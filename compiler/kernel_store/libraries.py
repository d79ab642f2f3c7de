"""Finds kernels that earlier compiles built, by name, on a worker's disk.

Inductor names a C++ library by a digest of its source, the compiler's command line and version, so the same name means
the same binary. Triton's binaries and winners have names of the same kind (triton_cache.py). A job only reads the store
and puts its own files into a second folder (`KernelExchange`); the process that supervises the job collects them, so
that other jobs find a kernel as soon as it is built. Namespaces share nothing, because later jobs load these files.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from ..process.own_files import own_folder, trim

NAME = re.compile(r"c[a-z2-7]{51}(\.main)?\.so|t[a-z2-7]{52}\.triton|w[a-z2-7]{52}\.json")
"""A library as torch._inductor.codecache names it; one Triton kernel's binaries; a winner."""
LIBRARY_LIMIT = 64 << 20
"""Bytes of one file."""
DEFAULT_LIMIT = 2 << 30
NAMESPACE = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


class KernelExchange(Struct, frozen=True):
    """A job's access: the store that it reads, and the folder for its own files. Safe for threads."""

    store: Path
    offers: Path

    def read(self, name: str) -> bytes | None:
        """The stored file; None if there is none."""
        if NAME.fullmatch(name) is None:
            return None
        try:
            data = (self.store / name).read_bytes()
        except FileNotFoundError:
            return None
        (self.offers / name).touch()  # an empty offer says that the stored file was used
        return data

    def copy_to(self, name: str, target: Path) -> bool:
        """Write the stored file to `target` atomically; False if there is none.

        A link would let the job change what others will load.
        """
        data = self.read(name)
        if data is None:
            return False
        with _temporary_file(target) as temporary:
            temporary.write_bytes(data)
            temporary.replace(target)
        return True

    def offer(self, built: Path) -> None:
        """Offer a finished file, by its name."""
        if NAME.fullmatch(built.name) is not None:
            with contextlib.suppress(FileExistsError):
                os.link(built, self.offers / built.name)

    def offer_bytes(self, name: str, data: bytes) -> None:
        if NAME.fullmatch(name) is not None:
            with _temporary_file(self.offers) as temporary, contextlib.suppress(FileExistsError):
                temporary.write_bytes(data)
                os.link(temporary, self.offers / name)


class KernelStore:
    """The kernels of one worker machine, in a folder that its slots share; at most `limit_bytes`."""

    def __init__(self, folder: Path, limit_bytes: int = DEFAULT_LIMIT) -> None:
        _private(folder)
        self.folder = folder
        self._limit_bytes = limit_bytes

    def of(self, namespace: str) -> NamespaceKernels:
        """Raises ValueError for what is no namespace's name."""
        if NAMESPACE.fullmatch(namespace) is None:
            raise ValueError(f"{namespace!r} is no namespace")
        return NamespaceKernels(self.folder / namespace, self._trim)

    def _trim(self) -> None:
        """Remove the least recently used files, of all namespaces, until the rest fits."""
        trim(self.folder.glob("*/*"), self._limit_bytes)


class NamespaceKernels:
    """One namespace's folder of the store. trim: keeps the whole store within its limit."""

    def __init__(self, folder: Path, trim: Callable[[], None]) -> None:
        _private(folder)
        self.folder = folder
        self._trim = trim

    def collect(self, offers: Path) -> int:
        """Store what a job offers, and note what it used; returns how many files are new."""
        new = 0
        try:  # the job may have replaced the folder or put anything into it
            folder = os.open(offers, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            return 0
        try:
            for name in sorted(os.listdir(folder)):  # noqa: PTH208 (by descriptor)
                if NAME.fullmatch(name) is not None:
                    new += self._store(name, folder)
                with contextlib.suppress(OSError):  # a folder: it is removed with the job's own
                    os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)
        if new:
            self._trim()
        return new

    def _store(self, name: str, folder: int) -> bool:
        target = self.folder / name
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except OSError:  # a link, or gone
            return False
        with os.fdopen(descriptor, "rb") as source:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return False
            with contextlib.suppress(FileNotFoundError):
                os.utime(target)
                return False
            if not 0 < status.st_size <= LIBRARY_LIMIT:
                return False
            with _temporary_file(target) as temporary:
                temporary.write_bytes(source.read(status.st_size))  # it may still grow
                temporary.replace(target)
        return True


def _private(folder: Path) -> None:
    with own_folder(folder):
        pass


@contextlib.contextmanager
def _temporary_file(target: Path) -> Iterator[Path]:
    """A file in `target`'s folder; removed afterwards unless it was moved."""
    handle, name = tempfile.mkstemp(prefix=".", dir=target.parent)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
