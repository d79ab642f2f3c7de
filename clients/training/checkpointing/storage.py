"""Stores checkpoints in a folder that all nodes see, or in an object store.

A checkpoint is the folder `step-N` with a list of its files, `whole.json`, which is written last: without the list it
is not complete, and does not count. In a folder it is written as `step-N.partial` and renamed; in an object store each
rank puts its own files, under names that no other contents have: a list's files stay until another list is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Struct

from ....compiler import decoding, install_hint
from ....compiler.errors import CheckpointError, SettingsError
from ...atomic_file import write_atomically

_MANIFEST = "whole.json"
_PARTIAL = ".partial"
_REPLACED = ".replaced" + _PARTIAL
_NAME = re.compile(r"step-([0-9]{1,16})")
_SILENCE = timedelta(seconds=20)
"""The longest time without an answer from a store."""
_TRANSFER = timedelta(minutes=30)
"""The longest time of one request."""


class CheckpointFile(Struct, frozen=True):
    """name: within the checkpoint. digest: SHA-256."""

    name: str
    bytes: int
    digest: str


class CheckpointManifest(Struct, frozen=True):
    """The list of a complete checkpoint. ranks: how many wrote it."""

    step: int
    ranks: int
    files: list[CheckpointFile]


def storage_of(location: str | Path) -> CheckpointStorage:
    """Raises SettingsError for what is neither a folder nor a store's URL."""
    text = str(location)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if scheme in ("", "file"):
        return FolderStorage(Path(unquote(urlsplit(text).path) if scheme else text).absolute())
    return ObjectStorage(text)


def step_of(name: str) -> int:
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else -1


def file_of(folder: Path, name: str) -> CheckpointFile:
    with (folder / name).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return CheckpointFile(name, file.tell(), digest)


def damage(folder: Path, files: Iterable[CheckpointFile]) -> str:
    """Describes the first file that differs from its entry in the list; '' if none does."""
    for file in files:
        try:
            found = file_of(folder, file.name)
        except OSError as error:
            return f"{file.name}: {error.strerror or error}"
        if found.bytes != file.bytes:
            return f"{file.name} has {found.bytes} bytes of {file.bytes}"
        if found != file:
            return f"{file.name} is not what was written"
    return ""


def _decode(name: str, data: bytes) -> CheckpointManifest:
    try:
        return decoding.from_json(data, type=CheckpointManifest)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"the list of {name} cannot be read: {error}") from None


def _object_name(name: str, file: CheckpointFile) -> str:
    return f"{name}/{file.name}.{file.digest[:32]}"


def _newest_first(names: Iterable[str]) -> list[str]:
    return sorted((name for name in names if step_of(name) >= 0), key=step_of, reverse=True)


class FolderStorage:
    """A folder that all ranks see. Each rank has its own instance. Methods raise OSError or CheckpointError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def clear(self) -> None:
        """Called by rank 0 before the first save: delete incomplete checkpoints."""
        for old in self._folder.glob(f"step-*{_REPLACED}"):
            name = old.name.removesuffix(_REPLACED)
            if self._current_folder(name) == old:
                shutil.rmtree(self._folder / name, ignore_errors=True)
                old.rename(self._folder / name)
        for path in self._folder.glob(f"step-*{_PARTIAL}"):
            shutil.rmtree(path, ignore_errors=True)

    def begin(self, name: str) -> Path:
        """A folder for this rank's files; other ranks may use the same one."""
        partial = self._folder / (name + _PARTIAL)
        partial.mkdir(parents=True, exist_ok=True)
        return partial

    def store(self, name: str, files: Iterable[CheckpointFile]) -> None:
        """Called by each rank after it has written its files: move them to their final place."""

    def publish(self, name: str, manifest: CheckpointManifest) -> None:
        """Called by rank 0 when all ranks have stored their files."""
        partial, final = self._folder / (name + _PARTIAL), self._folder / name
        write_atomically(partial / _MANIFEST, msgspec.json.encode(manifest), mode=0o644, synced=True)
        if not final.exists():
            partial.rename(final)
            return
        old = self._folder / (name + _REPLACED)  # of an earlier run that went further, or damaged
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        try:
            partial.rename(final)
        except OSError:
            old.rename(final)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def abandon(self, name: str) -> None:
        """Called by each rank for a checkpoint that failed: delete what the rank wrote."""
        shutil.rmtree(self._folder / (name + _PARTIAL), ignore_errors=True)

    def done(self, name: str) -> None:
        """Called by each rank after `publish`."""

    def names(self) -> list[str]:
        """The complete checkpoints, the newest first."""
        found = {
            path.parent.name.removesuffix(_REPLACED) for path in self._folder.glob(f"step-*/{_MANIFEST}")
        }
        return _newest_first(found)

    def manifest(self, name: str) -> CheckpointManifest:
        """Raises CheckpointError if its list cannot be read."""
        return _decode(name, (self._current_folder(name) / _MANIFEST).read_bytes())

    @contextlib.contextmanager
    def opened(self, name: str, manifest: CheckpointManifest) -> Iterator[Path]:
        """A folder on this machine with the files, valid inside the block. For one process of each machine."""
        yield self._current_folder(name)

    def _current_folder(self, name: str) -> Path:
        """The checkpoint's folder; if a process ended just as it replaced the checkpoint, that of the one before."""
        final, old = self._folder / name, self._folder / (name + _REPLACED)
        return old if not (final / _MANIFEST).exists() and (old / _MANIFEST).exists() else final

    def drop(self, name: str) -> None:
        """Called by rank 0. The list is deleted first, so that a half deleted checkpoint does not count."""
        for folder in (self._folder / (name + _REPLACED), self._folder / name):
            with contextlib.suppress(FileNotFoundError):
                (folder / _MANIFEST).unlink()
            shutil.rmtree(folder, ignore_errors=True)


