"""Tokens, namespaces, keys and the audit log as administrators look at them; a token is revoked there."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from page_parts import BROWSER, stranger
from service_parts import Running


def issued(http: httpx2.Client, name: str, *roles: str, **more: Any) -> dict[str, Any]:
    answer = http.post("/v1/tokens", json={"name": name, "roles": roles or ["read"], **more})
    assert answer.status_code == 201, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def signed_in(gateway: Running, token: str) -> httpx2.Client:
    client = stranger(gateway)
    assert client.post("/sign-in", data={"token": token}).status_code == 303
    return client


@pytest.fixture
def browser(gateway: Running, http: httpx2.Client) -> httpx2.Client:
    return signed_in(gateway, http.headers["authorization"].partition(" ")[2])


def test_it_has_what_the_lists_have(http: httpx2.Client, browser: httpx2.Client) -> None:
    issued(http, "alice", "compile", namespace="team-a")
    http.patch("/v1/namespaces/team-a", json={"compiles": 7}).raise_for_status()
    state = http.get("/administration").json()
    assert state["tokens"] == http.get("/v1/tokens").json()
    assert state["keys"] == http.get("/v1/keys").json()
    assert [each["name"] for each in state["namespaces"]] == ["default", "team-a"]
    assert state["entries"] == http.get("/v1/audit").json()["entries"]
    page = browser.get("/administration").text
    for text in ("alice", "team-a", "0 of 7", state["keys"]["current"], "token_created"):
        assert text in page


def test_an_administrator_of_one_namespace_sees_its_own(gateway: Running, http: httpx2.Client) -> None:
    issued(http, "secretive", namespace="other")
    token = issued(http, "lead", "admin", namespace="team-a")["token"]
    with gateway.http(token) as lead:
        state = lead.get("/administration").json()
        page = lead.get("/administration", headers=BROWSER).text
    assert [each["name"] for each in state["namespaces"]] == ["team-a"]
    assert state["keys"] is None and "Signing keys" not in page
    assert "secretive" not in page and "other" not in page


@pytest.mark.parametrize("role", ["read", "compile", "tune", "train"])
def test_others_see_nothing(gateway: Running, http: httpx2.Client, role: str) -> None:
    with gateway.http(issued(http, "bob", role)["token"]) as bob:
        assert bob.get("/administration").status_code == 403
        assert bob.post("/administration", data={"revoke": "0" * 12}).status_code == 403


def test_a_token_is_revoked_by_its_button(
    gateway: Running, http: httpx2.Client, browser: httpx2.Client
) -> None:
    made = issued(http, "alice")
    alice, name = made["token"], made["record"]
    assert f'value="{name["id"]}"' in browser.get("/administration").text
    foreign = {"Origin": "http://evil.example"}
    refused = browser.post("/administration", data={"revoke": name["id"]}, headers=foreign)
    assert refused.status_code == 403
    with gateway.http(alice) as client:
        assert client.get("/v1/cache").status_code == 200
        answer = browser.post("/administration", data={"revoke": name["id"]})
        assert (answer.status_code, answer.headers["location"]) == (303, "administration")
        assert client.get("/v1/cache").status_code == 401
    assert f'value="{name["id"]}"' not in browser.get("/administration").text
    assert browser.post("/administration", data={"revoke": "0" * 12}).status_code == 404
    assert browser.post("/administration", data={"revoke": "x"}).status_code == 422


def test_the_audit_log_is_searched_and_read_on(
    http: httpx2.Client, browser: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrelay.service.gateway.pages.administration._ENTRIES", 3)
    for number in range(8):
        issued(http, f"person-{number % 2}-{number}")
    everything = [each["detail"] for each in http.get("/v1/audit").json()["entries"]]
    seen, before = [], ""
    while True:
        state = http.get("/administration", params={"before": before}).json()
        seen += [each["detail"] for each in state["entries"]]
        if not (before := state["next"]):
            break
    assert seen == everything
    odd = http.get("/administration", params={"search": "PERSON-1"}).json()["entries"]
    assert odd and all("person-1" in str(each) for each in odd)
    assert "Earlier entries" in browser.get("/administration").text
    assert "No entry that was read" in browser.get("/administration", params={"search": "nothing"}).text
