"""Who gets in, and that every answer that is an error says so in the same form."""

from __future__ import annotations

import asyncio

import httpx2
import pytest
from service_parts import Running, StartGateway, graph, post
from torchrelay.service.access.audit import AuditLog
from torchrelay.service.access.tokens import OWNER_ID, Grant, Role, Tokens
from torchrelay.service.storage.redis.connections import connect
from torchrelay.service.storage.redis.keys import Keys
from torchrelay.service.storage.redis.scripts import Scripts

KEY = "0" * 64
GUARDED = [
    ("POST", "/v1/compile"),
    ("GET", f"/v1/artifacts/{KEY}"),
    ("POST", "/v1/tokens"),
    ("GET", "/v1/cache"),
]
"""All the others: tests/security/test_tokens.py."""


@pytest.mark.parametrize("token", [None, "wrong", "x" * 5000], ids=["no token", "wrong", "too long"])
@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_nothing_opens_without_a_known_token(
    method: str, path: str, token: str | None, gateway: Running
) -> None:
    with gateway.http(token) as http:
        answer = http.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthenticated")
    assert answer.headers["WWW-Authenticate"] == "Bearer"


def _issue(running: Running, *roles: Role) -> str:
    """A token from the service's own code: no administrator is there to ask over HTTP."""

    async def issue() -> str:
        redis, keys = connect(running.settings), Keys(running.settings.redis_prefix)
        tokens = Tokens(redis, keys, Scripts(redis), AuditLog(redis, keys, entries=100), running.settings)
        try:
            issued = await tokens.issue("reader", frozenset(roles), by=Grant("owner", frozenset(), OWNER_ID))
            return issued.secret
        finally:
            await redis.aclose()

    return asyncio.run(issue())


def test_a_token_opens_what_its_roles_allow(gateway: Running) -> None:
    with gateway.http(_issue(gateway, "read")) as http:
        assert http.get("/v1/stats").status_code == 200
        refused = post(http, graph())
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing/here", 404, "not_found"),
        ("DELETE", "/v1/stats", 405, "bad_request"),
        ("GET", "/v1/artifacts/short", 422, "malformed"),
        ("GET", f"/v1/artifacts/{KEY}", 404, "not_found"),
        ("GET", f"/v1/compiles/{KEY}", 404, "not_found"),
        ("GET", f"/v1/compiles/{KEY}/events", 404, "not_found"),
        ("POST", "/v1/compile?wait=forever", 422, "malformed"),
    ],
)
def test_every_error_has_the_same_form(
    method: str, path: str, status: int, code: str, http: httpx2.Client
) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json()["error"]["code"] == code
    if status == 405:
        assert "GET" in answer.headers["Allow"]


def test_a_last_event_id_of_another_service_is_refused(http: httpx2.Client) -> None:
    answer = http.get(f"/v1/compiles/{KEY}/events", headers={"Last-Event-ID": "+"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "malformed")


def test_without_a_token_in_the_settings_only_issued_ones_work(start_gateway: StartGateway) -> None:
    gateway = start_gateway(token=None)
    with gateway.http() as http:
        assert http.get("/v1/stats").status_code == 401
    with gateway.http(_issue(gateway, "admin")) as http:
        assert http.get("/v1/stats").status_code == 200
