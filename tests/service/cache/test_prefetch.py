"""What a script used is remembered by the names it gives itself, offered while it is there, and bounded."""

from __future__ import annotations

import httpx2
import pytest
from service_parts import RedisServer, Running, compiled, graph
from torchrelay.service.cache import script_history

SCRIPT, OTHER = "1" * 64, "2" * 64


def tell(http: httpx2.Client, keys: list[str], **more: object) -> int:
    return http.post("/v1/prefetch", json={"scripts": [SCRIPT], "keys": keys, **more}).status_code


def recall(http: httpx2.Client, script: str = SCRIPT) -> list[str]:
    return [entry["key"] for entry in http.get(f"/v1/prefetch/{script}").json()["artifacts"]]


def make(gateway: Running, http: httpx2.Client, count: int) -> list[str]:
    for size in range(1, count + 1):
        compiled(http, graph(size))
    return gateway.pool.calls[-count:]


def test_the_next_start_is_told_what_is_still_there_in_order_of_use(
    gateway: Running, http: httpx2.Client
) -> None:
    one, two, three = make(gateway, http, 3)
    assert recall(http) == []
    assert tell(http, [two, one, "ee" * 32]) == 204
    assert recall(http) == [two, one]
    tell(http, [three])
    assert recall(http) == [three, two, one]
    tell(http, [one])
    assert recall(http) == [one, three, two]
    assert recall(http, OTHER) == []
    http.post("/v1/prefetch", json={"scripts": [OTHER, SCRIPT], "keys": [two]})
    assert recall(http, OTHER) == [two]
    (entry,) = http.get(f"/v1/prefetch/{OTHER}").json()["artifacts"]
    assert entry["size"] == len(http.get(f"/v1/artifacts/{two}").content)
    assert http.delete(f"/v1/cache/{two}").status_code < 300
    assert recall(http, OTHER) == []


def test_what_was_prefetched_counts_as_hits_when_it_was_used(gateway: Running, http: httpx2.Client) -> None:
    one, two = make(gateway, http, 2)
    before = http.get("/v1/stats").json()
    tell(http, [one, two], prefetched=[one, "ee" * 32])
    after = http.get("/v1/stats").json()
    assert [after[name] - before[name] for name in ("requests", "hits", "misses")] == [1, 1, 0]
    assert after["seconds_saved"] - before["seconds_saved"] == pytest.approx(3.0)


def test_an_artifact_counts_once_and_only_where_the_script_used_it(
    gateway: Running, http: httpx2.Client, redis_server: RedisServer
) -> None:
    one, two, three = make(gateway, http, 3)
    with redis_server.client() as redis:
        redis.hset(f"torchrelay:index:{two}", "seconds", "nan")
    before = http.get("/v1/stats").json()
    assert tell(http, [one, two], prefetched=[one, one, two, *[three] * 200]) == 204
    after = http.get("/v1/stats").json()
    assert after["hits"] - before["hits"] == 2
    assert after["seconds_saved"] - before["seconds_saved"] == pytest.approx(3.0)


def test_what_is_kept_is_bounded(
    http: httpx2.Client, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_history, "KEYS", 3)
    monkeypatch.setattr(script_history, "SCRIPTS", 2)
    tell(http, [f"{n:064x}" for n in range(5)])
    redis = redis_server.client()
    (name,) = [name for name in redis.keys("*script*") if SCRIPT.encode() in name]
    assert redis.zrange(name, 0, -1) == [f"{n:064x}".encode() for n in (2, 3, 4)]
    assert redis.ttl(name) > 0
    for script in ("3" * 64, "4" * 64):
        http.post("/v1/prefetch", json={"scripts": [script], "keys": ["ab" * 32]})
    assert not redis.exists(name)


def sizes(http: httpx2.Client, script: str = SCRIPT) -> set[str]:
    return set(http.get(f"/v1/prefetch/{script}").json()["varied"])


def test_sizes_that_vary_are_those_of_all_runs_until_one_takes_them_back(http: httpx2.Client) -> None:
    one, two, three = (f"{n:064x}" for n in range(3))
    tell(http, [], varied=[one, two])
    tell(http, [], varied=[three])
    http.post("/v1/prefetch", json={"scripts": [OTHER], "keys": [], "varied": [one]})
    assert sizes(http) == {one, two, three}
    tell(http, [], varied=[two], constant=[one, three, "ee" * 32])
    assert sizes(http) == {two}
    assert sizes(http, OTHER) == {one}


def test_sizes_are_bounded_and_go_with_their_script(
    http: httpx2.Client, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_history, "SCRIPTS", 2)
    redis, name = redis_server.client(), f"torchrelay:script_sizes:{SCRIPT}"
    for first in (0, 128, 256):
        tell(http, [], varied=[f"{n:064x}" for n in range(first, first + 128)])
    assert redis.zcard(name) == len(sizes(http)) == 256
    assert f"{383:064x}" in sizes(http)
    redis.pexpire(name, 100_000)
    tell(http, ["ab" * 32])
    assert redis.ttl(name) == redis.ttl(f"torchrelay:script:{SCRIPT}") > 100
    for script in ("3" * 64, "4" * 64):
        http.post("/v1/prefetch", json={"scripts": [script], "keys": ["ab" * 32]})
    assert not redis.exists(name)


@pytest.mark.parametrize(
    "body",
    [
        {"scripts": [], "keys": ["ab" * 32]},
        {"scripts": [SCRIPT], "keys": ["train.py"]},
        {"scripts": ["train.py"], "keys": ["ab" * 32]},
        {"scripts": [SCRIPT], "keys": ["ab" * 32] * 257},
        {"scripts": [SCRIPT], "keys": [], "varied": ["L['x']"]},
        {"scripts": [SCRIPT], "keys": [], "varied": ["ab" * 32] * 129},
        {"scripts": [SCRIPT], "keys": [], "constant": [7]},
    ],
)
def test_what_is_no_use_is_refused(http: httpx2.Client, body: object) -> None:
    assert http.post("/v1/prefetch", json=body).status_code == 422
