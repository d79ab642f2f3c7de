"""The audit log: every act is there with its author, never with a secret; pages meet without a gap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from command_line import torchrelay, user
from service_parts import (
    TOKEN,
    ArtifactPool,
    RedisServer,
    Running,
    StartGateway,
    compiled,
    follow,
    graph,
    post,
)
from torchrelay.compiler.errors import CompileFailed


def _entries(http: httpx2.Client, **query: Any) -> list[dict[str, Any]]:
    answer = http.get("/v1/audit", params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["entries"]
    return found


def test_a_compile_tells_who_caused_built_and_signed_it(gateway: Running, http: httpx2.Client) -> None:
    made = http.post("/v1/tokens", json={"name": "ada", "roles": ["compile"]}).json()
    with gateway.http(made["token"]) as ada:
        compiled(ada, graph())
        compiled(ada, graph())
    (key,) = gateway.pool.calls
    entries = {entry["action"]: entry for entry in _entries(http)}
    assert list(entries) in (
        ["published", "compile", "token_created"],
        ["compile", "published", "token_created"],
    )
    cause, published, created = entries["compile"], entries["published"], entries["token_created"]
    assert (cause["name"], cause["token"], cause["key"]) == ("ada", made["record"]["id"], key)
    assert (published["name"], published["key"], published["worker"]) == ("service", key, "w0")
    assert [published["signer"]] == http.get("/v1/info").json()["key_ids"]
    assert len(published["digest"]) == 64
    assert (created["name"], created["token"]) == ("owner", "owner")
    assert "ada" in created["detail"]


def test_what_was_not_published_is_not_said_to_be(start_gateway: StartGateway) -> None:
    pool = ArtifactPool()
    pool.errors.append(CompileFailed("no such operator"))
    with start_gateway(pool).http() as http:
        *_, (_, stage, _) = follow(http, post(http, graph()).json()["key"])
        assert stage == "failed"
        assert [entry["action"] for entry in _entries(http)] == ["compile"]


def test_a_revocation_is_logged_once_and_no_secret_ever(
    http: httpx2.Client, redis_server: RedisServer
) -> None:
    made = http.post("/v1/tokens", json={"name": "ada", "roles": ["read"]}).json()
    for _ in range(2):
        http.delete(f"/v1/tokens/{made['record']['id']}")
    assert [entry["action"] for entry in _entries(http)] == ["token_revoked", "token_created"]
    logged = repr(redis_server.client().xrange("torchrelay:audit"))
    assert made["token"] not in logged
    assert TOKEN not in logged


def test_pages_meet_without_gap_or_overlap(http: httpx2.Client) -> None:
    for number in range(7):
        http.post("/v1/tokens", json={"name": f"n{number}", "roles": ["read"]})
    everything = [entry["id"] for entry in _entries(http)]
    assert len(everything) == 7
    found: list[str] = []
    before = ""
    while True:
        page = http.get("/v1/audit", params={"before": before, "limit": 3}).json()
        found += [entry["id"] for entry in page["entries"]]
        before = page["next"]
        if not before:
            break
    assert found == everything


def test_the_log_is_bounded(start_gateway: StartGateway, redis_server: RedisServer) -> None:
    redis = redis_server.client()
    redis.config_set("stream-node-max-entries", 5)  # Redis trims whole nodes
    with start_gateway(audit_entries=10).http() as http:
        for _ in range(30):
            http.post("/v1/tokens", json={"name": "ada", "roles": ["read"]})
        assert 10 <= len(_entries(http, limit=1000)) <= 15


@pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 1001}, {"before": "+"}, {"before": "x"}])
def test_a_wrong_page_is_refused(query: dict[str, Any], http: httpx2.Client) -> None:
    assert http.get("/v1/audit", params=query).json()["error"]["code"] == "malformed"


def test_only_administrators_read_it(gateway: Running, http: httpx2.Client) -> None:
    made = http.post("/v1/tokens", json={"name": "ada", "roles": ["read", "compile", "tune", "train"]}).json()
    with gateway.http(made["token"]) as ada:
        assert ada.get("/v1/audit").status_code == 403


def test_the_command_prints_the_log(gateway: Running, http: httpx2.Client, tmp_path: Path) -> None:
    compiled(http, graph())
    environment = user(tmp_path, gateway.url, TOKEN)

    def run(*arguments: str) -> str:
        return torchrelay("audit", *arguments, environment=environment, status=0).stdout

    assert {entry["action"] for entry in json.loads(run("--json"))} == {"compile", "published"}
    assert len(json.loads(run("--json", "--limit", "1"))) == 1
    shown = run()
    assert "owner (owner)" in shown
    assert gateway.pool.calls[0][:12] in shown


@pytest.mark.parametrize("before", ["0-0", "000-00"])
def test_nothing_is_older_than_the_first_id_there_can_be(before: str, http: httpx2.Client) -> None:
    assert http.post("/v1/tokens", json={"name": "ada", "roles": ["read"]}).status_code == 201
    assert _entries(http, before=before) == []
    assert len(_entries(http, before="0-1")) == 0
    assert len(_entries(http)) == 1