class ObjectStorage:
    """An object store that obstore knows: s3://, gs://, az://. Credentials are the environment's. Its methods are those
    of FolderStorage; they raise CheckpointError."""

    def __init__(self, url: str) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise SettingsError(
                f"checkpoints in {url} need the package obstore", hint=install_hint("server")
            ) from None
        self._do: Any = obstore
        try:
            self.objects: Any = from_url(
                url,
                client_options={
                    "allow_http": True,
                    "connect_timeout": _SILENCE,
                    "read_timeout": _SILENCE,
                    "timeout": _TRANSFER,
                },
                retry_config={"max_retries": 3, "retry_timeout": _SILENCE},
            )
        except (ValueError, obstore.exceptions.BaseError) as error:
            raise SettingsError(f"{url} cannot store checkpoints: {error}") from None
        self._drafts: dict[str, Path] = {}

    def clear(self) -> None:
        complete = set(self.names())
        names = {entry["path"].partition("/")[0] for entry in self._listed()}
        for name in names - complete:
            if step_of(name) >= 0:
                self.drop(name)

    def begin(self, name: str) -> Path:
        self._drafts[name] = Path(tempfile.mkdtemp(prefix="torchrelay-checkpoint-"))
        return self._drafts[name]

    def store(self, name: str, files: Iterable[CheckpointFile]) -> None:
        with self._errors(f"{name} could not be sent"):
            for file in files:
                self._do.put(self.objects, _object_name(name, file), self._drafts[name] / file.name)

    def publish(self, name: str, manifest: CheckpointManifest) -> None:
        with self._errors(f"{name} could not be sent"):
            self._do.put(self.objects, f"{name}/{_MANIFEST}", msgspec.json.encode(manifest))
        with contextlib.suppress(CheckpointError):  # what stays goes with the checkpoint
            listed = {f"{name}/{_MANIFEST}", *(_object_name(name, file) for file in manifest.files)}
            self._delete({entry["path"] for entry in self._listed(f"{name}/")} - listed)

    def abandon(self, name: str) -> None:
        self.done(name)

    def done(self, name: str) -> None:
        draft = self._drafts.pop(name, None)
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)

    def names(self) -> list[str]:
        paths = (entry["path"].partition("/") for entry in self._listed())
        return _newest_first(name for name, _, rest in paths if rest == _MANIFEST)

    def manifest(self, name: str) -> CheckpointManifest:
        with self._errors(f"the list of {name} could not be read"):
            return _decode(name, bytes(self._do.get(self.objects, f"{name}/{_MANIFEST}").bytes()))

    @contextlib.contextmanager
    def opened(self, name: str, manifest: CheckpointManifest) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="torchrelay-checkpoint-") as folder:
            for file in manifest.files:
                path = _object_name(name, file)
                with self._errors(f"{name} could not be read"), (Path(folder) / file.name).open("wb") as out:
                    for chunk in self._do.get(self.objects, path).stream():
                        out.write(chunk)
            yield Path(folder)

    def drop(self, name: str) -> None:
        self._delete({entry["path"] for entry in self._listed(f"{name}/")})

    def _delete(self, paths: Iterable[str]) -> None:
        with self._errors("files of a checkpoint could not be deleted"):
            for path in sorted(paths, key=lambda path: not path.endswith(_MANIFEST)):
                self._do.delete(self.objects, path)

    def _listed(self, prefix: str = "") -> list[Any]:
        with self._errors("the store of the checkpoints could not be read"):
            return [entry for batch in self._do.list(self.objects, prefix or None) for entry in batch]

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._do.exceptions.BaseError as error:
            raise CheckpointError(f"{what}: {' '.join(str(error).split())[:300]}") from None


CheckpointStorage = FolderStorage | ObjectStorage
