"""Artifacts that were changed after they were signed, or signed by nobody we trust: refused by their bytes alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from signed import KEY, assembled, manifest_of, sealed, sign, signature_of, signed, signed_again, taken_apart
from torchrelay.compiler import decoding
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact import manifest as artifact_manifest
from torchrelay.compiler.artifact.signing import Trust, key_id
from torchrelay.compiler.errors import ArtifactError, SignatureError
from torchrelay.compiler.request import codec, schema

SIGNER = Ed25519PrivateKey.from_private_bytes(b"\1" * 32)
STRANGER = Ed25519PrivateKey.from_private_bytes(b"\2" * 32)
TRUSTED = Trust.of([SIGNER.public_key()], namespace="default")
FILES = {"bundle.pickle": b"a" * 40, "cpp/0.so": b"\x7fELF" * 9, "libraries.msgpack": b"\x90"}
GOOD = signed(FILES, SIGNER)

HARMS: dict[str, Any] = {
    "schema": schema.SCHEMA + 1,
    "key": "cd" * 32,
    "toolchain": schema.Toolchain("cp399", "9.9.9", "", "", "linux-x86_64"),
    "target": schema.Target("cuda", "NVIDIA H200", "9.0", 132, []),
    "members": [container.member("other", b"other")],
    "guards": [],
    "stages": [("aot", 2.0)],
    "verification": artifact_manifest.Verification("skipped", "", 0.0, 0.1),
    "tuning": [],
    "kernels": 2,
    "created": "2027-01-01T00:00:00Z",
    "worker": "w1",
}


def refused(data: bytes, *, key: str = KEY) -> type[Exception]:
    with pytest.raises((ArtifactError, SignatureError)) as caught:
        container.verify(data, TRUSTED, key=key)
    return caught.type


def test_the_artifact_that_is_forged_below_is_good() -> None:
    assert container.verify(GOOD, TRUSTED, key=KEY).members == FILES


def test_no_bit_can_flip_unseen() -> None:
    """A bit of a compressed frame's own header may be unused; then what comes out is what was signed."""
    good, refusals = container.verify(GOOD, TRUSTED, key=KEY), 0
    for position in range(len(GOOD)):
        for bit in range(8):
            data = bytearray(GOOD)
            data[position] ^= 1 << bit
            try:
                assert container.verify(bytes(data), TRUSTED, key=KEY) == good
            except (ArtifactError, SignatureError):
                refusals += 1
    assert refusals > 7.9 * len(GOOD)


def test_no_prefix_and_no_longer_file_passes() -> None:
    for length in range(len(GOOD)):
        refused(GOOD[:length])
    refused(GOOD + b"\0")
    refused(GOOD + GOOD)


@pytest.mark.parametrize(
    "field", [name for name in artifact_manifest.Manifest.__struct_fields__ if name in HARMS]
)
def test_every_field_of_the_manifest_is_signed(field: str) -> None:
    envelope, frames = taken_apart(GOOD)
    changed = msgspec.msgpack.encode(manifest_of(FILES, **{field: HARMS[field]}))
    assert changed != envelope.manifest
    assert refused(assembled(msgspec.structs.replace(envelope, manifest=changed), frames)) is SignatureError


def test_a_field_that_the_manifest_gets_is_signed_too() -> None:
    """The manifest's exact bytes are signed, so this holds for fields that the table above does not know."""
    envelope, frames = taken_apart(GOOD)
    manifest = decoding.from_msgpack(envelope.manifest)
    for name in artifact_manifest.Manifest.__struct_fields__:
        changed = msgspec.msgpack.encode({**manifest, name: None})
        forged = assembled(msgspec.structs.replace(envelope, manifest=changed), frames)
        assert refused(forged) is SignatureError


def _with_signature(data: bytes, **changes: Any) -> bytes:
    """The file, its one signature changed and not made again."""
    envelope, frames = taken_apart(data)
    (signature,) = envelope.signatures
    changed = msgspec.structs.replace(signature, **changes)
    return assembled(msgspec.structs.replace(envelope, signatures=[changed]), frames)


