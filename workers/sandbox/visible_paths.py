"""The paths and device nodes that the processes of a slot may see.

A closed list of what compilers, Python and CUDA need. Homes, state folders, run-time sockets and other programs'
temporary files are not on it.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct

_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store", "/gnu/store"),
    *("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d"),
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/localtime", "/etc/ssl/openssl.cnf"),
    "/sys/devices/system",
)
_OF_A_GPU = ("/sys", "/run/opengl-driver")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_FOLDER_LISTS = ("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV")
_PROGRAMS = ("CC", "CXX", "TRITON_PTXAS_PATH")


class VisiblePaths(Struct, frozen=True):
    """Existing paths, none below another of its list."""

    readable: list[str]
    devices: list[str]
    gpu: bool


def visible_paths_of(kind: Literal["cpu", "cuda"], environment: Mapping[str, str]) -> VisiblePaths:
    """For a slot's processes that are started with `environment`, by this Python."""
    system = [*_SYSTEM, *(_OF_A_GPU if kind == "cuda" else ())]
    named = [path for path in (*_python(), *_named(environment)) if Path(path).is_absolute()]
    devices = [*_DEVICES]
    if kind == "cuda":
        devices += sorted(str(path) for path in Path("/dev").glob("nvidia*"))
    return VisiblePaths(
        readable=_outermost([*filter(_exists, system), *_without_homes(named)]),
        devices=[path for path in devices if _exists(path)],
        gpu=kind == "cuda",
    )


def _python() -> Iterator[str]:
    yield from (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)
    yield str(Path(sys.executable).resolve().parent)
    package = (
        Path(__file__).absolute().parents[2]
    )  # of a checkout only what a job imports: much may lie in one
    yield from (str(package / name) for name in ("__init__.py", "compiler", "workers"))
    yield from (entry for entry in sys.path if entry)


def _named(environment: Mapping[str, str]) -> Iterator[str]:
    for name in _FOLDER_LISTS:
        yield from (entry for entry in environment.get(name, "").split(os.pathsep) if entry)
    for name in _PROGRAMS:
        program = environment.get(name, "").partition(" ")[0]
        if Path(program).is_absolute():
            yield str(Path(program).parent)
            yield str(Path(program).resolve().parent)


def _without_homes(paths: Iterable[str]) -> Iterator[str]:
    """Leave out folders that contain a whole home, or all temporary files: what is needed there is named singly."""
    kept_out = [Path("/tmp"), Path("/var/tmp"), Path("/run"), Path.home(), Path("/root")]
    kept_out += [Path(entry.pw_dir) for entry in [_own_entry()] if entry is not None]
    closed = {os.path.realpath(path) for path in kept_out}
    for path in paths:
        for form in (os.path.normpath(path), os.path.realpath(path)):
            if _exists(form) and not any(_holds(os.path.realpath(form), home) for home in closed):
                yield form


def _exists(path: str) -> bool:
    return Path(path).exists()


def _own_entry() -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(os.getuid())
    except KeyError:
        return None


def _holds(folder: str, path: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _outermost(paths: Iterable[str]) -> list[str]:
    outermost: list[str] = []
    for path in sorted(set(paths), key=lambda path: (path.count("/"), path)):
        if not any(_holds(folder, path) for folder in outermost):
            outermost.append(path)
    return outermost
