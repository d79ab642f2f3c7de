"""Sends what all ranks of a node report to the job's driver, in one call at a time; in: reports, out: StopOrders.

A thread of one of the node's workers; the workers reach it by a Unix socket. If its process dies, the others call the
driver themselves, and send again what was not acknowledged: reports have numbers, so that none counts twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
import threading
from typing import Any

import msgspec

from ....compiler import decoding
from ....compiler.errors import Unavailable
from ...process import private_folders
from ...scheduling.ray_resources import NAMESPACE
from ..messages import RankReport, StopOrder

log = logging.getLogger(__name__)

REPORT = struct.Struct("!I?")
"""Before each RankReport, encoded: its bytes, and whether it is urgent."""
ANSWER = struct.Struct("!dQ?")
"""To each worker after each call: StopOrder.stop, the last of its reports that the driver has stored, and whether the
driver was lost."""
_PREFIX = "torchrelay-relay-"
_BACKLOG = 1024


def host_relay(driver: str, attempt: int, seconds: float) -> str:
    """Serve this node's workers from now on, until this process ends; the socket's path, or '' if no folder takes one:
    then each worker calls the driver. driver: its actor's name. seconds: between two calls of it."""
    try:
        folder, lock = private_folders.make(str(private_folders.short_root(_PREFIX)), _PREFIX)
    except (OSError, Unavailable) as error:
        log.warning("ranks report one by one: %s", error)
        return ""
    relay = _NodeRelay(driver, attempt, seconds)
    listening = threading.Event()
    path = str(folder / "socket")

    def run() -> None:
        try:
            asyncio.run(relay.serve(path, listening))
        finally:
            os.close(lock)  # the next relay of this user removes the folder
            listening.set()

    threading.Thread(target=run, daemon=True, name="relay").start()
    listening.wait()
    return path


class _NodeRelay:
    """Runs in the thread's event loop."""

    def __init__(self, driver: str, attempt: int, seconds: float) -> None:
        import ray

        self._driver: Any = ray.get_actor(driver, namespace=NAMESPACE)
        self._attempt, self._seconds = attempt, seconds
        self._waiting: list[RankReport] = []
        self._stored: dict[int, int] = {}
        self._workers: dict[int, asyncio.StreamWriter] = {}
        """By rank, from its first report."""
        self._urgent = asyncio.Event()

    async def serve(self, path: str, listening: threading.Event) -> None:
        server = await asyncio.start_unix_server(self._receive, path, backlog=_BACKLOG)
        listening.set()
        async with server:
            while True:
                self._urgent.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._seconds):
                        await self._urgent.wait()
                if self._workers:
                    await self._send()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = -1
        try:
            while True:
                size, urgent = REPORT.unpack(await reader.readexactly(REPORT.size))
                report = decoding.from_msgpack(await reader.readexactly(size), type=RankReport)
                rank = report.rank
                self._workers[rank] = writer
                self._waiting.append(report)
                if urgent:
                    self._urgent.set()
        except (EOFError, OSError, msgspec.MsgspecError):
            if self._workers.get(rank) is writer:
                del self._workers[rank]
            writer.close()

    async def _send(self) -> None:
        reports, self._waiting = self._waiting, []
        lost, answer = False, StopOrder()
        try:
            data = await self._driver.record.remote(self._attempt, msgspec.msgpack.encode(reports))
            answer = decoding.from_msgpack(data, type=StopOrder)
            for report in reports:
                self._stored[report.rank] = report.number
        except Exception as error:  # whatever Ray raises: the workers end their ranks
            log.warning("the job's driver was lost: %s", error)
            lost = True
        for rank, writer in self._workers.items():
            writer.write(ANSWER.pack(answer.stop, self._stored.get(rank, 0), lost))
