"""What the service's tests are made of: a real Redis, a pool whose artifacts need no compiler, a gateway.

Run as a script it is one process of a service: `python service_parts.py <settings JSON> <compile seconds> [ROLE
[LOG]]`, a gateway, a dispatcher, or both; LOG: of an ArtifactPool.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import httpx2
import msgspec
import redis
import uvicorn
from request_parts import TARGET, TOOLCHAIN, manifest_of, request_of
from torchrelay.compiler import decoding
from torchrelay.compiler.api import compiles
from torchrelay.compiler.api.training.events import NumberedEvent
from torchrelay.compiler.api.training.node_messages import CapturedGraphs, TrainOrder
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact import manifest as artifact_manifest
from torchrelay.compiler.errors import NoWorker, Unavailable
from torchrelay.compiler.request import codec
from torchrelay.compiler.request import schema as request_schema
from torchrelay.compiler.tuning import queries
from torchrelay.service.admission.compile_request import parse
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.compile.single_flight import CompileNeeds, Lease, Leases, Priority
from torchrelay.service.gateway.server import create_server
from torchrelay.service.local.dispatcher import create_dispatcher_app
from torchrelay.service.local.redis_server import find_server
from torchrelay.service.storage.redis.connections import connect
from torchrelay.service.storage.redis.keys import Keys
from torchrelay.service.storage.redis.scripts import Scripts
from torchrelay.workers.pool import SearchDevice
from waiting import until, wait_until

TOKEN = "test-token-" + "0" * 32
NEEDS = CompileNeeds(TOOLCHAIN, TARGET, request_schema.REVISION)


def graph(
    size: int = 8, *, nodes: int = 1, target: str = "_operator.add", schema: int = request_schema.SCHEMA
) -> bytes:
    """The body of a request: `nodes` additions of a tensor of `size` elements."""
    body = [request_schema.Node("placeholder", "", [])]
    body += [
        request_schema.Node("call_function", target, [request_schema.Ref(i), request_schema.Ref(i)])
        for i in range(nodes)
    ]
    body += [request_schema.Node("output", "", [request_schema.TupleArg([request_schema.Ref(nodes)])])]
    tensor = request_schema.TensorInput([size], [1], "float32", "cpu", requires_grad=False)
    return codec.pack_request(request_of(body, [tensor], schema=schema))


async def queue_and_take(
    leases: Leases, key: str, body: bytes, needs: CompileNeeds
) -> Lease | Literal["hit", "wait"]:
    """As a dispatcher has a job's graph compiled."""
    if await leases.queue(key, body, needs) == "hit":
        return "hit"
    return await leases.take(key, needs) or "wait"