def _strangers() -> Iterator[tuple[str, bytes]]:
    envelope, frames = taken_apart(GOOD)
    statement = envelope.signatures[0].statement
    yield "another key", signed(FILES, STRANGER)
    yield "another key under our name", signed_again(GOOD, STRANGER, key_id=statement.key_id)
    theirs = msgspec.structs.replace(statement, key_id=key_id(STRANGER.public_key()))
    yield "our signature under another name", _with_signature(GOOD, statement=theirs)
    yield "an empty signature", _with_signature(GOOD, value=b"")
    yield "no signature", assembled(msgspec.structs.replace(envelope, signatures=[]), frames)
    yield "no key", signed_again(GOOD, SIGNER, key_id="")
    yield "unsigned", container.pack(manifest_of(FILES), FILES)
    plain = msgspec.msgpack.encode((statement, envelope.manifest))
    yield "signed without the domain", _with_signature(GOOD, value=SIGNER.sign(plain))
    alone = SIGNER.sign(container.DOMAIN + envelope.manifest)
    yield "only the manifest signed", _with_signature(GOOD, value=alone)
    yield "a zero signature", _with_signature(GOOD, value=bytes(64))
    other = signature_of(statement, msgspec.msgpack.encode(manifest_of(FILES, worker="w9")), SIGNER)
    yield (
        "the signature of another artifact",
        assembled(msgspec.structs.replace(envelope, signatures=[other]), frames),
    )


@pytest.mark.parametrize(("what", "data"), list(_strangers()), ids=[what for what, _ in _strangers()])
def test_who_is_not_trusted_cannot_sign(what: str, data: bytes) -> None:
    assert refused(data) is SignatureError


def test_an_artifact_whose_key_is_trusted_no_more_is_refused() -> None:
    with pytest.raises(SignatureError):
        container.verify(GOOD, Trust.of([]), key=KEY)
    with pytest.raises(SignatureError):
        container.verify(GOOD, Trust.of([STRANGER.public_key()]), key=KEY)


STATEMENT = taken_apart(GOOD)[0].signatures[0].statement
OTHER_STATEMENTS = {"key_id": "00" * 8, "namespace": "rivals", "signed_at": 1, "epoch": 7, "origin": "ab" * 8}


@pytest.mark.parametrize("field", STATEMENT.__struct_fields__)
def test_every_field_of_the_statement_is_signed(field: str) -> None:
    """Also for whoever would believe the changed one: the stranger's key is trusted under the forged id."""
    trust = Trust(keys={"00" * 8: SIGNER.public_key(), STATEMENT.key_id: SIGNER.public_key()})
    assert container.verify(GOOD, trust, key=KEY).statement == STATEMENT
    changed = msgspec.structs.replace(STATEMENT, **{field: OTHER_STATEMENTS[field]})
    with pytest.raises(SignatureError, match="does not match"):
        container.verify(_with_signature(GOOD, statement=changed), trust, key=KEY)


def test_a_statement_of_one_artifact_does_not_serve_another() -> None:
    data = signed_again(signed(FILES, SIGNER, worker="w9"), SIGNER, namespace="rivals")
    theirs = taken_apart(data)[0].signatures[0]
    for value in (theirs.value, taken_apart(GOOD)[0].signatures[0].value):
        for statement in (theirs.statement, STATEMENT):
            mixed = _with_signature(data, statement=statement, value=value)
            if (statement, value) != (theirs.statement, theirs.value):
                assert refused(mixed) is SignatureError


def test_another_namespaces_artifact_is_refused() -> None:
    theirs = signed(FILES, SIGNER, namespace="rivals")
    with pytest.raises(SignatureError, match="for namespace 'rivals', not 'default'"):
        container.verify(theirs, TRUSTED, key=KEY)
    anyones = Trust.of([SIGNER.public_key()])
    assert container.verify(theirs, anyones, key=KEY).statement.namespace == "rivals"


