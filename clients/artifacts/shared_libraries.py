"""Makes a private folder for what this process loads, and writes the shared libraries of verified artifacts there.

What was verified is what runs: no file that lay anywhere before is loaded. Imports no torch, because a prefetch does
this before the script needs them.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import mmap
import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...compiler import decoding
from ...compiler.artifact import container
from ...compiler.artifact.container import Artifact
from ...compiler.errors import ArtifactError, CannotLoad
from ...compiler.process import own_files
from ...compiler.process.fork_safe_lock import ForkSafeLock

_PREFIX = "torchrelay-loaded-"
_PLACES = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))
"""Tried last, since one of them is always safe. One may be mounted noexec."""
_FORBIDDEN = frozenset({errno.EPERM, errno.EACCES, errno.EROFS, errno.ENOENT})
"""Errors that stay as they are. A full disk, for one, concerns this process alone."""


def cpp_libraries(opened: Artifact, cache_dir: Path) -> dict[tuple[tuple[str, ...], str], Path]:
    """Files of the artifact's C++ libraries, by (argument types, source). Raises ArtifactError."""
    try:
        index = decoding.from_msgpack(
            opened.members[container.LIBRARIES], type=list[tuple[list[str], str, str]]
        )
        files = {
            name: store_library(opened.members[name], cache_dir) for name in {name for _, _, name in index}
        }
    except (KeyError, msgspec.MsgspecError) as error:
        raise ArtifactError(f"the artifact's libraries cannot be found: {error}") from None
    return {(tuple(argtypes), source): files[name] for argtypes, source, name in index}


def triton_modules(opened: Artifact, cache_dir: Path) -> dict[str, Path]:
    """Triton's own C extensions, by triton_module_id (torch_internals/triton/extensions.py)."""
    return {
        name.removeprefix(container.TRITON): store_library(data, cache_dir)
        for name, data in opened.members.items()
        if name.startswith(container.TRITON)
    }


def store_libraries(opened: Artifact, cache_dir: Path) -> None:
    """Write a verified artifact's libraries to files, so that loading it finds them. A thread may do this while the
    program runs. Raises ArtifactError, CannotLoad."""
    cpp_libraries(opened, cache_dir)
    triton_modules(opened, cache_dir)


def store_library(binary: bytes, cache_dir: Path) -> Path:
    """A file of this process with exactly these bytes, named by their digest, from which code can be loaded. Raises
    CannotLoad."""
    path = loading_folder(cache_dir) / f"{hashlib.sha256(binary).hexdigest()}.so"
    with _lock:  # no thread finds a part of it, and no other process uses the folder
        if not path.exists():
            try:
                path.write_bytes(binary)
            except OSError as error:
                path.unlink(missing_ok=True)
                raise CannotLoad(f"{path.parent} does not take its libraries: {error}") from None
    return path


def why_nothing_loads(cache_dir: Path) -> str:
    """Why no process on this machine can load code; '' if they can, or if this one cannot for a reason that concerns it
    alone."""
    try:
        return _found(cache_dir).forbidden
    except CannotLoad:
        return ""


def loading_folder(cache_dir: Path) -> Path:
    """The folder of this process in which the libraries and the generated code of its artifacts lie: new, so that there
    is nothing in it that this process has not verified, and no other user can write to it. It is gone when the process
    ends. cache_dir: where it is made if the temporary folders will not do. Raises CannotLoad."""
    found = _found(cache_dir)
    if found.folder is None:
        raise CannotLoad(
            f"no folder takes its libraries: {found.forbidden}",
            hint="Set TMPDIR to a folder of this user's that is not mounted noexec",
        )
    return found.folder


class _Found(NamedTuple):
    folder: Path | None
    forbidden: str = ""
    """Why there is none, where each place forbids it and none just failed."""


_lock = ForkSafeLock()
_folders: dict[int, _Found] = {}
"""The folder of each process: a forked one makes its own, since its parent may end first."""


def _found(cache_dir: Path) -> _Found:
    with _lock:
        found = _folders.get(os.getpid())
        if found is None or (found.folder is not None and not found.folder.is_dir()):
            found = _folders[os.getpid()] = _make(cache_dir)
        return found


def _make(cache_dir: Path) -> _Found:
    """Raises CannotLoad where a place may do another time."""
    forbidden: list[str] = []
    failed: list[str] = []
    for place in dict.fromkeys((*_temporary(), cache_dir, *_PLACES)):
        try:
            if place == cache_dir:
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if reason := own_files.why_exposed(place):
                forbidden.append(reason)
                continue
            folder, _ = own_files.new_folder(place, _PREFIX)
        except OSError as error:
            (forbidden if error.errno in _FORBIDDEN else failed).append(f"{place}: {error.strerror}")
            continue
        problem = why_not_executable(folder)
        if problem is None:
            _delete_at_exit(folder)
            return _Found(folder)
        shutil.rmtree(folder, ignore_errors=True)
        (forbidden if problem.errno in _FORBIDDEN else failed).append(
            f"nothing in {place} can be executed: {problem.strerror}"
        )
    if failed:
        raise CannotLoad(f"no folder takes its libraries: {'; '.join(failed + forbidden)}")
    return _Found(None, "; ".join(forbidden))


def _temporary() -> list[Path]:
    try:
        return [Path(tempfile.gettempdir())]
    except OSError:  # there is none that can be written
        return []


def why_not_executable(folder: Path) -> OSError | None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"a file to map")
            file.flush()
            mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
    except OSError as error:
        return error
    return None


def _delete_at_exit(folder: Path) -> None:
    owner = os.getpid()

    def delete() -> None:
        if os.getpid() == owner:  # not in a forked child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(delete)
