"""Reads Ed25519 keys from files and texts."""

from __future__ import annotations

import stat
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from ...compiler.artifact.signing import key_id, read_key
from ...compiler.errors import SettingsError


def read_private(path: Path) -> Ed25519PrivateKey:
    """The private key at `path` (PEM, PKCS 8). Raises SettingsError for a file that others may read, or that holds
    no Ed25519 key."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise SettingsError(f"{path} is readable by others", hint=f"chmod 600 {path}")
        key = load_pem_private_key(path.read_bytes(), password=None)
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
