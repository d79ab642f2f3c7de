"""What this machine offers to the binaries of an artifact, and whether that is enough.

Read from the C library and from the libraries that this process has mapped: an artifact's library gets those, because
torch has loaded them before.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from ....compiler.artifact import symbol_versions
from ....compiler.errors import CannotLoad

_MAPPED = re.compile(r"\S*/lib(?:stdc\+\+|gcc_s|gomp)[-.][^/\n]*$", re.MULTILINE)
"""The libraries, beside the C library, whose versions a kernel can need."""


class Machine(Struct, frozen=True):
    """What a process can load. `offered`: the versions of `offered()`. `problem`: why it can load no library at all, or
    ''."""

    offered: dict[str, str]
    problem: str = ""


def check_needs(needs: Mapping[str, str], has: Mapping[str, str], where: str) -> None:
    """Raises CannotLoad, with both versions, if the machine `where` offers less than an artifact `needs`."""
    lacking = symbol_versions.lacking(needs, has)
    if lacking:
        wanted = ", ".join(f"{name} {needs[name]}" for name in lacking)
        found = ", ".join(f"{name} {has[name]}" for name in lacking)
        raise CannotLoad(
            f"the artifact was built for {wanted}, {where} has {found}",
            hint="Run the workers on a system that is no newer than this one, and remove the artifact (`torchrelay "
            "cache rm`, and from TORCHRELAY_CACHE_DIR); or use a newer system here",
        )


@functools.cache
def offered() -> dict[str, str]:
    """The version of each family (symbol_versions.py), where it can be known. Call it after torch was imported."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):  # ValueError: another C library
        _, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        found["GLIBC"] = version
    with contextlib.suppress(OSError):
        for path in set(_MAPPED.findall(Path("/proc/self/maps").read_text(errors="replace"))):
            with contextlib.suppress(OSError, ValueError):  # replaced since: the loader decides
                symbol_versions.merge(found, symbol_versions.defined(Path(path).read_bytes()))
    if (driver := _cuda_driver()) is not None:
        found[symbol_versions.CUDA] = driver
    return found


def _cuda_driver() -> str | None:
    """The latest version of CUDA that the GPU's driver supports; None without a driver."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"
