"""Tokens: issued once, listed without their secrets, refused once expired or revoked; and `torchrelay login`."""

from __future__ import annotations

import json
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from command_line import torchrelay, user
from service_parts import TOKEN, RedisServer, Running, graph, post


def _issued(http: httpx2.Client, *roles: str, **more: Any) -> dict[str, Any]:
    answer = http.post("/v1/tokens", json={"name": "ada", "roles": roles, **more})
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def _change(server: RedisServer, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Changes the record of the only token."""
    with server.client() as redis:
        ((field, data),) = redis.hgetall("torchrelay:tokens").items()
        redis.hset("torchrelay:tokens", field, json.dumps(change(json.loads(data))))


def _status(gateway: Running, token: str) -> int:
    with gateway.http(token) as http:
        return http.get("/v1/stats").status_code


@pytest.fixture
def environment(tmp_path: Path, gateway: Running) -> dict[str, str]:
    """Of a user who has only heard of the gateway."""
    return user(tmp_path / "config")


def _run(environment: dict[str, str], *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return torchrelay(*arguments, environment=environment, answer=stdin)


def test_the_secret_is_in_one_answer_and_nowhere_else(
    gateway: Running, http: httpx2.Client, redis_server: RedisServer
) -> None:
    made = _issued(http, "read", expires_seconds=60)
    assert _status(gateway, made["token"]) == 200
    (listed,) = http.get("/v1/tokens").json()
    assert listed == made["record"]
    assert (listed["name"], listed["roles"]) == ("ada", ["read"])
    assert listed["expires"] - listed["created"] == 60
    stored = redis_server.client().hgetall("torchrelay:tokens")
    assert made["token"].encode() not in b"".join([*stored, *stored.values()])
    assert made["token"] not in http.get("/v1/tokens").text


def test_a_revoked_token_is_refused_at_once_and_told_why(gateway: Running, http: httpx2.Client) -> None:
    made = _issued(http, "compile")
    first = http.delete(f"/v1/tokens/{made['record']['id']}").json()
    assert first["revoked"] <= time.time()
    assert http.delete(f"/v1/tokens/{made['record']['id']}").json() == first
    with gateway.http(made["token"]) as revoked:
        answer = revoked.get("/v1/stats")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (401, "unauthenticated")
    assert "revoked" in error["message"]
    assert "torchrelay login" in error["hint"]


def test_an_empty_server_that_was_replaced_as_primary_does_not_say_that_a_token_is_unknown(
    gateway: Running, http: httpx2.Client, redis_server: RedisServer
) -> None:
    """Killed and started again as a replica, it has nothing until it is in step; a gateway may still ask it."""
    token = _issued(http, "read")["token"]
    with redis_server.client() as redis:
        records = redis.hgetall("torchrelay:tokens")
        redis.delete("torchrelay:tokens")
        assert _status(gateway, token) == 401
        redis.replicaof("127.0.0.1", "1")
        assert _status(gateway, token) == 503
        redis.replicaof("NO", "ONE")
        redis.hset("torchrelay:tokens", mapping=records)
        assert _status(gateway, token) == 200


def test_a_revoked_token_is_refused_though_this_gateways_clock_is_behind(
    gateway: Running, http: httpx2.Client, redis_server: RedisServer
) -> None:
    made = _issued(http, "compile")
    http.delete(f"/v1/tokens/{made['record']['id']}")
    # as another gateway wrote it, whose clock is ten minutes ahead
    _change(redis_server, lambda record: {**record, "revoked": record["revoked"] + 600})
    assert _status(gateway, made["token"]) == 401


def test_an_expired_token_is_refused_and_told_why(
    gateway: Running, http: httpx2.Client, redis_server: RedisServer
) -> None:
    made = _issued(http, "compile", expires_seconds=600)
    _change(redis_server, lambda record: {**record, "expires": int(time.time()) - 1})
    with gateway.http(made["token"]) as expired:
        answer = expired.get("/v1/stats")
    assert answer.status_code == 401
    assert "expired" in answer.json()["error"]["message"]
    assert "torchrelay login" in answer.json()["error"]["hint"]


@pytest.mark.parametrize("role", ["compile", "tune", "train"])
def test_every_role_may_read_and_only_admin_may_administer(
    role: str, gateway: Running, http: httpx2.Client
) -> None:
    with gateway.http(_issued(http, role)["token"]) as user:
        assert user.get("/v1/stats").status_code == 200
        assert post(user, graph()).status_code == (202 if role == "compile" else 403)
        for method, path in (("POST", ""), ("GET", ""), ("DELETE", "/000000000000")):
            assert user.request(method, f"/v1/tokens{path}").status_code == 403
    assert len(http.get("/v1/tokens").json()) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"name": "ada"}',
        b'{"name": "ada", "roles": []}',
        b'{"name": "ada", "roles": ["root"]}',
        b'{"name": "", "roles": ["read"]}',
        b'{"name": "ada\\n", "roles": ["read"]}',
        b'{"name": "ada", "roles": ["read"], "expires_seconds": 0}',
        b'{"name": "ada", "roles": ["read"], "expires_seconds": 1e300}',
        b'{"name": "ada", "roles": ["read"], "more": 1}',
    ],
)
def test_a_request_for_a_token_is_checked(body: bytes, http: httpx2.Client) -> None:
    assert http.post("/v1/tokens", content=body).json()["error"]["code"] == "malformed"
    assert http.get("/v1/tokens").json() == []


def test_tokens_that_are_long_over_are_forgotten(http: httpx2.Client, redis_server: RedisServer) -> None:
    redis = redis_server.client()
    old = {"id": "0" * 12, "name": "old", "roles": ["read"], "created": 1, "expires": 2}
    redis.hset("torchrelay:tokens", "f" * 64, json.dumps(old))
    made = _issued(http, "read")
    assert http.post("/v1/cache/gc").status_code == 200
    assert http.get("/v1/tokens").json() == [made["record"]]


def test_unknown_ids_are_not_found(http: httpx2.Client) -> None:
    assert http.delete(f"/v1/tokens/{'0' * 12}").status_code == 404
    assert http.delete("/v1/tokens/short").status_code == 422


def test_an_administrator_issues_and_a_user_logs_in_and_is_revoked(
    environment: dict[str, str], gateway: Running, tmp_path: Path
) -> None:
    administrator = {**environment, "TORCHRELAY_URL": gateway.url, "TORCHRELAY_TOKEN": TOKEN}
    made = _run(administrator, "token", "create", "ada", "--role", "compile", "--expires", "30d")
    assert made.returncode == 0, made.stderr
    secret = made.stdout.strip()
    (record,) = json.loads(_run(administrator, "token", "ls", "--json").stdout)
    assert record["expires"] - record["created"] == 30 * 86400
    assert secret not in made.stderr

    done = _run(environment, "login", gateway.url, stdin=f"{secret}\n")
    assert done.returncode == 0, done.stderr
    assert secret not in done.stdout + done.stderr
    path = tmp_path / "config" / "torchrelay" / "credentials.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    held = json.loads(path.read_bytes())
    with gateway.http() as http:
        assert held == {
            "url": gateway.url,
            "token": secret,
            "public_keys": http.get("/v1/info").json()["public_keys"],
            "namespace": "default",
        }
    assert _run(environment, "stats").returncode == 0

    assert "active" in _run(administrator, "token", "ls").stdout
    assert _run(administrator, "token", "revoke", record["id"]).returncode == 0
    assert "revoked" in _run(administrator, "token", "ls").stdout
    refused = _run(environment, "stats")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (1, 1)
    assert "was revoked" in refused.stderr


def test_a_login_keeps_the_credentials_for_another_gateway(
    environment: dict[str, str], gateway: Running, tmp_path: Path
) -> None:
    folder = tmp_path / "config" / "torchrelay"
    folder.mkdir(parents=True)
    other = b'{"url": "https://relay.example.org:8443", "token": "other\'s", "public_keys": []}'
    (folder / "credentials.json").write_bytes(other)
    (folder / "credentials.json").chmod(0o600)
    done = _run(environment, "login", gateway.url, stdin=TOKEN)
    assert done.returncode == 0, done.stderr
    assert "TORCHRELAY_PROFILE=relay.example.org-8443" in done.stdout
    kept = folder / "credentials" / "relay.example.org-8443.json"
    assert (kept.read_bytes(), stat.S_IMODE(kept.stat().st_mode)) == (other, 0o600)
    assert _run(environment, "stats").returncode == 0
    assert _run(environment, "login", gateway.url, stdin=TOKEN).returncode == 0
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]

    assert _run(environment, "login", gateway.url, "--profile", "mine", stdin=TOKEN).returncode == 0
    named = {**environment, "TORCHRELAY_PROFILE": "mine"}
    assert _run(named, "stats").returncode == 0
    assert _run(named, "logout").returncode == 0
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    assert _run(environment, "stats").returncode == 0


def test_login_with_a_wrong_token_leaves_the_credentials_alone(
    environment: dict[str, str], gateway: Running, tmp_path: Path
) -> None:
    assert _run(environment, "login", gateway.url, stdin=TOKEN).returncode == 0
    path = tmp_path / "config" / "torchrelay" / "credentials.json"
    before = path.read_bytes()
    for stdin in ("wrong\n", "\n", ""):
        done = _run(environment, "login", gateway.url, stdin=stdin)
        assert done.returncode in (1, 2)
        assert len(done.stderr.splitlines()) == 1
    assert path.read_bytes() == before


def test_login_sends_nothing_unencrypted_to_another_machine(environment: dict[str, str]) -> None:
    done = _run(environment, "login", "http://relay.example.org", stdin=TOKEN)
    assert done.returncode == 2
    assert "--insecure" in done.stderr


@pytest.mark.parametrize("life", ["0d", "1y", "-1d", "30", "", "99999999d"])
def test_a_life_that_is_none_is_wrong_use(life: str, environment: dict[str, str]) -> None:
    done = _run(environment, "token", "create", "ada", "--expires", life)
    assert (done.returncode, "30d" in done.stderr) == (2, True)
