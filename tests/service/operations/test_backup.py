"""`torchrelay backup` and `torchrelay restore`: all is destroyed, and comes back, but for what should not."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import msgspec
import pytest
import redis
from conftest import StartGateway
from moto.server import ThreadedMotoServer
from service_parts import RedisServer, Running, client_of, compiled, free_port, graph, post, wait_until
from torchrelay.compiler.api.admin import REINDEX_PARTS
from torchrelay.service.access.tokens import digest, new_token, rank_token_name
from torchrelay.service.local import state_folder
from torchrelay.service.local.redis_server import RedisServer as LocalRedis
from tuning_parts import entries, entry, found, lookup

T = TypeVar("T")
WINNER = f"/v1/autotunes/triton/{'0' * 64}"


def command(settings: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRELAY_")}
    given = {f"TORCHRELAY_SERVICE_{name.upper()}": str(value) for name, value in settings.items()}
    return subprocess.run(
        [sys.executable, "-m", "torchrelay.service", *arguments],
        env=kept | given,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def done(settings: dict[str, Any], *arguments: str) -> None:
    result = command(settings, *arguments)
    assert result.returncode == 0, result.stderr


@pytest.fixture(params=["folder", "s3"])
def target(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where backups lie, and settings for it."""
    if request.param == "folder":
        yield str(tmp_path / "backups of relay"), {}
        return
    port = free_port()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    for name, value in (
        ("ACCESS_KEY_ID", "key"),
        ("SECRET_ACCESS_KEY", "secret"),
        ("DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    bucket = f"bucket-{time.monotonic_ns()}"
    assert httpx2.put(f"http://127.0.0.1:{port}/{bucket}", trust_env=False).status_code == 200
    yield f"s3://{bucket}/relay", {"blob_allow_http": True}
    server.stop()


def token(http: httpx2.Client, name: str, **more: Any) -> dict[str, Any]:
    answer = http.post("/v1/tokens", json={"name": name, "roles": ["compile"], **more})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def reindex(http: httpx2.Client) -> int:
    return sum(http.post(f"/v1/cache/reindex?part={part}").json()["indexed"] for part in range(REINDEX_PARTS))


def test_all_is_destroyed_and_restored(
    start_gateway: StartGateway,
    settings: dict[str, Any],
    redis_server: RedisServer,
    target: tuple[str, dict[str, Any]],
) -> None:
    place, more = target
    settings |= {"blob_inline_bytes": 3000, **more}
    gateway = start_gateway(blob_inline_bytes=3000)
    with gateway.http() as http, redis_server.client() as client:
        assert http.patch("/v1/namespaces/red", json={"compiles": 7}).status_code == 200
        ada, eve = token(http, "ada", namespace="red"), token(http, "eve")
        rank = {"token": new_token()}
        record = msgspec.json.encode(
            {**ada["record"], "name": rank_token_name("0123"), "namespace": "default"}
        )
        client.hset("torchrelay:tokens", digest(rank["token"]), record)
        assert http.delete(f"/v1/tokens/{eve['record']['id']}").status_code == 200
        gateway.pool.questions = [found(entry(2))]
        with client_of(gateway.url, ada["token"]) as red:
            small = compiled(red, graph(1))  # in Redis alone
            assert red.put(WINNER, json={"key": "K", "data": "{}"}).status_code == 200
        gateway.pool.questions = []
        gateway.pool.member_bytes = 10_000
        large = compiled(http, graph(2))
        keys = http.get("/v1/info").json()["public_keys"]
        client.set("torchrelay:ns:red:spent", 5, px=3000)
        done(settings, "backup", place, "--keys", "--store")
        requests = http.get("/v1/stats?namespace=red").json()["requests"]
        refused = command(settings, "restore", place)
        assert (refused.returncode, "holds an installation" in refused.stderr) == (2, True)
    gateway.stop()
    with redis_server.client() as client:
        client.flushall()
    shutil.rmtree(gateway.settings.state_dir)
    time.sleep(3)  # what expires meanwhile does not come back
    done(settings, "restore", place)
    with redis_server.client() as redis:  # sums of a cache that is not there, and what would put work off
        words = {name.decode().split(":")[1] for name in redis.keys("torchrelay:*")}
    assert not words & {
        "index",
        "total",
        "bytes",
        "held",
        "components",
        "described",
        "saved",
        "kept",
        "swept",
    }, words
    again = start_gateway(blob_inline_bytes=3000)
    with again.http() as http, redis_server.client() as client:
        assert client.exists("torchrelay:ns:red:spent") == 0
        assert http.post("/v1/cache/gc").json()["swept"] == 0
        assert reindex(http) == 2
        assert http.get("/v1/info").json()["public_keys"] == keys
        with client_of(again.url, ada["token"]) as red:
            assert post(red, graph(1)).content == small
            assert red.get(WINNER).status_code == 200
        assert post(http, graph(2)).content == large
        for refused_token in (eve, rank):
            with client_of(again.url, refused_token["token"]) as other:
                assert other.get("/v1/stats").status_code == 401
        (red_quota,) = (each for each in http.get("/v1/namespaces").json() if each["name"] == "red")
        assert red_quota["quota"]["compiles"] == 7
        assert http.get("/v1/stats?namespace=red").json()["requests"] == requests + 1
        actions = [each["action"] for each in http.get("/v1/audit?namespace=red").json()["entries"]]
        assert {"token_created", "published"} <= set(actions)
        again.pool.questions = [lookup(2)]
        with client_of(again.url, ada["token"]) as red:
            compiled(red, graph(3))
        assert entries(again.pool.answers[-1]) == [entry(2)]
        wait_until(lambda: http.get("/readyz").json()["ready"], seconds=20)


def test_without_the_store_small_artifacts_come_back_and_the_stores_stay_where_they_are(
    start_gateway: StartGateway, settings: dict[str, Any], redis_server: RedisServer, tmp_path: Path
) -> None:
    gateway = start_gateway(blob_inline_bytes=3000)
    with gateway.http() as http:
        small = compiled(http, graph(1))
        gateway.pool.member_bytes = 10_000
        large = compiled(http, graph(2))
    done(settings, "backup", str(tmp_path / "b"))
    blobs = [path for path in (tmp_path / "b" / "blobs").rglob("*") if path.is_file()]
    assert [path.stat().st_size for path in blobs] == [len(small)]
    (archive,) = (tmp_path / "b" / "backups").iterdir()
    assert (archive.stat().st_mode & 0o777, (tmp_path / "b").stat().st_mode & 0o777) == (0o600, 0o700)
    gateway.stop()
    with redis_server.client() as client:
        client.flushall()
    done(settings, "restore", str(tmp_path / "b"), "--backup", f"backups/{archive.name}")
    with start_gateway(blob_inline_bytes=3000).http() as http:
        assert reindex(http) == 2
        assert [post(http, graph(size)).content for size in (1, 2)] == [small, large]


@pytest.mark.parametrize("harm", ["damaged", "shortened", "another store"])
def test_what_cannot_be_right_is_refused_before_anything_is_written(
    harm: str, gateway: Running, settings: dict[str, Any], redis_server: RedisServer, tmp_path: Path
) -> None:
    with gateway.http() as http:
        token(http, "ada")
    done(settings, "backup", str(tmp_path / "b"))
    (archive,) = (tmp_path / "b" / "backups").iterdir()
    gateway.stop()
    with redis_server.client() as client:
        client.flushall()
    data = archive.read_bytes()
    if harm == "damaged":
        archive.write_bytes(data.replace(b'"ada"', b'"eve"'))
    elif harm == "shortened":
        archive.write_bytes(data[:1000])
    else:
        (gateway.settings.state_dir / "blobs" / "installation").write_text('{"id":"another","sweeps":0}')
    result = command(settings, "restore", str(tmp_path / "b"))
    expected = {
        "damaged": (1, "another digest"),
        "shortened": (1, "damaged"),
        "another store": (2, "another installation's"),
    }
    assert (result.returncode, expected[harm][1] in result.stderr) == (expected[harm][0], True), result.stderr
    with redis_server.client() as client:
        assert client.dbsize() == 0


def test_a_service_on_one_machine_needs_no_address(tmp_path: Path) -> None:
    """Its Redis lies in the state folder."""

    async def with_redis(state: Path, use: Callable[[str], Awaitable[T]]) -> T:
        async with state_folder.exclusive(state) as lock:
            with state_folder.runtime_directory(state) as runtime:
                server = LocalRedis(state / "redis", runtime / "redis.sock", state / "redis.log", lock)
                await server.start()
                try:
                    return await use(server.url)
                finally:
                    await server.stop()

    async def back_up(url: str) -> subprocess.CompletedProcess[str]:
        with redis.Redis.from_url(url) as client:
            client.hset("torchrelay:installation", "id", "one")
            client.hset("torchrelay:namespaces", "red", "{}")
        return await asyncio.to_thread(
            command, {}, "backup", str(tmp_path / "b"), "--state", str(tmp_path / "state")
        )

    async def namespaces(url: str) -> dict[bytes, bytes]:
        with redis.Redis.from_url(url) as client:
            found: dict[bytes, bytes] = client.hgetall("torchrelay:namespaces")
            return found

    made = asyncio.run(with_redis(tmp_path / "state", back_up))
    assert made.returncode == 0, made.stderr
    assert command({}, "backup", str(tmp_path / "b"), "--state", str(tmp_path / "state")).returncode == 2
    done({}, "restore", str(tmp_path / "b"), "--state", str(tmp_path / "new"))
    assert asyncio.run(with_redis(tmp_path / "new", namespaces)) == {b"red": b"{}"}
