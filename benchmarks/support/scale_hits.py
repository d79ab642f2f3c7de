"""Hits a second of a core, from an edge (deploy/edge/nginx.conf) and from gateways, beside redis-py that reads the same
bytes from the same Redis, and nginx that serves them from a file.

Compared are requests for each second of processor time, user and system, of all processes that serve, in rounds that
alternate: for the edge its own, the gateways' and Redis', also what they do while nobody asks them. Redis' time is
counted on both sides, and redis-py's own process is what serves there. The others are asked by wrk, which is faster
than they are, so that they are busy; it is not counted.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import gateway
import redis
from support.local_redis import free_port
from support.scale_rows import Row, at_least, exponent
from support.scale_service import Service, cpu_seconds, key_of, leaves, running_service
from torchrelay.compiler.request import codec

SIZES = {"20 kB": 20_000, "200 kB": 200_000, "1 MB": 1_000_000}
BARRED = ("20 kB", "1 MB")
ROUNDS = 3
SECONDS = 11
"""Of a round. The edge's answers count for 5: it asks gateways again in each round."""
CONNECTIONS = 32
_EDGE = Path(__file__).parents[2] / "deploy" / "edge" / "nginx.conf"
# With tcp_nopush small files take less of a processor, and large ones more: the better of both is what counts.
_NGINX = """
pid {folder}/nginx.pid; error_log {folder}/nginx.log; worker_processes auto;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; keepalive_requests 1000000000; root {folder}/served;
  client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  server {{ listen 127.0.0.1:{ports[0]}; tcp_nopush on; }}
  server {{ listen 127.0.0.1:{ports[1]}; tcp_nopush off; }}
}}
"""
_WRK = """
wrk.format = function() return io.open("REQUEST", "rb"):read("*a") end
done = function(summary)
  local e = summary.errors
  local failed = e.connect + e.read + e.write + e.status + e.timeout
  print(string.format("%.0f %.0f %.0f", summary.requests, summary.bytes, failed))
end
"""


class NotInstalled(Exception):
    """A program that this measures or measures with."""


@dataclass
class Way:
    """A way of getting the same bytes. ask: gets them for a round; how often. pids: of all processes that serve.

    per_core: answers for each second of these processes, a value for each round. cpu: their seconds in all rounds."""

    ask: Callable[[], int]
    pids: Sequence[int]
    per_core: list[float] = field(default_factory=list)
    answers: int = 0
    cpu: dict[int, float] = field(default_factory=dict)
    wall: float = 0.0

    def round(self) -> None:
        before, began = {pid: cpu_seconds([pid]) for pid in self.pids}, time.perf_counter()
        answers = self.ask()
        self.wall += time.perf_counter() - began
        spent = {pid: cpu_seconds([pid]) - seconds for pid, seconds in before.items()}
        self.cpu = {pid: self.cpu.get(pid, 0.0) + seconds for pid, seconds in spent.items()}
        self.answers += answers
        self.per_core.append(answers / max(sum(spent.values()), 1e-9))

    def of_all(self, pid: int) -> float:
        """A process' part of the seconds."""
        return self.cpu[pid] / max(sum(self.cpu.values()), 1e-9)


def _binary(name: str) -> str:
    fetched = f"{sys.prefix}/nginx/usr"
    found = shutil.which(
        name, path=f"/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin:{fetched}/sbin:{fetched}/bin"
    )
    if found is None:
        raise NotInstalled(f"hits are measured with {name}, which is not installed; --parts leaves them out")
    return found


def can_be_measured() -> bool:
    try:
        return bool(_binary("wrk") and _binary("nginx"))
    except NotInstalled:
        return False


@contextlib.contextmanager
def _nginx(folder: Path, text: str) -> Iterator[tuple[int, ...]]:
    """An nginx with this configuration: its processes' ids."""
    (folder / "nginx.conf").write_text(text)
    user = " user root;" if os.geteuid() == 0 else ""
    command = [_binary("nginx"), "-p", str(folder), "-c", "nginx.conf", "-g", f"daemon off;{user}"]
    started = subprocess.Popen(command)
    try:
        time.sleep(1)
        yield tuple(pid for pid in leaves(started.pid) if "cache loader" not in _title(pid))  # which ends
    finally:
        started.terminate()
        started.wait()


def _title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def _edge(folder: Path, port: int, gateways: int) -> str:
    """The shipped configuration, with other ports and another folder."""
    text = _EDGE.read_text().replace("/var/cache/torchrelay", str(folder))
    text, count = re.subn("server gateway:8642", f"server 127.0.0.1:{gateways}", text)
    text, places = re.subn("listen 8640", f"listen 127.0.0.1:{port}", text)
    assert count == places == 1
    return text


