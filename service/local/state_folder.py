"""The state folder of an installation: its lock and the owner's token. Also writes the client's credentials file.

lock           held by the running service and its redis-server
token          the owner's bearer token
keys/          the artifacts' signing keys (signing/keyring.py)
redis/         the append-only file
blobs/         large artifacts
kernels/       C++ libraries that compiles built, for later compiles
runtime        the path of the running service's folder of sockets; the next service removes what was left there
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import structlog
from pydantic import SecretStr

from ...compiler import decoding
from ...compiler.errors import SettingsError, Unavailable
from ...compiler.process.own_files import read_own
from ...workers.pool import short_directory
from ..access.tokens import new_token
from ..base.settings import MIN_TOKEN
from ..storage.private_files import private_folder, write_private

log = structlog.get_logger(__name__)

LOCK_SECONDS = 15.0
"""How long to wait for a service that is just shutting down."""
RUNTIME_PREFIX = "torchrelay-"
PROFILES_FOLDER = "credentials"
"""Beside credentials.json; as clients/settings.py says."""


@asynccontextmanager
async def exclusive(state_dir: Path) -> AsyncIterator[int]:
    """Hold the folder's lock; yields its file descriptor. Raises Unavailable when another service has it, SettingsError
    for a folder to which others may write."""
    private_folder(state_dir)
    descriptor = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        until = time.monotonic() + LOCK_SECONDS
        locked = _try_lock(descriptor)
        if not locked:
            log.info("waiting_for_another_service_to_end", state_dir=str(state_dir), seconds=LOCK_SECONDS)
        while not locked:
            if time.monotonic() > until:
                raise Unavailable(
                    f"another torchrelay service runs on {state_dir}",
                    hint="Stop it, or give this one a folder of its own with --state",
                )
            await asyncio.sleep(0.1)
            locked = _try_lock(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def runtime_directory(state_dir: Path) -> Iterator[Path]:
    """A folder with a short path for sockets, removed at the end; the folder of a killed service is removed first."""
    note = state_dir / "runtime"
    if note.exists():
        left = Path(note.read_text().strip())
        if left.name.startswith(RUNTIME_PREFIX) and left.is_dir() and left.stat().st_uid == os.getuid():
            shutil.rmtree(left, ignore_errors=True)
    directory = short_directory(RUNTIME_PREFIX)
    try:
        write_private(note, f"{directory}\n".encode())
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        note.unlink(missing_ok=True)


def owner_token(state_dir: Path) -> SecretStr:
    """The token in the state folder, made on the first start. Raises SettingsError if another user owns the file or may
    read it, or if it holds no token."""
    private_folder(state_dir)
    path = state_dir / "token"
    if not path.exists():
        write_private(path, new_token().encode(), replace=False)  # gateways may start at one time
    text = read_own(path).decode(errors="replace").strip()
    if len(text) < MIN_TOKEN or not text.isascii() or not text.isprintable() or " " in text:
        raise SettingsError(
            f"{path} holds no token of {MIN_TOKEN} visible characters or more",
            hint="Remove it, and the next start makes another; or restore it from a backup",
        )
    return SecretStr(text)


def place_for_credentials(default: Path, url: str, public_keys: list[str]) -> Path:
    """Where credentials for this service replace none for another: `default`, or the file of a profile beside it, which
    clients use by TORCHRELAY_PROFILE or by this URL."""
    profiles = default.parent / PROFILES_FOLDER
    places = (default, profiles / "local.json", profiles / f"local-{urlsplit(url).port or 'https'}.json")
    return next((place for place in places if not _another_service(place, url, public_keys)), places[-1])


def _another_service(path: Path, url: str, public_keys: list[str]) -> bool:
    """Whether the file is not this service's, or its predecessor's at this URL."""
    try:
        found = decoding.from_json(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return False
    except (OSError, msgspec.MsgspecError):
        return True
    keys = found.get("public_keys")
    if not found.get("token") or (isinstance(keys, list) and any(key in public_keys for key in keys)):
        return False
    return found.get("url") != url or "sign_in" in found


def write_credentials(path: Path, *, url: str, token: str, public_keys: list[str], namespace: str) -> None:
    """The settings of this user's clients (clients/settings.py), mode 0600, replaced atomically."""
    content = {"url": url, "token": token, "public_keys": public_keys, "namespace": namespace}
    write_private(path, msgspec.json.format(msgspec.json.encode(content)) + b"\n")
