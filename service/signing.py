"""The installation's Ed25519 key: made once, kept in one file of mode 0600, used by the gateway alone."""

from __future__ import annotations

import base64
import os
import stat
import tempfile
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from ..compiler.errors import SettingsError


def load_or_create(path: Path) -> Ed25519PrivateKey:
    """The private key at `path` (PEM, PKCS 8). Two gateways that start at once end up with the same key.

    Raises SettingsError for a file that others may read, or that holds no Ed25519 key.
    """
    if not path.exists():
        _create(path)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise SettingsError(f"{path} is readable by others", hint=f"chmod 600 {path}")
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except ValueError as error:
        raise SettingsError(f"{path} holds no private key: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SettingsError(f"{path} holds a key that is not Ed25519")
    return key


def public_key_text(key: Ed25519PrivateKey) -> str:
    """The public half, as key_text writes it."""
    return key_text(key.public_key())


def key_text(key: Ed25519PublicKey) -> str:
    """A public key as clients keep it: base64 of the 32 raw bytes."""
    return base64.b64encode(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).decode()


def trusted(signer: Ed25519PrivateKey, others: str) -> list[Ed25519PublicKey]:
    """Whose artifacts this installation serves: its own key first, then `others` (key_text, with commas).

    Raises SettingsError.
    """
    keys = [signer.public_key()]
    for text in others.replace(",", " ").split():
        try:
            keys.append(Ed25519PublicKey.from_public_bytes(base64.b64decode(text, validate=True)))
        except ValueError:
            raise SettingsError(
                f"trusted_public_keys holds {text[:80]!r}",
                hint="Allowed: raw Ed25519 public keys (32 bytes) in base64, separated by commas",
            ) from None
    return keys


def _create(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=".signing-")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)  # unlike rename, never replaces a key that another gateway just made
    except FileExistsError:
        return
    finally:
        Path(draft).unlink()
