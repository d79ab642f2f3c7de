"""A service on the same machine, as far as another site: a port in; a port that answers a round trip later out.

TCP on loopback; each direction delays what passes by half a round trip and lets through so many bytes a second. A new
connection costs a round trip too, as it does with TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator

_PIECE = 16 << 10


@contextlib.contextmanager
def distant(port: int, *, round_trip: float, bytes_per_second: float) -> Iterator[int]:
    """Yields the port of a proxy before loopback's `port`. Seconds, bytes a second."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="distant")
    thread.start()
    line = _Line(port, round_trip / 2, bytes_per_second)
    try:
        yield asyncio.run_coroutine_threadsafe(line.listen(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(line.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


class _Line:
    def __init__(self, port: int, delay: float, rate: float) -> None:
        self._port = port
        self._delay = delay
        self._rate = rate
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2 * self._delay)
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        for source, target in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._carry(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        """What arrives together leaves together: the delay is each piece's own, the rate is the line's."""
        underway: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        task = asyncio.create_task(self._deliver(underway, target))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        free = 0.0
        with contextlib.suppress(OSError):
            while data := await source.read(_PIECE):
                free = max(free, time.monotonic()) + len(data) / self._rate
                underway.put_nowait((free + self._delay, data))
        underway.put_nowait((time.monotonic() + self._delay, b""))

    async def _deliver(
        self, underway: asyncio.Queue[tuple[float, bytes]], target: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = await underway.get()
                await asyncio.sleep(max(due - time.monotonic(), 0))
                if not data:
                    break
                target.write(data)
                await target.drain()
        target.close()
