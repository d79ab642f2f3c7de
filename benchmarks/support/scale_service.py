"""A service as it is deployed, on loopback: a Redis, or two that fail over, `torchrelay gateway --workers N`, and
dispatchers in processes of their own whose workers are simulated; and what its processes have used, from /proc
(Linux)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, cast

import gateway
import httpx2
import msgspec
import redis
import uvicorn
from msgspec import Struct
from support.failover_redis import FailoverRedis
from support.local_redis import free_port, redis_server
from torchrelay.compiler import decoding
from torchrelay.compiler.api import compiles
from torchrelay.compiler.request import codec, key, schema
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.local.dispatcher import create_dispatcher_app
from torchrelay.workers.pool import WorkerPool

_TICKS = os.sysconf("SC_CLK_TCK")
_START_SECONDS = 120.0
_COMPILE_SECONDS = 120.0
RATE = 1_000_000
"""Requests a second that the ranks' token may ask: its limit is checked, and never met."""


Setting = str | int | float


class DispatcherOrder(Struct):
    """How the process of a dispatcher is started. log: a file that gets a line as each compile begins: its key, and
    CLOCK_MONOTONIC in seconds."""

    port: int
    settings: Mapping[str, Setting]
    slots: int
    compile_seconds: float
    log: str


class SimulatedPool(gateway.RandomPool):
    """`slots` compiles at once, each for a while; an artifact has as many random bytes as its graph's input has
    elements."""

    def __init__(self, order: DispatcherOrder) -> None:
        self._order = order
        self._running = 0
        self._changed: Callable[[], None] = lambda: None

    def on_change(self, call: Callable[[], None]) -> None:
        self._changed = call

    def on_failure(self, call: Callable[[str, Exception | None], None]) -> None:
        return

    def room(self, toolchain: schema.Toolchain, target: schema.Target) -> int:
        return self._order.slots - self._running

    async def compile(
        self,
        request_bytes: bytes,
        *,
        key: str,
        on_progress: Callable[[compiles.Stage, str], None],
        **rest: object,
    ) -> bytes:
        self._running += 1
        try:
            with Path(self._order.log).open("a") as log:
                log.write(f"{key} {time.monotonic()}\n")
            on_progress("inductor", "")
            await asyncio.sleep(self._order.compile_seconds)
            return gateway.unsigned(key, gateway.size_of(request_bytes))
        finally:
            self._running -= 1
            self._changed()


def dispatch(text: str) -> None:
    """Be the dispatcher, until a signal."""
    order = decoding.from_json(text, type=DispatcherOrder)
    settings = ServiceSettings.model_validate(order.settings)
    app = create_dispatcher_app(settings, cast(WorkerPool, SimulatedPool(order)))
    uvicorn.run(app, host="127.0.0.1", port=order.port, log_config=None, access_log=False)


