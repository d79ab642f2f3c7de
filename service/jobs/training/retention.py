"""Removes folders of training jobs that are old, or too large together.

Folders of jobs that run or can be resumed stay, and folders whose checkpoints such a job names. Folders that belong to
no job are not touched.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import structlog
from msgspec import Struct

from ....compiler.api.training.jobs import TRAIN_ID, TrainJob

log = structlog.get_logger(__name__)

_GOING = ".going-"
_UNENDED = "order.msgpack"
"""The driver removes this file once its job has ended."""
_FRESH_SECONDS = 3600.0
"""A folder written to this recently stays: its job may run although a Redis that came back empty does not know it."""


class JobFolder(Struct, frozen=True):
    """The folder of a job. written: when something in it was last written."""

    path: Path
    written: float
    bytes: int


def resumable(jobs: Iterable[TrainJob]) -> list[TrainJob]:
    """Jobs that run or can be resumed."""
    return [job for job in jobs if job.state != "done"]


def holds_any(location: Path) -> bool:
    """Whether there is a folder of any job."""
    try:
        return next(location.iterdir(), None) is not None
    except OSError:  # no job has had one yet
        return False


def free_share(root: Path) -> float:
    """How much of the disk with the folders is free, 0 to 1. Raises OSError."""
    usage = shutil.disk_usage(root)
    return usage.free / usage.total


def remove_old(
    root: Path,
    needed: dict[Path, list[TrainJob]],
    *,
    seconds: float,
    limit: int,
    stopping: Callable[[], bool] = lambda: False,
) -> list[Path]:
    """Remove folders not written to for `seconds`, and the oldest while all have more than `limit` bytes (0: no such
    bound). Returns what was removed. needed: the jobs that need their folders, by parent folder. stopping: checked
    between two folders, whose trees may be large."""
    now = time.time()
    gone: list[Path] = []
    for parent in [root, *_others(root)]:
        for left in _entries(parent, re.escape(_GOING) + ".*"):
            shutil.rmtree(left, ignore_errors=True)
    names = {name for jobs in needed.values() for job in jobs for name in _named(job)}
    own = {parent / job.id for parent, jobs in needed.items() for job in jobs}
    folders: list[JobFolder] = []
    for path in [path for parent in [root, *_others(root)] for path in _entries(parent, TRAIN_ID)]:
        if stopping():
            return gone
        folders.append(_measured(path))
    total = sum(folder.bytes for folder in folders)
    for folder in sorted(folders, key=lambda folder: folder.written):
        age = now - folder.written
        old = bool(seconds) and age > seconds
        much = bool(limit) and total > limit and not (folder.path / _UNENDED).exists()
        if folder.path in own or folder.path.name in names or age < _FRESH_SECONDS or not (old or much):
            continue
        if stopping():
            break
        if _remove(folder.path):
            total -= folder.bytes
            gone.append(folder.path)
    return gone


def _named(job: TrainJob) -> Iterator[str]:
    """Ids of other jobs whose files the job may read."""
    for text in (job.spec.checkpoints, *job.spec.arguments):
        yield from re.findall("[0-9a-f]{16}", text)


def _others(root: Path) -> list[Path]:
    """Parent folders of namespaces other than the default one (ServiceSettings.train_folder)."""
    return _entries(root, "of-[a-z0-9-]+")


def _entries(parent: Path, pattern: str) -> list[Path]:
    """Real folders in `parent` whose names match."""
    try:
        with os.scandir(parent) as entries:
            return [
                parent / entry.name
                for entry in entries
                if re.fullmatch(pattern, entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []


def _measured(path: Path) -> JobFolder:
    written, size = 0.0, 0
    for folder, _, files in os.walk(path):
        for name in (".", *files):
            try:
                status = Path(folder, name).lstat()
            except OSError:
                continue  # it was removed meanwhile
            written = max(written, status.st_mtime)
            size += status.st_size if name != "." else 0
    return JobFolder(path, written, size)


def _remove(path: Path) -> bool:
    """Rename the folder first, so that no job reads half a checkpoint."""
    going = path.with_name(f"{_GOING}{uuid.uuid4().hex}")
    try:
        path.rename(going)
    except OSError as error:
        log.warning("train_folder_not_removed", folder=str(path), error=str(error))
        return False
    shutil.rmtree(going, ignore_errors=True)
    return True
