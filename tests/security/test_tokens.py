"""Tokens: what each opens and for how long, how they are compared, and that no secret reaches a log or an answer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from service_parts import TOKEN, RedisServer, Running, StartGateway, compiled, graph, post
from torchrelay.compiler.api.admin import ROLES
from torchrelay.service.access import tokens
from waiting import wait_until
from watched import WatchedGateway

KEY = "0" * 64
PUBLIC = {"/livez", "/readyz", "/metrics", "/v1/sign-in"}
ADMIN_ONLY = [("GET", "/v1/tokens"), ("POST", "/v1/tokens"), ("DELETE", "/v1/tokens/000000000000")]
EVERYBODY = {("POST", "/v1/report"), ("POST", "/v1/page-tickets")}
"""What changes something and is open to every token. A ticket is for the token that asks for it."""


def operations(http: httpx2.Client) -> Iterator[tuple[str, str]]:
    """Every guarded operation that the API describes, with its parameters filled in."""
    for path, methods in http.get("/openapi.json").json()["paths"].items():
        if path not in PUBLIC:
            filled = path.replace("{key}", KEY).replace("{token_id}", "0" * 12)
            filled = re.sub(r"\{[^}]*\}", "0", filled)
            yield from ((method.upper(), filled) for method in methods)


def issue(http: httpx2.Client, *roles: str, **more: Any) -> dict[str, Any]:
    answer = http.post("/v1/tokens", json={"name": "somebody", "roles": roles, **more})
    assert answer.status_code == 201, answer.text
    return answer.json()


def refused(gateway: Running, token: str | None, method: str, path: str) -> tuple[int, str]:
    with gateway.http(token) as http:
        answer = http.request(method, path)
    if answer.status_code < 400:
        return answer.status_code, ""
    return answer.status_code, answer.json()["error"]["code"]


def wrong_tokens() -> dict[str, str | None]:
    return {
        "none": None,
        "wrong": "w" * 43,
        "one letter off": TOKEN[:-1] + "1",
        "cut": TOKEN[:-1],
        "longer": TOKEN + "0",
        "another case": TOKEN.upper(),
        "its digest": tokens.digest(TOKEN),
        "too long": "x" * 10_000,
        "a JSON record": '{"id":"0","name":"x","roles":["admin"],"created":0}',
    }


def test_every_operation_wants_a_token_that_is_known(gateway: Running, http: httpx2.Client) -> None:
    found = list(operations(http))
    assert len(found) >= 11
    for what, token in wrong_tokens().items():
        for method, path in found:
            assert refused(gateway, token, method, path) == (401, "unauthenticated"), (what, method, path)


def test_a_scheme_that_is_not_bearer_opens_nothing(gateway: Running) -> None:
    for header in (f"Basic {TOKEN}", TOKEN, f"Token {TOKEN}", "Bearer", f"Bearer {TOKEN} x"):
        with gateway.http(None) as http:
            assert http.get("/v1/stats", headers={"Authorization": header}).status_code == 401, header
    with gateway.http(None) as http:
        assert http.get(f"/v1/stats?token={TOKEN}&access_token={TOKEN}").status_code == 401
        assert http.get("/v1/stats", headers={"Cookie": f"token={TOKEN}"}).status_code == 401


def test_an_expired_token_and_a_revoked_one_open_nothing(gateway: Running, http: httpx2.Client) -> None:
    short, revoked = issue(http, "admin", expires_seconds=1), issue(http, "admin")
    with gateway.http(revoked["token"]) as other:
        assert other.get("/v1/tokens").status_code == 200
        assert http.delete(f"/v1/tokens/{revoked['record']['id']}").status_code == 200
        assert other.get("/v1/tokens").status_code == 401
    wait_until(lambda: time.time() >= short["record"]["expires"], seconds=10)
    for token in (short["token"], revoked["token"]):
        for method, path in operations(http):
            assert refused(gateway, token, method, path) == (401, "unauthenticated"), (method, path)


@pytest.mark.parametrize("role", ["read", "compile", "tune", "train"])
def test_a_role_that_is_too_small_is_forbidden(role: str, gateway: Running, http: httpx2.Client) -> None:
    token = issue(http, role)["token"]
    for method, path in ADMIN_ONLY:
        assert refused(gateway, token, method, path) == (403, "forbidden"), (method, path)
    if role == "read":
        for method, path in operations(http):
            if method != "GET" and (method, path) not in EVERYBODY:
                assert refused(gateway, token, method, path) == (403, "forbidden"), (method, path)
    with gateway.http(token) as other:
        assert post(other, graph()).status_code == (202 if role == "compile" else 403)
    wait_until(lambda: role != "compile" or bool(gateway.pool.calls), seconds=30)
    assert len(gateway.pool.calls) == (1 if role == "compile" else 0)


@pytest.mark.parametrize("role", ROLES)
def test_a_token_of_another_namespace_opens_nothing_of_ours(
    role: str, gateway: Running, http: httpx2.Client
) -> None:
    """Whether it names our namespace or not, and whatever it asks for: a refusal, and none of our data."""
    ours = issue(http, "admin", namespace="ours")
    theirs = issue(http, role, namespace="theirs")["token"]
    name = ours["record"]["id"]
    with gateway.http(ours["token"]) as our, gateway.http(theirs) as their:
        secret = compiled(our, graph())
        key = post(our, graph()).headers["X-Torchrelay-Key"]
        before = our.get("/v1/tokens").json(), our.get("/v1/cache").json()
        found = [(way, path.replace(KEY, key).replace("0" * 12, name)) for way, path in operations(http)]
        assert len(found) >= 26 and any(key in path for _, path in found)
        for method, path in found:
            named = their.request(method, path, params={"namespace": "ours"})
            assert named.status_code == 403, (method, path)
            answer = their.request(method, path)
            if key in path or name in path:
                assert answer.status_code in (403, 404, 422), (method, path)
            for data in (secret[:200], key.encode(), name.encode(), b'"ours"'):
                assert data not in answer.content or data in path.encode(), (method, path)
        assert their.get("/v1/namespaces/ours").status_code == 403
        assert their.post("/v1/tokens", json={"name": "x", "roles": ["read"], "namespace": "ours"}).is_error
        asked = post(their, graph(), wait="cache")  # the very graph that we have
        assert asked.status_code == (404 if role in ("compile", "admin") else 403)
        assert (our.get("/v1/tokens").json(), our.get("/v1/cache").json()) == before
        assert post(our, graph()).content == secret


def test_nobody_gives_more_than_an_administrator_may(gateway: Running, http: httpx2.Client) -> None:
    for bad in (
        {"name": "x", "roles": []},
        {"name": "x", "roles": ["root"]},
        {"name": "x", "roles": ["read"], "id": "0" * 12},
        {"name": "a\nb", "roles": ["read"]},
        {"name": "a\n", "roles": ["read"]},
        {"name": "\x1b[2J", "roles": ["read"]},
        {"name": "x", "roles": ["read"], "expires_seconds": 0},
        {"name": "x", "roles": ["read"], "expires_seconds": -1},
        {"name": "x", "roles": ["read"], "expires_seconds": 10**30},
    ):
        assert http.post("/v1/tokens", json=bad).status_code == 422, bad
    assert http.get("/v1/tokens").json() == []


def test_tokens_are_compared_by_digest_in_constant_time(
    gateway: Running, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison takes the same time whatever differs, and what it compares tells nothing of the token."""
    compared: list[tuple[str, str]] = []
    real = tokens.hmac.compare_digest

    def watched(left: str, right: str) -> bool:
        compared.append((left, right))
        return bool(real(left, right))

    monkeypatch.setattr(tokens.hmac, "compare_digest", watched)
    asked = [token for what, token in wrong_tokens().items() if token and what != "too long"]
    for token in (*asked, TOKEN):
        refused(gateway, token, "GET", "/v1/stats")
    assert compared == [(tokens.digest(token), tokens.digest(TOKEN)) for token in (*asked, TOKEN)]
    # One letter changes the whole digest: how much of it agrees says nothing about how much of the token does.
    near, far = tokens.digest(TOKEN[:-1] + "1"), tokens.digest(TOKEN)
    assert sum(a == b for a, b in zip(near, far, strict=True)) < 20


