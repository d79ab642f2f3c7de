"""A namespace that is deleted: nothing of it is left, and nothing of others is missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openid_parts import SigningIssuer, sign_in_file
from service_parts import (
    ArtifactPool,
    RedisServer,
    Running,
    StartGateway,
    busy_pool,
    client_of,
    compiled,
    graph,
    post,
)
from torchrelay.service.admission.admit import Admission
from torchrelay.service.parts import shared
from tune_parts import SearchingPool, begun, operator
from waiting import wait_until

BODY_SECONDS = 2.0
"""How long a request's body may take: so long does a removal wait for those that have begun."""
NAMES = ("red", "red-2", "blue")
"""One begins as another does."""


def token(http: httpx2.Client, namespace: str, *roles: str) -> str:
    made = http.post(
        "/v1/tokens", json={"name": "ada", "roles": roles or ["compile"], "namespace": namespace}
    )
    assert made.status_code == 201, made.text
    return str(made.json()["token"])


def remove(http: httpx2.Client, name: str) -> tuple[str, int]:
    answer = http.delete(f"/v1/namespaces/{name}")
    assert answer.status_code == 200, answer.text
    return answer.json()["state"], answer.json()["count"]


def removed(http: httpx2.Client, name: str) -> list[tuple[str, int]]:
    """The answers until it is deleted, but those that say how long to wait."""
    parts = [remove(http, name)]
    while parts[-1][0] != "done":
        if parts[-1][0] == "requests":
            time.sleep(parts.pop()[1])
        parts.append(remove(http, name))
    return parts


def files(running: Running, name: str) -> list[Path]:
    return [path for path in (running.settings.state_dir / "blobs").glob(f"*/{name}/**/*") if path.is_file()]


def keys(redis_server: RedisServer, name: str) -> list[bytes]:
    with redis_server.client() as redis:
        found = redis.keys(f"torchrelay:ns:{name}:*")
        return [key for key in found if not key.endswith(b":stats")]  # what was counted a moment ago


@pytest.mark.parametrize("inline", [0, 1 << 20], ids=["in the store", "in Redis"])
def test_nothing_is_left_of_it_and_nothing_of_others_is_missing(
    start_gateway: StartGateway, redis_server: RedisServer, inline: int
) -> None:
    gateway = start_gateway(ArtifactPool(), blob_inline_bytes=inline, body_timeout_seconds=BODY_SECONDS)
    with gateway.http() as http:
        tokens = {name: token(http, name) for name in NAMES}
        for name in NAMES:
            with client_of(gateway.url, tokens[name]) as team:
                compiled(team, graph(1))
                compiled(team, graph(2))
        assert bool(files(gateway, "red")) == (inline == 0)
        parts = removed(http, "red")
        assert parts == ([("deleting", 2)] if inline == 0 else []) + [("done", 0)]

        assert (files(gateway, "red"), keys(redis_server, "red")) == ([], [])
        listed = [each["name"] for each in http.get("/v1/namespaces").json()]
        assert listed == ["blue", "default", "red-2"]
        assert http.delete("/v1/namespaces/red").status_code == 404
        with client_of(gateway.url, tokens["red"]) as team:
            refused = post(team, graph(1))
            assert (refused.status_code, "was revoked" in refused.text) == (401, True)
        for name in ("red-2", "blue"):
            with client_of(gateway.url, tokens[name]) as team:
                assert [post(team, graph(size)).status_code for size in (1, 2)] == [200, 200]
        entry = http.get("/v1/audit?limit=1").json()["entries"][0]
        assert (entry["action"], entry["name"], entry["detail"]) == ("namespace_deleted", "owner", "red")
        with redis_server.client() as redis:
            stored = dict(redis.zrange("torchrelay:namespace_bytes", 0, -1, withscores=True))
            assert stored.keys() == {b"torchrelay:ns:red-2:lru", b"torchrelay:ns:blue:lru"}
            assert float(redis.get("torchrelay:bytes")) == sum(stored.values())
            assert (int(redis.get("torchrelay:inline") or 0) > 0) == (inline > 0)

        # a new team of that name begins with nothing
        with client_of(gateway.url, token(http, "red")) as team:
            assert post(team, graph(1), wait="cache").status_code == 404
            compiled(team, graph(1))
            assert team.get("/v1/stats").json()["entries"] == 1


