"""Many ranks' connections in a process of their own: whole requests' bytes in; statuses and seconds of answers out.

Run as a script it reads an Asking (JSON) from its input and writes Answers (JSON). So the load's work is not that of
the servers whose processor time is read, and no client library is measured.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections import Counter

import msgspec
import uvloop
from msgspec import Struct
from torchrelay.compiler import decoding

_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)
_BUFFER = bytearray(1 << 20)
_CONNECTING = 100
"""Connections that are opened at a time."""


class Asking(Struct):
    """`connections` to 127.0.0.1, open before any asks. Each sends each request once, all beginning together, and waits
    `pause_seconds` after each answer."""

    port: int
    requests: list[bytes]
    connections: int
    pause_seconds: float = 0.0


class Answers(Struct):
    """statuses: how many answers by status (0: the connection was lost). p99: seconds of an answer, 99th percentile.
    body_bytes: of all bodies together. wall: seconds from the first request to the last answer."""

    statuses: dict[int, int]
    count: int
    p99: float
    body_bytes: int
    wall: float


class _Connection(asyncio.BufferedProtocol):
    """One kept-alive connection; what it receives is counted, not stored."""

    def __init__(self) -> None:
        self.body_bytes = 0
        self._head = bytearray()
        self._left = -1
        self._status = 0
        self._answer: asyncio.Future[int] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return _BUFFER

    def buffer_updated(self, count: int) -> None:
        if self._left < 0:
            self._head += _BUFFER[:count]
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            length = _LENGTH.search(self._head, 0, end)
            assert length is not None, bytes(self._head[:300])
            self._status = int(self._head[9:12])
            self.body_bytes += int(length[1])
            self._left = int(length[1]) - (len(self._head) - end - 4)
        else:
            self._left -= count
        if self._left == 0:
            self._end(self._status)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(0)

    def _end(self, status: int) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(status)

    async def ask(self, request: bytes) -> int:
        """The answer's status, once its last byte is there."""
        assert self._transport is not None
        self._head.clear()
        self._left = -1
        self._answer = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            return 0
        self._transport.write(request)
        return await self._answer


async def _load(asking: Asking) -> Answers:
    loop = asyncio.get_running_loop()
    connections: list[_Connection] = []
    while len(connections) < asking.connections:
        count = min(_CONNECTING, asking.connections - len(connections))
        opening = (loop.create_connection(_Connection, "127.0.0.1", asking.port) for _ in range(count))
        connections += [connection for _, connection in await asyncio.gather(*opening)]
    statuses: Counter[int] = Counter()
    seconds: list[float] = []

    async def ask_all(connection: _Connection) -> None:
        for request in asking.requests:
            began = time.perf_counter()
            statuses[await connection.ask(request)] += 1
            seconds.append(time.perf_counter() - began)
            await asyncio.sleep(asking.pause_seconds)

    began = time.perf_counter()
    await asyncio.gather(*map(ask_all, connections))
    wall = time.perf_counter() - began
    p99 = sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * 0.99))]
    return Answers(dict(statuses), len(seconds), p99, sum(each.body_bytes for each in connections), wall)


def ask(asking: Asking) -> Answers:
    """Have a process ask; its answers."""
    process = subprocess.run(
        [sys.executable, __file__], input=msgspec.json.encode(asking), stdout=subprocess.PIPE, check=True
    )
    return decoding.from_json(process.stdout, type=Answers)


if __name__ == "__main__":
    sys.stdout.buffer.write(
        msgspec.json.encode(uvloop.run(_load(decoding.from_json(sys.stdin.buffer.read(), type=Asking))))
    )