class ArtifactPool:
    """Makes real, unsigned artifacts after `seconds`. `errors`: raised by the next compiles, in order. log: a file that
    gets a line as each compile begins and ends: the word, the process, the key, CLOCK_MONOTONIC in seconds."""

    def __init__(self, seconds: float = 0.0, member_bytes: int = 1000, log: str = "") -> None:
        self.seconds = seconds
        self._log = log
        self.queued = 0
        self.overdue: Mapping[str, int] = {}
        self.elsewhere = 0
        self.compiling = 0
        self._changed: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.nodes: list[dict[str, float]] = []
        self.told = 0
        """How often it has said what nodes it has, as each time its dispatcher registers."""
        self.idle: int | None = 1000
        """How many compiles it does at once; None: it has no such worker."""
        self.member_bytes = member_bytes
        self.members: dict[str, bytes] = {}
        """More of these in each artifact."""
        self.errors: list[Exception] = []
        self.calls: list[str] = []
        self.namespaces: list[str] = []
        """Whose each call was."""
        self.traces: list[str] = []
        """In whose trace."""
        self.cancelled: list[str] = []
        self.questions: list[bytes] = []
        """What each compile asks of its team's tuning database, and `answers` what it was told."""
        self.answers: list[bytes] = []
        self.patient = False
        """It asks again until nothing is open."""
        self.problems = (0, 0)
        self.unverified = ""
        """Why the next compiles compare nothing with eager."""
        """How many a compile says that it has measured and has known."""
        self.tuned: list[tuple[str, int]] = []
        """Problems that a compile says its graph has, and how often."""
        self.talks = 0
        """Steps that a compile tells of, spread over its `seconds`."""
        self.note: Callable[[str, Exception | None], None] = lambda task, error: None
        self.corrupt = False
        self.stages = [("aot", 1.0), ("inductor", 2.0)]
        """What its manifests say."""
        self.toolchain = TOOLCHAIN
        """What its one worker says it has; any request is taken all the same."""

    async def start(self) -> None:
        return

    async def close(self) -> None:
        return

    def ready(self) -> bool:
        return True

    def workers(self) -> list[compiles.WorkerInfo]:
        return [compiles.WorkerInfo("w0", self.toolchain, TARGET, "idle", len(self.calls))]

    def search_devices(
        self, toolchain: request_schema.Toolchain, target: request_schema.Target
    ) -> list[SearchDevice]:
        raise NoWorker("no worker searches here")

    async def search(self, order: bytes, *, worker: str, **rest: Any) -> None:
        raise NoWorker("no worker searches here")

    def on_change(self, call: Callable[[], None]) -> None:
        self._changed, self._loop = call, asyncio.get_running_loop()

    def on_failure(self, call: Callable[[str, Exception | None], None]) -> None:
        self.note = call

    def changed(self) -> None:
        """It is no more what it was: to be called by a test's own thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._changed)

    def room(self, toolchain: request_schema.Toolchain, target: request_schema.Target) -> int | None:
        return None if self.idle is None else self.idle - self.compiling

    cluster = ""

    def node_resources(self) -> list[dict[str, float]]:
        self.told += 1
        return self.nodes

    @property
    def training(self) -> ArtifactPool:
        return self

    async def free_resources(self) -> list[dict[str, float]]:
        return self.node_resources()

    async def warm(self, order: TrainOrder) -> None:
        raise Unavailable("no node here trains")

    async def begin(self, order: TrainOrder) -> None:
        raise Unavailable("no node here trains")

    async def events(self, job: str, after: int, seconds: float) -> list[NumberedEvent]:
        raise Unavailable("no node here trains")

    async def cancel(self, job: str) -> None:
        raise Unavailable("no node here trains")

    async def forget(self, job: str) -> None:
        return

    async def capture(
        self, order: TrainOrder, *, world: int, seconds: float, placed: Callable[[], Awaitable[None]]
    ) -> CapturedGraphs:
        raise Unavailable("no node here trains")

    async def compile(
        self,
        request_bytes: bytes,
        *,
        key: str,
        namespace: str,
        toolchain: request_schema.Toolchain,
        target: request_schema.Target,
        deadline_seconds: float,
        on_progress: Callable[[compiles.Stage, str], None],
        on_query: Callable[[bytes], Awaitable[bytes]],
        holds_source: bool,
        trace_id: str,
    ) -> bytes:
        self.traces.append(trace_id)
        self.compiling += 1
        self._record("begin", key)
        try:
            return await self._compile(key, namespace, toolchain, target, on_progress, on_query)
        finally:
            self._record("end", key)
            self.compiling -= 1
            self._changed()

    def _record(self, what: str, key: str) -> None:
        if self._log:
            with Path(self._log).open("a") as log:
                log.write(f"{what} {os.getpid()} {key} {time.monotonic()}\n")

    async def _compile(
        self,
        key: str,
        namespace: str,
        toolchain: request_schema.Toolchain,
        target: request_schema.Target,
        on_progress: Callable[[compiles.Stage, str], None],
        on_query: Callable[[bytes], Awaitable[bytes]],
    ) -> bytes:
        self.calls.append(key)
        self.namespaces.append(namespace)
        on_progress("aot", "")
        try:
            for step in range(self.talks):
                await asyncio.sleep(self.seconds / self.talks)
                on_progress("autotune", f"{step} of {self.talks} problems searched")
            if not self.talks:
                await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled.append(key)
            raise
        self.answers += [await self._answered(question, on_query) for question in self.questions]
        if self.errors:
            raise self.errors.pop(0)
        on_progress("inductor", "1 kernel")
        files = {"code.py": os.urandom(self.member_bytes), **self.members}
        manifest = manifest_of(
            key,
            files,
            toolchain=toolchain,
            target=target,
            stages=self.stages,
            verification=artifact_manifest.Verification(
                "skipped" if self.unverified else "passed", self.unverified, 0.0, 0.1
            ),
            tuning=[
                artifact_manifest.Measurement(text, "aten mm", 0.25, 3, uses) for text, uses in self.tuned
            ],
            searched=self.problems[0],
            recalled=self.problems[1],
        )
        packed = container.pack(manifest, files)
        return packed[:-10] if self.corrupt else packed

    async def _answered(self, question: bytes, on_query: Callable[[bytes], Awaitable[bytes]]) -> bytes:
        async def answered() -> tuple[bytes] | None:
            answer = await on_query(question)
            waits = self.patient and decoding.from_msgpack(answer, type=queries.KnownEntries).open
            return None if waits else (answer,)

        return (await until(answered, seconds=600))[0]


def busy_pool() -> ArtifactPool:
    """Workers of a dispatcher that takes no compile before `idle` is raised."""
    pool = ArtifactPool()
    pool.idle = 0
    return pool


class RedisServer:
    """A real redis-server on a Unix socket, in a short folder of its own."""

    def __init__(
        self, *, persistent: bool = False, user: tuple[str, str] | None = None, **options: str
    ) -> None:
        """`user`: name and password of who looks at it. `options`: redis-server's own, - as _."""
        self.folder = Path(tempfile.mkdtemp(prefix="tr-"))
        self.socket = self.folder / "r.sock"
        self.url = f"unix://{self.socket}"
        self._persistent = persistent
        self._user = user
        self.options = {name.replace("_", "-"): value for name, value in options.items()}
        self._process: subprocess.Popen[bytes] | None = None
        self._configured: dict[str, str] = {}

    def start(self) -> None:
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "dir": str(self.folder),
            "save": "",
            "appendonly": "yes" if self._persistent else "no",
            "appendfsync": "always",
            **self.options,
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", value)]
        self._process = subprocess.Popen([find_server(), *flags], stdout=subprocess.DEVNULL)
        with self.client() as client:
            wait_until(lambda: _answers(client), seconds=30)
            self._configured = client.config_get("*")

    def reset(self) -> None:
        """Empty, with the settings it was started with; started again if it was stopped."""
        if self._process is None:
            self.start()
        with self.client() as client:
            client.flushall()
            for name, value in client.config_get("*").items():
                if value != self._configured[name]:
                    client.config_set(name, self._configured[name])

    def client(self) -> Any:
        """redis.Redis, whose answers have types that depend on its settings."""
        name, password = self._user or (None, None)
        return redis.Redis(unix_socket_path=str(self.socket), username=name, password=password)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)


