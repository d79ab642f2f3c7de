"""What administrators do to the cache: list, show, pin, remove, collect; over HTTP and from the command line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from command_line import torchrelay, user
from service_parts import TOKEN, ArtifactPool, RedisServer, Running, StartGateway, compiled, graph, post

MISSING = "0" * 64


def _entries(http: httpx2.Client) -> dict[str, dict[str, Any]]:
    """All pages, two at a time."""
    found: dict[str, dict[str, Any]] = {}
    cursor = ""
    while True:
        page = http.get("/v1/cache", params={"cursor": cursor, "limit": 2}).json()
        found |= {entry["key"]: entry for entry in page["entries"]}
        cursor = page["next"]
        if not cursor:
            return found


def _offered(http: httpx2.Client, sizes: range) -> list[int]:
    return [size for size in sizes if post(http, graph(size), wait="cache").status_code == 200]


def _blobs(gateway: Running) -> list[Path]:
    return [
        path
        for path in (gateway.settings.state_dir / "blobs").rglob("*")
        if path.is_file() and path.name != "installation"
    ]


@pytest.mark.parametrize("place", ["redis", "store"])
def test_the_list_tells_of_every_artifact_and_counts_as_no_use(
    place: str, start_gateway: StartGateway
) -> None:
    gateway = start_gateway(ArtifactPool(), blob_inline_bytes=1 << 20 if place == "redis" else 0)
    with gateway.http() as http:
        made = [len(compiled(http, graph(size))) for size in range(1, 6)]
        sizes = dict(zip(gateway.pool.calls, made, strict=True))
        first = _entries(http)
        assert {key: entry["bytes"] for key, entry in first.items()} == sizes
        for entry in first.values():
            assert (entry["place"], entry["pinned"], entry["seconds"]) == (place, False, 3.0)
            shown = http.get(f"/v1/cache/{entry['key']}").json()
            assert shown["entry"] == entry
        assert _entries(http) == first
        stats = http.get("/v1/stats").json()
        assert (stats["entries"], stats["hits"]) == (5, 0)


def test_an_artifact_shows_what_is_inside_and_what_its_key_covers(
    gateway: Running, http: httpx2.Client
) -> None:
    compiled(http, graph())
    (key,) = gateway.pool.calls
    shown = http.get(f"/v1/cache/{key}").json()
    assert (shown["manifest"]["key"], shown["manifest"]["worker"]) == (key, "w0")
    assert [shown["signer"]] == http.get("/v1/info").json()["key_ids"]
    assert shown["components"]["inputs.count"] == "1"


def test_a_damaged_artifact_cannot_be_shown_and_says_so(
    start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    gateway = start_gateway(memory_cache_bytes=0)
    with gateway.http() as http:
        compiled(http, graph())
        (key,) = gateway.pool.calls
        (blob,) = redis_server.client().keys("torchrelay:blob:*")
        for harm in (b"damaged", None):
            redis_server.client().set(blob, harm) if harm else redis_server.client().delete(blob)
            answer = http.get(f"/v1/cache/{key}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
            assert "compiled again" in answer.json()["error"]["hint"]


def test_pinned_artifacts_outlive_everything_used_later(
    start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    gateway = start_gateway(
        ArtifactPool(member_bytes=100_000), cache_limit_bytes=350_000, blob_inline_bytes=0
    )
    with gateway.http() as http:
        compiled(http, graph(1))
        pinned = gateway.pool.calls[0]
        assert http.put(f"/v1/cache/{pinned}/pin").json()["pinned"] is True
        for size in range(2, 8):
            compiled(http, graph(size))
        assert http.post("/v1/cache/gc").json() == {"evicted": 0, "swept": 0}
        assert _offered(http, range(1, 8)) == [1, 6, 7]
        assert sorted(path.stat().st_size for path in _blobs(gateway)) == sorted(
            entry["bytes"] for entry in _entries(http).values()
        )
        assert http.delete(f"/v1/cache/{pinned}/pin").json()["pinned"] is False
        assert _offered(http, range(6, 8)) == [6, 7]  # used later than 1
        compiled(http, graph(8))
        http.post("/v1/cache/gc")
        assert _offered(http, range(1, 9)) == [6, 7, 8]
        stats = http.get("/v1/stats").json()
        assert stats["bytes_stored"] == sum(path.stat().st_size for path in _blobs(gateway))


def test_a_cache_full_of_pinned_artifacts_still_takes_the_newest(start_gateway: StartGateway) -> None:
    gateway = start_gateway(ArtifactPool(member_bytes=10_000), cache_limit_bytes=15_000)
    with gateway.http() as http:
        for size in (1, 2, 3):
            compiled(http, graph(size))
            assert http.put(f"/v1/cache/{gateway.pool.calls[-1]}/pin").status_code == 200
        for size in (4, 5):
            compiled(http, graph(size))
        assert http.post("/v1/cache/gc").status_code == 200
        assert _offered(http, range(1, 6)) == [1, 2, 3, 5]


@pytest.mark.parametrize("place", ["redis", "store"])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_removed_artifact_is_gone_with_its_bytes_and_compiled_again(
    pinned: bool, place: str, start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    gateway = start_gateway(ArtifactPool(), blob_inline_bytes=1 << 20 if place == "redis" else 0)
    redis = redis_server.client()
    with gateway.http() as http:
        first = compiled(http, graph())
        (key,) = gateway.pool.calls
        if pinned:
            http.put(f"/v1/cache/{key}/pin")
        assert http.delete(f"/v1/cache/{key}").json()["key"] == key
        assert http.get(f"/v1/artifacts/{key}").status_code == 404
        assert (_entries(http), _blobs(gateway), redis.keys("torchrelay:blob:*")) == ({}, [], [])
        assert (int(redis.get("torchrelay:bytes")), int(redis.get("torchrelay:inline") or 0)) == (0, 0)
        assert compiled(http, graph()) != first
        assert _entries(http)[key]["pinned"] is False


def test_every_act_is_in_the_audit_log_once(gateway: Running, http: httpx2.Client) -> None:
    compiled(http, graph())
    (key,) = gateway.pool.calls
    digest = _entries(http)[key]["digest"]
    for _ in range(2):
        http.put(f"/v1/cache/{key}/pin")
    for _ in range(2):
        http.delete(f"/v1/cache/{key}/pin")
    for _ in range(2):
        http.delete(f"/v1/cache/{key}")
    entries = http.get("/v1/audit", params={"limit": 3}).json()["entries"]
    assert [(entry["action"], entry["name"], entry["key"]) for entry in entries] == [
        ("deleted", "owner", key),
        ("unpinned", "owner", key),
        ("pinned", "owner", key),
    ]
    assert entries[0]["digest"] == digest


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("PUT", "/pin"), ("DELETE", "/pin"), ("DELETE", "")],
)
def test_what_is_not_there_is_not_found(method: str, path: str, http: httpx2.Client) -> None:
    answer = http.request(method, f"/v1/cache/{MISSING}{path}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_readers_look_and_only_administrators_touch(gateway: Running, http: httpx2.Client) -> None:
    compiled(http, graph())
    (key,) = gateway.pool.calls
    made = http.post("/v1/tokens", json={"name": "ada", "roles": ["compile"]}).json()
    with gateway.http(made["token"]) as ada:
        assert ada.get("/v1/cache").status_code == 200
        assert ada.get(f"/v1/cache/{key}").status_code == 200
        for method, path in (("PUT", "/pin"), ("DELETE", "/pin"), ("DELETE", "")):
            assert ada.request(method, f"/v1/cache/{key}{path}").status_code == 403
        assert ada.post("/v1/cache/gc").status_code == 403
    assert list(_entries(http)) == [key]


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(gateway: Running, tmp_path: Path) -> Command:
    return partial(torchrelay, "cache", environment=user(tmp_path, gateway.url, TOKEN))


def test_the_command_line_does_it_all(command: Command, gateway: Running, http: httpx2.Client) -> None:
    compiled(http, graph())
    (key,) = gateway.pool.calls
    (listed,) = json.loads(command("ls", "--json").stdout)
    assert listed["key"] == key
    assert "1 artifacts" in command("ls").stdout
    shown = command("show", key[:8]).stdout
    assert key in shown
    assert "torch 2.13.0+cpu" in shown
    assert command("pin", key[:8]).stdout == f"pinned {key}\n"
    assert "pinned" in command("ls").stdout.splitlines()[1]
    assert command("unpin", key).returncode == 0
    assert "0 artifacts evicted" in command("gc").stdout
    assert command("rm", key).returncode == 0
    again = command("rm", key)
    assert (again.returncode, len(again.stderr.splitlines())) == (1, 1)
    assert command("show", key[:8]).returncode == 2
    assert command("show", "../etc").returncode == 2
