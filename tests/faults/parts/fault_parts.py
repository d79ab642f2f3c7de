"""What the tests of faults are made of: a proxy before Redis, gateways as processes, load that checks answers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx2
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from service_parts import follow, free_port, post
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact.signing import Trust


class RedisProxy:
    """TCP on loopback before a Redis on a Unix socket; what passes can be delayed or held for a while."""

    def __init__(self, target: Path) -> None:
        self._target = str(target)
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.latency = 0.0
        self.holds_at = b""
        """Requests with these bytes close the proxy before they pass."""
        self.held = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="redis proxy")

    def start(self) -> None:
        self._thread.start()
        self._run(self._listen())

    def hold(self) -> None:
        """Become a black hole: connections are accepted, and nothing passes."""
        self._loop.call_soon_threadsafe(self._close)

    def let_go(self) -> None:
        """Pass on what was held, and all that follows."""
        self.holds_at = b""
        self._loop.call_soon_threadsafe(self._open.set)

    def stop(self) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _stop(self) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_unix_connection(self._target)
        except OSError:
            writer.close()
            return
        for pump in (
            self._pump(reader, up_writer, requests=True),
            self._pump(up_reader, writer, requests=False),
        ):
            task = asyncio.create_task(pump)
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, requests: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if requests and self.holds_at and self.holds_at in data:
                    self._close()
                    self.held.set()
                await self._open.wait()
                if requests and self.latency:
                    await asyncio.sleep(self.latency)
                writer.write(data)
                await writer.drain()
        writer.close()

    def _close(self) -> None:
        self._open.clear()


def public_key(http: httpx2.Client) -> Ed25519PublicKey:
    """The gateway's, by its own word."""
    (text,) = http.get("/v1/info").json()["public_keys"]
    return Ed25519PublicKey.from_public_bytes(base64.b64decode(text))


class Load:
    """Threads that ask gateways for `bodies`, wait for compiles, and check every byte that they are given."""

    def __init__(self, urls: list[httpx2.Client], bodies: dict[str, bytes], signer: Ed25519PublicKey) -> None:
        self._clients = urls
        self._bodies = bodies
        self._signer = signer
        self._ended = threading.Event()
        self.slowest = 0.0
        """Seconds that one call took at most; following a compile is not a call."""
        self.refusals: list[tuple[int, str]] = []
        self.served = [0.0] * len(urls)
        """When each gateway last gave out an artifact."""
        self.wrong: list[str] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(n, start))
            for n in range(len(urls))
            for start in range(2)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def _ask(self, n: int, start: int) -> None:
        http = self._clients[n]
        for key in itertools.islice(itertools.cycle(self._bodies), start, None):
            if self._ended.wait(0.02):
                return
            began = time.monotonic()
            answer = post(http, self._bodies[key])
            self.slowest = max(self.slowest, time.monotonic() - began)
            if answer.status_code == 202:
                answer = self._follow(http, key)
            if answer is None:
                continue
            if answer.status_code == 200:
                try:
                    container.verify(answer.content, Trust.of([self._signer]), key=key)
                except Exception as error:  # whatever it is, the test is to fail with it
                    self.wrong.append(repr(error))
                self.served[n] = time.monotonic()
            else:
                self.refusals.append((answer.status_code, answer.json()["error"]["code"]))

    def _follow(self, http: httpx2.Client, key: str) -> httpx2.Response | None:
        try:
            *_, (_, stage, data) = follow(http, key)
        except AssertionError:  # the stream was refused: Redis went away after the post
            return None
        if stage != "done":
            self.refusals.append((503, data["error"]["code"]))
            return None
        return http.get(f"/v1/artifacts/{key}")
