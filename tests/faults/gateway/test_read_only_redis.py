"""Redis answers, and takes no writes: hits go on, and a miss is refused with the reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from service_parts import (
    TOKEN,
    ArtifactPool,
    RedisServer,
    StartGateway,
    busy_pool,
    client_of,
    compiled,
    follow,
    graph,
    post,
)
from waiting import wait_until


class _Refusal:
    """How writes begin to be refused, and what Redis says then."""

    def __init__(self, code: str, begin: Callable[[RedisServer], None], **end: str) -> None:
        self.code = code
        self.begin = begin
        self._end = end

    def end(self, server: RedisServer) -> None:
        with server.client() as client:
            client.replicaof("NO", "ONE")
            for name, value in self._end.items():
                client.config_set(name.replace("_", "-"), value)


def _demote(server: RedisServer) -> None:
    with server.client() as client:
        client.replicaof("127.0.0.1", "1")  # it follows nobody


def _break_disk(server: RedisServer) -> None:
    (server.folder / "dump").mkdir()
    with server.client() as client:
        client.config_set("save", "3600 1000000")
        client.bgsave()
        wait_until(lambda: client.info()["rdb_last_bgsave_status"] == "err", seconds=20)


REFUSALS = [
    _Refusal("READONLY", _demote),
    _Refusal("MISCONF", _break_disk, stop_writes_on_bgsave_error="no"),
]


@pytest.fixture
def savable() -> Iterator[RedisServer]:
    server = RedisServer(dbfilename="dump")
    server.start()
    yield server
    server.close()


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.code)
def test_a_redis_that_takes_no_writes_serves_hits_and_counts_them_later(
    refusal: _Refusal, savable: RedisServer, start_gateway: StartGateway
) -> None:
    pool = ArtifactPool()
    gateway = start_gateway(pool, redis_url=savable.url)
    with gateway.http() as owner:
        made = owner.post("/v1/tokens", json={"name": "ada", "roles": ["compile"]}).json()
        small = compiled(owner, graph(1))
        pool.member_bytes = 1 << 20
        large = compiled(owner, graph(2))
        before = owner.get("/v1/stats").json()
        for token in (made["token"], TOKEN):
            with client_of(gateway.url, token) as http:
                refusal.begin(savable) if token == made["token"] else None
                assert [post(http, graph(size)).content for size in (1, 2)] == [small, large]
                assert http.get(f"/v1/artifacts/{pool.calls[0]}").content == small
                assert post(http, graph(3), wait="cache").status_code == 404
                missed = post(http, graph(3))
                assert (missed.status_code, "Retry-After" in missed.headers) == (503, True)
                error = missed.json()["error"]
                assert error["code"] == "unavailable"
                assert "Redis takes no writes" in error["message"] and refusal.code in error["message"]
        assert owner.get("/v1/stats").json()["hits"] == before["hits"]
        refusal.end(savable)

        def counted() -> bool:
            with savable.client() as client:  # written in the background, without being asked for
                return int(client.hget("torchrelay:stats", "hits") or 0) == before["hits"] + 4

        wait_until(counted, seconds=20)
        after = owner.get("/v1/stats").json()
        assert {name: after[name] - before[name] for name in ("misses", "fetches", "requests")} == {
            "misses": 2,
            "fetches": 2,
            "requests": 6,
        }
        assert after["bytes_served"] - before["bytes_served"] == 4 * len(small) + 2 * len(large)
        assert compiled(owner, graph(3))


def test_the_least_recently_used_is_by_uses_that_came_while_redis_took_no_writes(
    redis_server: RedisServer, start_gateway: StartGateway
) -> None:
    gateway = start_gateway(cache_limit_bytes=4000)
    with gateway.http() as http:
        first, _ = compiled(http, graph(1)), compiled(http, graph(2))
        _demote(redis_server)
        assert post(http, graph(1)).content == first
        REFUSALS[0].end(redis_server)
        compiled(http, graph(3))
        wait_until(lambda: http.get("/v1/stats").json()["entries"] == 2, seconds=20)
        assert post(http, graph(1), wait="cache").content == first
        assert post(http, graph(2), wait="cache").status_code == 404


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.code)
def test_what_was_compiled_meanwhile_is_published_when_redis_takes_writes_again(
    refusal: _Refusal, savable: RedisServer, start_gateway: StartGateway
) -> None:
    pool = ArtifactPool(seconds=0.5)
    with start_gateway(pool, redis_url=savable.url).http() as http:
        key = post(http, graph(1)).json()["key"]
        wait_until(lambda: pool.calls == [key], seconds=20)
        refusal.begin(savable)
        time.sleep(2)  # it is tried meanwhile
        refusal.end(savable)
        compiled(http, graph(1))
        assert pool.calls == [key]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.code)
def test_who_waits_for_what_nobody_can_take_is_told_so(
    refusal: _Refusal, savable: RedisServer, start_gateway: StartGateway
) -> None:
    pool = busy_pool()
    gateway = start_gateway(pool, redis_url=savable.url)
    with gateway.http() as http, ThreadPoolExecutor(1) as threads:
        key = post(http, graph(1)).json()["key"]
        refusal.begin(savable)
        stream = threads.submit(list, follow(http, key))
        try:
            _, stage, data = stream.result(30)[-1]
            assert (stage, data["error"]["code"]) == ("failed", "unavailable")
        finally:
            refusal.end(savable)
            pool.idle = 1
        assert compiled(http, graph(1))
