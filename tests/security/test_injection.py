"""Hostile names, texts, sizes, numbers and nesting: typed refusals, and a gateway that starts nothing for them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import msgspec
import pytest
from service_parts import TOKEN, compiled, graph, post
from torchrelay.compiler import decoding
from torchrelay.compiler.request import codec
from watched import WatchedGateway

KEY = "0" * 64
DIGITS = b"9" * 1_000_000

TEXTS = [
    "__import__('os').system('touch /tmp/x')",
    '"); system("id"); //',
    "'; DROP TABLE keys; --",
    "${jndi:ldap://127.0.0.1/a}",
    "$(touch /tmp/x)",
    "`id`",
    "{{7*7}}",
    "%s%n%x",
    "../../../etc/passwd",
    "\0",
    "a\0b",
    "\r\nSet-Cookie: a=b",
    "\x1b[2J\x1b]0;title\x07",
    "\u202e\u2066",
    "\ud7ff\U0010ffff",
    "s0\nimport os",
    "lambda: 0",
    "a" * 100_000,
]
EXPRESSIONS = [
    *TEXTS,
    "9" * 1_000_000,
    "0x" + "f" * 1_000_000,
    "1e" + "9" * 1_000_000,
    "9" * 4000,
    "2 ** 2 ** 2 ** 2 ** 2 ** 2",
    "(s0 ** 64) ** 64",
    "s0" + " ** 64" * 600,
    "(" * 10_000 + "s0" + ")" * 10_000,
    "(" * 2_000 + "s0" + ")" * 2_000,
    "-" * 4_000 + "1",
    "not " * 1_000 + "s0",
    "Max(" * 800 + "s0" + ", 1)" * 800,
    "s0.__class__.__mro__[1].__subclasses__()",
    "eval('1')",
    "exec('1')",
    "open('/etc/passwd')",
    "[x for x in s0]",
    "(yield s0)",
    "f'{s0}'",
    "s0 if s0 else s0",
    "print(s0)",
    "Max(*s0)",
    "Max(s0, key=s0)",
]


def packed(value: object) -> bytes:
    return codec.compress(msgspec.msgpack.encode(value))


def plain(**changes: object) -> dict[str, Any]:
    """A good request with an argument text, as MessagePack holds it; `changes` replace whole fields."""
    return {**decoding.from_msgpack(codec.encode_request(codec.unpack_request(graph()))), **changes}


def calls(*nodes: dict[str, object], target: str = "torch.add") -> dict[str, object]:
    """A graph of a placeholder, `nodes` and an output."""
    ends = {"target": "", "kwargs": []}
    return {
        "nodes": [
            {"op": "placeholder", "args": [], **ends},
            *({"op": "call_function", "target": target, "kwargs": [], **node} for node in nodes),
            {"op": "output", "args": [["n", 0]], **ends},
        ],
        "subgraphs": [],
    }


def _texts() -> Iterator[bytes]:
    """Every place of a request that holds text, with every hostile text in it."""
    for text in TEXTS:
        yield packed(plain(graph=calls({"args": [["n", 0]]}, target=text)))
        yield packed(plain(graph=calls({"args": [["n", 0], text]})))
        yield packed(plain(graph=calls({"args": [["n", 0]], "kwargs": [[text, 1]]})))
        yield packed(plain(graph=calls({"args": [["d", [[text, text]]]]})))
        for tag in ("dt", "dv", "mf", "ly", "bi", "sy", "f", text):
            yield packed(plain(graph=calls({"args": [[tag, text]]})))
        yield packed(plain(graph=calls({"op": "call_method", "target": text, "args": [["n", 0]]})))
        yield packed(plain(graph=calls({"op": text, "args": []})))
        yield packed(plain(options=[[text, True]]))
        yield packed(plain(aot_options=[[text, True]]))
        yield packed(plain(options=[["max_autotune_gemm_backends", text]]))
        yield packed(plain(mode=text))
        yield packed(plain(relations=[text]))
        yield packed(plain(symbols=[{"name": text, "hint": 1, "lower": 0, "upper": None}]))
        yield packed({**plain(), text: 1})
        request = plain()
        for table in ("toolchain", "target", "ambient"):
            held = request[table]
            assert isinstance(held, dict)
            for field, value in held.items():
                if isinstance(value, str):
                    yield packed({**request, table: {**held, field: text}})
        yield packed(
            plain(
                constants=[{"dtype": text, "shape": [1], "device": text, "data": b"", "requires_grad": False}]
            )
        )


def _expressions() -> Iterator[bytes]:
    for text in EXPRESSIONS:
        yield packed(plain(relations=[text]))
        yield packed(plain(inputs=[{"type": "symint", "expr": text}]))
        yield packed(plain(graph=calls({"args": [["sy", text]]})))


def _numbers() -> Iterator[bytes]:
    """Numbers that do not fit: in decimal, in MessagePack's own widest, and where a size or index stands."""
    yield packed(plain(graph=calls({"args": [["bi", DIGITS.decode()]]})))
    yield packed(plain(graph=calls({"args": [["bi", "-" + DIGITS.decode()]]})))
    yield packed(plain(relations=[f"s0 < {DIGITS.decode()}"]))
    for number in (1 << 63, (1 << 64) - 1, -(1 << 63), -1, 1 << 62):
        (tensor,) = decoding.from_msgpack(codec.encode_request(codec.unpack_request(graph())))["inputs"]
        for field in ("shape", "stride"):
            yield packed(plain(inputs=[{**tensor, field: [number]}]))
        for tag in ("n", "k", "g"):
            yield packed(plain(graph=calls({"args": [[tag, number]]})))
        constant = {"dtype": "int8", "shape": [number], "device": "cpu", "data": b"", "requires_grad": False}
        yield packed(plain(constants=[constant]))


