"""The container a compile comes back in: manifest and members in; one signed file out, and back.

Layout: MAGIC, a 4-byte little-endian length, an Envelope of that length (MessagePack), then one zstd frame for
each member in manifest order. The signature (Ed25519, with a domain prefix) covers the manifest's exact bytes,
and the manifest holds every member's size and SHA-256, so nothing in the file can change unseen. A worker
packs without a signature; the gateway signs; the client opens and gets members only if everything holds.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Mapping

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from msgspec import Struct

from . import wire
from .errors import ArtifactError, LimitExceeded, MalformedRequest, SignatureError

MAGIC = b"TRLYART1"
DOMAIN = b"torchrelay artifact v1\0"
MAX_MEMBER_BYTES = 4 << 30
"""One member, unpacked."""
_LENGTH = struct.Struct("<I")
_MEMBER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+\-]*(/[A-Za-z0-9_][A-Za-z0-9_.+\-]*)*", re.ASCII)
"""Relative, and no part of it is hidden or leads upwards: whoever writes a member to a folder stays inside."""
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Envelope(Struct, frozen=True, forbid_unknown_fields=True):
    """What stands before the members. `frames`: each member's compressed size in bytes."""

    manifest: bytes
    frames: list[int]
    key_id: str = ""
    signature: bytes = b""


class Artifact(Struct, frozen=True):
    """An opened artifact: the manifest, and each member's bytes by name."""

    manifest: wire.Manifest
    members: dict[str, bytes]


def member(name: str, data: bytes) -> wire.Member:
    return wire.Member(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def pack(manifest: wire.Manifest, members: Mapping[str, bytes]) -> bytes:
    """An unsigned artifact file. `manifest.members` must list `members` in the same order."""
    if [m.name for m in manifest.members] != list(members):
        raise ArtifactError("the manifest's members are not the ones packed")
    frames = [wire.compress(data) for data in members.values()]
    return _assemble(Envelope(msgspec.msgpack.encode(manifest), [len(f) for f in frames]), frames)


def sign(data: bytes, signer: Ed25519PrivateKey, *, key: str) -> bytes:
    """Sign an unsigned artifact file after checking that it is whole and answers request `key`.

    Raises ArtifactError: a damaged artifact, or one for another key, is never signed.
    """
    envelope, body = _split(data)
    manifest = _open(envelope, body).manifest
    if manifest.key != key:
        raise ArtifactError(f"artifact answers {manifest.key}, not {key}")
    signed = msgspec.structs.replace(
        envelope, key_id=key_id(signer.public_key()), signature=signer.sign(DOMAIN + envelope.manifest)
    )
    return _assemble(signed, [body])


def verify(data: bytes, trusted: Iterable[Ed25519PublicKey], *, key: str) -> Artifact:
    """Open a signed artifact: signature first, then key, then every digest.

    Raises SignatureError when no trusted key signed it, ArtifactError when it is damaged or answers another key.
    """
    envelope, body = _split(data)
    public = {key_id(k): k for k in trusted}.get(envelope.key_id)
    if public is None:
        raise SignatureError(f"artifact is signed by unknown key {envelope.key_id or '(none)'!r}")
    try:
        public.verify(envelope.signature, DOMAIN + envelope.manifest)
    except InvalidSignature:
        raise SignatureError("the artifact's signature does not match its manifest") from None
    artifact = _open(envelope, body)
    if artifact.manifest.key != key:
        raise ArtifactError(f"artifact answers {artifact.manifest.key}, not {key}")
    return artifact


def read_manifest(data: bytes) -> wire.Manifest:
    """The manifest alone, unverified: for listings and logs, never for loading."""
    return _manifest(_split(data)[0])


def signed_by(data: bytes) -> str:
    """Id of the key that says it signed this, unverified; '' for none."""
    return _split(data)[0].key_id


def key_id(public: Ed25519PublicKey) -> str:
    """16 hex digits that name a public key."""
    return hashlib.sha256(public.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()[:16]


def _assemble(envelope: Envelope, parts: Iterable[bytes]) -> bytes:
    head = msgspec.msgpack.encode(envelope)
    return b"".join((MAGIC, _LENGTH.pack(len(head)), head, *parts))


def _split(data: bytes) -> tuple[Envelope, bytes]:
    start = len(MAGIC) + _LENGTH.size
    if len(data) < start or not data.startswith(MAGIC):
        raise ArtifactError("not an artifact: the first bytes are wrong")
    (length,) = _LENGTH.unpack_from(data, len(MAGIC))
    if len(data) < start + length:
        raise ArtifactError("the artifact is cut short")
    try:
        envelope = msgspec.msgpack.decode(data[start : start + length], type=Envelope)
    except _UNREADABLE as error:
        raise ArtifactError(f"the artifact's envelope cannot be read: {error}") from None
    body = data[start + length :]
    if any(size < 0 for size in envelope.frames) or sum(envelope.frames) != len(body):
        raise ArtifactError("the artifact's members are cut short or run over")
    return envelope, body


def _manifest(envelope: Envelope) -> wire.Manifest:
    try:
        return msgspec.msgpack.decode(envelope.manifest, type=wire.Manifest)
    except _UNREADABLE as error:
        raise ArtifactError(f"the artifact's manifest cannot be read: {error}") from None


def _open(envelope: Envelope, body: bytes) -> Artifact:
    manifest = _manifest(envelope)
    if manifest.schema != wire.SCHEMA:
        raise ArtifactError(f"artifact has schema {manifest.schema}, this side speaks {wire.SCHEMA}")
    if len(manifest.members) != len(envelope.frames):
        raise ArtifactError("the artifact's members are not the ones its manifest lists")
    members: dict[str, bytes] = {}
    position = 0
    for entry, size in zip(manifest.members, envelope.frames, strict=True):
        if not _MEMBER_NAME.fullmatch(entry.name) or len(entry.name) > 255:
            raise ArtifactError(f"member name {entry.name[:80]!r} is not allowed")
        if not 0 <= entry.size <= MAX_MEMBER_BYTES:
            raise ArtifactError(f"member {entry.name!r} has a size out of range")
        try:
            data = wire.decompress(body[position : position + size], entry.size)
        except (MalformedRequest, LimitExceeded):
            raise ArtifactError(f"member {entry.name!r} is damaged") from None
        if len(data) != entry.size or hashlib.sha256(data).hexdigest() != entry.sha256:
            raise ArtifactError(f"member {entry.name!r} does not match its digest")
        if entry.name in members:
            raise ArtifactError(f"member {entry.name!r} is listed twice")
        members[entry.name] = data
        position += size
    return Artifact(manifest, members)
