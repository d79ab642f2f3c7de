"""A path and bytes in; a file that readers see whole, the old one or the new, mode 0600 unless told otherwise, out."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


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
            os.fchmod(handle, mode)
            file.write(data)
            file.flush()
            if synced:
                os.fsync(handle)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
