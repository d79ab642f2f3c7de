"""What is deleted of the blob store, and when nothing is: after Redis was lost or restored, or with another store."""

from __future__ import annotations

import os
import time
from pathlib import Path

import httpx2
import pytest
from service_parts import ArtifactPool, RedisServer, Running, StartGateway, compiled, follow, graph, post

IDENTITY, ORPHANS = "torchrelay:installation", "torchrelay:orphans"


@pytest.fixture
def gateway(start_gateway: StartGateway) -> Running:
    return start_gateway(blob_inline_bytes=0)


def blobs(gateway: Running) -> list[Path]:
    folder = gateway.settings.state_dir / "blobs"
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "installation"]


def an_hour_ago(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (time.time() - 7200,) * 2)


def settled(redis_server: RedisServer) -> None:
    """The installation has been one for long."""
    with redis_server.client() as redis:
        redis.hset(IDENTITY, "since", 0)


def found_a_day_ago(redis_server: RedisServer) -> None:
    """All that sweeps have marked."""
    with redis_server.client() as redis:
        for path in redis.zrange(ORPHANS, 0, -1):
            redis.zadd(ORPHANS, {path: time.time() - 90_000})


def sweep(http: httpx2.Client) -> int:
    return int(http.post("/v1/cache/gc").json()["swept"])


def test_what_a_crash_left_is_marked_and_goes_a_day_later_and_all_else_stays(
    gateway: Running, redis_server: RedisServer
) -> None:
    with gateway.http() as http:
        compiled(http, graph())
        (kept,) = blobs(gateway)
        orphan, fresh = kept.with_name("0" * 64), kept.with_name("1" * 64)
        for path in (orphan, fresh):
            path.write_bytes(b"left by a crash")
        an_hour_ago(orphan, kept)
        assert sweep(http) == 0  # the installation is younger than an hour
        settled(redis_server)
        assert [sweep(http), sweep(http)] == [0, 0]
        assert orphan.exists()
        found_a_day_ago(redis_server)
        assert sweep(http) == 1
        assert sorted(blobs(gateway)) == sorted([kept, fresh])
        with redis_server.client() as redis:
            assert redis.zcard(ORPHANS) == 0


def test_what_is_used_again_is_no_longer_marked(gateway: Running, redis_server: RedisServer) -> None:
    with gateway.http() as http, redis_server.client() as redis:
        compiled(http, graph())
        (path,) = blobs(gateway)
        an_hour_ago(path)
        settled(redis_server)
        (index,) = redis.keys("torchrelay:index:*")
        digest = redis.hget(index, "digest")
        redis.hset(index, "digest", "0" * 64)
        sweep(http)
        assert redis.zcard(ORPHANS) == 1
        redis.hset(index, "digest", digest)
        found_a_day_ago(redis_server)
        assert sweep(http) == 0
        assert redis.zcard(ORPHANS) == 0


def test_a_redis_that_lost_everything_deletes_nothing_and_a_reindex_brings_all_back(
    start_gateway: StartGateway, redis_server: RedisServer, gateway: Running
) -> None:
    with gateway.http() as http:
        made = [compiled(http, graph(size)) for size in (1, 2, 3)]
    gateway.stop()
    an_hour_ago(*blobs(gateway))
    with redis_server.client() as redis:
        redis.flushall()
    other = start_gateway(blob_inline_bytes=0)
    with other.http() as http, redis_server.client() as redis:
        compiled(http, graph(4))  # it works
        settled(redis_server)
        assert [sweep(http), sweep(http)] == [0, 0]
        assert redis.exists(ORPHANS) == 0
        found = sum(http.post(f"/v1/cache/reindex?part={part}").json()["indexed"] for part in range(256))
        assert found == 3
        assert [post(http, graph(size)).content for size in (1, 2, 3)] == made
        settled(redis_server)
        an_hour_ago(*blobs(other))
        assert [sweep(http), sweep(http)] == [0, 0]
        assert len(blobs(other)) == 4
        seen = http.get("/v1/audit").json()["entries"]
        assert [each["detail"] for each in seen if each["action"] == "imported"] == [
            "from the blob store"
        ] * 3


def test_a_reindex_takes_nothing_that_is_damaged_or_signed_by_a_stranger(
    start_gateway: StartGateway, redis_server: RedisServer, gateway: Running, tmp_path: Path
) -> None:
    with gateway.http() as http:
        compiled(http, graph(1))
        (damaged,) = blobs(gateway)
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
        foreign = start_gateway(blob_inline_bytes=0, state_dir=str(tmp_path / "other"), redis_prefix="other:")
        with foreign.http() as theirs:
            compiled(theirs, graph(2))
        (theirs_path,) = blobs(foreign)
        here = (
            gateway.settings.state_dir
            / "blobs"
            / theirs_path.relative_to(foreign.settings.state_dir / "blobs")
        )
        here.parent.mkdir(parents=True)
        here.write_bytes(theirs_path.read_bytes())
        with redis_server.client() as redis:
            redis.delete(*redis.keys("torchrelay:index:*"))
        assert all(http.post(f"/v1/cache/reindex?part={part}").json()["indexed"] == 0 for part in range(256))


def test_a_redis_from_a_backup_deletes_nothing(gateway: Running, redis_server: RedisServer) -> None:
    with gateway.http() as http, redis_server.client() as redis:
        compiled(http, graph(1))
        settled(redis_server)
        backup = {name: redis.dump(name) for name in redis.scan_iter()}
        sweep(http)
        compiled(http, graph(2))
        an_hour_ago(*blobs(gateway))
        redis.flushall()
        for name, data in backup.items():
            redis.restore(name, 0, data, replace=True)  # the gateway may have written some meanwhile
        assert [sweep(http), sweep(http)] == [0, 0]
        assert redis.exists(ORPHANS) == 0
        assert len(blobs(gateway)) == 2


def test_a_gateway_with_another_store_is_not_ready_and_quarantines_nothing(
    start_gateway: StartGateway, redis_server: RedisServer, gateway: Running, tmp_path: Path
) -> None:
    with gateway.http() as http:
        made = compiled(http, graph(1))
        keys = str(gateway.settings.state_dir / "keys")
        other = start_gateway(
            ArtifactPool(), blob_inline_bytes=0, state_dir=str(tmp_path / "b"), keys_dir=keys
        )
        with other.http() as there:
            refused = post(there, graph(1))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            assert "store" in there.get("/readyz").json()["parts"]
            name = post(there, graph(2)).json()["key"]
            *_, (_, stage, _) = follow(there, name)
            assert (stage, gateway.pool.calls[-1:], other.pool.calls) == ("done", [name], [])
        assert http.get("/v1/stats").json()["damaged"] == 0
        assert post(http, graph(1)).content == made
        assert "store" not in http.get("/readyz").json()["parts"]
