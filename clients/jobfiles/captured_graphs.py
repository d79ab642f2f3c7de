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
from ..atomic_file import file_errors, write_atomically

MAX_GRAPHS = 1024
"""Graphs of a file."""
_BYTES = 1 << 30
_HINT = "`torchrelay capture train.py` writes one"


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    torchrelay_graphs: Literal[1]
    graphs: Annotated[list[bytes], Meta(max_length=MAX_GRAPHS)]


def write_graphs(path: Path, bodies: Sequence[bytes]) -> None:
    """Replaces an existing file. bodies: of codec.pack_request. Raises SettingsError."""
    with file_errors(path, "written", hint="Check the folder and its permissions"):
        write_atomically(path, msgspec.msgpack.encode(_File(1, list(bodies))), mode=0o644)


def read_graphs(path: Path) -> list[bytes]:
    """Raises SettingsError."""
    with file_errors(path, "read", hint=_HINT):
        if path.stat().st_size > _BYTES:
            raise SettingsError(f"{path} has more than {_BYTES} bytes", hint="Capture fewer graphs")
        data = path.read_bytes()
    try:
        return decoding.from_msgpack(data, type=_File).graphs
    except msgspec.MsgspecError:
        raise SettingsError(f"{path} is not a file of captured graphs", hint=_HINT) from None
