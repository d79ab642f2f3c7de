"""What the gateway refuses before any worker sees it, and how it says so."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from service_parts import TOKEN, ArtifactPool, Running, StartGateway, compiled, graph, post
from torchrelay.compiler.request import codec, schema
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.gateway.http import slow_clients


def nested(levels: int) -> bytes:
    """A request whose one argument is a list in a list in a list."""
    plain = codec.encode_request(codec.unpack_request(graph()))
    start = plain.index(b"\x92\xa1n\x00")
    return codec.compress(plain[:start] + b"\x92\xa1l\x91" * levels + plain[start:])


def _refusal(answer: httpx2.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "hint"}
    assert error["message"]
    return answer.status_code, error["code"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", (422, "malformed")),
        (b"garbage that is no zstd frame", (422, "malformed")),
        (codec.compress(b"\xc1 is never used in MessagePack"), (422, "malformed")),
        (graph()[:-4], (422, "malformed")),
        (graph() + b"tail", (422, "malformed")),
        (nested(60), (413, "limit_exceeded")),
        (nested(100_000), (413, "limit_exceeded")),
        (graph(schema=schema.SCHEMA + 1), (422, "schema_mismatch")),
        (graph(target="os.system"), (422, "forbidden_target")),
        (graph(target="torch.load"), (422, "forbidden_target")),
        (graph(-1), (422, "malformed")),
    ],
    ids=[
        "empty",
        "garbage",
        "no MessagePack",
        "cut short",
        "bytes after the frame",
        "nested past the limit",
        "nested without end",
        "another schema",
        "os.system",
        "torch.load",
        "negative size",
    ],
)
def test_a_bad_body_is_refused_before_any_worker(
    body: bytes, expected: tuple[int, str], gateway: Running, http: httpx2.Client
) -> None:
    assert _refusal(post(http, body)) == expected
    assert gateway.pool.calls == []
    compiled(http, graph())


def test_a_body_over_the_limit_is_not_read_to_its_end(start_gateway: StartGateway) -> None:
    with start_gateway(body_bytes=10_000).http() as http:
        assert _refusal(post(http, os.urandom(10_001))) == (413, "limit_exceeded")
        assert _refusal(post(http, os.urandom(5_000_000))) == (413, "limit_exceeded")

        def endless() -> object:
            sent = 0
            while sent < 200_000_000:
                sent += 65536
                yield bytes(65536)
            raise AssertionError("the gateway read on")

        headers = {"Content-Type": codec.GRAPH_MEDIA_TYPE}
        assert http.post("/v1/compile", content=endless(), headers=headers).status_code == 413
        compiled(http, graph())


def test_a_bomb_is_not_unpacked(start_gateway: StartGateway) -> None:
    with start_gateway(request_bytes=1 << 20).http() as http:
        assert _refusal(post(http, codec.compress(bytes(100 << 20)))) == (413, "limit_exceeded")


def test_limits_on_nodes_come_from_the_settings(start_gateway: StartGateway) -> None:
    with start_gateway(request_nodes=10).http() as http:
        assert _refusal(post(http, graph(nodes=50))) == (413, "limit_exceeded")
        compiled(http, graph(nodes=5))


def test_a_body_that_never_ends_is_given_up(start_gateway: StartGateway) -> None:
    gateway = start_gateway(body_timeout_seconds=0.5)
    head = (
        f"POST /v1/compile HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Type: {codec.GRAPH_MEDIA_TYPE}\r\nContent-Length: 100\r\n\r\nabc"
    )
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as raw:
        raw.sendall(head.encode())
        assert raw.recv(1000).startswith(b"HTTP/1.1 422")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/report"),
        ("POST", "/v1/prefetch"),
        ("POST", "/v1/tokens"),
        ("POST", "/v1/tunes"),
        ("POST", "/v1/trains"),
        ("PATCH", "/v1/namespaces/vision"),
        ("POST", "/v1/cache"),
    ],
)
def test_a_slow_body_of_any_route_is_given_up(start_gateway: StartGateway, method: str, path: str) -> None:
    gateway = start_gateway(body_timeout_seconds=0.2)
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as slow:
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        slow.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode())
        answer = b"".join(iter(lambda: slow.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 422"), answer
    assert b"the body did not arrive" in answer, answer


def test_a_connection_may_rest_for_longer_than_clients_keep_one(gateway: Running) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as raw:
        for pause in (6.0, 0.0):  # httpx keeps a connection for 5 s
            raw.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b"ok\n"):
                answer += (part := raw.recv(1000))
                assert part, answer
            assert answer.startswith(b"HTTP/1.1 200")
            time.sleep(pause)


def test_a_head_without_end_is_given_up(gateway: Running) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as raw:
        raw.sendall(b"GET /livez HTTP/1.1\r\nX: ")
        with pytest.raises(OSError):
            for _ in range(1000):
                raw.sendall(b"x" * 65536)


def test_an_answer_does_not_wait_for_the_clients_acknowledgement(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the listener is given, as `torchrelay up` does: asyncio turns Nagle's algorithm off only for sockets
    of its own."""
    at_once: list[int] = []
    start = slow_clients.HeadLimitsProtocol._start_timer

    def look(protocol: slow_clients.HeadLimitsProtocol) -> None:
        connection = protocol.transport.get_extra_info("socket")
        at_once.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        start(protocol)

    monkeypatch.setattr(slow_clients.HeadLimitsProtocol, "_start_timer", look)
    running = Running(ServiceSettings(**settings), ArtifactPool())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", running.port))
        listener.listen()
        thread = threading.Thread(target=lambda: asyncio.run(running.server.serve(sockets=[listener])))
        thread.start()
        try:
            with running.http() as http:
                assert http.get("/livez").status_code == 200
        finally:
            running.server.should_exit = True
            thread.join(20)
    assert at_once == [1]


def test_another_content_type_is_refused(http: httpx2.Client) -> None:
    answer = http.post("/v1/compile", content=graph(), headers={"Content-Type": "application/json"})
    assert _refusal(answer) == (415, "malformed")


def test_a_large_hostile_body_does_not_hold_up_others(gateway: Running, http: httpx2.Client) -> None:
    body = graph(nodes=90_000)
    gc.collect()
    gc.disable()  # what all tests together leave in this process takes as long to look through
    try:
        with ThreadPoolExecutor(1) as other, gateway.http() as second:
            slow = other.submit(post, second, body)
            slowest = 0.0
            while not slow.done():
                began = time.perf_counter()
                assert http.get("/livez").status_code == 200
                slowest = max(slowest, time.perf_counter() - began)
            assert slow.result().status_code == 202
    finally:
        gc.enable()
    assert slowest < 0.5  # unpacking this in place holds the loop for well over a second
