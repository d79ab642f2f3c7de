"""Writes the shared libraries of a verified artifact to files of this machine.

Imports no torch, because a prefetch does so before the script needs them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import logging
import mmap
import os
import shutil
import tempfile
from pathlib import Path

import msgspec

from ...compiler import decoding
from ...compiler.artifact import member_names
from ...compiler.artifact.container import Artifact
from ...compiler.errors import ArtifactError, CannotLoad
from ..atomic_file import write_atomically

_log = logging.getLogger(__name__)


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
    """A file with exactly these bytes, named by their digest, from which code can be loaded.

    In `folder`, if that can be written and is not mounted noexec; else in a temporary folder that is deleted when this
    process ends. Raises CannotLoad if neither can hold it.
    """
    name = f"{hashlib.sha256(binary).hexdigest()}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.statvfs(folder).f_flag & os.ST_NOEXEC:
            return _stored(binary, folder / name)
        problem = f"{folder} is mounted noexec"
    except OSError as error:
        problem = str(error)
    try:
        path = _stored(binary, _temporary_folder() / name)
    except OSError as error:
        raise CannotLoad(f"no folder takes its libraries: {problem}; {error}") from None
    _log.info("libraries are in %s for this process alone: %s", path.parent, problem)
    return path


def why_nothing_loads(folder: Path) -> str:
    """Why code can be loaded from no folder that `store_library` uses; '' if it can be."""
    try:
        path = store_library(b"a file to map", folder)
        with path.open("rb") as file:
            mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
        path.unlink()
    except CannotLoad as error:
        return error.message
    except OSError as error:
        return f"nothing in {path.parent} can be executed: {error.strerror}"
    return ""


def _stored(binary: bytes, path: Path) -> Path:
    if path.is_file() and path.stat().st_size == len(binary) and path.read_bytes() == binary:
        with contextlib.suppress(OSError):  # a read-only disk
            os.utime(path)  # it was used now (disk_cache.py)
    else:
        write_atomically(path, binary, mode=0o700)
    return path


@functools.cache
def _temporary_folder() -> Path:
    folder, owner = tempfile.mkdtemp(prefix="torchrelay-libraries-"), os.getpid()

    def delete() -> None:
        if os.getpid() == owner:  # not in a forked child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(delete)
    return Path(folder)
