"""A thousand requests for one key through two gateways on one Redis: one compile, whatever its clients do."""

from __future__ import annotations

import asyncio
import hashlib

import httpx2
from service_parts import TOKEN, ArtifactPool, RedisServer, Running, StartGateway, follow, graph, post
from torchrelay.compiler.request import codec
from waiting import wait_until

REQUESTS = 1000
HEADERS = {"Authorization": f"Bearer {TOKEN}", "Content-Type": codec.GRAPH_MEDIA_TYPE}


async def _fetch(http: httpx2.AsyncClient, body: bytes) -> bytes:
    answer = await http.post("/v1/compile", content=body)
    if answer.status_code == 202:
        async with http.stream("GET", answer.json()["events"]) as events:
            text = (await events.aread()).decode()
        assert "event: done" in text
        answer = await http.get(answer.json()["artifact"])
    assert answer.status_code == 200
    return hashlib.sha256(answer.content).digest()


def _client(gateway: Running) -> httpx2.AsyncClient:
    limits = httpx2.Limits(max_connections=REQUESTS)
    return httpx2.AsyncClient(
        base_url=gateway.url, headers=HEADERS, timeout=120, limits=limits, trust_env=False
    )


def test_a_thousand_simultaneous_requests_make_one_compile_and_get_one_artifact(
    start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    gateways = [start_gateway(ArtifactPool(seconds=3), lease_seconds=5.0) for _ in range(2)]

    async def everyone() -> set[bytes]:
        async with _client(gateways[0]) as one, _client(gateways[1]) as two:
            work = (_fetch((one, two)[n % 2], graph()) for n in range(REQUESTS))
            return set(await asyncio.gather(*work))

    assert len(asyncio.run(everyone())) == 1
    assert sum(len(gateway.pool.calls) for gateway in gateways) == 1
    with gateways[0].http() as http:
        stats = http.get("/v1/stats").json()
    assert (stats["requests"], stats["misses"], stats["compiles"]) == (REQUESTS, 1, 1)
    assert stats["coalesced"] + stats["hits"] == REQUESTS - 1
    assert (stats["failures"], stats["refused"], stats["overloaded"]) == (0, 0, 0)


def test_clients_of_two_gateways_may_leave_until_the_last_one_has(start_gateway: StartGateway) -> None:
    gateways = [start_gateway(ArtifactPool(seconds=60), abandon_seconds=1) for _ in range(2)]
    with gateways[0].http() as one, gateways[1].http() as two:
        key = gateways[0].queue_for_job(graph())
        streams = [follow(http, key, comments=True) for http in (one, one, two, two)]
        for stream in streams:
            next(stream)
        (pool,) = (gateway.pool for gateway in gateways if gateway.pool.calls)
        for stream in streams[:3]:
            stream.close()
        comments = 0
        for _, stage, _ in streams[3]:  # for longer than abandon_seconds
            comments += stage == "comment"
            if comments == 5:
                break
        assert pool.cancelled == []
        streams[3].close()
        wait_until(lambda: pool.cancelled == [key], seconds=30)


def test_a_jobs_compile_that_one_client_asked_for_outlives_all_of_them(start_gateway: StartGateway) -> None:
    gateways = [start_gateway(ArtifactPool(seconds=6), abandon_seconds=1) for _ in range(2)]
    with gateways[0].http() as one, gateways[1].http() as two:
        key = gateways[0].queue_for_job(graph())
        post(two, graph())
        stream = follow(one, key)
        next(stream)
        stream.close()
        wait_until(lambda: two.get(f"/v1/artifacts/{key}").status_code == 200, seconds=20)
        assert gateways[0].pool.cancelled == gateways[1].pool.cancelled == []
