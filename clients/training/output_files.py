"""Uploads the files that a script wrote into its working directory as files of the job, `output/NAME`.

That directory is a copy, which is deleted when the job's ranks end or start again. When its script has ended, rank 0
uploads the files that are newer than its own start: small ones first, up to a limit. Files that `.torchrelayignore`
names, files that are never sent and hidden files are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...compiler.errors import LimitExceeded, MalformedRequest, RelayError
from ..gateway.jobs import TrainingJobsClient
from ..jobfiles.working_directory import IGNORE_FILE, included_names
from ..settings import load_settings

FOLDER = "output"
MOST_FILES = 256
MOST_BYTES = 1 << 30
_NAMED = 5
"""Files that a note names."""

UploadFile = Callable[[str, Path], None]
"""Uploads a file under its name in the job. Raises RelayError, OSError."""


def upload_output_files(folder: Path, since: float, upload: UploadFile) -> tuple[str, str]:
    """Two notes, on the files that were uploaded and on those that were not; '' if there are none. since: the script's
    start, seconds since 1970. Raises nothing."""
    if not folder.is_dir():
        return "", "nothing of the working directory was kept: the script has removed it"
    try:
        written = sorted(_written(folder, since))
    except (RelayError, OSError) as error:
        return "", f"nothing of the working directory was kept: {error}"
    uploaded: list[str] = []
    skipped: list[str] = []
    not_kept = ""
    room = MOST_BYTES
    for number, (size, name) in enumerate(written):
        if size > room or number >= MOST_FILES:
            skipped.append(name)
            continue
        try:
            upload(f"{FOLDER}/{name}", folder / name)
        except (LimitExceeded, MalformedRequest, OSError):  # too large, or so called
            skipped.append(name)
            continue
        except RelayError as error:
            not_kept = f"{name} and what is larger was not kept: {error}"
            break
        uploaded.append(name)
        room -= size
    if skipped and not not_kept:
        not_kept = (
            f"not kept of the working directory, which is gone: {_listed(skipped)}; write what is to stay to a path "
            f"that outlives the job, or name in {IGNORE_FILE} what need not be kept"
        )
    kept = f"kept of the working directory, as {FOLDER}/: {_listed(uploaded)}" if uploaded else ""
    return kept, not_kept


def _written(folder: Path, since: float) -> list[tuple[int, str]]:
    found = []
    for name in included_names(folder):
        path = folder / name
        if name.startswith(".") or "/." in name:
            continue
        if path.is_file() and not path.is_symlink() and (status := path.stat()).st_mtime >= since:
            found.append((status.st_size, name))
    return found


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def uploader(job: str) -> UploadFile:
    """Uploads files with this process' token."""

    def upload(name: str, path: Path) -> None:
        with TrainingJobsClient(load_settings()) as trains:
            trains.put_file(job, name, path.read_bytes())

    return upload
