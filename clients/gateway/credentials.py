"""Writes the credentials file, which settings.py reads: url, token, trusted keys and namespace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...compiler.errors import SettingsError
from ..atomic_file import write_atomically


def write_credentials(
    path: Path, *, url: str, token: str, public_keys: Sequence[str], namespace: str = ""
) -> None:
    """Replace `path` in one step; only its owner can read it, at every moment. Raises SettingsError."""
    fields = {"url": url, "token": token, "public_keys": list(public_keys)}
    content = msgspec.json.encode(fields | ({"namespace": namespace} if namespace else {}))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.format(content) + b"\n", synced=True)
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}", hint="See to the folder") from None
