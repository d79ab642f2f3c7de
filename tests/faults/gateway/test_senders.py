"""Senders that dawdle, say nothing, or leave in the middle: nobody else waits for them, and nothing of them stays."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from service_parts import TOKEN, GatewayProcess, RedisServer, compiled, graph, post
from torchrelay.compiler.request import codec
from waiting import wait_until

HEAD = (
    f"POST /v1/compile HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    f"Content-Type: {codec.GRAPH_MEDIA_TYPE}\r\n"
).encode()
BODY_SECONDS = 3.0

StartProcess = Callable[..., GatewayProcess]


@pytest.fixture
def patient(settings: dict[str, Any]) -> Iterator[GatewayProcess]:
    process = GatewayProcess({**settings, "body_timeout_seconds": BODY_SECONDS}, 0.0)
    yield process
    process.kill()


def _connect(gateway: GatewayProcess, count: int, stack: contextlib.ExitStack) -> list[socket.socket]:
    address = ("127.0.0.1", gateway.port)
    return [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(count)]


def _check(gateway: GatewayProcess, count: int) -> None:
    """A third each: silent, in the middle of their headers, in the middle of their body."""
    own = psutil.Process(gateway.process.pid)
    with gateway.http() as http, contextlib.ExitStack() as stack:
        compiled(http, graph())
        before = own.num_fds()
        memory = own.memory_info().rss
        senders = _connect(gateway, count, stack)
        for n, sender in enumerate(senders):
            sender.sendall((b"", HEAD, HEAD + b"Content-Length: 1000\r\n\r\nabc")[n % 3])
        until = time.monotonic() + BODY_SECONDS - 1
        slowest = 0.0
        while time.monotonic() < until:
            for n, sender in enumerate(senders):
                if n % 3:
                    with contextlib.suppress(OSError):
                        sender.send(b"x")
            began = time.monotonic()
            assert post(http, graph()).status_code == 200
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(0.2)
        print(f"{count} senders: slowest hit beside them {slowest:.3f} s")
        assert slowest < 2
        wait_until(lambda: own.num_fds() <= before + 20, seconds=BODY_SECONDS + 30)
        print(f"memory grew by {(own.memory_info().rss - memory) >> 20} MiB")
        assert own.memory_info().rss - memory < 200 << 20
        ends = [sender.recv(100) for sender in senders[2::3]]
        assert {end[:12] for end in ends} == {b"HTTP/1.1 422"}
        compiled(http, graph(2))


def test_three_hundred_slow_senders_hold_nobody_up_and_are_given_up(patient: GatewayProcess) -> None:
    _check(patient, 300)


@pytest.mark.slow
def test_two_thousand_slow_senders_hold_nobody_up_and_are_given_up(patient: GatewayProcess) -> None:
    _check(patient, 2000)


def test_senders_that_leave_in_the_middle_of_a_body_start_nothing(
    patient: GatewayProcess, redis_server: RedisServer, capfd: pytest.CaptureFixture[str]
) -> None:
    body = graph(7)
    head = HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
    own = psutil.Process(patient.process.pid)
    with patient.http() as http:
        before = own.num_fds()
        for cut in range(0, len(body), max(1, len(body) // 50)):
            with socket.create_connection(("127.0.0.1", patient.port)) as sender:
                sender.sendall(head + body[:cut])
        wait_until(lambda: own.num_fds() <= before + 5, seconds=20)
        stats = http.get("/v1/stats").json()
        assert (stats["requests"], stats["compiles"], stats["entries"]) == (0, 0, 0)
        assert redis_server.client().keys("torchrelay:lease:*") == []
        compiled(http, body)
    assert "Traceback" not in capfd.readouterr().err  # what senders do is no error of the gateway's


def test_readers_that_leave_in_the_middle_of_an_artifact_cost_nothing(patient: GatewayProcess) -> None:
    own = psutil.Process(patient.process.pid)
    with patient.http() as http:
        data = compiled(http, graph())
        before = own.num_fds()
        request = HEAD + b"Content-Length: %d\r\n\r\n" % len(graph()) + graph()
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", patient.port), timeout=10) as reader:
                reader.sendall(request)
                reader.recv(1)
        wait_until(lambda: own.num_fds() <= before + 5, seconds=20)
        assert post(http, graph()).content == data
