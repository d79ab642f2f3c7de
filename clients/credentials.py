"""The credentials file, written: url, token, trusted keys and namespace in; what settings.py reads, mode 0600, out."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..compiler.errors import SettingsError


def write_credentials(
    path: Path, *, url: str, token: str, public_keys: Sequence[str], namespace: str = ""
) -> None:
    """Replace `path` in one step; nobody else can read it at any moment. Raises SettingsError."""
    known = {"url": url, "token": token, "public_keys": list(public_keys)}
    content = msgspec.json.encode(known | ({"namespace": namespace} if namespace else {}))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 0600
        draft = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.format(content) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}", hint="See to the folder") from None
