"""Where private keys are: in files (key_files.py), or in a device that gives none away (pkcs11_keys.py)."""

from __future__ import annotations

from typing import Protocol

from ...compiler.artifact.signing import PrivateKey


class KeyStore(Protocol):
    """Makes and finds keys by id. It may be shared with other processes; keys are made by one at a time."""

    def make(self) -> PrivateKey:
        """A new key, which is stored. Raises OSError, Unavailable."""

    def load(self, name: str) -> PrivateKey:
        """Raises SettingsError if there is none, or if it cannot be used; Unavailable."""
