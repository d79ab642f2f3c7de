"""A training job's working directory: a folder's files in; one compressed tar out, and back into a folder. No torch.

The same files give the same bytes: names are sorted, times and owners left out. `unpack` trusts nothing: names and
links stay inside the folder, links are made last, sizes are bounded.
"""

from __future__ import annotations

import io
import os
import posixpath
import sys
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from ...errors import LimitExceeded, MalformedRequest
from .jobs import PACKAGE_BYTES

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MOST_FILES = 100_000
UNPACKED_BYTES = 4 << 30
_LEVEL = 3
_PIECE = 1 << 20
_NAME_BYTES = 1024
_BEFORE_SECONDS = 60.0


def pack(root: Path, names: Iterable[str], *, limit: int = PACKAGE_BYTES) -> bytes:
    """names: files, folders and links, relative to `root`, with `/`.

    Raises LimitExceeded past `limit` packed bytes, MOST_FILES or UNPACKED_BYTES; OSError for a file that cannot be
    read; MalformedRequest for a link that leads outside and for anything but files, folders and links.
    """
    out, left = _Bounded(limit), UNPACKED_BYTES
    with (
        zstd.open(out, "wb", level=_LEVEL) as compressed,
        tarfile.open(fileobj=compressed, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_PIECE) as tar,
    ):
        for count, name in enumerate(sorted(names)):
            if count >= MOST_FILES:
                raise LimitExceeded(f"there are more than {MOST_FILES} files", hint="")
            left -= _add(tar, root, name, left)
    return out.getvalue()


def unpack(data: bytes, folder: Path, *, limit: int = UNPACKED_BYTES) -> None:
    """Unpack into an empty folder. Raises MalformedRequest for what `pack` cannot have made, LimitExceeded past `limit`
    bytes or MOST_FILES, and OSError.

    Files get times of _BEFORE_SECONDS ago, so that what a script writes there is newer.
    """
    before = time.time() - _BEFORE_SECONDS
    links: list[tuple[Path, str]] = []
    seen: set[str] = set()
    left = limit
    try:
        with tarfile.open(fileobj=zstd.open(io.BytesIO(data)), mode="r|", bufsize=_PIECE) as tar:
            for count, member in enumerate(tar):
                name = member.name.rstrip("/")
                if count >= MOST_FILES:
                    raise LimitExceeded(f"the package has more than {MOST_FILES} files")
                if not _inside(name) or name in seen:
                    raise MalformedRequest(f"the package has a file named {name[:80]!r}")
                seen.add(name)
                path = folder / name
                if member.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                if member.issym():
                    if not leads_inside(name, member.linkname):
                        raise MalformedRequest(f"the package's link {name[:80]!r} leads out of it")
                    links.append((path, member.linkname))
                    continue
                source = tar.extractfile(member) if member.isreg() else None
                if source is None:
                    raise MalformedRequest(f"the package's {name[:80]!r} is not a file, folder or link")
                left -= member.size
                if left < 0:
                    raise LimitExceeded(f"the package holds more than {limit} bytes")
                _write(path, source, before, executable=bool(member.mode & 0o100))
    except (tarfile.TarError, zstd.ZstdError, EOFError, FileExistsError, NotADirectoryError) as error:
        raise MalformedRequest(f"this is not a package of a working directory: {error}") from None
    for path, target in links:
        if path.exists() or path.is_symlink():
            raise MalformedRequest(f"the package has two of {path.name[:80]!r}")
        path.symlink_to(target)


def leads_inside(name: str, target: str) -> bool:
    """Whether a link `name` to `target` stays in the folder: `..` only at its beginning, and not too often. If all
    links do, no path over several links leads outside either."""
    parts = target.split("/")
    while parts and parts[0] == "..":
        parts.pop(0)
    ups = target.count("/") + 1 - len(parts)
    plain = all(part not in ("", "..") for part in parts) and "\0" not in target
    return bool(target) and plain and ups <= name.count("/") and len(target.encode()) <= _NAME_BYTES


def _inside(name: str) -> bool:
    parts = name.split("/")
    try:
        short = len(name.encode()) <= _NAME_BYTES
    except UnicodeEncodeError:
        return False
    return bool(name) and short and "\0" not in name and all(part not in ("", ".", "..") for part in parts)


def _add(tar: tarfile.TarFile, root: Path, name: str, room: int) -> int:
    """Returns the file's bytes."""
    path = root / name
    member = tarfile.TarInfo(name)
    if not _inside(name):
        raise MalformedRequest(f"{name!r} cannot be sent", hint="Rename it: UTF-8, of at most 1024 bytes")
    if path.is_symlink():
        target = _target(root, path)
        if not leads_inside(name, target):
            raise MalformedRequest(
                f"{name} is a link to {target}, outside of the folder",
                hint="Name it in .torchrelayignore, or put a copy in its place",
            )
        member.type, member.linkname = tarfile.SYMTYPE, target
        tar.addfile(member)
    elif path.is_dir():
        member.type, member.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(member)
    elif path.is_file():
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size > room:
                raise LimitExceeded(f"there are more than {UNPACKED_BYTES} bytes", hint="")
            member.size, member.mode = status.st_size, 0o755 if status.st_mode & 0o100 else 0o644
            tar.addfile(member, file)
    else:
        raise MalformedRequest(f"{name} is not a file", hint="Name it in .torchrelayignore")
    return member.size


def _target(root: Path, path: Path) -> str:
    """A link's target; an absolute path inside `root` becomes relative."""
    target = str(path.readlink())
    if target.startswith("/"):
        base = os.path.realpath(root)
        if posixpath.commonpath([base, posixpath.normpath(target)]) == base:
            return os.path.relpath(target, os.path.realpath(path.parent))
    return target


def _write(path: Path, source: IO[bytes], at: float, *, executable: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o755 if executable else 0o644), "wb") as file:
        while part := source.read(_PIECE):
            file.write(part)
        file.flush()
        os.utime(file.fileno(), (at, at))


class _Bounded(io.BytesIO):
    """Raises LimitExceeded past `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        if self.tell() > self._limit:
            raise LimitExceeded(f"there are more than {self._limit} bytes, packed", hint="")
        return written
