"""Load on one HTTP address: a whole request's bytes in; how long each answer took out. asyncio, no client library.

A library's own work would be most of what is measured. Each answer's status and length are checked, so that a fast
error is no success.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass

_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)


class BadAnswer(Exception):
    """An answer that is not 200, or of another length than expected."""


@dataclass(frozen=True)
class Load:
    """Where, what, and the length in bytes that every answer's body must have."""

    port: int
    request: bytes
    body_bytes: int


class _Connection(asyncio.Protocol):
    """One kept-alive connection; one request at a time."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._head = bytearray()
        self._left = -1
        self._answer: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._left < 0:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            length = _LENGTH.search(self._head, 0, end)
            if not self._head.startswith(b"HTTP/1.1 200 ") or length is None:
                self._fail(BadAnswer(bytes(self._head[:300]).decode(errors="replace")))
                return
            if int(length[1]) != self._load.body_bytes:
                self._fail(BadAnswer(f"{int(length[1])} bytes, not {self._load.body_bytes}"))
                return
            self._left = self._load.body_bytes - (len(self._head) - end - 4)
        else:
            self._left -= len(data)
        if self._left == 0 and self._answer is not None:
            self._answer.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(BadAnswer(f"the connection was closed: {error}"))

    def _fail(self, error: BadAnswer) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    async def ask(self) -> None:
        """Send the request and wait for the last byte of its answer."""
        assert self._transport is not None
        self._head.clear()
        self._left = -1
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(self._load.request)
        await self._answer

    def close(self) -> None:
        self._answer = None
        if self._transport is not None:
            self._transport.close()


async def _connect(load: Load, count: int) -> list[_Connection]:
    loop = asyncio.get_running_loop()
    made = [
        await loop.create_connection(lambda: _Connection(load), "127.0.0.1", load.port) for _ in range(count)
    ]
    return [connection for _, connection in made]


def as_fast_as_possible(load: Load, *, connections: int, seconds: float) -> list[float]:
    """Each connection asks again as soon as it was answered; seconds that each answer took."""

    async def run() -> list[float]:
        taken: list[float] = []
        until = time.perf_counter() + seconds

        async def keep_asking(connection: _Connection) -> None:
            while (began := time.perf_counter()) < until:
                await connection.ask()
                taken.append(time.perf_counter() - began)
            connection.close()

        await asyncio.gather(*map(keep_asking, await _connect(load, connections)))
        return taken

    return asyncio.run(run())


def at_rate(load: Load, *, rate: float, connections: int, seconds: float) -> list[float]:
    """`rate` requests a second whatever the answers do; seconds from when each was due, so that waiting for a free
    connection counts."""

    async def run() -> list[float]:
        taken: list[float] = []
        free: asyncio.Queue[_Connection] = asyncio.Queue()
        for connection in await _connect(load, connections):
            free.put_nowait(connection)
        began = time.perf_counter()

        async def one(due: float) -> None:
            connection = await free.get()
            await connection.ask()
            taken.append(time.perf_counter() - due)
            free.put_nowait(connection)

        async with asyncio.TaskGroup() as tasks:
            for number in range(int(rate * seconds)):
                due = began + number / rate
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                tasks.create_task(one(due))
        while not free.empty():
            free.get_nowait().close()
        return taken

    return asyncio.run(run())