def _ask_with_wrk(port: int, request: bytes, size: int, seconds: int) -> int:
    """One thread on 32 connections sends a whole request's bytes again and again: how many answers it got, all of them
    good and with this many bytes."""
    with tempfile.TemporaryDirectory(prefix="tr-") as name:
        (Path(name) / "request").write_bytes(request)
        (Path(name) / "wrk.lua").write_text(_WRK.replace("REQUEST", f"{name}/request"))
        command = [_binary("wrk"), "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "--timeout=30s"]
        command += ["-s", f"{name}/wrk.lua", f"http://127.0.0.1:{port}"]
        libraries = ":".join(str(path.parent) for path in Path(sys.prefix).glob("nginx/usr/lib/*/libluajit*"))
        environment = {**os.environ, "LD_LIBRARY_PATH": libraries} if libraries else None
        said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    answers, received, failed = map(int, said.splitlines()[-1].split())
    assert not failed and received >= answers * size > 0, said
    return answers


def _ask_with_redis_py(port: int, name: str, size: int, seconds: int) -> int:
    count, until = 0, time.perf_counter() + seconds
    with redis.Redis(port=port) as client:
        while time.perf_counter() < until:
            assert len(client.get(name)) == size
            count += 1
    return count


def rows(sizes: dict[str, int] = SIZES, *, seconds: int = SECONDS, rounds: int = ROUNDS) -> list[Row]:
    """seconds: of each round. Raises NotInstalled."""
    for program in ("wrk", "nginx"):
        _binary(program)
    with (
        tempfile.TemporaryDirectory(prefix="tr-") as name,
        running_service(Path(name)) as service,
        tempfile.TemporaryDirectory(prefix="tr-edge-", dir="/dev/shm") as memory,
        multiprocessing.get_context("spawn").Pool(1) as reader,
    ):
        bodies = {label: codec.pack_request(gateway.graph(size)) for label, size in sizes.items()}
        service.compile(*bodies.values())
        ports = (free_port(), free_port(), free_port())
        (service.folder / "served").mkdir()
        reader_pid: int = reader.apply(os.getpid)
        with (
            _nginx(service.folder, _NGINX.format(folder=service.folder, ports=ports)) as plain,
            _nginx(Path(memory), _edge(Path(memory), ports[2], service.port)) as edge,
            redis.Redis(port=service.redis_port) as direct,
        ):

            def ways(body: bytes) -> dict[str, Way]:
                """All give the bytes of this graph's artifact."""
                key = key_of(body)
                data = service.artifact(key)
                (service.folder / "served" / key).write_bytes(data)
                direct.set(f"direct {key}", data)
                get, behind = service.fetch(key), (*service.gateways, service.redis_pid)
                file = get.replace(b"/v1/artifacts/", b"/")

                def wrk(port: int, request: bytes, pids: Sequence[int]) -> Way:
                    return Way(lambda: _ask_with_wrk(port, request, len(data), seconds), pids)

                arguments = (service.redis_port, f"direct {key}", len(data), seconds)
                return {
                    "POST": wrk(service.port, service.post(body), behind),
                    "GET": wrk(service.port, get, behind),
                    "redis-py": Way(
                        lambda: reader.apply(_ask_with_redis_py, arguments), (reader_pid, service.redis_pid)
                    ),
                    "edge": wrk(ports[2], get, (*edge, *behind)),
                    "nginx": wrk(ports[0], file, plain),
                    "nginx, tcp_nopush off": wrk(ports[1], file, plain),
                }

            measured = {label: ways(body) for label, body in bodies.items()}
            for _ in range(rounds):
                for each in measured.values():
                    for way in each.values():
                        way.round()
    return [row for label in sizes for row in _rows(label, sizes, measured, service)]


def _rows(
    label: str, sizes: dict[str, int], measured: dict[str, dict[str, Way]], service: Service
) -> Iterator[Row]:
    ways = measured[label]
    for name, way in ways.items():
        law = _spread(way.per_core)
        if name == "POST" and len(sizes) > 1 and label == next(iter(sizes)):
            costs = [1 / median(measured[each]["POST"].per_core) for each in sizes]
            law += f", seconds ~ bytes^{exponent(list(sizes.values()), costs):.2f}"
        yield Row(f"hits, {label}, {name}", median(way.per_core), "a core and second", law=law)
    post, edge = ways["POST"], ways["edge"]
    yield Row(f"hits, {label}, POST, all cores", post.answers / post.wall, "a second")
    busy = [post.cpu[pid] for pid in service.gateways]
    yield Row(f"hits, {label}, POST, the busier gateway's part", max(busy) / max(sum(busy), 1e-9), "of 1")
    yield Row(f"hits, {label}, POST, Redis' part", post.of_all(service.redis_pid), "of 1")
    behind = sum(edge.of_all(pid) for pid in (*service.gateways, service.redis_pid))
    yield Row(f"hits, {label}, edge, gateways' and Redis' part", behind, "of 1")
    nginx = max((ways["nginx"], ways["nginx, tcp_nopush off"]), key=lambda way: median(way.per_core))
    for other, way, bar in (("redis-py", ways["redis-py"], 1.5), ("nginx", nginx, 0.5)):
        for name in ("POST", "edge"):
            ratios = [a / b for a, b in zip(ways[name].per_core, way.per_core, strict=True)]
            what, value, law = f"hits, {label}, {name} / {other}", median(ratios), _spread(ratios)
            barred = name == "edge" and label in BARRED
            yield at_least(what, value, "x", bar, law) if barred else Row(what, value, "x", law=law)


def _spread(values: Sequence[float]) -> str:
    return f"rounds {min(values):.4g} to {max(values):.4g}"
