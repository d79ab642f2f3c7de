"""Random and damaged bytes for every reader of foreign bytes: whatever comes in, only typed errors come out."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from pathlib import Path

import httpx2
import msgspec
import pytest
import strategies
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import example, given, settings
from hypothesis import strategies as st
from service_parts import graph
from signed import KEY, assembled, manifest_of, sealed, signed, taken_apart
from torchrelay.clients.gateway import connection
from torchrelay.clients.gateway.connection import Deadline
from torchrelay.clients.gateway.event_stream import EventStream
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler import decoding
from torchrelay.compiler.api import compiles
from torchrelay.compiler.artifact import container, trust_document
from torchrelay.compiler.artifact.signing import Statement, Trust, key_id, key_text
from torchrelay.compiler.artifact.trust_document import ListedKey, SignedDocument, TrustDocument
from torchrelay.compiler.errors import (
    ArtifactError,
    BadExpression,
    RelayError,
    RequestError,
    SchemaMismatch,
    SignatureError,
)
from torchrelay.compiler.request import codec, schema, size_expr
from torchrelay.compiler.request.validate import check_request
from torchrelay.compiler.tuning import queries, records
from torchrelay.service.admission.compile_request import parse
from torchrelay.service.compile.search.queue import decode_query
from torchrelay.workers import messages

LIMITS = codec.Limits()
SIGNER = Ed25519PrivateKey.from_private_bytes(b"\1" * 32)
TRUSTED = Trust.of([SIGNER.public_key()], namespace="default")
FILES = {"bundle.pickle": b"a" * 40, "libraries.msgpack": b"\x90"}
PLAIN = codec.encode_request(codec.unpack_request(graph(nodes=3)))

RANDOM = settings(strategies.RANDOM, max_examples=200)


def only_typed(call: Callable[[], object], *kinds: type[RelayError]) -> bool:
    """True when `call` came through. Any other error than `kinds` fails the test, by leaving it."""
    try:
        call()
    except kinds:
        return False
    return True


def damaged_bytes(good: bytes) -> st.SearchStrategy[bytes]:
    """`good` with up to four cuts, each with something else in its place."""
    cut = st.tuples(st.integers(0, len(good)), st.integers(0, 12), st.binary(max_size=12))

    def apply(cuts: list[tuple[int, int, bytes]]) -> bytes:
        data = good
        for start, length, replacement in cuts:
            data = data[:start] + replacement + data[start + length :]
        return data

    return st.lists(cut, min_size=1, max_size=4).map(apply)


# --- the wire decoder ------------------------------------------------------------------------------------


@given(damaged_bytes(PLAIN))
@settings(RANDOM, max_examples=500)
def test_damaged_requests(data: bytes) -> None:
    only_typed(lambda: parse(codec.compress(data), LIMITS), RequestError)


@given(damaged_bytes(graph(nodes=3)))
@RANDOM
def test_damaged_frames(body: bytes) -> None:
    only_typed(lambda: codec.unpacked_size(body, 1 << 20), RequestError)
    only_typed(lambda: parse(body, LIMITS), RequestError)


@given(strategies.requests(), st.randoms(use_true_random=False))
@settings(RANDOM, max_examples=50)
def test_one_byte_of_a_random_request_changed(request: schema.GraphRequest, chance: random.Random) -> None:
    plain = codec.encode_request(request)
    for _ in range(20):
        position = chance.randrange(len(plain))
        data = plain[:position] + bytes([chance.randrange(256)]) + plain[position + 1 :]
        only_typed(lambda data=data: parse(codec.compress(data), LIMITS), RequestError)


@given(strategies.requests())
@settings(RANDOM, max_examples=50)
def test_what_passes_says_the_same_when_it_is_sent_again(request: schema.GraphRequest) -> None:
    first = parse(codec.pack_request(request), LIMITS)
    assert parse(codec.compress(first.canonical), LIMITS) == first


DEEP = b"\x91" * 100_000 + b"\xc0"
TEXT = b"_operator.add"


@pytest.mark.parametrize(
    "data",
    [
        b"\x82\xa5graph\x05\xa6inputs" + DEEP,
        b"\x82\xa4nope" + DEEP + b"\xa5graph\x05",
        b"\x81\xa6schema" + DEEP,
        PLAIN.replace(TEXT, b"\xff" * len(TEXT)),
        b"\x81\xa5\xff\xff\xff\xff\xff\x01",
        b"\x82\xa5graph\x05\xa6schema\xa1\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"",
    ],
    ids=[
        "deep where it is skipped",
        "deep under an unknown name",
        "deep schema",
        "text no UTF-8",
        "name no UTF-8",
        "schema no UTF-8",
        "4 Gi names",
        "4 Gi values",
        "4 GiB of bytes",
        "nothing",
    ],
)
def test_bytes_that_broke_a_reader_once_or_might(data: bytes) -> None:
    with pytest.raises(RequestError):
        parse(codec.compress(data), LIMITS)
    with pytest.raises(ArtifactError):
        container.verify(sealed(data, [], SIGNER), TRUSTED, key=KEY)


# --- the artifact reader ---------------------------------------------------------------------------------


@given(st.one_of(st.binary(max_size=300), st.binary(max_size=300).map(container.MAGIC.__add__)))
@RANDOM
def test_random_bytes_are_no_artifact(data: bytes) -> None:
    assert not only_typed(lambda: container.verify(data, TRUSTED, key=KEY), ArtifactError, SignatureError)
    only_typed(lambda: container.read_manifest(data), ArtifactError)


@given(damaged_bytes(signed(FILES, SIGNER)))
@settings(RANDOM, max_examples=500)
def test_a_damaged_artifact_is_refused_or_says_the_same(data: bytes) -> None:
    try:
        assert container.verify(data, TRUSTED, key=KEY).members == FILES
    except (ArtifactError, SignatureError):
        pass


@given(damaged_bytes(msgspec.msgpack.encode(manifest_of(FILES))))
@settings(RANDOM, max_examples=500)
def test_a_damaged_manifest_that_was_signed(manifest: bytes) -> None:
    """What a broken worker could bring about."""
    frames = [codec.compress(data) for data in FILES.values()]
    data = sealed(manifest, frames, SIGNER)
    if only_typed(lambda: container.verify(data, TRUSTED, key=KEY), ArtifactError, SignatureError):
        assert decoding.from_msgpack(manifest)["key"] == KEY


NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1)
STATEMENTS = st.builds(Statement, st.text(max_size=20), st.text(max_size=200), NUMBERS, NUMBERS, st.text())


@given(
    st.lists(NUMBERS, max_size=4),
    st.lists(st.builds(container.Signature, STATEMENTS, st.binary(max_size=80)), max_size=10),
)
@RANDOM
def test_an_envelope_of_any_values(frames: list[int], signatures: list[container.Signature]) -> None:
    envelope, body = taken_apart(signed(FILES, SIGNER))
    data = assembled(msgspec.structs.replace(envelope, frames=frames, signatures=signatures), body)
    assert not only_typed(lambda: container.verify(data, TRUSTED, key=KEY), ArtifactError, SignatureError)


DOCUMENT = TrustDocument(
    serial=2, epoch=1, issued=1, keys=[ListedKey(id="a" * 16, public="b" * 44)], revoked=["c" * 16]
)


@given(st.one_of(st.binary(max_size=300), damaged_bytes(msgspec.msgpack.encode(DOCUMENT))))
@settings(RANDOM, max_examples=300)
def test_a_list_of_keys_that_is_none_though_it_was_signed(data: bytes) -> None:
    """What a gateway that was broken into could send; a client refuses it or learns nothing that it cannot use."""
    public = SIGNER.public_key()
    known = trust_document.KnownKeys(
        keys=[trust_document.ListedKey(id=key_id(public), public=key_text(public))]
    )
    signed_document = SignedDocument(data, {key_id(public): SIGNER.sign(trust_document.DOMAIN + data)})

    def learn() -> None:
        learned = trust_document.learn(known, signed_document)
        trust_document.trust(learned, namespace="", now=0)

    only_typed(learn, SignatureError)


# --- what a compile's process writes ------------------------------------------------------------------------


PLACE = records.DeviceEnvironment("a CPU", "avx2", "", "2.13.0", "", "", threads=2)
SIDE = records.Operand("float32", (8, 4), (4, 1))
PROBLEM = records.Problem("mm", (SIDE, SIDE), SIDE, (("precision", "high"),))
TIMING = records.Timing("aten mm", 0.25, 0.24, 0.26, 40)
ENTRY = records.TuningEntry(problem=PROBLEM, place=PLACE, winner=TIMING, candidates=3, error=0.5)
QUESTIONS = [
    msgspec.msgpack.encode(queries.EntryLookup(PLACE, [PROBLEM])),
    msgspec.msgpack.encode(queries.SearchResult(ENTRY)),
]
DEEP = b"\x82\xa1x" + b"\x91" * 100_000 + b"\xc0\xa4type"


@given(st.one_of(st.binary(max_size=200), *map(damaged_bytes, QUESTIONS)))
@example(DEEP + b"\xa5found")
@settings(RANDOM, max_examples=1000)
def test_a_damaged_question_is_refused_or_can_be_answered(data: bytes) -> None:
    def answer() -> None:
        match decode_query(data):
            case queries.EntryLookup(place, problems):
                fields = [
                    (place.digest(), records.problem_digest(problem), problem.text()) for problem in problems
                ]
                assert all(records.NAME.fullmatch(name) for _, name, _ in fields)
            case queries.SearchResult(entry):
                again = decoding.from_msgpack(msgspec.msgpack.encode(entry), type=records.TuningEntry)
                assert again == entry

    only_typed(answer, RequestError)


MESSAGES = [
    messages.JobQuery(1, QUESTIONS[0]),
    messages.StageEvent("aot", "x"),
    messages.JobFailed("code", "why", "do"),
]


@given(
    st.one_of(
        st.binary(max_size=200), *(damaged_bytes(msgspec.msgpack.encode(message)) for message in MESSAGES)
    )
)
@example(DEEP + b"\xa5query")
@settings(RANDOM, max_examples=1000)
def test_a_damaged_message_of_a_job_is_a_bad_frame_or_a_message(data: bytes) -> None:
    try:
        message = messages.decode_from_child(data)
    except messages.BadFrame:
        return
    assert isinstance(
        message, messages.StageEvent | messages.JobQuery | messages.JobDone | messages.JobFailed
    )


# --- the size grammar ------------------------------------------------------------------------------------

tokens = st.sampled_from(
    [
        *("s0", "s1", "s9", "0", "1", "2", "64", "65", "1e999", "0x10", "1_0", "1j", "01", "9" * 30),
        *("(", ")", ",", "+", "-", "*", "/", "//", "%", "**", "<", "<=", "==", "!=", ">", ">=", "="),
        *(" and ", " or ", "not ", " if ", " else ", " in ", " is ", "lambda", "await ", "yield ", ":=", "."),
        *(sorted(size_expr.FUNCTIONS)),
        *("True", "False", "None", "__import__", "eval", "open", "__class__", "print", "[", "]", "{", "}"),
        *('"', "'", "\\", "\n", ";", "#", "\0", "\u0455", "f''", "@"),
    ]
)
OPERATORS = st.sampled_from(["+", "-", "*", "/", "//", "%", "**", "<", "==", "and", "or"])
sums = st.recursive(
    st.sampled_from(["s0", "s1", "1", "2", "0", "True", "1.5"]),
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, OPERATORS, inner),
        st.builds("{}({}, {})".format, st.sampled_from(sorted(size_expr.FUNCTIONS)), inner, inner),
        st.builds("{}({})".format, st.sampled_from(sorted(size_expr.FUNCTIONS)), inner),
        st.builds("(-{})".format, inner),
    ),
    max_leaves=12,
)
ENVIRONMENT = {"s0": 7, "s1": 0}
ALLOWED = (ast.Constant, ast.Name, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.Call)


@given(st.one_of(st.lists(tokens, max_size=20).map("".join), st.text(max_size=80), sums))
@example("s0" + " ** 2" * 500)
@example("(" * 2000 + "s0" + ")" * 2000)
@example("-" * 4000 + "s0")
@example("not " * 1000 + "s0")
@example("s0" + " + s0" * 800)
@example("9" * 4096)
@example("0x" + "f" * 4000)
@example("1e" + "9" * 4000)
@example("Mod(s0, 0)")
@example("2 ** s0")
@example("(2 ** 64) ** 64")
@example("Sqrt(-1)")
@example("IntTrueDiv(s0 ** 64 ** 64, 3)")
@settings(RANDOM, max_examples=1500)
def test_a_text_is_a_size_or_a_bad_expression(text: str) -> None:
    if not only_typed(lambda: size_expr.check(text, ENVIRONMENT), BadExpression):
        with pytest.raises(BadExpression):
            size_expr.evaluate(text, ENVIRONMENT)
        return
    for node in ast.walk(ast.parse(text, mode="eval").body):
        assert isinstance(node, (*ALLOWED, ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.Load))
        if isinstance(node, ast.Name):
            assert node.id in ENVIRONMENT or node.id in size_expr.FUNCTIONS
    only_typed(lambda: size_expr.evaluate(text, ENVIRONMENT), BadExpression)


@given(st.text(max_size=40), st.sampled_from(["symint", "relation", "sym"]))
@RANDOM
def test_a_text_in_the_place_of_a_size(text: str, place: str) -> None:
    request = codec.unpack_request(graph())
    if place == "relation":
        request = msgspec.structs.replace(request, relations=[text])
    elif place == "symint":
        request = msgspec.structs.replace(request, inputs=[schema.SymIntInput(text)])
    else:
        nodes = list(request.graph.nodes)
        nodes[1] = msgspec.structs.replace(nodes[1], args=[schema.Ref(0), schema.Sym(text)])
        request = msgspec.structs.replace(request, graph=schema.Graph(nodes))
    only_typed(lambda: check_request(request, LIMITS), RequestError)


# --- what a client reads from a gateway that is not one, or lies --------------------------------------------


@given(
    st.integers(100, 599), st.one_of(st.binary(max_size=80), st.binary(max_size=40).map(b'{"error":'.__add__))
)
@example(500, b'{"error":{"code":"\xff"}}')
@example(502, b'{"error":' + b"[" * 100_000)
@example(422, b'{"error":{"code":"nothing","message":"","hint":""}}')
@RANDOM
def test_any_answer_of_a_gateway_is_a_typed_error(status: int, body: bytes) -> None:
    assert isinstance(connection.error_of(status, body), RelayError)


@given(
    st.one_of(
        st.binary(max_size=80), damaged_bytes(codec.to_json(compiles.CompileStatus("a", "aot", 1.0, "", "")))
    )
)
@example(b'{"key":"\xff"}')
@example(b"[" * 100_000)
@RANDOM
def test_any_status_is_read_or_refused(body: bytes) -> None:
    only_typed(lambda: connection.decode(body, compiles.CompileStatus), SchemaMismatch)


EVENTS = b': hi\n\nevent: aot\nid: 1-0\ndata: {"stage": "aot", "seconds": 1}\n\nretry: 9\r\n\r\n'


@given(st.lists(st.one_of(st.binary(max_size=40), damaged_bytes(EVENTS)), max_size=5))
@RANDOM
def test_any_stream_is_events_or_a_typed_error(chunks: list[bytes]) -> None:
    headers = {"content-type": "text/event-stream"}
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=headers, content=iter(chunks)))
    settings = ClientSettings(url="http://127.0.0.1", cache_dir=Path("/nonexistent"))
    stream = EventStream(connection.Connection(settings, transport), "/events", Deadline(60))
    try:
        for event in stream.read():
            assert isinstance(event.data, str)
    except RelayError:
        return
