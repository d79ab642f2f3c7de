"""Kernels that earlier compiles built, kept on a worker's disk: a kernel's name in; its file out.

Inductor names a C++ library by a digest of its source, the compiler's whole command line and its version: who asks
for the same name wants the same binary. Triton's binaries and winners have names of the same kind
(triton_cache.py). A job only reads the store and lays what it built beside it (`KernelExchange`); the
process that watches the job takes that in, so that other jobs find a library as soon as it is built. Namespaces
share nothing: what a job offers is loaded by later ones.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

NAME = re.compile(r"c[a-z2-7]{51}(\.main)?\.so|t[a-z2-7]{52}\.triton|w[a-z2-7]{52}\.json")
"""A library as torch._inductor.codecache names it; one Triton kernel's binaries; a winner."""
LIBRARY_LIMIT = 64 << 20
"""Bytes; a larger file is no kernel."""
DEFAULT_LIMIT = 2 << 30
NAMESPACE = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_UNFINISHED_SECONDS = 3600.0


class KernelExchange(Struct, frozen=True):
    """What a job sees: where to look for libraries, and where to lay its own. Safe for threads."""

    store: Path
    offers: Path

    def borrow(self, name: str, target: Path) -> bool:
        """Copy the stored library to `target`, whole or not at all; False if there is none.

        A copy, because a link would let the job change what others will load.
        """
        source = self.store / name
        if NAME.fullmatch(name) is None or not source.is_file():
            return False
        with _beside(target) as temporary:
            try:
                shutil.copyfile(source, temporary)
            except FileNotFoundError:  # trimmed a moment ago
                return False
            temporary.replace(target)
        (self.offers / name).touch()  # empty: it was used
        return True

    def read(self, name: str) -> bytes | None:
        """The stored file; None if there is none."""
        if NAME.fullmatch(name) is None:
            return None
        try:
            data = (self.store / name).read_bytes()
        except FileNotFoundError:
            return None
        (self.offers / name).touch()
        return data

    def offer_bytes(self, name: str, data: bytes) -> None:
        """Lay a file out for the store, whole or not at all."""
        handle, whole = tempfile.mkstemp(dir=self.offers.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        if NAME.fullmatch(name) is not None:
            with contextlib.suppress(FileExistsError):
                os.link(whole, self.offers / name)
        Path(whole).unlink()

    def offer(self, built: Path) -> None:
        """Lay a finished library out for the store."""
        if NAME.fullmatch(built.name) is not None:
            with contextlib.suppress(FileExistsError):
                os.link(built, self.offers / built.name)


class KernelStore:
    """The libraries of one worker machine, in one folder that several slots share; at most `limit_bytes` of them."""

    def __init__(self, folder: Path, limit_bytes: int = DEFAULT_LIMIT) -> None:
        _private(folder)
        self.folder = folder
        self._limit_bytes = limit_bytes

    def of(self, namespace: str) -> NamespaceKernels:
        """The libraries that `namespace` built, in a folder of its own. Raises ValueError for another name."""
        if NAMESPACE.fullmatch(namespace) is None:
            raise ValueError(f"{namespace!r} is no namespace")
        return NamespaceKernels(self.folder / namespace, self._trim)

    def _trim(self) -> None:
        """Remove the least recently used libraries, of all namespaces, until the rest fits."""
        held: list[tuple[float, int, Path]] = []
        for path in self.folder.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):  # another slot trims too
                status = path.stat()
                if NAME.fullmatch(path.name) is not None:
                    held.append((status.st_mtime, status.st_size, path))
                elif status.st_mtime < time.time() - _UNFINISHED_SECONDS:
                    path.unlink()  # a copy that a crash cut short
        total = sum(size for _, size, _ in held)
        for _, size, path in sorted(held):
            if total <= self._limit_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


class NamespaceKernels:
    """One namespace's folder of the store. `trim` keeps the whole store in its limit."""

    def __init__(self, folder: Path, trim: Callable[[], None]) -> None:
        _private(folder)
        self.folder = folder
        self._trim = trim

    def take_in(self, offers: Path) -> int:
        """Keep what a job laid out, and note what it used; returns how many libraries are new."""
        kept = 0
        try:  # the job may have put anything in its folder's place, or in it
            folder = os.open(offers, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            return 0
        try:
            for name in sorted(os.listdir(folder)):  # noqa: PTH208 (by descriptor)
                if NAME.fullmatch(name) is not None:
                    kept += self._keep(name, folder)
                with contextlib.suppress(OSError):  # a folder: it goes with the job's own
                    os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)
        if kept:
            self._trim()
        return kept

    def _keep(self, name: str, folder: int) -> bool:
        target = self.folder / name
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except OSError:  # a link, or gone: nothing that a job of ours lays out
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
            with _beside(target) as temporary:
                temporary.write_bytes(source.read(status.st_size))  # no more, if it still grows
                temporary.replace(target)
        return True


def _private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A temporary file in `target`'s folder, gone afterwards unless it was moved."""
    handle, name = tempfile.mkstemp(prefix=".", dir=target.parent)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