def _nested() -> Iterator[bytes]:
    """10,000 levels: of lists, tuples, dicts, slices, subgraphs, and of what no schema knows."""
    body = codec.encode_request(codec.unpack_request(graph()))
    start = body.index(b"\x92\xa1n\x00")
    for level in (
        b"\x92\xa1l\x91",
        b"\x92\xa1t\x91",
        b"\x92\xa1d\x91\x92\xa1a",
        b"\x94\xa1s\xc0\xc0",
        b"\x91",
    ):
        yield codec.compress(body[:start] + level * 10_000 + body[start:])
    inner = (
        msgspec.msgpack.encode("subgraphs") + b"\x91" + b"\x82" + msgspec.msgpack.encode("nodes") + b"\x90"
    )
    yield codec.compress(b"\x81\xa5graph\x82\xa5nodes\x90" + inner * 10_000 + b"\xc0")
    yield codec.compress(b"\x81\xa5graph" + b"\x81\xa5graph" * 10_000 + b"\xc0")
    yield codec.compress(b"\x82\xa5graph\x05\xa6inputs" + b"\x91" * 10_000 + b"\xc0")


BODIES: list[tuple[str, Callable[[], Iterator[bytes]]]] = [
    ("texts", _texts),
    ("expressions", _expressions),
    ("numbers", _numbers),
    ("nested", _nested),
]


def typed(answer: httpx2.Response) -> bool:
    """A 4xx in the service's own form."""
    error = answer.json()["error"]
    return (
        400 <= answer.status_code < 500
        and set(error) == {"code", "message", "hint"}
        and error["message"] != ""
    )


def exercise(http: httpx2.Client) -> None:
    """What a gateway does for good clients, each way to check a body included; and one refusal of each."""
    for nodes in (1, 1_000, 40_000):
        compiled(http, graph(nodes=nodes))
        compiled(http, graph(nodes=nodes))
        assert post(http, graph(nodes=nodes, target="os.system")).status_code == 422
    assert post(http, b"no frame").status_code == 422
    assert http.get("/v1/stats").status_code == 200
    assert http.get("/openapi.json").status_code == 200
    assert http.post("/v1/report", json={"reason": "unsupported"}).status_code == 204
    assert http.get(f"/v1/compiles/{KEY}").status_code == 404
    assert http.get("/no/such").status_code == 404
    assert http.get("/metrics").status_code in (200, 401, 403)


@pytest.mark.parametrize(("kind", "bodies"), BODIES, ids=[kind for kind, _ in BODIES])
def test_hostile_bodies_are_refused_and_nothing_is_started_for_them(
    kind: str, bodies: Callable[[], Iterator[bytes]], watch_gateway: Callable[..., WatchedGateway]
) -> None:
    gateway = watch_gateway()
    with gateway.http() as http:
        exercise(http)
        usual = gateway.done()
        # The hook works, and sees the one process that a gateway may start.
        assert [event for event in usual if "subprocess.Popen" in event and "parse_process" in event]
        allowed = 0
        for body in bodies():
            answer = post(http, body)
            if answer.status_code in (200, 202):  # an argument that is text may hold most of Unicode
                assert kind == "texts"
                allowed += 1
            else:
                assert typed(answer), (answer.status_code, answer.text[:200])
        assert allowed <= len(TEXTS) * 2
        assert gateway.done() - usual == set()
        compiled(http, graph(9))
    # Texts of a request do not steer the terminal that shows the log.
    assert b"\x1b" not in gateway.log.read_bytes()


