"""Writes the shared libraries of a verified artifact to files of this machine.

Imports no torch, because a prefetch does so before the script needs them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

import msgspec

from ...compiler import decoding
from ...compiler.artifact import member_names
from ...compiler.artifact.container import Artifact
from ...compiler.errors import ArtifactError
from ..atomic_file import write_atomically


def cpp_libraries(opened: Artifact, folder: Path) -> dict[tuple[tuple[str, ...], str], Path]:
    """Files of the artifact's C++ libraries, by (argument types, source). Raises ArtifactError."""
    try:
        index = decoding.from_msgpack(
            opened.members[member_names.LIBRARIES], type=list[tuple[list[str], str, str]]
        )
        files = {name: store_library(opened.members[name], folder) for name in {name for _, _, name in index}}
    except (KeyError, msgspec.MsgspecError) as error:
        raise ArtifactError(f"the artifact's libraries cannot be found: {error}") from None
    return {(tuple(argtypes), source): files[name] for argtypes, source, name in index}


def triton_modules(opened: Artifact, folder: Path) -> dict[str, Path]:
    """Triton's own C extensions, by triton_module_id (torch_internals/triton/extensions.py)."""
    return {
        name.removeprefix(member_names.TRITON): store_library(data, folder)
        for name, data in opened.members.items()
        if name.startswith(member_names.TRITON)
    }


def store_library(binary: bytes, folder: Path) -> Path:
    """A file with exactly these bytes, named by their digest; written whole or not at all."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{hashlib.sha256(binary).hexdigest()}.so"
    if path.is_file() and path.stat().st_size == len(binary) and path.read_bytes() == binary:
        with contextlib.suppress(OSError):  # a read-only disk
            os.utime(path)  # it was used now (disk_cache.py)
        return path
    write_atomically(path, binary, mode=0o700)
    return path
