"""What a signer and those who ask it send each other, as JSON. A body of `POST /v1/sign` is an artifact's file; the
answer is its signature (container.py), which the asker adds: the artifact itself need not come back."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ...compiler.artifact.manifest import Name
from ...compiler.artifact.signing import KeyId
from ...compiler.artifact.trust_document import SignedDocument

_YEARS_10 = 10 * 366 * 86400


class SignQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """The query of `POST /v1/sign`: arguments of TrustedKeys.sign."""

    key: Annotated[Name, Meta(min_length=1)]
    namespace: Annotated[str, Meta(min_length=1, max_length=128)]
    origin: KeyId = ""


class RingReply(Struct, frozen=True):
    """Answer of `GET /v1/ring`, and of every change. `sites`: other sites' public keys, as signing.key_text writes
    them."""

    trust: SignedDocument
    sites: list[str]


class Rotation(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/rotate`."""

    overlap_seconds: Annotated[int, Meta(ge=0, le=_YEARS_10)] | None


class Revocation(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/revoke`. `key_id`: 16 hex digits."""

    key_id: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
