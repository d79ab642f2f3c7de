"""A job's working directory on one node: a folder that the job's ranks there share, unpacked from the job's package.

A lock on the folder is held as long as any of them runs. `open` removes the folders of dead jobs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ....compiler.api.training import working_directory
from ....compiler.process.own_files import UNWRITABLE

_PREFIX = "torchrelay-train-"
_UNPACKED = ".whole"


class WorkingDirectory:
    """The folder, locked until `close`."""

    def __init__(self, folder: Path, lock: int) -> None:
        self._folder = folder
        self.lock = lock
        self.path = folder / "work"

    @classmethod
    def open(cls, job: str, package: Callable[[], bytes]) -> WorkingDirectory:
        """The job's folder on this node; the first caller unpacks it. Raises OSError, and what `unpack` raises."""
        root = Path(tempfile.gettempdir())
        _sweep(root, job)
        folder = root / f"{_PREFIX}{os.getuid()}-{job}"
        while True:
            folder.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            here = cls(folder, lock)
            try:
                status = os.fstat(lock)
                if status.st_uid != os.getuid() or status.st_mode & UNWRITABLE:
                    raise PermissionError(f"{folder} is not this user's alone")
                fcntl.flock(lock, fcntl.LOCK_SH)  # filling it takes an exclusive lock
                if _is(folder, lock) and here._whole():
                    return here
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is(folder, lock):
                    here._fill(package)
            except BlockingIOError:
                time.sleep(0.02)
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)

    def _fill(self, package: Callable[[], bytes]) -> None:
        if self._whole():
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir()
        data = package()
        if data:
            working_directory.unpack(data, self.path)
        (self._folder / _UNPACKED).touch()

    def _whole(self) -> bool:
        return (self._folder / _UNPACKED).exists()

    def close(self) -> None:
        """Unlock it; the last one removes it."""
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(self._folder)
        except BlockingIOError:
            pass
        os.close(self.lock)


def _remove(folder: Path) -> None:
    """Remove the mark first: Ray kills workers whose ranks have ended, and a folder that is half removed must not count
    as complete."""
    with contextlib.suppress(OSError):
        (folder / _UNPACKED).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _is(folder: Path, lock: int) -> bool:
    try:
        there, here = folder.stat(), os.fstat(lock)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _sweep(root: Path, job: str) -> None:
    for folder in root.glob(f"{_PREFIX}{os.getuid()}-*"):
        if folder.name.endswith(job):
            continue
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
