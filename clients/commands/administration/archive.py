"""Writes and reads an archive of signed artifacts: a tar file with members `<key>.artifact`.

Nothing in it is trusted: the service verifies each artifact's signature on import.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from ....compiler.errors import ArtifactError, SettingsError

_SUFFIX = ".artifact"
_LARGEST = 1 << 30
"""Bytes; a service accepts no larger artifact."""


def write_archive(path: Path, artifacts: Iterable[tuple[str, bytes]]) -> int:
    """Write all of `artifacts`, or no file at all; returns how many. Raises SettingsError."""
    count = 0
    try:
        with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=".torchrelay-export-") as folder:
            draft = Path(folder) / "draft"
            with tarfile.open(draft, "w") as archive:
                for key, data in artifacts:
                    member = tarfile.TarInfo(f"{key}{_SUFFIX}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
                    count += 1
            path.hardlink_to(draft)  # unlike a rename, never replaces a file
    except FileExistsError:
        raise SettingsError(f"{path} exists", hint="Remove it, or name another file") from None
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}", hint="Check its folder") from None
    return count


def read_archive(path: Path) -> Iterator[tuple[str, bytes]]:
    """Each artifact's name and bytes. Nothing is unpacked to disk. Raises SettingsError, ArtifactError."""
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if not member.isreg() or not member.name.endswith(_SUFFIX):
                    raise ArtifactError(f"{path} holds {member.name[:80]!r}, which is not an artifact")
                if member.size > _LARGEST:
                    raise ArtifactError(f"{path} holds an artifact of {member.size} bytes")
                data = archive.extractfile(member)
                assert data is not None  # a regular file
                yield member.name, data.read()
    except tarfile.TarError as error:
        raise ArtifactError(f"{path} is not an export: {error}") from None
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read: {error.strerror or error}", hint="Check its permissions"
        ) from None
