"""The installation's Ed25519 key: made once, kept in one file of mode 0600, used by the gateway alone."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from ..compiler import artifact
from ..compiler.errors import SettingsError
from ..compiler.trust import Trust, key_id, read_key


class Keyring:
    """Signs what workers built, and says whose signatures count here."""

    def __init__(self, signer: Ed25519PrivateKey, sites: Mapping[str, Ed25519PublicKey]) -> None:
        self._signer = signer
        self._sites = sites

    @property
    def current(self) -> str:
        """Id of the key that signs now."""
        return key_id(self._signer.public_key())

    @property
    def public(self) -> list[Ed25519PublicKey]:
        """Whose signatures clients must trust, the current key first."""
        return [self._signer.public_key()]

    def sign(self, data: bytes, *, key: str, namespace: str, origin: str = "") -> bytes:
        """An artifact with this installation's signature added. Raises ArtifactError if it is damaged."""
        return artifact.sign(
            data,
            self._signer,
            key=key,
            namespace=namespace,
            epoch=0,
            signed_at=int(time.time()),
            origin=origin,
        )

    def trust(self, namespace: str) -> Trust:
        """What may be served in `namespace`: signed by this installation."""
        return Trust.of(self.public, namespace=namespace)

    def import_trust(self) -> Trust:
        """What may be taken in: signed by this installation in any namespace, or by a site that it trusts."""
        return Trust(keys={key_id(key): key for key in self.public}, sites=self._sites)

    def vouches_for(self, origin: str) -> bool:
        """Whether what was taken in because `origin` had signed it may still be served."""
        return origin in self._sites or origin == self.current


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


def read_sites(keys: str) -> dict[str, Ed25519PublicKey]:
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
