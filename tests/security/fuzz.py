"""By hand, with atheris: bytes guided by coverage for one reader of foreign bytes, until something untyped comes out.

    pip install atheris
    python tests/security/fuzz.py request -max_total_time=3600    # or: damaged, artifact, size, keys

What follows the reader's name are libFuzzer's own options. A crash is an error that is not one of ours; its input
is written beside where you stand. `damaged` wants long inputs: a folder of random files, -len_control=0 -max_len=8192.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris
from torchrelay.compiler import decoding

sys.path += [str(parts) for parts in Path(__file__).parent.parent.glob("*/parts")]

with atheris.instrument_imports(include=["torchrelay.compiler", "torchrelay.service.admission"]):
    from torchrelay.compiler.artifact import container, trust_document
    from torchrelay.compiler.artifact.signing import Trust, key_id, key_text
    from torchrelay.compiler.artifact.trust_document import ListedKey, SignedDocument, TrustDocument
    from torchrelay.compiler.errors import ArtifactError, BadExpression, RequestError, SignatureError
    from torchrelay.compiler.request import codec, size_expr
    from torchrelay.service.admission.compile_request import parse

import msgspec
import strategies
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from service_parts import graph
from signed import KEY, manifest_of, sealed, signed

SIGNER = Ed25519PrivateKey.from_private_bytes(b"\1" * 32)
TRUSTED = Trust.of([SIGNER.public_key()], namespace="default")
FILES = {"bundle.pickle": b"a" * 40, "libraries.msgpack": b"\x90"}
FRAMES = [codec.compress(data) for data in FILES.values()]
GOOD = signed(FILES, SIGNER)
MANIFEST = msgspec.msgpack.encode(manifest_of(FILES))
PLAIN = codec.encode_request(codec.unpack_request(graph(nodes=3)))
LIMITS = codec.Limits()
OWN, TEXT = key_id(SIGNER.public_key()), key_text(SIGNER.public_key())
KNOWN = trust_document.KnownKeys(keys=[trust_document.ListedKey(id=key_id(SIGNER.public_key()), public=TEXT)])
KEYS = msgspec.msgpack.encode(
    TrustDocument(serial=2, epoch=1, issued=1, keys=[ListedKey(id=OWN, public=TEXT)], revoked=["c" * 16])
)


TOKENS = [
    *("s0", "s1", "s9", "0", "1", "2", "64", "65", "1.5", "1e308", "9" * 30, "True", "None"),
    *("(", ")", ",", ", ", "+", "-", "*", "/", "//", "%", "**", "<", "<=", "==", "!=", ">", "=", "."),
    *(" and ", " or ", "not ", " if ", " else ", " in ", " is ", "lambda", ":=", " "),
    *(f"{name}(" for name in sorted(size_expr.FUNCTIONS)),
]


def spliced(good: bytes, data: bytes) -> bytes:
    """`data` is a program of cuts: position (2 bytes), length and what to put there (1 byte each, then bytes)."""
    out = good
    while len(data) >= 4:
        position, length, new = (
            int.from_bytes(data[:2], "little") % (len(out) + 1),
            data[2] % 16,
            data[3] % 32,
        )
        out = out[:position] + data[4 : 4 + new] + out[position + length :]
        data = data[4 + new :]
    return out


def request(data: bytes) -> None:
    body = data[1:] if data[:1] == b"\0" else spliced(PLAIN, data)
    read_request(body)


def read_request(body: bytes) -> None:
    try:
        parse(codec.compress(body), LIMITS)
    except RequestError:
        pass


@settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def damaged_request(draws: st.DataObject) -> None:
    """Bytes choose a request of every kind that there is, and what is damaged in it: deeper than splices get."""
    plain = decoding.from_msgpack(codec.encode_request(draws.draw(strategies.requests())))
    for _ in range(draws.draw(st.integers(0, 3))):
        plain = draws.draw(strategies.damaged(plain))
    read_request(msgspec.msgpack.encode(plain))


def damaged(data: bytes) -> None:
    damaged_request.hypothesis.fuzz_one_input(data)


def read_artifact(data: bytes) -> None:
    """An odd first byte damages the manifest before it is signed, an even one the file."""
    if data[:1] and data[0] % 2:
        forged = sealed(spliced(MANIFEST, data[1:]), FRAMES, SIGNER)
    else:
        forged = spliced(GOOD, data[1:])
    try:
        container.verify(forged, TRUSTED, key=KEY)
    except (ArtifactError, SignatureError):
        pass


def size(data: bytes) -> None:
    """After an odd first byte each byte is a token, otherwise the bytes are the text."""
    if data[:1] and data[0] % 2:
        text = "".join(TOKENS[byte % len(TOKENS)] for byte in data[1:])
    else:
        text = data.decode("utf-8", "replace")
    try:
        size_expr.check(text, {"s0", "s1"})
        size_expr.evaluate(text, {"s0": 7, "s1": 0})
    except BadExpression:
        pass


def keys(data: bytes) -> None:
    document = spliced(KEYS, data)
    signed_document = SignedDocument(document, {OWN: SIGNER.sign(trust_document.DOMAIN + document)})
    try:
        learned = trust_document.learn(KNOWN, signed_document)
        trust_document.trust(learned, namespace="", now=0)
    except SignatureError:
        pass


if __name__ == "__main__":
    readers = {"request": request, "damaged": damaged, "artifact": read_artifact, "size": size, "keys": keys}
    reader = readers[sys.argv.pop(1)]
    atheris.Setup(sys.argv, reader)
    atheris.Fuzz()
