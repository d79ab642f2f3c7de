"""Artifacts to forge: members in, signed files out; and a pickle that tells when somebody reads it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import request_parts
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torchrelay.compiler import decoding
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact import manifest as artifact_manifest
from torchrelay.compiler.artifact.signing import Statement, key_id
from torchrelay.compiler.request import codec

KEY = "ab" * 32


class _Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self._path), "w"))


def evil_members(canary: Path) -> dict[str, bytes]:
    """What a real artifact holds, with a bundle that writes `canary` when it is read."""
    return {
        container.BUNDLE: pickle.dumps(_Touch(canary)),
        container.LIBRARIES: msgspec.msgpack.encode([(["void"], "source", "cpp/0.so")]),
        "cpp/0.so": b"\x7fELF no library",
        "triton/launcher-00": b"\x7fELF no module",
    }


def manifest_of(files: Mapping[str, bytes], **changes: Any) -> artifact_manifest.Manifest:
    measured = [artifact_manifest.Measurement("mm", "triton", 0.5, 3)]
    fields = {"key": KEY, "guards": ["s0 < 9"], "tuning": measured, **changes}
    return request_parts.manifest_of(fields.pop("key"), files, **fields)


def packed(manifest: artifact_manifest.Manifest, frames: list[bytes]) -> bytes:
    """As container.pack, which makes the frames and looks at them."""
    head = msgspec.msgpack.encode(
        container.Envelope(msgspec.msgpack.encode(manifest), [len(frame) for frame in frames])
    )
    return b"".join([container.MAGIC, len(head).to_bytes(4, "little"), head, *frames])


def signed(
    files: Mapping[str, bytes], signer: Ed25519PrivateKey, *, namespace: str = "default", **changes: Any
) -> bytes:
    """A file whose signature holds, whatever `changes` make of its manifest."""
    manifest = msgspec.msgpack.encode(manifest_of(files, **changes))
    frames = [codec.compress(data) for data in files.values()]
    return sealed(manifest, frames, signer, namespace=namespace)


def sealed(
    manifest: bytes, frames: list[bytes], signer: Ed25519PrivateKey, *, namespace: str = "default"
) -> bytes:
    """Any bytes as a manifest, signed."""
    statement = Statement(key_id(signer.public_key()), namespace, 1_800_000_000, 0)
    signature = signature_of(statement, manifest, signer)
    return assembled(
        container.Envelope(manifest, [len(frame) for frame in frames], [signature]), b"".join(frames)
    )


def sign(data: bytes, signer: Ed25519PrivateKey, **said: Any) -> bytes:
    """An artifact file with one signature more. said: arguments of container.make_signature. Raises ArtifactError."""
    signature = container.make_signature(data, signer, **said)
    return container.with_head(data, container.head_with(data, signature))


def signature_of(statement: Statement, manifest: bytes, signer: Ed25519PrivateKey) -> container.Signature:
    return container.Signature(statement, signer.sign(container.signed_bytes(statement, manifest)))


def signed_again(data: bytes, signer: Ed25519PrivateKey, **changes: Any) -> bytes:
    """The file with one signature, by `signer`, whose statement has `changes`; by default it says so itself."""
    envelope, frames = taken_apart(data)
    changes = {"key_id": key_id(signer.public_key()), **changes}
    statement = msgspec.structs.replace(envelope.signatures[0].statement, **changes)
    signature = signature_of(statement, envelope.manifest, signer)
    return assembled(msgspec.structs.replace(envelope, signatures=[signature]), frames)


def taken_apart(data: bytes) -> tuple[container.Envelope, bytes]:
    """The envelope, and all frames after it."""
    start = len(container.MAGIC) + 4
    length = int.from_bytes(data[len(container.MAGIC) : start], "little")
    return decoding.from_msgpack(data[start : start + length], type=container.Envelope), data[
        start + length :
    ]


def assembled(envelope: container.Envelope, frames: bytes) -> bytes:
    head = msgspec.msgpack.encode(envelope)
    return container.MAGIC + len(head).to_bytes(4, "little") + head + frames