class Running:
    """A gateway under uvicorn on a loopback port, in a thread of this process. pool: None: dispatchers are apart."""

    def __init__(self, settings: ServiceSettings, pool: Any) -> None:
        self.settings = settings
        self.pool = pool
        self.server = create_server(settings, pool)
        self.app: Any = self.server.config.app
        self.port = free_port()
        self.server.config.port = self.port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self.server.run, name=f"gateway {self.port}")

    def start(self) -> None:
        self._thread.start()
        wait_until(lambda: self.server.started or not self._thread.is_alive(), seconds=20)
        assert self.server.started

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def http(self, token: str | None = TOKEN, **options: Any) -> httpx2.Client:
        return client_of(self.url, token, **options)

    def queue_for_job(self, body: bytes) -> str:
        """The key of a graph that is queued for a training job, which does not wait for it."""

        async def queue() -> str:
            client = connect(self.settings)
            leases = Leases(Keys(self.settings.redis_prefix), Scripts(client), self.settings)
            request = parse(body, self.settings.limits)
            needs = msgspec.structs.replace(leases.needs(request), priority=Priority.DEVICES)
            await leases.queue(request.key, body, needs)
            await client.aclose()
            return request.key

        return asyncio.run(queue())


StartGateway = Callable[..., Running]


class GatewayProcess:
    """A process of its own, to be killed: a gateway and dispatcher, or the role in `arguments`."""

    script = __file__

    def __init__(self, settings: dict[str, Any], seconds: float, *arguments: str, port: int = 0) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        argument = msgspec.json.encode({**settings, "port": self.port}).decode()
        self.process = subprocess.Popen([sys.executable, self.script, argument, str(seconds), *arguments])
        try:
            with client_of(self.url, None) as http:
                wait_until(lambda: lives(http), seconds=120)
        except BaseException:
            self.kill()
            raise

    def http(self, **options: Any) -> httpx2.Client:
        return client_of(self.url, TOKEN, **options)

    def most_memory(self) -> int:
        """Resident bytes at their highest."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def server_sent_events(
    http: httpx2.Client, path: str, after: str = ""
) -> Generator[tuple[str, str, dict[str, Any]], None, None]:
    """(id, name, data) of each."""
    with http.stream("GET", path, headers={"Last-Event-ID": after} if after else {}) as response:
        assert response.status_code == 200, response.read()
        fields: dict[str, str] = {}
        for line in response.iter_lines():
            if line.startswith(":"):
                continue
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif "event" in fields:
                yield fields["id"], fields["event"], decoding.from_json(fields["data"])
                fields = {}


def client_of(url: str, token: str | None, **options: Any) -> httpx2.Client:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx2.Client(base_url=url, headers=headers, timeout=30, trust_env=False, **options)


def post(http: httpx2.Client, body: bytes | Iterator[bytes], **query: Any) -> httpx2.Response:
    return http.post(
        "/v1/compile", content=body, params=query, headers={"Content-Type": codec.GRAPH_MEDIA_TYPE}
    )


def follow(
    http: httpx2.Client, key: str, after: str = "", *, comments: bool = False
) -> Generator[tuple[str, str, dict[str, Any]], None, None]:
    """(id, stage, data) of each server-sent event; on request also comments, as ("", "comment", {}).

    A comment comes whenever a stream was silent for a while, so on a busy machine anywhere.
    """
    headers = {"Last-Event-ID": after} if after else {}
    with http.stream("GET", f"/v1/compiles/{key}/events", headers=headers) as response:
        assert response.status_code == 200, response.read()
        fields: dict[str, str] = {}
        for line in response.iter_lines():
            if line.startswith(":"):
                if comments:
                    yield "", "comment", {}
            elif line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif "event" in fields:
                yield fields["id"], fields["event"], decoding.from_json(fields["data"])
                fields = {}


def compiled(http: httpx2.Client, body: bytes) -> bytes:
    """Post, wait for the end, and fetch."""
    answer = post(http, body)
    if answer.status_code == 200:
        return answer.content
    assert answer.status_code == 202, answer.text
    key = answer.json()["key"]
    *_, (_, stage, data) = follow(http, key)
    assert stage == "done", data
    found = http.get(f"/v1/artifacts/{key}")
    assert found.status_code == 200
    return found.content


def registered(http: httpx2.Client, pool: ArtifactPool) -> None:
    """Waits until the gateway knows the workers of `pool` as they are now, and its nodes."""
    for _ in range(2):  # as the second registration begins, the first has been written
        told = pool.told
        pool.changed()
        wait_until(lambda seen=told: pool.told > seen, seconds=30)
    time.sleep(0.3)  # gateways read it so often
    workers = msgspec.to_builtins(pool.workers())
    wait_until(lambda: http.get("/v1/workers").json() == workers, seconds=30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(client: redis.Redis) -> bool:
    with contextlib.suppress(redis.ConnectionError):
        return bool(client.ping())
    return False


def lives(http: httpx2.Client) -> bool:
    with contextlib.suppress(httpx2.TransportError):
        return http.get("/livez").status_code == 200
    return False


def _main(configuration: str, seconds: str, role: str = "", log: str = "") -> None:
    settings = ServiceSettings(**decoding.from_json(configuration))
    pool: Any = ArtifactPool(float(seconds), log=log)
    if role == "dispatcher":
        uvicorn.run(create_dispatcher_app(settings, pool), port=settings.port, log_level="warning")
    else:
        create_server(settings, None if role == "gateway" else pool).run()


if __name__ == "__main__":
    _main(*sys.argv[1:])
