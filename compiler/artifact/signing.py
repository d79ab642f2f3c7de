"""Stage 10: an artifact's signature is verified: the statement that it makes is accepted, or a SignatureError raised.

A signature covers a Statement and the manifest's exact bytes together, so that neither can be given another: who
signs (by key id), for which namespace, when, and in which epoch of the installation's trust. Trust is what one
side believes: keys by id, its namespace, the current epoch, and which key ids were revoked.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec import Meta, Struct

from ..errors import SignatureError

KeyId = Annotated[str, Meta(max_length=16)]
Count = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
"""JSON's whole numbers."""


class PrivateKey(Protocol):
    """An Ed25519 key that signs, wherever it is; cryptography's Ed25519PrivateKey is one."""

    def public_key(self) -> Ed25519PublicKey: ...

    def sign(self, data: bytes, /) -> bytes: ...


class Statement(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a signature says beside the manifest. `signed_at`: seconds since 1970."""

    key_id: KeyId
    namespace: Annotated[str, Meta(max_length=128)]
    signed_at: Count
    epoch: Count
    origin: KeyId = ""
    """The key whose signature the signer believed, of an artifact that was signed elsewhere before; else ''."""


class Trust(Struct, frozen=True, kw_only=True):
    """What one side believes."""

    keys: Mapping[str, Ed25519PublicKey]
    """The trusted keys by their ids."""
    namespace: str = ""
    """Whose artifacts are wanted; '' for any namespace of the trusted keys."""
    epoch: int = 0
    """What was signed in an earlier one is disowned."""
    revoked: frozenset[str] = frozenset()
    """Key ids that count no longer, neither as signer nor as origin."""
    sites: Mapping[str, Ed25519PublicKey] = {}
    """Other sites' keys, for who imports: their namespaces and epochs are names of theirs, and not looked at."""

    @classmethod
    def of(cls, keys: Iterable[Ed25519PublicKey], *, namespace: str = "") -> Trust:
        return cls(keys={key_id(key): key for key in keys}, namespace=namespace)

    def key_for(self, statement: Statement) -> Ed25519PublicKey:
        """The key that must have signed a statement that is otherwise acceptable. Raises SignatureError."""
        for signer in (statement.key_id, statement.origin):
            if signer in self.revoked:
                raise SignatureError(f"artifact rests on key {signer!r}, which is revoked")
        if statement.key_id in self.sites:
            return self.sites[statement.key_id]
        public = self.keys.get(statement.key_id)
        if public is None:
            raise SignatureError(f"artifact is signed by unknown key {statement.key_id or '(none)'!r}")
        if statement.epoch < self.epoch:
            raise SignatureError(
                f"artifact is of epoch {statement.epoch}, all before {self.epoch} is disowned"
            )
        if self.namespace and statement.namespace != self.namespace:
            raise SignatureError(f"artifact is for namespace {statement.namespace!r}, not {self.namespace!r}")
        return public


def key_id(public: Ed25519PublicKey) -> str:
    """16 hex digits that name a public key."""
    return hashlib.sha256(public.public_bytes_raw()).hexdigest()[:16]


def key_text(public: Ed25519PublicKey) -> str:
    """A public key as people and files keep it: base64 of the 32 raw bytes."""
    return base64.b64encode(public.public_bytes_raw()).decode()


def read_key(text: str) -> Ed25519PublicKey:
    """Raises ValueError for what key_text does not write."""
    return Ed25519PublicKey.from_public_bytes(base64.b64decode(text, validate=True))