@dataclass(frozen=True)
class Service:
    """gateways, dispatchers, redis_pid: process ids. redis_port, redis_pid: of the primary at the start, if Redis fails
    over. token: issued to the ranks' job, kept in Redis as any but the owner's."""

    folder: Path
    port: int
    redis_port: int
    gateways: tuple[int, ...]
    dispatchers: tuple[int, ...]
    redis_pid: int
    token: str
    connect: Callable[[], redis.Redis]
    """A client of Redis, or of what is the primary now."""

    def compiles(self) -> Counter[str]:
        """How often each key was compiled."""
        return Counter({name: len(begun) for name, begun in self.begun().items()})

    def begun(self) -> dict[str, list[float]]:
        """When each key's compiles began, by time.monotonic()."""
        found: dict[str, list[float]] = {}
        for line in (self.folder / "compiles").read_text().splitlines():
            name, at = line.split()
            found.setdefault(name, []).append(float(at))
        return found

    def metrics(self) -> str:
        """Of all gateway processes together, as anyone may read them."""
        return httpx2.get(f"http://127.0.0.1:{self.port}/metrics", timeout=30, trust_env=False).text

    def compile(self, *bodies: bytes) -> None:
        """Have graphs compiled; no gateway reads the artifacts."""
        before = self.entries()
        with self._http() as http:
            for body in bodies:
                assert http.post("/v1/compile", content=body, headers=gateway.HEADERS).status_code == 202
        self.wait_for_entries(before + len(bodies))

    def wait_for_entries(self, count: int) -> None:
        wait_until(lambda: self.entries() >= count, "the compiles did not end")

    def entries(self) -> int:
        """Artifacts in the cache."""
        with self.connect() as client:
            return int(client.hlen("torchrelay:sizes"))

    def registered(self) -> int:
        """Dispatchers that have started."""
        with self.connect() as client:
            return int(client.zcard("torchrelay:dispatchers"))

    def artifact(self, name: str) -> bytes:
        with self._http() as http:
            return http.get(f"/v1/artifacts/{name}").content

    def _http(self) -> httpx2.Client:
        headers = {"Authorization": f"Bearer {self.token}"}
        url = f"http://127.0.0.1:{self.port}"
        return httpx2.Client(base_url=url, headers=headers, timeout=30, trust_env=False)

    def post(self, body: bytes) -> bytes:
        """The request of a client that sends a graph."""
        return self._request("POST", "/v1/compile", body, f"Content-Type: {codec.GRAPH_MEDIA_TYPE}\r\n")

    def fetch(self, name: str) -> bytes:
        """The request of a client that fetches an artifact by key."""
        return self._request("GET", f"/v1/artifacts/{name}")

    def _request(self, method: str, path: str, body: bytes = b"", headers: str = "") -> bytes:
        if body:
            headers += f"Content-Length: {len(body)}\r\n"
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nAccept: */*\r\n"
            "Accept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\nUser-Agent: torchrelay/0\r\n"
            f"Authorization: Bearer {self.token}\r\n{headers}\r\n"
        )
        return head.encode() + body


def key_of(body: bytes) -> str:
    return key.key_of(codec.unpack_request(body, codec.Limits()))


@contextlib.contextmanager
def running_service(
    folder: Path,
    *,
    gateways: int = 2,
    dispatchers: int = 1,
    slots: int = 8,
    compile_seconds: float = 0.0,
    changes: Mapping[str, Setting] = MappingProxyType({}),
    failover: FailoverRedis | None = None,
    log: Path | None = None,
) -> Iterator[Service]:
    """slots: of each dispatcher. changes: of the service's settings. failover: its Redis; None: one of its own. log:
    a file for what its processes log; None: they log to this one's stderr."""
    (folder / "compiles").touch()
    with contextlib.ExitStack() as stack:
        logged = None if log is None else stack.enter_context(log.open("wb"))
        connect: Callable[[], redis.Redis]
        if failover is None:
            only = stack.enter_context(redis_server(folder))
            redis_url, connect = f"redis://127.0.0.1:{only}", partial(redis.Redis, port=only)
        else:
            redis_url, connect = failover.url, failover.client
        settings: dict[str, Setting] = {
            "redis_url": redis_url,
            "state_dir": str(folder / "state"),
            "token": gateway.TOKEN,
            "log_level": "warning",
            **changes,
        }
        port = free_port()
        command = ["-m", "torchrelay.service", "gateway", "--workers", str(gateways), "--port", str(port)]
        started = stack.enter_context(
            process([*command, "--credentials", str(folder / "credentials.json")], settings, log=logged)
        )
        main = str(Path(__file__).parents[1] / "scale.py")
        dispatching = []
        for _ in range(dispatchers):
            order = DispatcherOrder(free_port(), settings, slots, compile_seconds, str(folder / "compiles"))
            words = [main, "--dispatch", msgspec.json.encode(order).decode()]
            dispatching.append(stack.enter_context(process(words, log=logged)).pid)
        token = _token(port)
        processes = tuple(leaves(started.pid))
        assert len(processes) == gateways, processes
        with connect() as client:
            server = client.info("server")
        redis_port, redis_pid = int(server["tcp_port"]), int(server["process_id"])
        service = Service(folder, port, redis_port, processes, tuple(dispatching), redis_pid, token, connect)
        service.compile(codec.pack_request(gateway.graph(1)))
        wait_until(lambda: service.registered() == dispatchers, "the dispatchers did not start")
        yield service


def wait_until(condition: Callable[[], bool], problem: str) -> None:
    until = time.monotonic() + _COMPILE_SECONDS
    while not condition():
        assert time.monotonic() < until, problem
        time.sleep(0.1)


def _token(port: int) -> str:
    """A new token for compiles, once the gateway answers."""
    body = msgspec.json.encode({"name": "ranks", "roles": ["compile"], "namespace": "", "rate": RATE})
    headers = {"Authorization": f"Bearer {gateway.TOKEN}", "Content-Type": "application/json"}
    until = time.monotonic() + _START_SECONDS
    while True:
        with contextlib.suppress(httpx2.TransportError):
            answer = httpx2.post(
                f"http://127.0.0.1:{port}/v1/tokens", content=body, headers=headers, trust_env=False
            )
            assert answer.status_code == 201, answer.text
            token: str = answer.json()["token"]
            return token
        assert time.monotonic() < until, "the gateway did not start"
        time.sleep(0.1)


@contextlib.contextmanager
def process(
    arguments: Sequence[str],
    settings: Mapping[str, Setting] = MappingProxyType({}),
    *,
    log: IO[bytes] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """This Python with these arguments, and settings of the service in its environment, until the context is left. log:
    its stderr; None: that of this process."""
    given = {f"TORCHRELAY_SERVICE_{name.upper()}": str(value) for name, value in settings.items()}
    started = subprocess.Popen(
        [sys.executable, *arguments], env={**os.environ, **given}, stdout=subprocess.DEVNULL, stderr=log
    )
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def leaves(pid: int) -> list[int]:
    """Of a process' tree: those without children."""
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [leaf for child in children for leaf in leaves(child)] if children else [pid]


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time of processes so far, all threads."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def forget_peak(pid: int) -> None:
    """`peak_bytes` counts from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pid: int) -> int:
    """The most that was resident."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"process {pid} is gone")


def bytes_read(pid: int) -> int:
    """By read() and pread(), of files mostly: sockets are read by recv()."""
    return int(Path(f"/proc/{pid}/io").read_text().split()[1])
