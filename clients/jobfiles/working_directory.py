"""Packs the working directory of a job, without ignored files.

`.torchrelayignore` has gitignore's patterns. Version control, caches and virtual environments are never sent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from ...compiler import install_hint
from ...compiler.api.training.jobs import PACKAGE_BYTES
from ...compiler.api.training.working_directory import pack
from ...compiler.errors import LimitExceeded, RelayError, SettingsError
from ..atomic_file import file_errors

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

IGNORE_FILE = ".torchrelayignore"
_NEVER = frozenset(
    {
        ".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "node_modules", ".ipynb_checkpoints",
        ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox", ".DS_Store",
    }
)  # fmt: skip
_LARGEST = 5
"""Files that an error names."""


class PackedDirectory(Struct, frozen=True):
    """data: the body of POST /v1/trains/packages. names: of files, folders and links."""

    data: bytes
    names: list[str]


def pack_directory(folder: Path, *, limit: int = PACKAGE_BYTES) -> PackedDirectory:
    """Raises LimitExceeded, which names the largest files; SettingsError for what cannot be read or sent."""
    names = list(included_names(folder))
    try:
        data = pack(folder, names, limit=limit)
    except LimitExceeded as error:
        sizes = {name: (folder / name).lstat().st_size for name in names if (folder / name).is_file()}
        largest = sorted(sizes, key=lambda name: -sizes[name])[:_LARGEST]
        largest_text = ", ".join(f"{name} ({sizes[name] / (1 << 20):.1f} MiB)" for name in largest)
        raise LimitExceeded(
            f"{folder} is too large to be sent: {error.message}; the largest: {largest_text}",
            hint=f"Name in {IGNORE_FILE} what the job does not need (gitignore's patterns), and put data where all "
            "nodes see it",
        ) from None
    except RelayError as error:
        raise SettingsError(error.message, hint=error.advice) from None
    except OSError as error:
        raise SettingsError(
            f"{error.filename or folder} cannot be read: {error.strerror}",
            hint=f"Name it in {IGNORE_FILE}, or check its permissions",
        ) from None
    return PackedDirectory(data, names)


def included_names(folder: Path) -> Iterator[str]:
    """The names in `folder` that would be sent. Raises SettingsError for what cannot be read."""
    return _names(folder, _ignored(folder))


def _ignored(folder: Path) -> GitIgnoreSpec | None:
    file = folder / IGNORE_FILE
    with file_errors(file, "read", hint="Correct it"):
        if not file.exists():
            return None
        lines = file.read_text().splitlines()
    try:
        from pathspec import GitIgnoreSpec
    except ImportError:
        raise SettingsError(f"{IGNORE_FILE} needs pathspec", hint=install_hint("cli")) from None
    try:
        return GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise SettingsError(f"{file} has a wrong pattern: {error}", hint="Correct it") from None


def _names(folder: Path, ignored: GitIgnoreSpec | None, under: str = "") -> Iterator[str]:
    """Depth first; an ignored folder is not looked into, as git does not."""
    hint = f"Name it in {IGNORE_FILE}, or name another folder"
    with file_errors(folder / under, "read", hint=hint):
        entries = sorted(os.scandir(folder / under), key=lambda entry: entry.name)
    for entry in entries:
        name = f"{under}/{entry.name}" if under else entry.name
        if entry.name in _NEVER or entry.name.endswith(".pyc"):
            continue
        inner = entry.is_dir(follow_symlinks=False)
        if ignored is not None and ignored.match_file(f"{name}/" if inner else name):
            continue
        if inner and (folder / name / "pyvenv.cfg").exists():
            continue
        yield name
        if inner:
            yield from _names(folder, ignored, name)
