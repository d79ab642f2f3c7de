"""Ranks that ask for graphs that nobody has compiled: how long until each is accepted, and what is done only once.

Every rank sends the same graphs, one after the other, with a pause as Dynamo makes it while it traces the next; and, in
a run of its own, each as soon as the one before was accepted. Their compiles run meanwhile.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import gateway
import msgspec
import redis
from support.scale_load import Asking, ask
from support.scale_rows import Row, at_most, exponent
from support.scale_service import Service, cpu_seconds, key_of, running_service
from torchrelay.compiler.request import codec, schema

GRAPHS = 30
RANKS = (250, 500, 1000)
CONSTANT_BYTES = 16_000
"""With them a body has about 18 kB, as that of a transformer of 12 layers; random bytes do not get smaller."""
COMPILE_SECONDS = 2.0
PAUSE_SECONDS = 2.0
SLOTS = 8
_PARSES = re.compile(r"^torchrelay_request_parses_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


def body_of(number: int) -> bytes:
    """The request of a graph of some hundred nodes with a constant; another number is another graph."""
    graph = gateway.graph(100 + number)
    constant = schema.Constant("uint8", [CONSTANT_BYTES], "cpu", os.urandom(CONSTANT_BYTES))
    nodes = [graph.graph.nodes[0], schema.Node("get_attr", "", [schema.Const(0)]), *graph.graph.nodes[1:]]
    # all but the input stand one place later
    nodes[2:-1] = [
        schema.Node("call_function", "_operator.add", [schema.Ref(max(i, 0)), schema.Ref(max(i, 0))])
        for i in (0, *range(2, len(nodes) - 2))
    ]
    nodes[-1] = schema.Node("output", "", [schema.TupleArg([schema.Ref(len(nodes) - 2), schema.Ref(1)])])
    return codec.pack_request(msgspec.structs.replace(graph, graph=schema.Graph(nodes), constants=[constant]))


class RedisTraffic:
    """What MONITOR shows. bodies: how often a client sent Redis more than `size` bytes in one command; what a script
    does inside Redis is not counted. leases: how often each compile was leased."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.bodies = 0
        self.leases: Counter[bytes] = Counter()

    @contextmanager
    def counted(self, port: int) -> Iterator[None]:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"MONITOR\r\n")
            thread = threading.Thread(target=self._count, args=(connection.makefile("rb"),))
            thread.start()
            try:
                yield
            finally:
                with redis.Redis(port=port) as client:
                    client.echo("the benchmark ends")
                thread.join(60)
                connection.shutdown(socket.SHUT_RDWR)

    def _count(self, lines: Iterator[bytes]) -> None:
        for line in lines:
            if b'"the benchmark ends"' in line:
                return
            inside = b" lua] " in line[:60]
            self.bodies += len(line) > self._size and not inside
            if inside and line.endswith(b'"leases" "1"\r\n'):
                self.leases[line.split()[4]] += 1


def rows(
    ranks: Sequence[int] = RANKS,
    *,
    graphs: int = GRAPHS,
    compile_seconds: float = COMPILE_SECONDS,
    pause_seconds: float = PAUSE_SECONDS,
) -> list[Row]:
    paused = [_measure(count, graphs, compile_seconds, pause_seconds) for count in ranks]
    hurried = [_measure(count, graphs, compile_seconds, 0.0) for count in ranks]
    what = f"{ranks[-1]:,} ranks, {graphs} new graphs each"

    def grows(values: Sequence[float]) -> str:
        if len(ranks) == 1:
            return ""
        return f"ranks^{exponent(ranks, values):.2f}, {ranks[0]:,} to {ranks[-1]:,}"

    p99s, hurried_p99s = [each.p99 for each in paused], [each.p99 for each in hurried]
    costs = [each.milliseconds for each in paused]
    name = f"{what}, {pause_seconds:g} s apart: until accepted, p99"
    return [
        at_most(name, p99s[-1], "s", 2, grows(p99s)),
        Row(f"{what}: gateways' processor time of a request", costs[-1], "ms", law=grows(costs)),
        at_most(
            f"{what}, as fast as accepted: until accepted, p99", hurried_p99s[-1], "s", 2, grows(hurried_p99s)
        ),
        Row(f"{what}, as fast as accepted", hurried[-1].per_second, "a second"),
        at_most(f"{what}: parses of a graph by a gateway", hurried[-1].parses, "", 1),
        at_most(f"{what}: compiles of a graph, the most", hurried[-1].compiles, "", 1),
        *_traffic_rows(ranks[0], graphs, compile_seconds),
    ]


class _Measured(NamedTuple):
    p99: float
    milliseconds: float
    per_second: float
    parses: float
    compiles: int


def _measure(ranks: int, graphs: int, compile_seconds: float, pause_seconds: float) -> _Measured:
    bodies = [body_of(number) for number in range(graphs)]
    with _service(compile_seconds) as service:
        parsed, stored = _parses(service), service.entries()
        cpu = cpu_seconds(service.gateways)
        posts = [service.post(body) for body in bodies]
        answers = ask(Asking(service.port, posts, ranks, pause_seconds=pause_seconds))
        cpu = cpu_seconds(service.gateways) - cpu
        service.wait_for_entries(stored + graphs)
        assert set(answers.statuses) <= {200, 202}, answers.statuses
        compiles = service.compiles()
        return _Measured(
            answers.p99,
            1000 * cpu / answers.count,
            answers.count / answers.wall,
            (_parses(service) - parsed) / graphs / len(service.gateways),
            max(compiles[key_of(body)] for body in bodies),
        )


def _traffic_rows(ranks: int, graphs: int, compile_seconds: float) -> list[Row]:
    """Of a run of its own: MONITOR costs Redis and this process more than the requests do."""
    bodies = [body_of(number) for number in range(graphs)]
    traffic = RedisTraffic(min(map(len, bodies)))
    with _service(compile_seconds, gateways=3, dispatchers=2) as service:
        parsed, stored = _parses(service), service.entries()
        with traffic.counted(service.redis_port):
            answers = ask(Asking(service.port, [service.post(body) for body in bodies], ranks))
            service.wait_for_entries(stored + graphs)
        assert set(answers.statuses) <= {200, 202}, answers.statuses
        parses = (_parses(service) - parsed) / graphs / len(service.gateways)
        compiles = service.compiles()
    assert len(traffic.leases) == graphs
    what = f"{ranks:,} ranks, {graphs} new graphs each, 3 gateways, 2 dispatchers"
    return [
        at_most(f"{what}: parses of a graph by a gateway", parses, "", 1),
        at_most(f"{what}: compiles of a graph, the most", max(compiles.values()), "", 1),
        at_most(f"{what}: leases of a graph, the most", max(traffic.leases.values()), "", 1),
        at_most(f"{what}: times a body crosses to Redis", traffic.bodies / graphs, "", 1),
    ]


@contextmanager
def _service(compile_seconds: float, *, gateways: int = 2, dispatchers: int = 1) -> Iterator[Service]:
    with (
        tempfile.TemporaryDirectory(prefix="tr-") as name,
        running_service(
            Path(name),
            gateways=gateways,
            dispatchers=dispatchers,
            slots=SLOTS,
            compile_seconds=compile_seconds,
        ) as service,
    ):
        yield service


def _parses(service: Service) -> float:
    """By all gateways, of any request."""
    found = _PARSES.search(service.metrics())
    assert found is not None
    return float(found[1])
