"""What a shared library needs of a machine, and what a machine's libraries define: versions of symbols, read from ELF.

What this machine offers is read from the C library and from the libraries that this process has mapped: an artifact's
library gets those, because torch has loaded them before.

The dynamic loader refuses a library that needs a version which the machine's libraries do not define. A family is what
stands before the version: GLIBC, GLIBCXX, CXXABI, GCC, GOMP, OMP. Only the highest version of a family counts, because
each includes those before it. Versions that are no numbers (GLIBC_PRIVATE) are left to the loader.

An own reader and no library: the client needs it too, for libstdc++, and its installation stays as small as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ..errors import CannotLoad

CUDA = "CUDA"
"""One more name beside the families: the version of CUDA that the GPU's driver supports."""

_ELF64_LITTLE = b"\x7fELF\2\1"
_SECTION = struct.Struct("<IIQQQQII")
"""sh_name, sh_type, sh_flags, sh_addr, sh_offset, sh_size, sh_link, sh_info."""
_NEED, _NEED_ENTRY = struct.Struct("<HHIII"), struct.Struct("<IHHII")
"""Verneed: version, entries, file, first entry, next. Vernaux: hash, flags, other, name, next."""
_DEFINITION, _DEFINITION_NAME = struct.Struct("<HHHHIII"), struct.Struct("<II")
"""Verdef: version, flags, index, names, hash, first name, next. Verdaux: name, next."""
_DEFINITIONS_TYPE, _NEEDS_TYPE = 0x6FFFFFFD, 0x6FFFFFFE
_Names = Callable[[bytes, int, int], Iterator[int]]
_WEAK = 2
"""Flag of a need that the loader only warns about."""


def needed(library: bytes) -> dict[str, str]:
    """The highest version of each family that the library needs (.gnu.version_r). Raises ValueError for what is no
    64-bit little-endian ELF file."""
    return _highest(library, _NEEDS_TYPE, _needs)


def defined(library: bytes) -> dict[str, str]:
    """The highest version of each family that the library defines (.gnu.version_d). Raises ValueError."""
    return _highest(library, _DEFINITIONS_TYPE, _definitions)


def merge(versions: dict[str, str], more: Mapping[str, str]) -> None:
    """Add `more` to `versions`; the higher version of a family stays."""
    for family, version in more.items():
        if _number(version) > _number(versions.get(family, "0")):
            versions[family] = version


def lacking(needs: Mapping[str, str], has: Mapping[str, str]) -> list[str]:
    """The families of `needs` that a machine which `has` these has in a lower version. What `has` does not tell is left
    to the loader."""
    return [
        name
        for name, version in needs.items()
        if (number := _number(has.get(name, ""))) and number < _number(version)
    ]


def _number(version: str) -> tuple[int, ...]:
    """What orders versions. One that is no number is below all others."""
    parts = version.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


def _highest(library: bytes, kind: int, names: _Names) -> dict[str, str]:
    if not library.startswith(_ELF64_LITTLE):
        raise ValueError("no 64-bit little-endian ELF file")
    found: dict[str, str] = {}
    try:
        sections = list(_sections(library))
        for _, type_, _, _, offset, _, link, count in sections:
            if type_ != kind:
                continue
            _, _, _, _, start, size, _, _ = sections[link]
            strings = library[start : start + size]
            for position in names(library, offset, count):
                text = strings[position : strings.index(b"\0", position)].decode("ascii")
                family, _, version = text.rpartition("_")
                if family and _number(version):
                    merge(found, {family: version})
    except (struct.error, IndexError, OverflowError) as error:  # OverflowError: an offset over 2**63
        raise ValueError(f"a damaged ELF file: {error}") from None
    return found


def _sections(library: bytes) -> Iterator[tuple[int, ...]]:
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count = struct.unpack_from("<HH", library, 0x3A)
    for index in range(count):
        yield _SECTION.unpack_from(library, table + index * size)


def _needs(library: bytes, offset: int, count: int) -> Iterator[int]:
    """Where the name of each needed version begins in the table of strings."""
    for _ in range(count):
        _, entries, _, first, following = _NEED.unpack_from(library, offset)
        entry = offset + first
        for _ in range(entries):
            _, flags, _, name, next_entry = _NEED_ENTRY.unpack_from(library, entry)
            if not flags & _WEAK:
                yield name
            entry += next_entry
        if not following:
            return
        offset += following


def _definitions(library: bytes, offset: int, count: int) -> Iterator[int]:
    """Where the name of each defined version begins in the table of strings."""
    for _ in range(count):
        _, _, _, names, _, first, following = _DEFINITION.unpack_from(library, offset)
        if names:
            yield _DEFINITION_NAME.unpack_from(library, offset + first)[0]
        if not following:
            return
        offset += following


# --- this machine ----------------------------------------------------------------------------------------

_MAPPED = re.compile(r"/\S*/lib(?:stdc\+\+|gcc_s|gomp)[-.][^/\n]*$", re.MULTILINE)
"""The libraries, beside the C library, whose versions a kernel can need."""


def check_needs(needs: Mapping[str, str], has: Mapping[str, str], where: str) -> None:
    """Raises CannotLoad, with both versions, if the machine `where` offers less than an artifact `needs`."""
    if names := lacking(needs, has):
        wanted = ", ".join(f"{name} {needs[name]}" for name in names)
        found = ", ".join(f"{name} {has[name]}" for name in names)
        raise CannotLoad(
            f"the artifact was built for {wanted}, {where} has {found}",
            hint="Run the workers on a system that is no newer than this one, and remove the artifact (`torchrelay "
            "cache rm`, and from TORCHRELAY_CACHE_DIR); or use a newer system here",
        )


@functools.cache
def offered() -> dict[str, str]:
    """The version of each family (see above), where it can be known. Call it after torch was imported."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):  # ValueError: another C library
        _, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        found["GLIBC"] = version
    with contextlib.suppress(OSError):
        for path in set(_MAPPED.findall(Path("/proc/self/maps").read_text(errors="replace"))):
            with contextlib.suppress(OSError, ValueError):  # replaced since: the loader decides
                merge(found, defined(Path(path).read_bytes()))
    if (driver := _cuda_driver()) is not None:
        found[CUDA] = driver
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
