"""The gateway's own share of a hit, and how many hits one gateway process serves, beside Redis alone.

A real uvicorn in its own process and a real Redis on this machine, over loopback, the artifact already in the cache.
Beside it, in the same run, the same bytes straight from Redis through redis-py: what the network and Redis cost
without a gateway. Three measurements: one connection, one request after the other, interleaved with redis-py; as many
hits a second as it gives (`--connections`), in rounds that alternate with redis-py; and 100 requests a second,
whatever the answers do. All the while a task in the gateway measures how long its event loop was held at a time.
Ratios travel between machines; milliseconds do not.

    python benchmarks/gateway.py [--requests 300] [--seconds 5] [--check] [--out out/gateway.json]
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import json
import math
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx2
import redis
from support import http_load, verdicts
from support.local_redis import redis_server
from torchrelay.compiler import decoding
from torchrelay.compiler.api import compiles
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact import manifest as artifact_manifest
from torchrelay.compiler.request import codec, key, schema
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.gateway.server import create_server
from torchrelay.workers.pool import WorkerPool

HEADERS = {"Content-Type": codec.GRAPH_MEDIA_TYPE}
TOKEN = "benchmark-" + "0" * 32
TOOLCHAIN = schema.Toolchain(python="cp311", torch="2.13.0+cpu", triton="", cuda="", platform="linux-x86_64")
TARGET = schema.Target(kind="cpu", name="", capability="", units=0, cpu=[])
GRAPH_NODES = 400
"""About the graph of a GPT-2 with 4 layers."""
WARM_UP = 20
ROUNDS = 3
RATE = 100
LOOK_SECONDS = 0.005


class RandomPool:
    """Compiling is not what is measured: an artifact is as many random bytes as the input has elements."""

    queued = elsewhere = 0
    cluster = ""

    async def start(self) -> None:
        return

    async def close(self) -> None:
        return

    def workers(self) -> list[compiles.WorkerInfo]:
        return []

    def node_resources(self) -> list[dict[str, float]]:
        return []

    def on_change(self, call: Callable[[], None]) -> None:
        return

    def on_failure(self, call: Callable[[str, Exception | None], None]) -> None:
        return

    def room(self, toolchain: schema.Toolchain, target: schema.Target) -> int | None:
        return 1000

    async def compile(
        self,
        request_bytes: bytes,
        *,
        key: str,
        on_progress: Callable[[compiles.Stage, str], None],
        **_: object,
    ) -> bytes:
        return unsigned(key, size_of(request_bytes))


def size_of(request_bytes: bytes) -> int:
    """What `graph` was given."""
    (tensor,) = decoding.from_msgpack(request_bytes, type=schema.GraphRequest).inputs
    assert isinstance(tensor, schema.TensorInput)
    return int(tensor.shape[0])


def graph(size: int) -> schema.GraphRequest:
    nodes = [schema.Node("placeholder", "", [])]
    nodes += [
        schema.Node("call_function", "_operator.add", [schema.Ref(i), schema.Ref(i)])
        for i in range(GRAPH_NODES)
    ]
    nodes += [schema.Node("output", "", [schema.TupleArg([schema.Ref(GRAPH_NODES)])])]
    ambient = schema.usual_ambient(grad=True, threads=1, flags=[])
    return schema.GraphRequest(
        schema=schema.SCHEMA,
        graph=schema.Graph(nodes),
        inputs=[schema.TensorInput([size], [1], "float32", "cpu", requires_grad=False)],
        symbols=[],
        relations=[],
        constants=[],
        ambient=ambient,
        mode="default",
        options=[],
        aot_options=[],
        toolchain=TOOLCHAIN,
        target=TARGET,
    )


def unsigned(name: str, size: int) -> bytes:
    member = os.urandom(size)
    manifest = artifact_manifest.Manifest(
        schema=schema.SCHEMA,
        key=name,
        toolchain=TOOLCHAIN,
        target=TARGET,
        members=[container.member("code", member)],
        guards=[],
        stages=[("inductor", 20.0)],
        verification=artifact_manifest.Verification("passed", "", 0.0, 0.1),
        tuning=[],
        kernels=1,
        created="2026-01-01T00:00:00Z",
        worker="benchmark",
    )
    return container.pack(manifest, {"code": member})


@dataclass
class GatewayProcess:
    """A gateway in a process of its own. `held_ms`: once it has stopped, the longest that its loop was held."""

    port: int
    held_ms: float = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def running_gateway(folder: Path, redis_port: int) -> Iterator[GatewayProcess]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        gateway = GatewayProcess(probe.getsockname()[1])
    settings = {
        "redis_url": f"redis://127.0.0.1:{redis_port}",
        "state_dir": str(folder / "state"),
        "token": TOKEN,
        "port": gateway.port,
        "log_level": "warning",
    }
    command = [sys.executable, __file__, "--serve", json.dumps(settings)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield gateway
    finally:
        process.terminate()
        said, _ = process.communicate()
    gateway.held_ms = float(said or math.inf)  # a gateway that died says nothing


def serve(settings: ServiceSettings) -> None:
    """Be the gateway until a SIGTERM, then print the most milliseconds that a timer of its loop came late by,
    the second request for /livez on: what starting costs is not what is asked."""
    server = create_server(settings, cast(WorkerPool, RandomPool()))
    worst = 0.0

    async def watch() -> None:
        nonlocal worst
        while True:
            due = time.perf_counter() + LOOK_SECONDS
            await asyncio.sleep(LOOK_SECONDS)
            worst = max(worst, time.perf_counter() - due)

    async def run() -> None:
        nonlocal worst
        watching = asyncio.create_task(watch())
        serving = asyncio.create_task(server.serve())
        while not server.started and not serving.done():
            await asyncio.sleep(LOOK_SECONDS)
        worst = 0.0
        await serving
        watching.cancel()

    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn stops at it, and then raises it again
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(run())
    print(f"{worst * 1000:.3f}")


def fill(http: httpx2.Client, name: str, body: bytes) -> bytes:
    """Have the artifact compiled and published; returns it as the cache serves it."""
    until = time.monotonic() + 30
    while True:
        with contextlib.suppress(httpx2.ConnectError):
            answer = http.post("/v1/compile", content=body, headers=HEADERS)
            if answer.status_code == 200:
                assert answer.headers["X-Torchrelay-Key"] == name
                return answer.content
            assert answer.status_code == 202, answer.text
        assert time.monotonic() < until, "the gateway did not start"
        time.sleep(0.1)


def timed(work: Callable[[], object], expected: bytes) -> float:
    began = time.perf_counter()
    data = work()
    took = time.perf_counter() - began
    assert data == expected
    return took * 1000


def summary(milliseconds: list[float]) -> dict[str, float]:
    ordered = sorted(milliseconds)
    return {
        "median_ms": round(statistics.median(ordered), 3),
        "p99_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 3),
        "count": len(ordered),
    }


def measure(
    http: httpx2.Client, direct: redis.Redis, name: str, body: bytes, requests: int
) -> dict[str, dict[str, float]]:
    data = fill(http, name, body)
    direct.set("direct", data)
    ways: dict[str, Callable[[], object]] = {
        "POST /v1/compile": lambda: http.post("/v1/compile", content=body, headers=HEADERS).content,
        "GET /v1/artifacts": lambda: http.get(f"/v1/artifacts/{name}").content,
        "redis-py": lambda: direct.get("direct"),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for index in range(WARM_UP + requests):
        for way, work in ways.items():
            took = timed(work, data)
            if index >= WARM_UP:
                taken[way].append(took)
    return {way: summary(values) for way, values in taken.items()}


def request_for(body: bytes) -> bytes:
    head = (
        "POST /v1/compile HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {TOKEN}\r\nContent-Type: {codec.GRAPH_MEDIA_TYPE}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def redis_as_fast_as_possible(port: int, expected: bytes, *, connections: int, seconds: float) -> list[float]:
    """As http_load.as_fast_as_possible, with a redis-py client for each connection, in a thread of its own."""
    until = time.perf_counter() + seconds

    def keep_asking(_: int) -> list[float]:
        taken = []
        with redis.Redis(port=port) as client:
            while (began := time.perf_counter()) < until:
                assert len(client.get("direct")) == len(expected)
                taken.append(time.perf_counter() - began)
        return taken

    with concurrent.futures.ThreadPoolExecutor(connections) as pool:
        return [each for taken in pool.map(keep_asking, range(connections)) for each in taken]


def loaded(
    load: http_load.Load, redis_port: int, data: bytes, arguments: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Rounds that alternate: the gateway, redis-py with one connection, and with as many as the gateway's."""
    many, seconds = arguments.connections, arguments.seconds
    ways: dict[str, Callable[[], list[float]]] = {
        "gateway": lambda: http_load.as_fast_as_possible(load, connections=many, seconds=seconds),
        "redis-py, 1": lambda: redis_as_fast_as_possible(redis_port, data, connections=1, seconds=seconds),
        f"redis-py, {many}": lambda: redis_as_fast_as_possible(
            redis_port, data, connections=many, seconds=seconds
        ),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, work in ways.items():
            taken[way] += work()
    found = {way: summary([1000 * t for t in values]) for way, values in taken.items()}
    for way, values in taken.items():
        found[way]["per_second"] = round(len(values) / (ROUNDS * seconds), 1)
    steady = http_load.at_rate(load, rate=RATE, connections=many, seconds=3 * seconds)
    found[f"gateway at {RATE}/s"] = summary([1000 * t for t in steady])
    return found


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    alone, under_load = {}, {}
    with (
        tempfile.TemporaryDirectory(prefix="tr-") as name,
        redis_server(Path(name)) as redis_port,
        running_gateway(Path(name), redis_port) as gateway,
        httpx2.Client(base_url=gateway.url, headers=headers, timeout=30, trust_env=False) as http,
        redis.Redis(port=redis_port) as direct,
    ):
        for label, size in (("50 KB", 50_000), ("1 MB", 1_000_000)):
            request = graph(size)
            body = codec.pack_request(request)
            alone[label] = measure(http, direct, key.key_of(request), body, arguments.requests)
            data = direct.get("direct")
            load = http_load.Load(gateway.port, request_for(body), len(data))
            under_load[label] = loaded(load, redis_port, data, arguments)
    return {"results": alone, "loaded": under_load, "loop_held_ms": gateway.held_ms}


def judge(found: dict[str, Any]) -> list[verdicts.Verdict]:
    """The bars: a share of a hit under 10 ms, half of Redis' rate, p99 at 100 requests a second, a free event loop."""
    big = found["loaded"]["1 MB"]
    share = found["results"]["1 MB"]["POST /v1/compile"]["median_ms"]
    best = max(numbers["per_second"] for way, numbers in big.items() if way.startswith("redis-py"))
    rate = big["gateway"]["per_second"] / best
    p99 = max(numbers[f"gateway at {RATE}/s"]["p99_ms"] for numbers in found["loaded"].values())
    return [
        (share < 10, f"{share:.2f} ms (< 10)  a hit of 1 MB, one connection, median"),
        (rate >= 0.5, f"{rate:.2f} (>= 0.5)  hits a second at 1 MB / the most that redis-py gets from Redis"),
        (p99 < 25, f"{p99:.1f} ms (< 25)  p99 at {RATE} requests a second"),
        (
            found["loop_held_ms"] < 100,
            f"{found['loop_held_ms']:.1f} ms (< 100)  the event loop held at a time",
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--requests", type=int, default=300, help="of each kind and size, one after the other"
    )
    parser.add_argument("--connections", type=int, default=16, help="under load")
    parser.add_argument("--seconds", type=float, default=5.0, help="of load in each round")
    parser.add_argument("--out", type=Path, default=Path("out/gateway.json"))
    verdicts.add_check(parser)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(ServiceSettings(**json.loads(arguments.serve)))
        return 0
    found = run(arguments)
    print(f"{'one connection':22} {'way':20} {'median ms':>10} {'p99 ms':>10} {'x redis-py':>10}")
    for label, ways in found["results"].items():
        base = ways["redis-py"]["median_ms"]
        for way, numbers in ways.items():
            ratio = numbers["median_ms"] / base
            print(f"{label:22} {way:20} {numbers['median_ms']:10.2f} {numbers['p99_ms']:10.2f} {ratio:10.1f}")
    print(
        f"{f'{arguments.connections} connections':22} {'way':20} {'median ms':>10} {'p99 ms':>10} {'per s':>10}"
    )
    for label, ways in found["loaded"].items():
        for way, numbers in ways.items():
            rate = numbers.get("per_second", RATE)
            print(f"{label:22} {way:20} {numbers['median_ms']:10.2f} {numbers['p99_ms']:10.2f} {rate:10.1f}")
    status = verdicts.conclude(judge(found), check=arguments.check)
    record = {"python": platform.python_version(), "cpus": os.cpu_count(), **found}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {arguments.out}")
    return status


if __name__ == "__main__":
    sys.exit(main())
