"""Where private keys are: in files, PEM and mode 0600, or in a device that gives none away (pkcs11_keys.py). And public
keys in texts."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from ...compiler.artifact.signing import PrivateKey, key_id, read_key
from ...compiler.errors import SettingsError
from ...compiler.process.own_files import read_own
from ..storage.private_files import write_private


class KeyStore(Protocol):
    """Makes and finds keys by id. It may be shared with other processes; keys are made by one at a time."""

    def make(self) -> PrivateKey:
        """A new key, which is stored. Raises OSError, Unavailable."""

    def load(self, name: str) -> PrivateKey:
        """Raises SettingsError if there is none, or if it cannot be used; Unavailable."""


class FileKeys:
    """The private keys of a folder: KEY_ID.pem."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(self) -> Ed25519PrivateKey:
        key = Ed25519PrivateKey.generate()
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_private(self._path(key_id(key.public_key())), pem)
        return key

    def load(self, name: str) -> Ed25519PrivateKey:
        return read_private(self._path(name))

    def has(self, name: str) -> bool:
        return self._path(name).exists()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.pem"


def read_private(path: Path) -> Ed25519PrivateKey:
    """The private key at `path` (PEM, PKCS 8). Raises SettingsError for a file that another user owns or may read, or
    that holds no Ed25519 key."""
    try:
        key = load_pem_private_key(read_own(path), password=None)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"{path} holds no private key: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SettingsError(f"{path} holds a key that is not Ed25519")
    return key


def read_trusted_keys(keys: str) -> dict[str, Ed25519PublicKey]:
    """Other sites' keys by id, from their texts (trust.key_text) with commas between. Raises SettingsError."""
    sites = {}
    for text in keys.replace(",", " ").split():
        try:
            site = read_key(text)
        except ValueError:
            raise SettingsError(
                f"trusted_public_keys holds {text[:80]!r}",
                hint="Allowed: raw Ed25519 public keys (32 bytes) in base64, separated by commas",
            ) from None
        sites[key_id(site)] = site
    return sites
