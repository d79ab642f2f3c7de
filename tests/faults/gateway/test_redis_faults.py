"""Redis killed, emptied, out of reach or slow, under load through two gateways that reach it by a proxy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from fault_parts import Load, RedisProxy, public_key
from service_parts import ArtifactPool, RedisServer, StartGateway, compiled, follow, graph, post
from waiting import wait_until

BACK_SECONDS = 10.0
SLACK_SECONDS = 5.0
"""On top, for a machine with much else to do."""


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[RedisProxy]:
    made = RedisProxy(redis_server.socket)
    made.start()
    yield made
    made.let_go()
    made.stop()


Fault = Callable[[RedisServer, RedisProxy], Iterator[float]]
"""Yields for how long it lasts, before it goes on."""


def _restart(server: RedisServer, proxy: RedisProxy) -> Iterator[float]:
    server.stop()
    yield 2
    server.start()  # empty


def _empty(server: RedisServer, proxy: RedisProxy) -> Iterator[float]:
    for _ in range(5):
        server.client().flushall()
        yield 0.3


def _black_hole(server: RedisServer, proxy: RedisProxy) -> Iterator[float]:
    proxy.hold()
    yield 4
    proxy.let_go()


def _latency(server: RedisServer, proxy: RedisProxy) -> Iterator[float]:
    proxy.latency = 0.5
    yield 5
    proxy.latency = 0.0


@pytest.mark.parametrize("fault", [_restart, _empty, _black_hole, _latency])
def test_under_load_no_artifact_is_wrong_calls_are_bounded_and_service_comes_back(
    fault: Fault, start_gateway: StartGateway, redis_server: RedisServer, proxy: RedisProxy
) -> None:
    gateways = [
        start_gateway(
            ArtifactPool(seconds=0.2), redis_url=proxy.url, redis_timeout_seconds=1.0, lease_seconds=3.0
        )
        for _ in range(2)
    ]
    clients = [gateway.http() for gateway in gateways]
    bodies: dict[str, bytes] = {}
    for size in range(1, 6):
        body = graph(size)
        bodies[post(clients[0], body).headers["X-Torchrelay-Key"]] = body
    load = Load(clients, bodies, public_key(clients[0]))
    load.start()
    try:
        wait_until(lambda: min(load.served) > 0, seconds=20)
        for seconds in fault(redis_server, proxy):
            time.sleep(seconds)
        over = time.monotonic()
        wait_until(lambda: min(load.served) > over, seconds=BACK_SECONDS + SLACK_SECONDS)
    finally:
        load.stop()
    assert load.wrong == []
    assert load.slowest < 20
    assert {status for status, _ in load.refusals} <= {503, 404}
    print(f"slowest call {load.slowest:.2f} s, {len(load.refusals)} refusals {set(load.refusals)}")
    # Two lives of an artifact at most for each time that Redis was emptied, never two at once.
    with gateways[0].http() as one, gateways[1].http() as two:
        for body in bodies.values():
            assert compiled(one, body) == compiled(two, body)
    for client in clients:
        client.close()


@pytest.mark.parametrize("fault", [_restart, _black_hole])
def test_who_waits_for_a_compile_waits_through_an_outage_of_many_leases(
    fault: Fault, start_gateway: StartGateway, redis_server: RedisServer, proxy: RedisProxy
) -> None:
    pool = ArtifactPool(seconds=6)
    gateway = start_gateway(pool, redis_url=proxy.url, redis_timeout_seconds=0.5, lease_seconds=0.3)
    with gateway.http() as http, ThreadPoolExecutor(1) as threads:
        key = post(http, graph()).json()["key"]
        stream = follow(http, key)
        next(stream)
        rest = threads.submit(list, stream)
        wait_until(lambda: pool.calls, seconds=20)
        for seconds in fault(redis_server, proxy):
            time.sleep(seconds)
        assert rest.result()[-1][1] == "done"


def test_calls_into_a_black_hole_are_answered_after_one_time_out_however_many_they_are(
    start_gateway: StartGateway, proxy: RedisProxy
) -> None:
    gateway = start_gateway(redis_url=proxy.url, redis_timeout_seconds=3.0)
    limits = httpx2.Limits(max_connections=200)
    with gateway.http(limits=limits) as http, ThreadPoolExecutor(150) as threads:
        compiled(http, graph())
        proxy.hold()
        began = time.monotonic()
        asked = [threads.submit(post, http, graph()) for _ in range(150)]
        time.sleep(0.5)
        alive = time.monotonic()
        assert http.get("/livez").status_code == 200
        assert time.monotonic() - alive < 2
        answers = [future.result() for future in asked]
        took = time.monotonic() - began
        assert {(answer.status_code, answer.json()["error"]["code"]) for answer in answers} == {
            (503, "unavailable")
        }
        assert all("Retry-After" in answer.headers for answer in answers)
        print(f"150 calls answered within {took:.2f} s")
        assert took < 9
        proxy.let_go()
        healed = time.monotonic()
        wait_until(lambda: post(http, graph()).status_code == 200, seconds=BACK_SECONDS + SLACK_SECONDS)
        print(f"back after {time.monotonic() - healed:.2f} s")
