"""Writes files that readers see whole, the old one or the new; typed errors of files; locks between processes."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from ..compiler.errors import RelayError, SettingsError


def write_atomically(
    path: Path, data: bytes, *, prefix: str = "", mode: int = 0o600, synced: bool = False
) -> None:
    """Replace `path` in one step. The draft beside it begins with `prefix` ('.NAME-' if that is empty) and is gone if
    this fails. synced: on the disk before it takes the old one's place. Raises OSError, and ValueError for a name
    that is no text."""
    handle, name = tempfile.mkstemp(prefix=prefix or f".{path.name}-", dir=path.parent)
    draft = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            draft.chmod(mode)
            file.write(data)
            file.flush()
            if synced:
                os.fsync(handle)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that the user named, which others may read: several processes may be given one name, and whoever
    reads it sees what one of them wrote. What is no file, as /dev/stdout, is written to. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_bytes(data)
    else:
        write_atomically(path.resolve(), data, mode=0o644)


@contextlib.contextmanager
def file_errors(
    what: Path | str, deed: Literal["read", "written"], *, hint: str, kind: type[RelayError] = SettingsError
) -> Iterator[None]:
    """An OSError or UnicodeError of the block becomes the error `kind`: `what` cannot be read, or written, and why."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise kind(f"{what} cannot be {deed}: {reason}", hint=hint) from None


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of the file `path`, which is made if it does not exist; whether it is held, always true with
    `wait`. Raises OSError."""
    import fcntl  # not on Windows, where this module can be imported and nothing is locked

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
