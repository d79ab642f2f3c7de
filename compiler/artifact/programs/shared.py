"""Programs that a team shares: each is one variant of one function, an artifact with a single member.

A function has SLOTS places for variants. The key of a place is a digest that is no request's key, so what a token may
store as a program is never the answer to a graph.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from ... import decoding
from ...errors import ArtifactError, MalformedRequest
from ...request import codec, schema
from ...request.schema import Target, Toolchain
from .. import container, manifest
from ..container import Artifact
from ..manifest import Manifest
from .records import FrameProgram

SLOTS = 16
BODY_LIMIT = 8 << 20
"""Bytes of a compressed upload."""
UNPACKED_LIMIT = 32 << 20
PROGRAM_MEDIA_TYPE = "application/vnd.torchrelay.program"
_DOMAIN = b"torchrelay program v1\0"
_MEMBER = "program"

Slot = Annotated[int, Meta(ge=0, lt=SLOTS)]


class ProgramUpload(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `PUT /v1/programs/{function}/{slot}`, compressed: the program, and for what it was made."""

    toolchain: Toolchain
    target: Target
    program: FrameProgram


class ProgramReply(Struct, frozen=True):
    """stored: it is there now. same: it was there. taken: another program is there, and stays."""

    outcome: Literal["stored", "same", "taken"]


def slot_key(function: str, slot: int) -> str:
    """The artifact's key. function: 64 hex digits that name a function and how it is compiled."""
    return hashlib.sha256(_DOMAIN + f"{function}/{slot}".encode()).hexdigest()


def encode_upload(upload: ProgramUpload) -> bytes:
    return codec.compress(msgspec.msgpack.encode(upload))


def decode_upload(body: bytes) -> ProgramUpload:
    """Raises MalformedRequest, LimitExceeded. Nothing of the program is run or unmarshalled."""
    try:
        return decoding.from_msgpack(codec.decompress(body, UNPACKED_LIMIT), type=ProgramUpload)
    except msgspec.MsgspecError as error:
        raise MalformedRequest(
            f"not a program: {error}", hint="The client's version may be another one"
        ) from None


def pack(upload: ProgramUpload, key: str, holder: str) -> bytes:
    """The unsigned artifact. holder: the public id of the token that brought it."""
    data = msgspec.msgpack.encode(upload.program)
    said = manifest.Manifest(
        schema=schema.SCHEMA,
        key=key,
        toolchain=upload.toolchain,
        target=upload.target,
        members=[container.member(_MEMBER, data)],
        guards=[],
        stages=[],
        verification=manifest.Verification("skipped", "a program: a client's bytecode", 0.0, 0.0),
        tuning=[],
        kernels=0,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        worker=f"token {holder}",
    )
    return container.pack(said, {_MEMBER: data})


def same_program(said: Manifest, upload: ProgramUpload) -> bool:
    """Whether the artifact with this manifest holds this program."""
    mine = container.member(_MEMBER, msgspec.msgpack.encode(upload.program))
    return said.members == [mine]


def holds_program(said: Manifest) -> bool:
    """Whether `unpack` may find a program in the artifact with this manifest, which is what is signed."""
    return any(each.name == _MEMBER for each in said.members)


def unpack(artifact: Artifact) -> FrameProgram:
    """The program in a verified artifact. Raises ArtifactError."""
    try:
        return decoding.from_msgpack(artifact.members[_MEMBER], type=FrameProgram)
    except (KeyError, msgspec.MsgspecError) as error:
        raise ArtifactError(f"the artifact holds no program: {error}") from None
