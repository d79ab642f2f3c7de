"""The gateway's own share of a hit: milliseconds from a request's first byte to the answer's last byte.

A real uvicorn in its own process and a real Redis on this machine, over loopback, one connection, the
artifact already in the cache. Beside it, in the same run and interleaved with it, the same bytes straight
from Redis through redis-py: what the network and Redis cost without a gateway. Ratios travel between
machines; milliseconds do not.

    python benchmarks/gateway.py [--requests 300] [--out out/gateway.json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import msgspec
import redis
from local_redis import redis_server
from torchrelay.compiler import artifact, key, wire
from torchrelay.service.app import create_server
from torchrelay.service.settings import ServiceSettings

HEADERS = {"Content-Type": wire.GRAPH_MEDIA_TYPE}
TOKEN = "benchmark-" + "0" * 32
TOOLCHAIN = wire.Toolchain(python="cp311", torch="2.13.0+cpu", triton="", cuda="", platform="linux-x86_64")
TARGET = wire.Target(kind="cpu", name="", capability="", units=0, cpu=[])
GRAPH_NODES = 400
"""About the graph of a GPT-2 with 4 layers."""
WARM_UP = 20


class RandomPool:
    """Compiling is not what is measured: an artifact is as many random bytes as the input has elements."""

    async def start(self) -> None:
        return

    async def close(self) -> None:
        return

    def ready(self) -> bool:
        return True

    def workers(self) -> list[wire.WorkerInfo]:
        return []

    async def compile(self, request_bytes: bytes, *, key: str, **_: object) -> bytes:
        request = msgspec.msgpack.decode(request_bytes, type=wire.GraphRequest)
        return unsigned(key, int(request.inputs[0].shape[0]))


def graph(size: int) -> wire.GraphRequest:
    nodes = [wire.Node("placeholder", "", [])]
    nodes += [
        wire.Node("call_function", "_operator.add", [wire.Ref(i), wire.Ref(i)]) for i in range(GRAPH_NODES)
    ]
    nodes += [wire.Node("output", "", [wire.TupleArg([wire.Ref(GRAPH_NODES)])])]
    ambient = wire.Ambient(
        grad=True,
        inference=False,
        autocast=[],
        default_dtype="float32",
        matmul_precision="highest",
        deterministic=False,
        deterministic_warn_only=False,
        fill_uninitialized=True,
        threads=1,
        flags=[],
    )
    return wire.GraphRequest(
        schema=wire.SCHEMA,
        graph=wire.Graph(nodes),
        inputs=[wire.TensorInput([size], [1], "float32", "cpu", requires_grad=False)],
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
    manifest = wire.Manifest(
        schema=wire.SCHEMA,
        key=name,
        toolchain=TOOLCHAIN,
        target=TARGET,
        members=[artifact.member("code", member)],
        guards=[],
        stages=[("inductor", 20.0)],
        verification=wire.Verification("passed", "", 0.0, 0.1),
        tuning=[],
        kernels=1,
        created="2026-01-01T00:00:00Z",
        worker="benchmark",
    )
    return artifact.pack(manifest, {"code": member})


@contextlib.contextmanager
def running_gateway(folder: Path, redis_port: int) -> Iterator[str]:
    """The gateway in a process of its own; yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "redis_url": f"redis://127.0.0.1:{redis_port}",
        "state_dir": str(folder / "state"),
        "token": TOKEN,
        "port": port,
        "log_level": "warning",
    }
    process = subprocess.Popen([sys.executable, __file__, "--serve", json.dumps(settings)])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


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


def timed(work: Callable[[], bytes], expected: bytes) -> float:
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
    ways: dict[str, Callable[[], bytes]] = {
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


def run(requests: int) -> dict[str, dict[str, dict[str, float]]]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    results = {}
    with (
        tempfile.TemporaryDirectory(prefix="tr-") as name,
        redis_server(Path(name)) as redis_port,
        running_gateway(Path(name), redis_port) as url,
        httpx2.Client(base_url=url, headers=headers, timeout=30, trust_env=False) as http,
        redis.Redis(port=redis_port) as direct,
    ):
        for label, size in (("50 KB", 50_000), ("1 MB", 1_000_000)):
            request = graph(size)
            body = wire.pack_request(request)
            results[label] = measure(http, direct, key.key_of(request), body, requests)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300, help="of each kind and size")
    parser.add_argument("--out", type=Path, default=Path("out/gateway.json"))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        create_server(ServiceSettings(**json.loads(arguments.serve)), RandomPool()).run()
        return
    results = run(arguments.requests)
    print(f"{'artifact':10} {'way':20} {'median ms':>10} {'p99 ms':>10} {'x redis-py':>10}")
    for label, ways in results.items():
        base = ways["redis-py"]["median_ms"]
        for way, numbers in ways.items():
            ratio = numbers["median_ms"] / base
            print(f"{label:10} {way:20} {numbers['median_ms']:10.2f} {numbers['p99_ms']:10.2f} {ratio:10.1f}")
    record = {"python": platform.python_version(), "cpus": os.cpu_count(), "results": results}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
