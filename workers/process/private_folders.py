"""Makes private folders: some are locked while their process runs, some have a path short enough for Unix sockets."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

from ...compiler.errors import Unavailable
from ...compiler.process import own_files

JOBS = "torchrelay-jobs-"
"""The prefix of the folder in which a fork server makes its jobs' folders."""
_BLOCK_BYTES = 4096
_NODE = "torchrelay-node-"
_SOCKET_ROOM = 43
"""Bytes that a session directory may have: Ray adds up to 64 (process ids have seven digits), sockets hold 107."""


def make(root: str | None, prefix: str = JOBS) -> tuple[Path, int]:
    """A new folder and its lock, from own_files.new_folder. root: None for the machine's temporary directory."""
    return own_files.new_folder(Path(root or tempfile.gettempdir()), prefix)


def shared(named: str | None) -> Path | None:
    """The folder that all slots of this user share; None, with a message, if other users may write to it."""
    folder = Path(named or Path(tempfile.gettempdir()) / f"torchrelay-shared-{os.getuid()}")
    try:
        with own_files.own_folder(folder):
            pass
    except OSError as error:
        print(f"C++ headers are compiled for each job: {error}", file=sys.stderr, flush=True)
        return None
    return folder


def short_directory(prefix: str) -> Path:
    """A new private directory whose path leaves room for sockets. Raises Unavailable."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=short_root(prefix)))


def node_directory() -> tuple[Path, int]:
    """A directory for the sockets and logs of a Ray node that outlives this program, and its lock's descriptor.

    Nodes of one machine must not share Ray's default: they would race for the names of their sockets. Also removes the
    directories of dead nodes. Raises Unavailable.
    """
    return make(str(short_root(_NODE)), _NODE)


def short_root(prefix: str) -> Path:
    """A parent for a folder with this prefix whose path is short enough. Raises Unavailable."""
    roots = [Path(tempfile.gettempdir()), Path("/tmp")]
    root = next(
        (r for r in roots if len(os.fsencode(r)) + len(prefix) + 9 <= _SOCKET_ROOM and r.is_dir()), None
    )
    if root is None:
        raise Unavailable(
            f"{roots[0]} is too long a path for sockets", hint="Set TMPDIR to a shorter directory"
        )
    return root


def disk_usage(folder: Path, most: int) -> int:
    """Bytes of the files below a folder, each of a block at least; it stops counting past `most`. Raises
    PermissionError for a folder that cannot be read."""
    held, left = 0, [str(folder)]
    while left and held <= most:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        held += max(_BLOCK_BYTES, entry.stat(follow_symlinks=False).st_blocks * 512)
                        if entry.is_dir(follow_symlinks=False):
                            left.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):  # it has gone meanwhile
            continue
    return held
