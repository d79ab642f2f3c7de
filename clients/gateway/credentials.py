"""The credentials file: url, token, trusted keys, namespace, which settings.py reads; and how the token is renewed."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from ...compiler import decoding
from ...compiler.api.sign_in import BearerKind
from ...compiler.errors import SettingsError
from ..atomic_file import write_atomically
from ..settings import PROFILES_FOLDER, same_gateway

_TOKEN = re.compile(rb"[!-~]+")
_FILE_BYTES = 1 << 20


class SignIn(Struct, frozen=True, kw_only=True):
    """How a token is renewed that a provider gave. renew, expires: seconds since 1970 by this machine's clock."""

    issuer: str
    client_id: str
    bearer: BearerKind
    refresh_token: str
    """'': the provider gave none; the token cannot be renewed."""
    renew: float
    expires: float


class SignedIn(Struct, frozen=True, kw_only=True):
    """What a credentials file of a sign-in holds."""

    url: str
    token: str
    public_keys: list[str]
    namespace: str = ""
    sign_in: SignIn


def write_credentials(
    path: Path,
    *,
    url: str,
    token: str,
    public_keys: Sequence[str],
    namespace: str = "",
    sign_in: SignIn | None = None,
) -> None:
    """Replace `path` in one step; only its owner can read it, at every moment. Raises SettingsError."""
    fields: dict[str, object] = {"url": url, "token": token, "public_keys": list(public_keys)}
    if namespace:
        fields["namespace"] = namespace
    if sign_in is not None:
        fields["sign_in"] = sign_in
    content = msgspec.json.encode(fields)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.format(content) + b"\n", synced=True)
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}", hint="Check its folder") from None


def keep_other(path: Path, url: str) -> Path | None:
    """Move credentials for another gateway than `url` from `path` into a profile, named by their host; where they are
    then, or None if there are none. Raises SettingsError."""
    try:
        found = decoding.from_json(path.read_bytes(), type=dict[str, object])
        other = str(found.get("url", ""))
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError):  # it may be anything
        other = "unreadable"
    if not other or same_gateway(url, other):
        return None
    name = re.sub(r"[^A-Za-z0-9.]+", "-", urlsplit(other).netloc or other).strip("-.") or "other"
    folder = path.parent / PROFILES_FOLDER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in count():
            place = folder / (f"{name}-{number}.json" if number else f"{name}.json")
            try:
                os.link(path, place)  # which replaces nothing
            except FileExistsError:
                continue
            path.unlink()
            return place
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be kept in {folder}: {error.strerror}",
            hint="Move it away, or check its permissions",
        ) from None
    raise AssertionError("unreachable")


def read_token_file(path: Path) -> str | SignedIn:
    """The token in a file of one line, or the credentials of a sign-in. Raises OSError, and SettingsError for what is
    neither."""
    with path.open("rb") as file:
        data = file.read(_FILE_BYTES).strip()
    if _TOKEN.fullmatch(data) and not data.startswith(b"{"):
        return data.decode()
    try:
        return decoding.from_json(data, type=SignedIn)
    except msgspec.MsgspecError:
        raise SettingsError(f"{path} holds no token", hint="Allowed: one line with the token") from None
