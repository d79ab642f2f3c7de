"""Files that only their owner may read, made or replaced in one step; and the folders that hold them."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from ...compiler.process.own_files import UNWRITABLE, check_own


def private_folder(folder: Path) -> None:
    """Make the folder if it does not exist. Raises SettingsError if another user owns it or may write to it, OSError.

    A group may write where root owns the folder, as in a volume of Kubernetes with an fsGroup. What is trusted there is
    looked at file by file.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    own = status.st_uid == os.geteuid()
    check_own(folder, status, UNWRITABLE if own else stat.S_IWOTH)


def write_private(path: Path, data: bytes, *, replace: bool = True) -> None:
    """Write `data` to `path`, mode 0600; a reader sees the old file or the new one, never half of it. It outlives a
    loss of power. replace: what is there; else that stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            Path(draft).replace(path)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
            Path(draft).unlink()
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # the file's name
        finally:
            os.close(folder)
    except OSError:
        Path(draft).unlink(missing_ok=True)
        raise