def test_a_revoked_key_counts_neither_as_signer_nor_as_origin() -> None:
    gone = msgspec.structs.replace(TRUSTED, revoked=frozenset({STATEMENT.key_id, "ab" * 8}))
    with pytest.raises(SignatureError, match="revoked"):
        container.verify(GOOD, gone, key=KEY)
    origin = msgspec.structs.replace(TRUSTED, revoked=frozenset({"ab" * 8}))
    with pytest.raises(SignatureError, match="revoked"):
        container.verify(signed_again(GOOD, SIGNER, origin="ab" * 8), origin, key=KEY)
    assert container.verify(GOOD, origin, key=KEY).statement == STATEMENT


def test_what_was_signed_before_the_epoch_is_disowned() -> None:
    trust = msgspec.structs.replace(TRUSTED, epoch=3)
    with pytest.raises(SignatureError, match="epoch 2, all before 3 is disowned"):
        container.verify(signed_again(GOOD, SIGNER, epoch=2), trust, key=KEY)
    for epoch in (3, 4):
        assert container.verify(signed_again(GOOD, SIGNER, epoch=epoch), trust, key=KEY)


def test_one_signature_that_holds_is_enough_and_none_of_the_others_can_hurt() -> None:
    twice = sign(
        signed(FILES, STRANGER), SIGNER, key=KEY, namespace="default", epoch=0, signed_at=1, origin="o"
    )
    assert container.verify(twice, TRUSTED, key=KEY).statement.origin == "o"
    by_stranger = Trust.of([STRANGER.public_key()])
    assert container.verify(twice, by_stranger, key=KEY).statement.origin == ""
    envelope, frames = taken_apart(twice)
    swapped = msgspec.structs.replace(
        envelope,
        signatures=[
            msgspec.structs.replace(envelope.signatures[0], value=envelope.signatures[1].value),
            msgspec.structs.replace(envelope.signatures[1], value=envelope.signatures[0].value),
        ],
    )
    assert refused(assembled(swapped, frames)) is SignatureError
    many = msgspec.structs.replace(envelope, signatures=envelope.signatures * 5)
    assert refused(assembled(many, frames)) is ArtifactError
    full = msgspec.structs.replace(envelope, signatures=envelope.signatures * 4)
    with pytest.raises(ArtifactError, match="takes no more"):
        sign(assembled(full, frames), SIGNER, key=KEY, namespace="default", epoch=0, signed_at=1)


def test_other_sites_namespaces_and_epochs_are_not_looked_at_but_their_revocation_is() -> None:
    theirs = signed_again(GOOD, STRANGER, namespace="theirs", epoch=0)
    name = key_id(STRANGER.public_key())
    trust = Trust(keys={}, namespace="default", epoch=9, sites={name: STRANGER.public_key()})
    assert container.verify(theirs, trust, key=KEY).statement.key_id == name
    with pytest.raises(SignatureError, match="revoked"):
        container.verify(theirs, msgspec.structs.replace(trust, revoked=frozenset({name})), key=KEY)


def test_a_file_of_the_first_format_is_no_artifact() -> None:
    assert refused(b"TRLYART1" + GOOD[8:]) is ArtifactError


def test_an_artifact_answers_one_key() -> None:
    assert refused(GOOD, key="cd" * 32) is ArtifactError


def _mixed() -> Iterator[tuple[str, bytes]]:
    other = {**FILES, "cpp/0.so": b"another library"}
    envelope, _ = taken_apart(GOOD)
    frames = [codec.compress(data) for data in FILES.values()]
    theirs = [codec.compress(data) for data in other.values()]

    def with_frames(parts: list[bytes]) -> bytes:
        return assembled(
            msgspec.structs.replace(envelope, frames=[len(part) for part in parts]), b"".join(parts)
        )

    yield "a member of another artifact", with_frames([frames[0], theirs[1], frames[2]])
    yield "members in another order", with_frames([frames[1], frames[0], frames[2]])
    yield "a member twice", with_frames([frames[0], frames[0], frames[2]])
    yield "a member missing", with_frames(frames[:2])
    yield "a member more", with_frames([*frames, frames[0]])
    yield "a member empty", with_frames([b"", frames[1], frames[2]])
    yield (
        "another split",
        assembled(
            msgspec.structs.replace(
                envelope, frames=[len(frames[0]) - 1, len(frames[1]) + 1, len(frames[2])]
            ),
            b"".join(frames),
        ),
    )
    yield (
        "negative lengths",
        assembled(
            msgspec.structs.replace(envelope, frames=[-1, 1 + sum(map(len, frames)), 0]), b"".join(frames)
        ),
    )
    yield "another artifact's members", assembled(envelope, b"".join(theirs))


