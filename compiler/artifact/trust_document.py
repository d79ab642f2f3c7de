"""What an installation tells its clients about its keys: a signed document in; what a client knows by now, out.

A document lists the installation's keys, the revoked ones and the epoch, under a serial that only grows. Every key
that the installation has signs it, so that whoever knows one of them can read it. A client adds up what it learns:
a revocation and an epoch are never taken back, whatever comes later, and an older document changes no keys. Whoever
sits in between can withhold news (TLS keeps him out), and can undo none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec import Struct

from .. import decoding
from ..errors import SignatureError
from .signing import Count, KeyId, PrivateKey, Trust, key_id, read_key

DOMAIN = b"torchrelay trust v1\0"
_LOGIN = "Run `torchrelay login`, or ask an administrator for the gateway's public keys"


class ListedKey(Struct, frozen=True, kw_only=True):
    """A key of the installation, times in seconds since 1970. `until`: the end of its overlap with its successor,
    after which nothing that it signed counts; None: no end is set."""

    id: KeyId
    public: str
    """The text that signing.key_text writes."""
    created: Count = 0
    until: Count | None = None


class TrustDocument(Struct, frozen=True, kw_only=True):
    """Lenient: a later version may say more. `issued`: seconds since 1970."""

    serial: Count
    epoch: Count
    issued: Count
    keys: list[ListedKey]
    revoked: list[KeyId]


class SignedDocument(Struct, frozen=True):
    """A TrustDocument as MessagePack, and signatures by key id over DOMAIN and these bytes."""

    document: bytes
    signatures: dict[KeyId, bytes]


class KnownKeys(Struct, frozen=True, kw_only=True):
    """What a client knows of one installation. Grows by `learn` alone."""

    keys: list[ListedKey]
    serial: Count = 0
    epoch: Count = 0
    revoked: list[KeyId] = []
    checked: Count = 0
    """When the installation was last asked, seconds since 1970."""


def sign_document(document: TrustDocument, signers: Iterable[PrivateKey]) -> SignedDocument:
    data = msgspec.msgpack.encode(document)
    return SignedDocument(
        data, {key_id(signer.public_key()): signer.sign(DOMAIN + data) for signer in signers}
    )


def learn(known: KnownKeys, signed: SignedDocument) -> KnownKeys:
    """What is known after a document. Raises SignatureError when no key that is known and not revoked signed it.

    A key that the document itself revokes is believed about revocations and the epoch, which can only close doors,
    and not about keys.
    """
    voters = _voters(known, signed)
    if not voters:
        raise SignatureError(
            "the gateway's list of keys is signed by no key that is trusted here", hint=_LOGIN
        )
    try:
        document = decoding.from_msgpack(signed.document, type=TrustDocument)
        for listed in document.keys:
            if key_id(read_key(listed.public)) != listed.id:
                raise ValueError(f"key {listed.id} has another id")
    except ValueError as error:
        raise SignatureError(f"the gateway's list of keys cannot be read: {error}") from None
    revoked = {*known.revoked, *document.revoked}
    grown = msgspec.structs.replace(known, revoked=sorted(revoked), epoch=max(known.epoch, document.epoch))
    if document.serial <= known.serial or voters <= revoked:
        return grown
    keys = {listed.id: listed for listed in (*known.keys, *document.keys)}
    return msgspec.structs.replace(grown, keys=list(keys.values()), serial=document.serial)


def merge(first: KnownKeys, second: KnownKeys) -> KnownKeys:
    """What two processes have learned about one installation, together."""
    older, newer = sorted((first, second), key=lambda known: known.serial)
    keys = {listed.id: listed for listed in (*older.keys, *newer.keys)}
    return KnownKeys(
        keys=list(keys.values()),
        serial=newer.serial,
        epoch=max(first.epoch, second.epoch),
        revoked=sorted({*first.revoked, *second.revoked}),
        checked=max(first.checked, second.checked),
    )


def trust(known: KnownKeys, *, namespace: str, now: float) -> Trust:
    """What is believed at `now`, seconds since 1970."""
    return Trust(
        keys=public_keys(known.keys, now=now),
        namespace=namespace,
        epoch=known.epoch,
        revoked=frozenset(known.revoked),
    )


def public_keys(listed: Iterable[ListedKey], *, now: float) -> Mapping[str, Ed25519PublicKey]:
    """The keys by id whose overlap has not ended. Raises ValueError for one that is none."""
    return {key.id: read_key(key.public) for key in listed if key.until is None or now < key.until}


def signers_of(signed: SignedDocument, keys: Iterable[ListedKey]) -> set[str]:
    """Ids of those of `keys` that signed a document. Raises ValueError for a key that is none."""
    found = set()
    for listed in keys:
        value = signed.signatures.get(listed.id)
        if value is None:
            continue
        try:
            read_key(listed.public).verify(value, DOMAIN + signed.document)
        except InvalidSignature:
            continue
        found.add(listed.id)
    return found


def _voters(known: KnownKeys, signed: SignedDocument) -> set[str]:
    """Ids of the known keys that signed; an ended overlap takes nothing from their word."""
    return signers_of(signed, [listed for listed in known.keys if listed.id not in known.revoked])
