"""The container a compile comes back in: manifest and members in; one signed file out, and back.

Layout: MAGIC, a 4-byte little-endian length, an Envelope of that length (MessagePack), then one zstd frame for
each member in manifest order. A signature (Ed25519, with a domain prefix) covers its statement (signing.py) and the
manifest's exact bytes, and the manifest holds every member's size and SHA-256, so nothing in the file can change
unseen. A worker packs without a signature; the gateway signs; the client opens and gets members only if
everything holds. A site that takes in another's artifact adds its own signature and leaves the others.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Protocol

import msgspec
from cryptography.exceptions import InvalidSignature
from msgspec import Meta, Struct

from .. import decoding
from ..errors import ArtifactError, LimitExceeded, MalformedRequest, SignatureError
from ..request import codec, schema
from . import manifest as artifact_manifest
from .signing import PrivateKey, Statement, Trust, key_id

MAGIC = b"TRLYART2"
"""The digit is the format's version: a file of another version is no artifact."""
DOMAIN = b"torchrelay artifact v2\0"
MAX_SIGNATURES = 8
MAX_MANIFEST_BYTES = 16 << 20
MAX_HEAD_BYTES = MAX_MANIFEST_BYTES + (1 << 20)
"""What stands before the members: manifest, sizes, signatures."""
MAX_RATIO = 256
"""How many times what they take here the members may have unpacked, together; past SMALL_BYTES."""
SMALL_BYTES = 64 << 20
PIECE_BYTES = 1 << 20
"""What is read of an artifact's file at a time."""
_LENGTH = struct.Struct("<I")
_FIRST_BYTES = len(MAGIC) + _LENGTH.size
_MEMBER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+\-]*(/[A-Za-z0-9_][A-Za-z0-9_.+\-]*)*", re.ASCII)
"""Relative, and no part of it is hidden or leads upwards: whoever writes a member to a folder stays inside."""


class ArtifactFile(Protocol):
    """An artifact's file: its bytes, or a large one on disk, of which a slice is read when it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes: ...


class Resigned:
    """A file with another head before its members, which are not copied."""

    def __init__(self, head: bytes, file: ArtifactFile) -> None:
        self._head = head
        self._file = file
        self._shift = head_bytes(file[:_FIRST_BYTES]) - len(head)

    def __len__(self) -> int:
        return len(self._file) - self._shift

    def __getitem__(self, part: slice, /) -> bytes:
        start, stop, _ = part.indices(len(self))
        head = len(self._head)
        return (
            self._head[start:stop]
            + self._file[max(start, head) + self._shift : max(stop, head) + self._shift]
        )


def pieces(data: ArtifactFile, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """The bytes from `start` to `stop`, default all, in pieces of at most PIECE_BYTES."""
    stop = len(data) if stop is None else stop
    for at in range(start, stop, PIECE_BYTES):
        yield data[at : min(at + PIECE_BYTES, stop)]


class Signature(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`value`: Ed25519 over `signed_bytes`."""

    statement: Statement
    value: bytes


class Envelope(Struct, frozen=True, forbid_unknown_fields=True):
    """What stands before the members. `frames`: each member's compressed size in bytes."""

    manifest: bytes
    frames: Annotated[list[int], Meta(max_length=artifact_manifest.MAX_MEMBERS)]
    signatures: Annotated[list[Signature], Meta(max_length=MAX_SIGNATURES)] = []


class Artifact(Struct, frozen=True):
    """A verified artifact: the manifest, each member's bytes by name, and the statement that was believed."""

    manifest: artifact_manifest.Manifest
    members: dict[str, bytes]
    statement: Statement


