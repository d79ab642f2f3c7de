"""What a script wrote into its working directory in; files of the job, `output/NAME`, out.

That directory is a copy, which is gone when the job's ranks have ended or start again. So rank 0, when its script has
ended, puts what is newer than its own start among the job's files: small ones first, up to a limit. What
`.torchrelayignore` names, what is never sent and hidden files are not kept either.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from ...compiler.errors import LimitExceeded, MalformedRequest, RelayError
from ..gateway.connection import Connection
from ..gateway.deadline import Deadline
from ..jobfiles.working_directory import IGNORE_FILE, included_names
from ..settings import load_settings

FOLDER = "output"
MOST_FILES = 256
MOST_BYTES = 1 << 30
_NAMED = 5
"""Files that a note names."""
_UPLOAD_SECONDS = 300.0

KeepFile = Callable[[str, Path], None]
"""Keeps a file, by its name in the job. Raises RelayError, OSError."""


def keep_output_files(folder: Path, since: float, keep: KeepFile) -> tuple[str, str]:
    """What is to be said of the files that were kept, and of those that were not; '' where there are none. since: the
    script's begin, seconds since 1970. Raises nothing."""
    if not folder.is_dir():
        return "", "nothing of the working directory was kept: the script has removed it"
    try:
        written = sorted(_written(folder, since))
    except (RelayError, OSError) as error:
        return "", f"nothing of the working directory was kept: {error}"
    kept: list[str] = []
    left: list[str] = []
    room = MOST_BYTES
    for number, (size, name) in enumerate(written):
        if size > room or number >= MOST_FILES:
            left.append(name)
            continue
        try:
            keep(f"{FOLDER}/{name}", folder / name)
        except (LimitExceeded, MalformedRequest, OSError):  # too large, or so called
            left.append(name)
            continue
        except RelayError as error:
            return _kept(kept), f"{name} and what is larger was not kept: {error}"
        kept.append(name)
        room -= size
    return _kept(kept), _left(left)


def _written(folder: Path, since: float) -> list[tuple[int, str]]:
    found = []
    for name in included_names(folder):
        path = folder / name
        if name.startswith(".") or "/." in name:
            continue
        if path.is_file() and not path.is_symlink() and (told := path.stat()).st_mtime >= since:
            found.append((told.st_size, name))
    return found


def _kept(names: list[str]) -> str:
    if not names:
        return ""
    return f"kept of the working directory, as {FOLDER}/: {_listed(names)}"


def _left(names: list[str]) -> str:
    if not names:
        return ""
    return (
        f"not kept of the working directory, which is gone: {_listed(names)}; write what is to stay to a path that "
        f"outlives the job, or name in {IGNORE_FILE} what need not be kept"
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def uploader(job: str) -> KeepFile:
    """Keeps a file as the job's own: `PUT /v1/trains/{job}/files/{name}`, with this process' token."""

    def keep(name: str, path: Path) -> None:
        connection = Connection(load_settings())
        try:
            connection.request(
                "PUT",
                f"/v1/trains/{job}/files/{quote(name)}",
                Deadline(_UPLOAD_SECONDS),
                content=path.read_bytes(),
                headers={"Content-Type": "application/octet-stream"},
            )
        finally:
            connection.close()

    return keep
