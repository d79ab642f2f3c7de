"""What runs and what waits: as JSON, as a page, and as events for the page."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

import httpx2
import pytest
from service_parts import ArtifactPool, RedisServer, StartGateway, client_of, graph, post
from torchrelay.service.gateway import live_pages
from torchrelay.service.gateway.http.page_bodies import STATIC, TEMPLATES
from torchrelay.service.gateway.pages import views
from torchrelay.service.storage.redis.keys import Keys
from waiting import wait_until

BROWSER = {"Accept": "text/html"}


def now(http: httpx2.Client) -> dict[str, Any]:
    answer = http.get("/now")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def begin(http: httpx2.Client, body: bytes) -> str:
    answer = post(http, body)
    assert answer.status_code == 202, answer.text
    key: str = answer.json()["key"]
    return key


def test_compiles_are_listed_with_stage_age_and_place(start_gateway: StartGateway) -> None:
    pool = ArtifactPool(seconds=30)
    pool.idle = 1
    gateway = start_gateway(pool)
    with gateway.http() as http:
        assert now(http)["compiles"] == []
        first = begin(http, graph(1))
        wait_until(lambda: [each["position"] for each in now(http)["compiles"]] == [0])
        pool.idle = 0
        second = begin(http, graph(2))
        found = wait_until(lambda: compiles if len(compiles := now(http)["compiles"]) == 2 else [])
        assert [each["key"] for each in found] == [first, second]
        assert [each["position"] for each in found] == [0, 1] and found[0]["target"] == "cpu"
        assert found[0]["seconds"] >= found[1]["seconds"] > 0
        page = http.get("/now", headers=BROWSER)
        assert first[:12] in page.text and second[:12] in page.text
        for told in http.get("/v1/compiles/" + first).json()["history"][-1:]:
            assert told["stage"] == now(http)["compiles"][0]["stage"]


def test_other_namespaces_compiles_and_hosts_are_not_shown(start_gateway: StartGateway) -> None:
    gateway = start_gateway(ArtifactPool(seconds=30))
    with gateway.http() as http:
        body = {"name": "x", "roles": ["read"], "namespace": "red"}
        with client_of(gateway.url, http.post("/v1/tokens", json=body).json()["token"]) as red:
            begin(http, graph(1))
            wait_until(lambda: now(http)["compiles"])
            assert now(red)["compiles"] == []
            assert {each["host"] for each in now(red)["workers"]} <= {""}


def test_what_redis_has_lost_or_damaged_does_not_keep_the_rest_away(
    start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    keys = Keys("torchrelay:")
    with start_gateway().http() as http, redis_server.client() as redis:
        redis.zadd(keys.active, {"ab" * 32: 4e12, "cd" * 32: 4e12})
        redis.hset(keys.run("cd" * 32), mapping={"started": "x", "needs": b"\xff"})
        found = wait_until(lambda: now(http)["compiles"])
        assert [(each["target"], each["seconds"], each["position"]) for each in found] == [("", 0.0, 1)] * 2


def test_the_page_is_sent_again_when_something_changes(start_gateway: StartGateway) -> None:
    with start_gateway(ArtifactPool(seconds=30)).http() as http, http.stream("GET", "/now/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        part = ""
        key = ""
        for line in lines:
            part += line + "\n"
            if not line and "None runs or waits" in part and not key:
                key = begin(http, graph(1))
            elif key and key[:12] in part:
                break
        assert key and "event: \n" in part and "data: <section>" in part


def test_a_stream_ends_so_that_its_token_is_checked_again(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_pages, "_STREAM_SECONDS", 1.0)
    monkeypatch.setattr(live_pages, "_LOOK_SECONDS", 0.2)
    gateway = start_gateway()
    with gateway.http() as http:
        made = http.post("/v1/tokens", json={"name": "x", "roles": ["read"]}).json()
        with client_of(gateway.url, made["token"]) as reader:
            with reader.stream("GET", "/now/events") as answer:
                assert http.delete(f"/v1/tokens/{reader.get('/v1/whoami').json()['id']}").status_code == 200
                assert "None runs or waits" in "".join(answer.iter_text())  # to its end
            wait_until(lambda: reader.get("/now/events").status_code == 401)


def test_a_busy_service_makes_the_page_once_for_all_who_look(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[float] = []
    page = views.now_part
    monkeypatch.setattr(views, "now_part", lambda *given: (made.append(time.monotonic()), page(*given))[1])
    monkeypatch.setattr(live_pages, "_STREAM_SECONDS", 3.0)
    gateway = start_gateway(ArtifactPool(seconds=30))
    with gateway.http() as http, ThreadPoolExecutor(8) as threads:
        looks = [threads.submit(http.get, "/now/events") for _ in range(8)]
        for number in range(40):  # each wakes whoever waits for compiles
            begin(http, graph(number + 1))
        assert all(look.result().status_code == 200 for look in looks)
    assert len(made) <= 8


def test_a_page_runs_scripts_only_if_it_renews_itself(start_gateway: StartGateway) -> None:
    with start_gateway().http() as http:
        policies = {
            path: http.get(path, headers=BROWSER).headers["content-security-policy"]
            for path in ("/now", "/runs", "/overview")
        }
        assert [path for path, policy in policies.items() if "script-src" in policy] == ["/now"]
        assert "script-src 'self'" in policies["/now"] and "unsafe" not in policies["/now"]
        for address, data in STATIC.items():
            answer = http.get(f"/{address}")
            assert answer.content == data and "immutable" in answer.headers["cache-control"]


def test_vendored_files_are_those_of_their_packages() -> None:
    folder = TEMPLATES.with_name("vendor")
    listed = {each["file"]: each for each in json.loads((folder / "vendored.json").read_text())}
    assert {file.name for file in folder.glob("*.js")} == set(listed)
    for name, about in listed.items():
        assert sha256((folder / name).read_bytes()).hexdigest() == about["sha256"]
        assert about["licence"] and about["version"]
