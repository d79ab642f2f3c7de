"""Searches for compiles, through a gateway: search workers are warm when a compile asks; all is told and counted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import msgspec
import pytest
from search_parts import SearchPool, of
from service_parts import ArtifactPool, StartGateway, compiled, graph, post
from torchrelay.compiler import decoding
from torchrelay.compiler.request import codec, schema
from torchrelay.compiler.tuning import records
from torchrelay.compiler.tuning.queries import KnownEntries, SearchRequest
from tuning_parts import PLACE
from waiting import wait_until


class SearchingPool(ArtifactPool):
    """Its lanes search, and each compile asks for `problems` until nothing is open."""

    def __init__(self, *problems: records.Problem) -> None:
        super().__init__()
        self.devices = SearchPool()
        self.wanted = list(problems)
        self.heard: list[KnownEntries] = []

    def search_devices(self, *place: Any) -> Any:
        return self.devices.search_devices(*place)

    async def search(self, order: bytes, **rest: Any) -> None:
        await self.devices.search(order, **rest)

    async def compile(self, request_bytes: bytes, **order: Any) -> bytes:
        on_query: Callable[[bytes], Awaitable[bytes]] = order["on_query"]
        known = KnownEntries([], open=1 if self.wanted else 0)
        while known.open:
            await asyncio.sleep(0.02)
            question = msgspec.msgpack.encode(SearchRequest(PLACE, self.wanted))
            known = decoding.from_msgpack(await on_query(question), type=KnownEntries)
            self.heard.append(known)
        return await super().compile(request_bytes, **order)


def tuning_graph(size: int, *, strict: bool = False) -> bytes:
    request = codec.unpack_request(graph(size))
    lock = schema.TuningLock(True, []) if strict else None
    return codec.pack_request(
        msgspec.structs.replace(request, mode="max-autotune-no-cudagraphs", tuning_lock=lock)
    )


def test_a_compiles_problems_are_searched_and_the_next_ones_are_known(start_gateway: StartGateway) -> None:
    pool = SearchingPool(of(1), of(2), of(3, unfit="nobody can"))
    running = start_gateway(pool)
    with running.http() as http:
        compiled(http, tuning_graph(1))
        first, last = pool.heard[0], pool.heard[-1]
        assert (first.entries, first.open) == ([], 3)
        assert sorted(entry.problem.text() for entry in last.entries) == [of(1).text(), of(2).text()]
        assert last.given_up == [of(3, unfit="nobody can")]
        pool.heard, began = [], len(pool.devices.began)
        compiled(http, tuning_graph(2))
        assert len(pool.heard) == 1
        assert len(pool.devices.began) == began
        assert _sample(http, 'torchrelay_searches_total{outcome="found"}') == 2.0
        assert _sample(http, 'torchrelay_searches_total{outcome="unfit"}') == 1.0
        assert _sample(http, "torchrelay_searchers") == 2.0


@pytest.mark.parametrize(
    ("body", "starts"),
    [(tuning_graph(1), 2), (tuning_graph(1, strict=True), 0), (graph(1), 0)],
    ids=["tunes", "under a strict lock", "does not tune"],
)
def test_searchers_are_warmed_for_what_tunes(body: bytes, starts: int, start_gateway: StartGateway) -> None:
    pool = SearchingPool()
    pool.seconds = 1.0
    with start_gateway(pool).http() as http:
        compiled(http, body)
        assert pool.devices.starts == starts


def test_a_gateway_that_stops_leaves_no_searcher(start_gateway: StartGateway) -> None:
    pool = SearchingPool(of(1, hold="yes"))
    running = start_gateway(pool)
    with running.http() as http:
        post(http, tuning_graph(1))
        wait_until(lambda: bool(pool.devices.began), seconds=20)
    running.stop()
    assert pool.devices.searching == {}


def _sample(http: httpx2.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + " ")), 0.0)
