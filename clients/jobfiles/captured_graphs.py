"""Reads and writes files of captured graphs. `torchrelay capture` writes them; jobs name them.

A file has the request bodies; the gateway checks each as it does any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from ...compiler import decoding
from ...compiler.errors import SettingsError
from ..atomic_file import write_atomically

MAX_GRAPHS = 1024
"""Graphs of a file."""
_BYTES = 1 << 30


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    torchrelay_graphs: Literal[1]
    graphs: Annotated[list[bytes], Meta(max_length=MAX_GRAPHS)]


def write_graphs(path: Path, bodies: Sequence[bytes]) -> None:
    """Replaces an existing file. bodies: of codec.pack_request. Raises SettingsError."""
    try:
        write_atomically(path, msgspec.msgpack.encode(_File(1, list(bodies))), mode=0o644)
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}", hint="See to the folder") from None


def read_graphs(path: Path) -> list[bytes]:
    """Raises SettingsError."""
    try:
        if path.stat().st_size > _BYTES:
            raise SettingsError(f"{path} has more than {_BYTES} bytes", hint="Capture fewer graphs")
        data = path.read_bytes()
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read: {error.strerror}", hint="`torchrelay capture train.py` writes one"
        ) from None
    try:
        return decoding.from_msgpack(data, type=_File).graphs
    except msgspec.MsgspecError:
        raise SettingsError(
            f"{path} is no file of captured graphs", hint="`torchrelay capture train.py` writes one"
        ) from None