def test_a_hundred_thousand_nodes_are_checked_and_one_more_is_refused(
    watch_gateway: Callable[..., WatchedGateway],
) -> None:
    gateway = watch_gateway()
    with gateway.http() as http:
        assert post(http, graph(nodes=99_998)).status_code == 202
        for nodes in (99_999, 200_000):
            answer = post(http, graph(nodes=nodes))
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "limit_exceeded")


REQUESTS = [
    b"GET /v1/artifacts/" + b"9" * 1_000_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/compile HTTP/1.1\r\nHost: x\r\nContent-Length: " + DIGITS[:5000] + b"\r\n\r\n",
    b"POST /v1/compile HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/compile HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/compile HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 5000 + b"\r\n",
    b"GET /v1/stats HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 1_000_000 + b"\r\n\r\n",
    b"GET /v1/stats HTTP/1.1\r\nHost: x\r\n" + b"X-A: b\r\n" * 20_000 + b"\r\n",
    b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%00%1b%5b2J%0d%0afake HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%1b%5b31m HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET //../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xff" * 100,
    b"A" * 100_000,
]


@pytest.mark.parametrize("raw", REQUESTS, ids=range(len(REQUESTS)))
def test_bytes_that_are_hardly_http_get_a_4xx_or_no_answer(
    raw: bytes, watch_gateway: Callable[..., WatchedGateway]
) -> None:
    gateway = watch_gateway(log_level="info")
    authorized = raw.replace(b"Host: x\r\n", b"Host: x\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n")
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connection:
        answer = b""
        try:
            connection.sendall(authorized)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(1000)
        except OSError:  # the gateway hung up
            pass
    assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200")), answer
    with gateway.http() as http:
        assert http.get("/v1/stats").status_code == 200
    log = gateway.log.read_bytes()
    assert b"\x1b" not in log
    assert not [line for line in log.splitlines() if line.startswith(b"fake")]


PARAMETERS = [
    ("GET", f"/v1/compiles/{KEY}/events", {"Last-Event-ID": "9" * 60_000}),
    ("GET", f"/v1/compiles/{KEY}/events", {"Last-Event-ID": "9" * 30 + "-" + "9" * 30}),
    ("GET", f"/v1/compiles/{KEY}/events", {"Last-Event-ID": "\xb2-\xb2"}),
    ("GET", f"/v1/artifacts/{KEY}%0A", {}),
    ("GET", f"/v1/artifacts/{KEY}%00", {}),
    ("GET", f"/v1/artifacts/..%2f..%2f{KEY}", {}),
    ("POST", "/v1/compile?wait=" + "9" * 30_000, {}),
    ("POST", "/v1/compile?wait=" + "%00", {}),
    ("POST", "/v1/compile?wait=%ff", {}),
    ("POST", "/v1/compile", {"Content-Type": "\xff\xfe"}),
    ("POST", "/v1/compile", {"Content-Encoding": "zstd"}),
    ("GET", "/v1/stats", {"Authorization": "Bearer \xff\xfe"}),
    ("GET", "/v1/stats", {"Authorization": "Bearer"}),
    ("GET", "/v1/stats", {"Authorization": "Basic " + "A" * 1000}),
]
REPORTS = [
    b'{"reason":"\xff"}',
    b'{"reason":"unsupported","count":' + b"9" * 3000 + b"}",
    b'{"reason":' + b"[" * 4000,
    b'{"reason":"unsupported","count":1e999}',
    b'{"reason":"\\ud800"}',
    b'{"reason":"unsupported","count":' + DIGITS + b"}",
    b"[" * 1_000_000,
]


def test_hostile_parameters_and_reports_are_refused(watch_gateway: Callable[..., WatchedGateway]) -> None:
    gateway = watch_gateway()
    with gateway.http() as http:
        exercise(http)
        usual = gateway.done()
        for method, path, headers in PARAMETERS:
            raw: Any = {name: value.encode("latin-1") for name, value in headers.items()}
            answer = http.request(method, path, headers=raw)
            assert 400 <= answer.status_code < 500, (path[:80], answer.status_code)
        for report in REPORTS:
            answer = http.post("/v1/report", content=report, headers={"Content-Type": "application/json"})
            assert typed(answer), report[:40]
        assert gateway.done() - usual == set()
