"""Floods of one sender: at a limit he is told to come back, and the others are served."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import psutil
import pytest
from service_parts import TOKEN, GatewayProcess, client_of, compiled, graph, post
from torchrelay.clients.gateway.compile_client import CompileWait
from torchrelay.clients.gateway.connection import Connection, Deadline
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler.request import codec, schema
from waiting import wait_until

HEAD = (
    f"POST /v1/compile HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    f"Content-Type: {codec.GRAPH_MEDIA_TYPE}\r\n"
).encode()


@pytest.fixture
def gateway(settings: dict[str, Any]) -> Iterator[GatewayProcess]:
    limits = {"connections": 40, "bodies_bytes": 8 << 20, "token_streams": 5, "max_queued": 1000}
    process = GatewayProcess({**settings, **limits}, 0.0)
    yield process
    process.kill()


def issued(http: httpx2.Client, namespace: str, *roles: str) -> str:
    answer = http.post("/v1/tokens", json={"name": namespace, "roles": roles, "namespace": namespace})
    assert answer.status_code == 201, answer.text
    return next(value for value in answer.json().values() if isinstance(value, str) and len(value) == 43)


def answer_to(sender: socket.socket) -> bytes:
    sender.settimeout(30)
    with contextlib.suppress(ConnectionError):
        return sender.recv(4096)
    return b""


def test_hits_go_on_while_silent_connections_take_every_place(gateway: GatewayProcess) -> None:
    own = psutil.Process(gateway.process.pid)
    with gateway.http() as http:
        compiled(http, graph())
        before = own.num_fds()
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port), timeout=30))
        wait_until(lambda: own.num_fds() <= before + 45, seconds=30)
        with gateway.http() as http:
            assert post(http, graph()).status_code == 200


def test_where_requests_take_every_place_a_new_connection_is_told_to_come_back(
    gateway: GatewayProcess,
) -> None:
    with contextlib.ExitStack() as stack:
        senders = [
            stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port), timeout=30))
            for _ in range(40)
        ]
        for sender in senders:
            sender.sendall(HEAD + b"Content-Length: 1000\r\n\r\nabc")

        def refused() -> bool:
            with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as late:
                late.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
                return answer_to(late).startswith(b"HTTP/1.1 503")

        wait_until(refused, seconds=20)
        senders.pop().close()
        with gateway.http() as http:
            wait_until(lambda: http.get("/livez").status_code == 200, seconds=20)


def test_unfinished_bodies_of_one_token_take_a_part_of_the_memory(gateway: GatewayProcess) -> None:
    with gateway.http() as http:
        compiled(http, graph())
        other = issued(http, "other", "compile")
    with contextlib.ExitStack() as stack:
        answers = []
        for _ in range(12):
            sender = stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port), timeout=30))
            with contextlib.suppress(ConnectionError):
                sender.sendall(HEAD + b"Content-Length: 3000000\r\n\r\n" + bytes(2 << 20))
            answers.append(sender)
        told = [answer_to(sender) for sender in answers[4:]]
        assert all(each.startswith(b"HTTP/1.1 429") and b"retry-after" in each.lower() for each in told)
        with client_of(gateway.url, other) as http:  # with a body of its own
            assert post(http, graph(5)).status_code in (200, 202)


def test_event_streams_of_one_token_have_an_end_and_its_clients_poll(settings: dict[str, Any]) -> None:
    process = GatewayProcess({**settings, "token_streams": 5}, 4.0)
    try:
        with process.http() as http, contextlib.ExitStack() as stack:
            reader, other = issued(http, "default", "compile"), issued(http, "default", "read")
            key = post(http, graph(31)).json()["key"]
            path = f"/v1/compiles/{key}/events"

            def opened(token: str) -> httpx2.Response:
                client = stack.enter_context(client_of(process.url, token))
                return stack.enter_context(client.stream("GET", path))

            answers = [opened(reader) for _ in range(7)]
            assert [each.status_code for each in answers] == [200] * 5 + [429] * 2
            assert answers[-1].headers["retry-after"]
            assert opened(other).status_code == 200
            connection = Connection(
                ClientSettings(url=process.url, token=reader, cache_dir=Path("/nonexistent"))
            )
            CompileWait(connection, key, Deadline(60), {}).run()
            connection.close()
            stack.close()
            wait_until(lambda: opened(reader).status_code == 200, seconds=20)
    finally:
        process.kill()


def test_a_thousand_bytes_of_values_are_refused_before_they_are_checked(gateway: GatewayProcess) -> None:
    many = schema.TupleArg([schema.TupleArg([])] * 100_000)
    nodes = [
        schema.Node("placeholder", "", []),
        schema.Node("call_function", "_operator.add", [schema.Ref(0), many]),
        schema.Node("output", "", [schema.TupleArg([schema.Ref(1)])]),
    ]
    request = codec.unpack_request(graph())
    body = codec.pack_request(
        msgspec.structs.replace(request, graph=msgspec.structs.replace(request.graph, nodes=nodes))
    )
    assert len(body) < 2000
    with gateway.http() as http:
        answer = post(http, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "limit_exceeded")
        assert "values" in answer.json()["error"]["message"]


LISTEN = """
import asyncio, resource
from torchrelay.service.local.listening import listen
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
async def main():
    listener = listen("127.0.0.1", 0, any_port_will_do=False)
    await asyncio.start_server(lambda reader, writer: asyncio.Event().wait(), sock=listener, backlog=2048)
    print(listener.getsockname()[1], flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_a_listener_without_descriptors_says_so_once_a_second() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        port = int(server.stdout.readline())
        with contextlib.ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            began = time.monotonic()
            time.sleep(3)
            server.kill()
            said = len(re.findall("Too many open files", server.communicate(timeout=30)[1]))
            assert 1 <= said <= 4 * (time.monotonic() - began) + 10
    finally:
        server.kill()
