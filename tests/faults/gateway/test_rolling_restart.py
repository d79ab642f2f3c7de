"""Gateways and dispatchers are replaced one after the other, behind a load balancer: no client notices."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_parts import TOKEN, GatewayProcess, RedisServer, graph
from torchrelay.clients.gateway.compile_client import GatewayClient
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler.errors import RelayError
from torchrelay.compiler.request import codec, key
from waiting import wait_until


class Balancer:
    """Gives each connection to the next gateway that takes one, as a load balancer for TCP does."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = itertools.cycle(ports)
        self._most = len(ports)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        )
        self._server = started.result(10)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for port in itertools.islice(self._ports, self._most):
            with contextlib.suppress(OSError):
                upstream = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(_copy(reader, upstream[1]), _copy(upstream[0], writer))
                return
        writer.close()

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(end(), self._loop)
        self._thread.join(10)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@pytest.fixture
def processes(settings: dict[str, Any]) -> Iterator[list[GatewayProcess]]:
    roles = ["gateway"] * 3 + ["dispatcher"] * 2
    started = [GatewayProcess(settings, 0.3, role) for role in roles]
    yield started
    for process in started:
        process.kill()


def test_replacing_all_parts_one_after_the_other_loses_no_request(
    processes: list[GatewayProcess], settings: dict[str, Any], redis_server: RedisServer
) -> None:
    balancer = Balancer([process.port for process in processes[:3]])
    over = threading.Event()
    hits = [0] * 3
    misses: list[int] = []
    errors: list[RelayError] = []

    def client(mine: int) -> None:
        made = ClientSettings(url=balancer.url, token=TOKEN, cache_dir=Path("/nonexistent"))
        with GatewayClient(made) as gateway:
            for n in itertools.count():
                if over.is_set():
                    return
                size = 1 + mine + 3 * (n // 10)  # one miss, then nine hits
                body = graph(size)
                try:
                    name = key.key_of(codec.unpack_request(body))
                    found = gateway.submit(body, name, cache_only=False, deadline=60).result()
                except RelayError as error:
                    errors.append(error)
                    return
                hits[mine] += found.hit
                if not found.hit:
                    misses.append(size)

    threads = [threading.Thread(target=client, args=[n]) for n in range(3)]
    try:
        for thread in threads:
            thread.start()
        for n, role in enumerate(["gateway"] * 3 + ["dispatcher"] * 2):
            seen = sum(hits)
            wait_until(lambda seen=seen: bool(errors) or sum(hits) > seen + 10, seconds=60)
            processes[n].process.send_signal(signal.SIGTERM)
            assert processes[n].process.wait(30) in (0, -signal.SIGTERM)
            processes[n] = GatewayProcess(settings, 0.3, role, port=processes[n].port)
    finally:
        over.set()
        for thread in threads:
            thread.join(90)
        balancer.close()
    assert errors == []
    assert len(misses) == len(set(misses)) >= 5
    assert int(redis_server.client().hget("torchrelay:stats", "compiles")) == len(misses)