def test_it_waits_for_the_compiles_that_run(start_gateway: StartGateway) -> None:
    pool = busy_pool()
    gateway = start_gateway(pool, body_timeout_seconds=BODY_SECONDS)
    with gateway.http() as http, client_of(gateway.url, token(http, "red")) as team:
        assert post(team, graph(1)).status_code == 202
        assert remove(http, "red") == ("compiles", 1)
        pool.idle = 1
        wait_until(lambda: remove(http, "red")[0] == "done", seconds=30)
    assert len(pool.calls) == 1


def test_it_is_refused_while_jobs_are_open(start_gateway: StartGateway) -> None:
    gateway = start_gateway(SearchingPool(seconds=600), body_timeout_seconds=BODY_SECONDS)
    with gateway.http() as http, client_of(gateway.url, token(http, "red", "tune")) as team:
        job = begun(team, operator(16))
        assert remove(http, "red") == ("jobs", 1)
        assert team.post(f"/v1/tunes/{job}/cancel").status_code == 200  # its token is still valid
        wait_until(lambda: remove(http, "red")[0] == "done", seconds=30)


def test_who_may_delete_which(gateway: Running, http: httpx2.Client) -> None:
    with client_of(gateway.url, token(http, "red", "admin")) as admin:
        assert admin.delete("/v1/namespaces/red").status_code == 403
    assert http.delete("/v1/namespaces/default").status_code == 422
    assert http.delete("/v1/namespaces/nobody").status_code == 404
    assert [each["name"] for each in http.get("/v1/namespaces").json()] == ["default", "red"]


def test_a_request_that_began_before_leaves_nothing_behind(
    start_gateway: StartGateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = start_gateway(body_timeout_seconds=4)
    body, authenticated, go_on = graph(1), threading.Event(), threading.Event()
    read = Admission.read

    async def told_read(*args: Any) -> bytes:
        authenticated.set()
        return await read(*args)

    def slowly() -> Iterator[bytes]:
        yield body[:10]
        go_on.wait(4)
        yield body[10:]

    monkeypatch.setattr(Admission, "read", told_read)

    with gateway.http() as http, client_of(gateway.url, token(http, "red")) as team:
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(post, team, slowly())
            assert authenticated.wait(30)
            state, _ = remove(http, "red")
            go_on.set()
            assert sent.result().status_code == 202
            assert state == "requests"
        assert removed(http, "red")[-1] == ("done", 0)
    assert keys(redis_server, "red") == []


def test_whoever_signed_in_does_not_bring_it_back(start_gateway: StartGateway, tmp_path: Path) -> None:
    issuer = SigningIssuer()
    rule = {"claim": "groups", "equals": "staff", "namespace": "red", "roles": ["compile"]}
    file = sign_in_file(
        tmp_path / "sign-in.toml", {"issuer": issuer.issuer, "audience": "torchrelay", "rules": [rule]}
    )
    gateway = start_gateway(sign_in_file=file, body_timeout_seconds=BODY_SECONDS)
    try:
        with gateway.http() as http, client_of(gateway.url, issuer.token(groups=["staff"])) as team:
            compiled(team, graph(1))
            assert remove(http, "red")[0] == "requests"
            assert team.get("/v1/info").status_code == 403  # as soon as issued tokens are refused
            assert removed(http, "red")[-1] == ("done", 0)
            refused = post(team, graph(1))
            assert (refused.status_code, "red was deleted" in refused.text) == (403, True)
            assert [each["name"] for each in http.get("/v1/namespaces").json()] == ["default"]

            assert http.patch("/v1/namespaces/red", json={"compiles": 4}).status_code == 200  # made anew
            assert post(team, graph(1), wait="cache").status_code == 404
            compiled(team, graph(1))
    finally:
        issuer.stop()


def test_a_token_for_all_namespaces_does_not_fill_one_that_is_gone(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "KNOWN_SECONDS", 0.5)
    gateway, other = (start_gateway(body_timeout_seconds=BODY_SECONDS) for _ in range(2))
    with gateway.http() as http, other.http() as elsewhere:
        token(http, "red")
        assert post(elsewhere, graph(1), namespace="red").status_code in (200, 202)
        wait_until(lambda: remove(http, "red")[0] == "done", seconds=30)
        wait_until(lambda: post(elsewhere, graph(2), namespace="red").status_code == 404, seconds=10)