def member(name: str, data: bytes) -> artifact_manifest.Member:
    return artifact_manifest.Member(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def pack(manifest: artifact_manifest.Manifest, members: Mapping[str, bytes]) -> bytes:
    """An unsigned artifact file. `manifest.members` must list `members` in the same order."""
    if [m.name for m in manifest.members] != list(members):
        raise ArtifactError("the manifest's members are not the ones packed")
    frames = [codec.compress(data) for data in members.values()]
    head = _head(Envelope(msgspec.msgpack.encode(manifest), [len(f) for f in frames]))
    return b"".join((head, *frames))


def make_signature(
    data: ArtifactFile,
    signer: PrivateKey,
    *,
    key: str,
    namespace: str,
    epoch: int,
    signed_at: int,
    origin: str = "",
) -> Signature:
    """A signature for an artifact file, after checking that it is whole and answers request `key`.

    `epoch`, `signed_at` (seconds since 1970) and `origin` are the statement's (signing.py). Raises ArtifactError: a
    damaged artifact, or one for another key, is never signed.
    """
    if len(data) > artifact_manifest.MAX_ARTIFACT_BYTES:
        raise ArtifactError(f"the artifact has {len(data)} bytes")
    envelope, start = _split(data)
    _open(envelope, data, start, key)
    _check_room(envelope)
    statement = Statement(key_id(signer.public_key()), namespace, signed_at, epoch, origin)
    return Signature(statement, signer.sign(signed_bytes(statement, envelope.manifest)))


def with_head(data: bytes, head: bytes) -> bytes:
    """The file with `head` before its members."""
    return b"".join((head, memoryview(data)[head_bytes(data) :]))


def head_with(data: ArtifactFile, signature: Signature, trust: Trust | None = None) -> bytes:
    """What stands before the members once `signature` is after those that the file has. Raises ArtifactError;
    SignatureError if `trust` is given, and does not accept it for this file."""
    envelope, _ = _split(data)
    if trust is not None:
        _check_signature(signature, envelope.manifest, trust)
    _check_room(envelope)
    return _head(msgspec.structs.replace(envelope, signatures=[*envelope.signatures, signature]))


def _check_room(envelope: Envelope) -> None:
    if len(envelope.signatures) == MAX_SIGNATURES:
        raise ArtifactError(f"the artifact has {MAX_SIGNATURES} signatures, and takes no more")


def signed_bytes(statement: Statement, manifest: bytes) -> bytes:
    """What a signature covers. msgspec writes equal values as equal bytes, and lengths stand before what they
    measure, so no two pairs share theirs."""
    return DOMAIN + msgspec.msgpack.encode((statement, manifest))


def verify(data: bytes, trust: Trust, *, key: str) -> Artifact:
    """Open a signed artifact: statement and signature first, then key, then every digest.

    Raises SignatureError when no signature is one that `trust` accepts, ArtifactError when the artifact is damaged
    or answers another key.
    """
    envelope, start = _split(data)
    statement = _believed(envelope, trust)
    members: dict[str, bytes] = {}
    return Artifact(_open(envelope, data, start, key, members), members, statement)


def check(data: ArtifactFile, trust: Trust, *, key: str) -> tuple[artifact_manifest.Manifest, Statement]:
    """Do as `verify`, without holding the members."""
    envelope, start = _split(data)
    statement = _believed(envelope, trust)
    return _open(envelope, data, start, key), statement


def check_head(head: ArtifactFile, size: int, trust: Trust, *, key: str) -> Statement:
    """Check what stands before the members alone: who signed which manifest, and for which key. `size`: of the whole
    file. The members, which `head` may lack, are not looked at."""
    envelope, start = _envelope(head)
    _check_size(envelope, size - start)
    statement = _believed(envelope, trust)
    _checked_manifest(envelope, size - start, key)
    return statement


def head_bytes(beginning: bytes) -> int:
    """How many bytes stand before the members; the file's first 12 tell it. Raises ArtifactError."""
    if len(beginning) < _FIRST_BYTES or not beginning.startswith(MAGIC):
        raise ArtifactError("not an artifact: the first bytes are wrong")
    length = _FIRST_BYTES + int(_LENGTH.unpack_from(beginning, len(MAGIC))[0])
    if length > MAX_HEAD_BYTES:
        raise ArtifactError(f"the artifact's head has {length} bytes")
    return length


def read_manifest(data: ArtifactFile) -> artifact_manifest.Manifest:
    """The manifest alone, unverified: for listings and logs, never for loading. The file's head is enough."""
    return _manifest(_envelope(data)[0])


def statements(data: ArtifactFile) -> list[Statement]:
    """What the signatures say, unverified: for listings and logs. The last is the latest. The head is enough."""
    return [signature.statement for signature in _envelope(data)[0].signatures]


def find_member(head: ArtifactFile, name: str) -> tuple[artifact_manifest.Member, int, int] | None:
    """A member, and where its frame begins and ends in the file, unverified: to be shown. None if there is none of the
    name. The head is enough. Raises ArtifactError."""
    envelope, start = _envelope(head)
    for entry, size in zip(_manifest(envelope).members, envelope.frames, strict=False):
        if entry.name == name and size >= 0:
            return entry, start, start + size
        start += size
    return None


def unpack_member(entry: artifact_manifest.Member, frame: bytes) -> bytes:
    """The bytes of a member that is as `entry` says. Raises ArtifactError."""
    return _unpack_member(entry, [frame], keep=True)


def _believed(envelope: Envelope, trust: Trust) -> Statement:
    """The latest acceptable statement. Raises SignatureError, about the latest one."""
    refusals = []
    for signature in reversed(envelope.signatures):
        try:
            _check_signature(signature, envelope.manifest, trust)
        except SignatureError as error:
            refusals.append(error)
        else:
            return signature.statement
    raise refusals[0] if refusals else SignatureError("artifact is not signed")


def _check_signature(signature: Signature, manifest: bytes, trust: Trust) -> None:
    public = trust.key_for(signature.statement)
    try:
        public.verify(signature.value, signed_bytes(signature.statement, manifest))
    except InvalidSignature:
        raise SignatureError("the signature does not match its statement and manifest") from None


def _head(envelope: Envelope) -> bytes:
    """What stands before the members."""
    encoded = msgspec.msgpack.encode(envelope)
    return b"".join((MAGIC, _LENGTH.pack(len(encoded)), encoded))


def _split(data: ArtifactFile) -> tuple[Envelope, int]:
    """The envelope of a whole file, and where the members begin."""
    envelope, start = _envelope(data)
    _check_size(envelope, len(data) - start)
    return envelope, start


def _check_size(envelope: Envelope, body_bytes: int) -> None:
    if any(size < 0 for size in envelope.frames) or sum(envelope.frames) != body_bytes:
        raise ArtifactError("the artifact's members are cut short or run over")


def _envelope(data: ArtifactFile) -> tuple[Envelope, int]:
    """The envelope, and where the members begin."""
    start = head_bytes(data[:_FIRST_BYTES])
    if len(data) < start:
        raise ArtifactError("the artifact is cut short")
    try:
        return decoding.from_msgpack(data[_FIRST_BYTES:start], type=Envelope), start
    except msgspec.MsgspecError as error:
        raise ArtifactError(f"the artifact's envelope cannot be read: {error}") from None


def _manifest(envelope: Envelope) -> artifact_manifest.Manifest:
    if len(envelope.manifest) > MAX_MANIFEST_BYTES:
        raise ArtifactError(f"the artifact's manifest has {len(envelope.manifest)} bytes")
    try:
        return decoding.from_msgpack(envelope.manifest, type=artifact_manifest.Manifest)
    except msgspec.MsgspecError as error:
        raise ArtifactError(f"the artifact's manifest cannot be read: {error}") from None


def _open(
    envelope: Envelope, data: ArtifactFile, start: int, key: str, members: dict[str, bytes] | None = None
) -> artifact_manifest.Manifest:
    """The manifest, once everything that it says of the members holds, which begin at `start`. `members`: gets their
    bytes; without it, no more than a piece of one is held."""
    manifest = _checked_manifest(envelope, len(data) - start, key)
    seen: set[str] = set()
    position = start
    for entry, size in zip(manifest.members, envelope.frames, strict=True):
        if not _MEMBER_NAME.fullmatch(entry.name):
            raise ArtifactError(f"member name {entry.name[:80]!r} is not allowed")
        if entry.name in seen:
            raise ArtifactError(f"member {entry.name!r} is listed twice")
        seen.add(entry.name)
        unpacked = _unpack_member(entry, pieces(data, position, position + size), keep=members is not None)
        if members is not None:
            members[entry.name] = unpacked
        position += size
    return manifest


def _unpack_member(entry: artifact_manifest.Member, frame: Iterable[bytes], *, keep: bool) -> bytes:
    """The member's bytes, which match size and digest; b"" unless `keep`, holding no more than a piece of them."""
    digest, held, length = hashlib.sha256(), [], 0
    try:
        for piece in codec.decompressed(frame, entry.size):
            digest.update(piece)
            length += len(piece)
            if keep:
                held.append(piece)
    except (MalformedRequest, LimitExceeded):
        raise ArtifactError(f"member {entry.name!r} is damaged") from None
    if length != entry.size or digest.hexdigest() != entry.sha256:
        raise ArtifactError(f"member {entry.name!r} does not match its digest")
    return b"".join(held)


def _checked_manifest(envelope: Envelope, body_bytes: int, key: str) -> artifact_manifest.Manifest:
    """The manifest, once it is for `key` and fits the envelope. `body_bytes`: of the members, as they are packed."""
    manifest = _manifest(envelope)
    if manifest.schema != schema.SCHEMA:
        raise ArtifactError(f"artifact has schema {manifest.schema}, this side speaks {schema.SCHEMA}")
    if len(manifest.members) != len(envelope.frames):
        raise ArtifactError("the artifact's members are not the ones its manifest lists")
    unpacked = sum(entry.size for entry in manifest.members)
    if unpacked > min(artifact_manifest.MAX_UNPACKED_BYTES, max(SMALL_BYTES, MAX_RATIO * body_bytes)):
        raise ArtifactError(f"the artifact has {body_bytes} bytes, and would have {unpacked} unpacked")
    if manifest.key != key:
        raise ArtifactError(f"artifact answers {manifest.key}, not {key}")
    return manifest


BUNDLE = "bundle.pickle"
"""The serialized callable: PyTorch's own run-time metadata, generated Python, Triton binaries. A pickle: read
only after the signature holds."""

TRITON = "triton/"
"""Prefix of Triton's own C extensions, by triton_module_id (torch_internals/triton/extensions.py)."""

LIBRARIES = "libraries.msgpack"
"""[(argument types, C++ source, member name), ...]: which library answers which request of generated code."""
