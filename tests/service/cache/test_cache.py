"""What happens to artifacts on disk and in Redis: lost, damaged, evicted, refused by a full disk."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from pathlib import Path

import httpx2
import pytest
from service_parts import (
    ArtifactPool,
    RedisServer,
    Running,
    StartGateway,
    busy_pool,
    compiled,
    follow,
    graph,
    post,
)


def _blobs(running: Running) -> list[Path]:
    return [
        path
        for path in (running.settings.state_dir / "blobs").rglob("*")
        if path.is_file() and path.name != "installation"
    ]


def test_small_artifacts_live_in_redis_and_large_ones_in_the_store(
    start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    gateway = start_gateway(ArtifactPool(member_bytes=1000))
    with gateway.http() as http:
        compiled(http, graph(1))
        assert _blobs(gateway) == []
        assert len(redis_server.client().keys("torchrelay:blob:*")) == 1
        gateway.pool.member_bytes = 1_000_000
        large = compiled(http, graph(2))
        assert [path.read_bytes() for path in _blobs(gateway)] == [large]
        assert len(redis_server.client().keys("torchrelay:blob:*")) == 1
        assert redis_server.client().ttl(redis_server.client().keys("torchrelay:blob:*")[0]) == -1
        assert post(http, graph(2)).content == large


def test_redis_holds_no_more_blobs_than_it_may(
    start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    gateway = start_gateway(
        ArtifactPool(member_bytes=10_000), redis_blob_limit_bytes=25_000, memory_cache_bytes=0
    )
    redis = redis_server.client()
    with gateway.http() as http:
        first, _, _ = (compiled(http, graph(size)) for size in (1, 2, 3))
        assert (len(redis.keys("torchrelay:blob:*")), len(_blobs(gateway))) == (2, 1)
        assert all(post(http, graph(size)).status_code == 200 for size in (1, 2, 3))
        redis.delete(f"torchrelay:blob:{hashlib.sha256(first).hexdigest()}")
        compiled(http, graph(1))
        assert (len(redis.keys("torchrelay:blob:*")), len(_blobs(gateway))) == (2, 1)
    assert int(redis.get("torchrelay:inline")) == sum(
        redis.strlen(name) for name in redis.keys("torchrelay:blob:*")
    )


@pytest.mark.parametrize("place", ["redis", "store"])
@pytest.mark.parametrize("harm", ["lost", "damaged", "cut short"])
def test_an_artifact_that_was_harmed_is_compiled_again(
    place: str, harm: str, start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    inline = {"blob_inline_bytes": 1 << 20 if place == "redis" else 0}
    gateway, other = start_gateway(**inline), start_gateway(busy_pool(), **inline)
    redis = redis_server.client()
    with gateway.http() as first, other.http() as http:
        good = compiled(first, graph())  # the first gateway has it in memory
        bad = {"lost": None, "damaged": good[:-1] + bytes([good[-1] ^ 1]), "cut short": good[:-1]}[harm]
        if place == "redis":
            (name,) = redis.keys("torchrelay:blob:*")
            redis.delete(name) if bad is None else redis.set(name, bad)
        else:
            (path,) = _blobs(gateway)
            path.unlink() if bad is None else path.write_bytes(bad)
        assert http.get(f"/v1/artifacts/{gateway.pool.calls[0]}").status_code == 404
        fresh = compiled(http, graph())
        assert fresh != good
        assert post(http, graph()).content == fresh
        stats = http.get("/v1/stats").json()
        assert (stats["damaged"], stats["hits"], stats["misses"]) == (1, 1, 2)
        assert (stats["entries"], stats["bytes_stored"]) == (1, len(fresh))


@pytest.mark.parametrize("harm", [b"", b"many", None])
def test_an_artifact_whose_index_entry_has_no_size_is_compiled_again(
    harm: bytes | None, gateway: Running, http: httpx2.Client, redis_server: RedisServer
) -> None:
    redis, script = redis_server.client(), "1" * 64
    compiled(http, graph(1))
    other = compiled(http, graph(2))
    key, whole = gateway.pool.calls
    http.post("/v1/prefetch", json={"scripts": [script], "keys": [key, whole]})
    index = f"torchrelay:index:{key}"
    redis.hdel(index, "size") if harm is None else redis.hset(index, "size", harm)
    assert [entry["key"] for entry in http.get("/v1/cache").json()["entries"]] == [whole]
    assert [entry["key"] for entry in http.get(f"/v1/prefetch/{script}").json()["artifacts"]] == [whole]
    assert http.get(f"/v1/cache/{key}").status_code == 404
    fresh = compiled(http, graph(1))
    assert gateway.pool.calls == [key, whole, key]
    assert post(http, graph(1)).content == fresh
    stats = http.get("/v1/stats").json()
    assert (stats["damaged"], stats["entries"], stats["bytes_stored"]) == (1, 2, len(fresh) + len(other))


@pytest.mark.parametrize("field", ["created", "seconds"])
def test_an_entry_that_is_damaged_otherwise_is_served_and_not_listed(
    field: str, gateway: Running, http: httpx2.Client, redis_server: RedisServer
) -> None:
    good = compiled(http, graph(1))
    compiled(http, graph(2))
    key, whole = gateway.pool.calls
    redis_server.client().hset(f"torchrelay:index:{key}", field, "x")
    assert [entry["key"] for entry in http.get("/v1/cache").json()["entries"]] == [whole]
    assert post(http, graph(1)).content == good


def test_a_harmed_artifact_found_by_a_post_is_compiled_by_the_same_post(
    start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    with start_gateway(memory_cache_bytes=0).http() as http:
        compiled(http, graph())
        redis_server.client().delete(*redis_server.client().keys("torchrelay:blob:*"))
        assert post(http, graph()).status_code == 202
        stats = http.get("/v1/stats").json()
    assert (stats["requests"], stats["hits"], stats["misses"]) == (2, 0, 2)
    assert stats["seconds_saved"] == 0


def test_the_least_recently_used_go_first(start_gateway: StartGateway, redis_server: RedisServer) -> None:
    gateway = start_gateway(
        ArtifactPool(member_bytes=100_000), cache_limit_bytes=350_000, blob_inline_bytes=0
    )
    with gateway.http() as http:
        for size in (1, 2, 3):
            compiled(http, graph(size))
        assert post(http, graph(1)).status_code == 200  # used again, so 2 is the oldest
        compiled(http, graph(4))
        follow(http, gateway.pool.calls[-1])
        answers = {size: post(http, graph(size), wait="cache").status_code for size in (1, 2, 3, 4)}
        assert answers == {1: 200, 2: 404, 3: 200, 4: 200}
        stats = http.get("/v1/stats").json()
        assert (stats["evictions"], stats["entries"]) == (1, 3)
        assert stats["bytes_stored"] == sum(path.stat().st_size for path in _blobs(gateway)) <= 350_000
        compiled(http, graph(2))


def test_an_artifact_above_the_limit_is_kept_until_the_next(start_gateway: StartGateway) -> None:
    gateway = start_gateway(ArtifactPool(member_bytes=100_000), cache_limit_bytes=1000)
    with gateway.http() as http:
        compiled(http, graph(1))
        assert post(http, graph(1)).status_code == 200
        compiled(http, graph(2))
        assert http.get("/v1/stats").json()["entries"] == 1


def test_a_store_that_cannot_be_written_fails_the_compile_and_heals(start_gateway: StartGateway) -> None:
    gateway = start_gateway(blob_inline_bytes=0, publish_retry_seconds=2)
    folder = gateway.settings.state_dir / "blobs"
    while folder.is_dir():  # the first sweep writes into it too
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
            folder.write_text("a file where the folder was")
    with gateway.http() as http:
        *_, (_, stage, data) = follow(http, post(http, graph()).json()["key"])
        assert (stage, data["error"]["code"]) == ("failed", "unavailable")
        assert http.get("/v1/stats").json()["entries"] == 0
        folder.unlink()
        folder.mkdir()
        compiled(http, graph())


def test_artifacts_outlive_the_gateway(start_gateway: StartGateway) -> None:
    first = start_gateway(ArtifactPool(member_bytes=1_000_000))
    with first.http() as http:
        data = compiled(http, graph())
    first.stop()
    second = start_gateway()
    with second.http() as http:
        assert post(http, graph()).content == data
        assert http.get("/v1/info").json()["public_keys"]
    assert second.pool.calls == []