@pytest.mark.parametrize(("what", "data"), list(_mixed()), ids=[what for what, _ in _mixed()])
def test_members_cannot_be_mixed(what: str, data: bytes) -> None:
    assert refused(data) is ArtifactError


NAMES = [
    "../evil.so",
    "cpp/../../evil.so",
    "cpp/..",
    "/etc/passwd",
    "//evil",
    "cpp//0.so",
    "cpp/",
    "nul\0.so",
    "cpp/0.so\0.txt",
    "line\nbreak",
    "back\\slash",
    "C:evil",
    "~/evil",
    ".hidden",
    "cpp/.hidden",
    "",
    ".",
    "..",
    "\u202egnp.so",
    "a" * 300,
    "$HOME",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_member_whose_name_leads_elsewhere_is_refused_also_with_a_good_signature(name: str) -> None:
    """A worker that was broken into could have it signed; neither the gateway nor a client takes it."""
    files = {**FILES, name: b"evil"}
    assert refused(signed(files, SIGNER)) is ArtifactError
    with pytest.raises(ArtifactError):
        sign(
            container.pack(manifest_of(files), files),
            SIGNER,
            key=KEY,
            namespace="default",
            epoch=0,
            signed_at=1,
        )


@pytest.mark.parametrize("size", [-1, -2, 0, 39, 41, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
def test_a_member_whose_size_is_not_its_own_is_refused(size: int) -> None:
    entries = [container.member(name, data) for name, data in FILES.items()]
    entries[0] = msgspec.structs.replace(entries[0], size=size)
    assert refused(signed(FILES, SIGNER, members=entries)) is ArtifactError


def test_a_member_twice_is_refused() -> None:
    entries = [container.member("a", b"1"), container.member("a", b"2")]
    frames = [codec.compress(b"1"), codec.compress(b"2")]
    data = sealed(msgspec.msgpack.encode(manifest_of({}, members=entries)), frames, SIGNER)
    assert refused(data) is ArtifactError


@pytest.mark.parametrize(
    "manifest",
    [b"", b"\xc1", b"\x80", b"\x91" * 100_000, b"\x81\xa1\xff\x00", b"\x81\xa3key\xa1\xff", b"\xc0"],
    ids=["empty", "reserved", "no fields", "deep", "name no UTF-8", "key no UTF-8", "nil"],
)
def test_a_manifest_that_is_none_is_refused_also_with_a_good_signature(manifest: bytes) -> None:
    assert refused(sealed(manifest, [], SIGNER)) is ArtifactError


@pytest.mark.parametrize(
    "head", [b"", b"\x91" * 100_000, b"\x81\xa1\xff\x00", b"\x82\xa8manifest\xc4\x00\xa6frames\x91\xa1\xff"]
)
def test_an_envelope_that_is_none_is_refused(head: bytes) -> None:
    assert refused(container.MAGIC + len(head).to_bytes(4, "little") + head) is ArtifactError


def test_a_member_that_unpacks_to_more_than_it_says_is_not_unpacked() -> None:
    bomb = codec.compress(bytes(64 << 20))
    entry = artifact_manifest.Member("bomb", 10, "00" * 32)
    data = sealed(msgspec.msgpack.encode(manifest_of({}, members=[entry])), [bomb], SIGNER)
    assert refused(data) is ArtifactError