# --- secrets ---------------------------------------------------------------------------------------------

PASSWORD = "redis-password-0123456789"
RAY_TOKEN = "ray-token-" + "9" * 64


def leaks(text: str, *secrets: str) -> list[str]:
    return [secret for secret in secrets if secret in text]


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_no_secret_reaches_the_log_of_a_gateway(
    log_format: str, redis_server: RedisServer, watch_gateway: Callable[..., WatchedGateway]
) -> None:
    redis = redis_server.client()
    redis.config_set("requirepass", PASSWORD)
    gateway = watch_gateway(
        redis_url=f"unix://:{PASSWORD}@{redis_server.socket}",
        ray_token=RAY_TOKEN,
        log_level="debug",
        log_format=log_format,
    )
    with gateway.http() as http:
        issued = issue(http, "compile")
        wrong = [token for token in wrong_tokens().values() if token]
        secrets = [
            TOKEN,
            PASSWORD,
            RAY_TOKEN,
            "PRIVATE KEY",
            issued["token"],
            *(w for w in wrong if len(w) > 9),
        ]
        compiled(http, graph())
        for token in (*wrong, issued["token"]):
            with gateway.http(token) as other:
                other.get("/v1/stats")
                post(other, graph(target="os.system"))
                other.get(f"/v1/stats?token={token}")
                other.post("/v1/tokens", json={"name": token, "roles": ["read"]})
                other.post("/v1/report", content=token.encode())
        answers = [
            http.get(path).text for path in ("/v1/tokens", "/v1/stats", "/v1/info", "/metrics", "/readyz")
        ]
        assert leaks("".join(answers), *secrets) == []
        # Redis goes away: what is logged then names neither its password nor who asked.
        redis.config_set("requirepass", "another")
        redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        for token in (TOKEN, issued["token"]):
            with gateway.http(token) as other:
                assert leaks(other.get("/v1/stats").text, *secrets) == []
                assert leaks(post(other, graph(5)).text, *secrets) == []
        redis_server.stop()
        assert leaks(http.get("/readyz").text + http.get("/v1/stats").text, *secrets) == []
    log = gateway.log.read_text()
    assert "/v1/stats" in log and "redis" in log.lower()
    assert leaks(log, *secrets) == []


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_defect_is_logged_without_the_values_it_met(
    log_format: str,
    start_gateway: StartGateway,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    gateway = start_gateway(log_format=log_format)

    async def broken(key: str, use: str) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(gateway.app.state.gateway.tenants.default.cache, "lookup", broken)
    with gateway.http() as http:
        answer = post(http, graph())
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "service")
    log = capfd.readouterr().err
    assert "ZeroDivisionError" in log
    assert leaks(log + answer.text, TOKEN, "Bearer") == []
