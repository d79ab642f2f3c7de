"""Files and folders that nobody but this user can have written, or can read. Root counts as this user: it needs no file
to do what it wants.

Owner and mode are those of the descriptor that is used afterwards, so that nothing can be exchanged in between.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import SettingsError

UNREADABLE = 0o077
"""The mode bits that a secret must not have."""
UNWRITABLE = 0o022
"""The mode bits that a file must not have whose content is trusted."""
_UNFINISHED_SECONDS = 3600.0
"""A draft older than this was left by a process that died."""
_EVERY_USER = 1 << 32
"""So many user ids a user namespace has that leaves none out."""


def read_own(path: Path, forbidden: int = UNREADABLE) -> bytes:
    """The bytes of a regular file of this user's. Raises OSError; SettingsError, with what to do, for another user's
    file or one with a forbidden mode bit."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SettingsError(f"{path} is no regular file")
        check_own(path, status, forbidden)
        return file.read()


def check_own(path: Path, status: os.stat_result, forbidden: int) -> None:
    """Raises SettingsError."""
    if status.st_uid not in (os.geteuid(), 0):
        raise SettingsError(
            f"{path} belongs to another user (uid {status.st_uid}; this process runs as {os.geteuid()})",
            hint=f"Run as that user, or give it to this one: chown {os.geteuid()} {path}",
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & forbidden:
        done = "readable" if mode & forbidden & ~UNWRITABLE else "writable"
        raise SettingsError(
            f"{path} is {done} by others", hint=f"chmod {mode & ~forbidden & 0o777:03o} {path}"
        )


@contextlib.contextmanager
def own_folder(folder: Path) -> Iterator[Path]:
    """The folder, made if it does not exist, by a path that names this very folder in this process, whatever others do
    with the folders above it. Raises OSError, and PermissionError for one that others own or may write to."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            check_own(folder, os.fstat(descriptor), UNWRITABLE)
        except SettingsError as error:
            raise PermissionError(f"{error.message}. {error.advice}") from None
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def new_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder in `place`, and the file descriptor of its lock, which holds as long as any process has it open.

    Also removes folders with the same prefix that a crash left behind: their locks are free. Raises OSError.
    """
    for left in parent.glob(f"{prefix}*"):
        lock = _locked(left)
        if lock is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = _locked(folder)
        # otherwise another process removed it as abandoned, between the two calls
        if lock is not None and folder.exists():
            return folder, lock
        if lock is not None:
            os.close(lock)


def trim(files: Iterable[Path], limit_bytes: int, down_to: float = 1.0) -> None:
    """If the files have more than `limit_bytes`, remove the least recently used, down to this share of it; besides,
    drafts that a crash left (names that begin with a dot). Others may trim too. Raises OSError."""
    found: list[tuple[float, int, Path]] = []
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                continue
            if not path.name.startswith("."):
                found.append((status.st_mtime, status.st_size, path))
            elif status.st_mtime < time.time() - _UNFINISHED_SECONDS:
                path.unlink()
    total = sum(size for _, size, _ in found)
    least = limit_bytes if total <= limit_bytes else limit_bytes * down_to
    for _, size, path in sorted(found):
        if total <= least:
            return
        path.unlink(missing_ok=True)
        total -= size


def _locked(folder: Path) -> int | None:
    """None if it is another user's, in use, or gone."""
    import fcntl  # not on Windows, where the client can be imported

    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(opened).st_uid == os.getuid():
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return opened
    except BlockingIOError:
        pass
    os.close(opened)
    return None


def why_exposed(folder: Path) -> str:
    """Why another user could exchange what this user makes in `folder`; '' if nobody can: root or this user owns it and
    all folders above it, and what others may write to is sticky, as /tmp is. Raises OSError."""
    trusted = {os.geteuid(), 0, *_unmapped_owner()}
    folder = folder.resolve()
    for each in (folder, *folder.parents):
        status = each.stat()
        if status.st_uid not in trusted and each != each.parent:
            return f"{each} belongs to another user (uid {status.st_uid})"
        if status.st_mode & UNWRITABLE and not status.st_mode & stat.S_ISVTX:
            return f"others may write to {each}"
    return ""


def _unmapped_owner() -> set[int]:
    """In a user namespace that leaves root out, as a container without privileges, root's files seem to be nobody's."""
    with contextlib.suppress(OSError, ValueError):
        mapped = [int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if sum(mapped) < _EVERY_USER - 1:
            return {int(Path("/proc/sys/kernel/overflowuid").read_text())}
    return set()
