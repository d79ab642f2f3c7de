"""Quotas and rates: what a namespace or a token may use, what happens past it, and that others keep their share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from service_parts import (
    ArtifactPool,
    RedisServer,
    Running,
    StartGateway,
    client_of,
    compiled,
    follow,
    graph,
    post,
)
from torchrelay.compiler.errors import CompileKilled
from waiting import wait_until


class Site:
    """A gateway, its owner's client, and clients of namespaces."""

    def __init__(self, gateway: Running) -> None:
        self.gateway = gateway
        self.pool = gateway.pool
        self.owner = gateway.http()
        self._opened = [self.owner]

    def tenant(self, namespace: str, **more: Any) -> httpx2.Client:
        body = {"name": "ada", "roles": ["compile"], "namespace": namespace, **more}
        made = self.owner.post("/v1/tokens", json=body)
        assert made.status_code == 201, made.text
        self._opened.append(client_of(self.gateway.url, made.json()["token"]))
        return self._opened[-1]

    def allow(self, namespace: str, **quota: float | None) -> dict[str, Any]:
        answer = self.owner.patch(f"/v1/namespaces/{namespace}", json=quota)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def close(self) -> None:
        for client in self._opened:
            client.close()


@pytest.fixture
def site(start_gateway: StartGateway) -> Iterator[Any]:
    opened: list[Site] = []

    def start(pool: ArtifactPool | None = None, **changes: Any) -> Site:
        opened.append(Site(start_gateway(pool, **changes)))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def _refused(answer: httpx2.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    assert error["hint"] and int(answer.headers["Retry-After"]) >= 1
    return answer.status_code, error["code"]


def _ends(http: httpx2.Client, answer: httpx2.Response) -> str:
    *_, (_, stage, _) = follow(http, answer.json()["key"])
    return stage


# --- compiles at once ------------------------------------------------------------------------------------


def test_a_namespace_compiles_no_more_at_once_than_its_quota(site: Any) -> None:
    here = site(ArtifactPool(seconds=60), namespace_compiles=1)
    red, blue = here.tenant("red"), here.tenant("blue")
    here.allow("red", compiles=2)
    assert [post(red, graph(size)).status_code for size in (1, 2)] == [202, 202]
    assert _refused(post(red, graph(3))) == (429, "over_quota")
    assert post(red, graph(2)).status_code == 202  # joins what runs
    assert post(blue, graph(3)).status_code == 202
    assert _refused(post(blue, graph(4))) == (429, "over_quota")  # the settings' quota
    assert red.get("/v1/stats").json()["over_quota"] == 1
    here.allow("red", compiles=0)
    assert post(red, graph(3)).status_code == 202
    assert here.allow("red", compiles=None)["quota"]["compiles"] == 1
    assert _refused(post(red, graph(5))) == (429, "over_quota")


def test_at_overload_every_namespace_finds_a_place(site: Any) -> None:
    here = site(ArtifactPool(seconds=60), max_queued=12)
    red, blue, green = (here.tenant(name) for name in ("red", "blue", "green"))

    def flood(http: httpx2.Client) -> int:
        statuses = [post(http, graph(size)).status_code for size in range(1, 14)]
        return statuses.count(202)

    first, refusal = flood(red), post(red, graph(20))
    assert _refused(refusal) == (429, "overloaded")
    assert "share" in refusal.json()["error"]["message"]
    assert (first, flood(blue), flood(green)) == (8, 3, 1)  # no more than twice what is free
    assert "the most that may" in post(green, graph(20)).json()["error"]["message"]


def test_a_service_with_one_namespace_uses_its_whole_queue(site: Any) -> None:
    here = site(ArtifactPool(seconds=60), max_queued=6)
    statuses = [post(here.owner, graph(size)).status_code for size in range(1, 9)]
    assert statuses == [202] * 6 + [429] * 2


# --- compile seconds -------------------------------------------------------------------------------------


def test_a_namespace_that_spent_its_seconds_waits_for_the_next_period(site: Any) -> None:
    here = site(ArtifactPool(seconds=0.3), quota_period_seconds=4, namespace_compile_seconds=0.2)
    red, blue = here.tenant("red"), here.tenant("blue")
    compiled(red, graph(1))
    wait_until(lambda: red.get("/v1/stats").json()["seconds_spent"] >= 0.3, seconds=30)
    answer = post(red, graph(2))
    if answer.status_code != 202:  # a machine that stalled for the whole period is in the next one
        assert _refused(answer) == (429, "over_quota")
        assert int(answer.headers["Retry-After"]) <= 4
    assert post(red, graph(1)).status_code == 200  # a hit costs nothing
    compiled(blue, graph(2))
    wait_until(lambda: post(red, graph(2)).status_code in (200, 202), seconds=20)


def test_failed_compiles_cost_their_seconds_too(site: Any) -> None:
    here = site(ArtifactPool(seconds=0.2))
    red = here.tenant("red")
    here.pool.errors = [CompileKilled("out of memory"), CompileKilled("out of memory")]
    assert _ends(red, post(red, graph())) == "failed"
    wait_until(lambda: red.get("/v1/stats").json()["seconds_spent"] >= 0.4, seconds=30)
    (seen,) = red.get("/v1/namespaces").json()
    assert seen["compile_seconds"] >= 0.4
    assert 0 < seen["period_ends_seconds"] <= 86400


def test_waiting_for_a_worker_costs_nothing(site: Any) -> None:
    class Queue(ArtifactPool):
        async def compile(self, request_bytes: bytes, **order: Any) -> bytes:
            order["on_progress"]("queued", "3 ahead of it in the worker queue")
            raise CompileKilled("no worker came")

    here = site(Queue())
    red = here.tenant("red")
    assert _ends(red, post(red, graph())) == "failed"
    assert red.get("/v1/stats").json()["seconds_spent"] == 0


# --- bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inline_bytes", [0, 1 << 20], ids=["in the store", "in Redis"])
def test_a_namespace_over_its_bytes_evicts_its_own_least_recently_used(
    inline_bytes: int, site: Any, redis_server: RedisServer
) -> None:
    here = site(ArtifactPool(member_bytes=10_000), blob_inline_bytes=inline_bytes)
    red, blue = here.tenant("red"), here.tenant("blue")
    here.allow("red", bytes=25_000)
    for size in (1, 2):
        compiled(red, graph(size))
    for size in (1, 2, 3, 4):
        compiled(blue, graph(size))
    assert post(red, graph(1)).status_code == 200  # 2 is the least recently used now
    compiled(red, graph(3))
    wait_until(lambda: red.get("/v1/stats").json()["entries"] == 2, seconds=30)
    assert [post(red, graph(size), wait="cache").status_code for size in (1, 2, 3)] == [200, 404, 200]
    assert all(post(blue, graph(size)).status_code == 200 for size in (1, 2, 3, 4))
    (of_blue, of_default, of_red) = here.owner.get("/v1/namespaces").json()
    assert (of_blue["artifacts"], of_default["artifacts"], of_red["artifacts"]) == (4, 0, 2)
    assert of_red["bytes"] <= 25_000 < of_blue["bytes"]
    blobs = [
        path
        for path in (here.gateway.settings.state_dir / "blobs").rglob("*")
        if path.is_file() and path.name != "installation"
    ]
    in_redis = redis_server.client().keys("torchrelay:*blob:*")
    wait_until(lambda: len(_files(here.gateway)) + len(in_redis) == 6, seconds=30)
    assert bool(blobs) is (inline_bytes == 0)


def _files(gateway: Running) -> list[Any]:
    return [
        path
        for path in (gateway.settings.state_dir / "blobs").rglob("*")
        if path.is_file() and path.name != "installation"
    ]


def _cached(http: httpx2.Client, sizes: range) -> list[bool]:
    return [post(http, graph(size), wait="cache").status_code == 200 for size in sizes]


def test_the_whole_cache_evicts_the_least_recently_used_of_who_holds_the_most(site: Any) -> None:
    here = site(ArtifactPool(member_bytes=10_000), cache_limit_bytes=45_000, blob_inline_bytes=0)
    red, blue = here.tenant("red"), here.tenant("blue")
    compiled(blue, graph(1))
    for size in (1, 2, 3):
        compiled(red, graph(size))
    # 2 is red's least recently used now, though blue's is older
    assert post(red, graph(1)).status_code == 200
    compiled(blue, graph(2))
    wait_until(lambda: here.owner.get("/v1/stats").json()["entries"] == 4, seconds=30)
    assert _cached(red, range(1, 4)) == [True, False, True]
    assert _cached(blue, range(1, 3)) == [True, True]
    assert red.get("/v1/stats").json()["evictions"] == 1
    wait_until(lambda: len(_files(here.gateway)) == 4, seconds=30)


def test_a_namespace_that_floods_the_cache_evicts_its_own(site: Any) -> None:
    here = site(ArtifactPool(member_bytes=10_000), cache_limit_bytes=65_000)
    red, blue = here.tenant("red"), here.tenant("blue")
    here.allow("red", bytes=40_000)
    for size in (1, 2):
        compiled(red, graph(size))  # never used again
    for size in range(1, 11):
        compiled(blue, graph(size))
    wait_until(lambda: here.owner.get("/v1/stats").json()["entries"] == 6, seconds=30)
    assert _cached(red, range(1, 3)) == [True, True]
    assert _cached(blue, range(1, 11)) == [False] * 6 + [True] * 4
    assert red.get("/v1/stats").json()["evictions"] == 0


def test_what_was_just_published_stays_though_its_namespace_holds_the_most(site: Any) -> None:
    here = site(ArtifactPool(member_bytes=10_000), cache_limit_bytes=45_000)
    red, blue = here.tenant("red"), here.tenant("blue")
    for size in (1, 2, 3):
        compiled(red, graph(size))
    here.pool.member_bytes = 40_000
    compiled(blue, graph(1))  # fetched by who waited for it
    wait_until(lambda: here.owner.get("/v1/stats").json()["entries"] == 1, seconds=30)
    assert _cached(blue, range(1, 2)) == [True]


# --- who sets them ---------------------------------------------------------------------------------------


def test_only_an_administrator_of_all_sets_a_quota(site: Any) -> None:
    here = site()
    red = here.tenant("red", roles=["admin"])
    assert red.patch("/v1/namespaces/red", json={"bytes": 0}).status_code == 403
    assert red.get("/v1/namespaces/blue").status_code == 403
    assert [found["name"] for found in red.get("/v1/namespaces").json()] == ["red"]
    for bad in ({"bytes": -1}, {"bytes": 1 << 60}, {"compiles": 1.5}, {"compiles": "4"}, {"other": 1}, []):
        assert here.owner.patch("/v1/namespaces/red", json=bad).status_code == 422, bad
    assert here.owner.patch("/v1/namespaces/Red", json={}).status_code == 422
    made = here.allow("new", bytes=10, compiles=3)
    assert made["own"] == {"bytes": 10, "compiles": 3}
    assert here.allow("new", compiles=None)["own"] == {"bytes": 10}
    assert here.owner.get("/v1/namespaces/new").json()["quota"] == {
        "compiles": 0,
        "compile_seconds": 0.0,
        "bytes": 10,
    }
    (last, *_) = here.owner.get("/v1/audit?namespace=new").json()["entries"]
    assert (last["action"], last["detail"]) == ("quota_changed", "compiles default")


# --- rates -----------------------------------------------------------------------------------------------


def test_a_token_that_asks_too_often_is_told_when_to_come_back(site: Any) -> None:
    here = site(token_burst_seconds=1)
    slow, other = here.tenant("red", rate=4), here.tenant("red")
    compiled(here.owner, graph())
    answers = [slow.get("/v1/stats") for _ in range(30)]
    good = [answer for answer in answers if answer.status_code == 200]
    assert 4 <= len(good) < 30
    assert _refused(next(answer for answer in answers if answer.status_code != 200)) == (429, "rate_limited")
    assert [other.get("/v1/stats").status_code for _ in range(10)] == [200] * 10
    assert other.get("/v1/stats").json()["rate_limited"] == 30 - len(good)
    wait_until(lambda: slow.get("/v1/stats").status_code == 200, seconds=10)


def test_the_owner_is_not_slowed_down_and_a_rate_of_0_is_none(site: Any) -> None:
    here = site(token_requests_per_second=1, token_burst_seconds=1)
    free, usual = here.tenant("red", rate=0), here.tenant("red")
    for http in (here.owner, free):
        assert [http.get("/v1/info").status_code for _ in range(8)] == [200] * 8
    assert 429 in [usual.get("/v1/info").status_code for _ in range(8)]


def test_an_administrator_of_one_namespace_gives_no_higher_rate_than_the_settings(site: Any) -> None:
    here = site(token_requests_per_second=50)
    red = here.tenant("red", roles=["admin"])

    def status(rate: float | None) -> int:
        return red.post("/v1/tokens", json={"name": "x", "roles": ["read"], "rate": rate}).status_code

    assert [status(rate) for rate in (None, 10, 50, 51, 0)] == [201, 201, 201, 403, 403]


def test_a_hit_still_takes_two_round_trips(site: Any, redis_server: RedisServer) -> None:
    """The token with its rate, and the lookup: neither namespaces nor rates cost one more."""
    here = site()
    red = here.tenant("red")
    compiled(red, graph())
    redis = redis_server.client()
    time.sleep(0.2)

    def calls() -> int:
        found = redis.info("commandstats")
        return sum(found.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval"))

    before = calls()
    for _ in range(10):
        assert post(red, graph()).status_code == 200
    assert calls() - before == 20
