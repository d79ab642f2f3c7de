"""Caches signed artifacts on this machine by key, for all processes of the user.

Layout: FOLDER/artifacts/<first two hex digits>/<key>, those of graphs and the team's programs; beside them, in
FOLDER/programs, the records of functions that were traced here (programs/store.py). A file appears whole or not at all
(temporary file in the same folder, then a rename). Its modification time is the last use, and trimming removes the
least recently used first. Nothing here is trusted: who gets a file verifies its signature and digests, every time. So a
folder of another user's is read all the same; nothing is written or removed there, since its links may lead anywhere.

Any failure of the disk (full, read-only, no permission) costs a cache entry, never the run: it is logged
once and the call says None or False.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
import zipfile
from collections.abc import Mapping
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from ...compiler.process.own_files import own_folder, trim
from ..atomic_file import locked, write_atomically, write_whole

_KEY = re.compile("[0-9a-f]{8,}")
_TEMPORARY = ".tmp-"


class CachedFile(NamedTuple):
    """used: seconds since 1970."""

    path: Path
    bytes: int
    used: float
    is_program: bool


class DiskCache:
    """A folder of artifacts, with a limit in bytes. Safe for threads and processes that share it.

    The limit is approximate: it is enforced on an instance's first put and every `trim_every` puts after,
    by one process at a time, and trims to nine tenths.
    """

    def __init__(self, folder: Path, limit_bytes: int, *, trim_every: int = 32) -> None:
        self._root = folder / "artifacts"
        self._programs = folder / "programs"
        self._limit = limit_bytes
        self._trim_every = trim_every
        self._puts = count()

    def get(self, key: str) -> bytes | None:
        """The artifact's bytes, or None. Marks it as used now. Raises ValueError unless `key` is hex."""
        path = self._root / _name(key)
        if self._limit <= 0:
            return None
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return None
                data = file.read()
                with contextlib.suppress(OSError):  # a read-only disk: the bytes are good
                    os.utime(descriptor)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._complain(error)
            return None
        return data

    def put(self, key: str, data: bytes) -> bool:
        """Keep `data`; False when the disk would not take it. Raises ValueError unless `key` is hex."""
        name = _name(key)
        stored = len(data) <= self._limit and self._write(name, data)
        if next(self._puts) % self._trim_every == 0:
            self.trim()
        return stored

    def remove(self, key: str) -> None:
        """Forget an entry, e.g. one whose signature did not hold. Absent is fine."""
        name = _name(key)
        try:
            with own_folder(self._root) as root:
                (root / name).unlink(missing_ok=True)
        except OSError as error:
            self._complain(error)

    def files(self) -> list[CachedFile]:
        """All artifacts and programs, the last used first; what is written or removed meanwhile may be missing."""
        found = []
        for folder, pattern in ((self._root, "[0-9a-f][0-9a-f]/*"), (self._programs, "**/*")):
            for path in folder.glob(pattern):
                with contextlib.suppress(OSError):
                    status = path.lstat()
                    program = folder is self._programs
                    named = not path.name.startswith(".") if program else _KEY.fullmatch(path.name)
                    if named and stat.S_ISREG(status.st_mode):
                        found.append(CachedFile(path, status.st_size, status.st_mtime, program))
        return sorted(found, key=lambda file: file.used, reverse=True)

    def clear(self) -> None:
        """Remove all artifacts and programs. Raises OSError: for another user's folder, or a disk that is read-only."""
        with contextlib.ExitStack() as stack:
            for folder in filter(Path.exists, (self._root, self._programs)):
                stack.enter_context(own_folder(folder))
            for file in self.files():
                file.path.unlink(missing_ok=True)

    def trim(self) -> None:
        """Remove the least recently used entries until nine tenths of the limit hold; skipped while another
        process trims."""
        try:
            with contextlib.ExitStack() as stack:
                folders = [stack.enter_context(own_folder(self._root))]
                if self._programs.exists():
                    folders.append(stack.enter_context(own_folder(self._programs)))
                if stack.enter_context(locked(folders[0] / ".lock", wait=False)):
                    files = [
                        folders[0].glob("[0-9a-f][0-9a-f]/*"),
                        *(each.rglob("*") for each in folders[1:]),
                    ]
                    trim(chain(*files), self._limit, down_to=0.9)
        except OSError as error:
            self._complain(error)

    def _write(self, name: str, data: bytes) -> bool:
        try:
            with own_folder(self._root) as root:
                path = root / name
                path.parent.mkdir(mode=0o700, exist_ok=True)
                write_atomically(path, data, prefix=_TEMPORARY)
        except OSError as error:
            self._complain(error)
            return False
        return True

    def _complain(self, error: OSError) -> None:
        _complain_once(f"disk cache {self._root} cannot be used: {error}; going on without it", self._root)


class BakedFile:
    """A file of `torchrelay bake`: a zip archive without compression, whose members are artifacts by key. It is trusted
    as little as the cache is."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, key: str) -> bytes | None:
        """The artifact's bytes, or None. A file that cannot be read is logged once, and has none."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                member = archive.getinfo(_name(key))
                if member.compress_type != zipfile.ZIP_STORED:
                    raise zipfile.BadZipFile(f"{member.filename} is compressed")
                return archive.read(member)
        except KeyError:
            return None
        except (OSError, EOFError, zipfile.BadZipFile, RuntimeError) as error:
            _complain_once(f"{self.path} cannot be used: {error}; going on without it", self.path)
            return None

    def write(self, artifacts: Mapping[str, bytes]) -> None:
        """Replace what is there. The same artifacts make the same bytes. Raises OSError."""
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as archive:
            for key in sorted(artifacts):
                archive.writestr(zipfile.ZipInfo(_name(key)), artifacts[key])
        write_whole(self.path, data.getvalue())


def _complain_once(text: str, path: Path) -> None:
    from ..reports.run_report import process_report

    process_report().complain_once(text, about=str(path))


def _name(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError(f"not a cache key: {key[:80]!r}")
    return f"{key[:2]}/{key}"
