"""Makes private folders: some are locked while their process runs, some have a path short enough for Unix sockets.

`make` also removes folders with the same prefix that a crash left behind: their locks are free. A process that
inherits a lock holds it too.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

from ...compiler.errors import Unavailable

JOBS = "torchrelay-jobs-"
"""The prefix of the folder in which a fork server makes its jobs' folders."""
_NODE = "torchrelay-node-"
_SOCKET_ROOM = 43
"""Bytes that a session directory may have: Ray adds up to 64 (process ids have seven digits), sockets hold 107."""


def make(root: str | None, prefix: str = JOBS) -> tuple[Path, int]:
    """A new folder and the file descriptor of its lock, which holds as long as any process has it open."""
    place = Path(root or tempfile.gettempdir())
    _remove_abandoned(place, prefix)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        lock = _locked(folder)
        if (
            lock is not None and folder.exists()
        ):  # otherwise another process removed it as abandoned, between the two calls
            return folder, lock
        if lock is not None:
            os.close(lock)


def shared(named: str | None) -> Path | None:
    """The folder that all slots of this user share; None, with a message, if other users may write to it."""
    folder = Path(named or Path(tempfile.gettempdir()) / f"torchrelay-shared-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(f"{folder} is not this user's alone")
    except OSError as error:
        print(f"C++ headers are compiled for each job: {error}", file=sys.stderr, flush=True)
        return None
    return folder


def _remove_abandoned(place: Path, prefix: str) -> None:
    for folder in place.glob(f"{prefix}*"):
        lock = _locked(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """None if it is another user's, in use, or gone."""
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(opened).st_uid == os.getuid():
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return opened
    except BlockingIOError:
        pass
    os.close(opened)
    return None


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
