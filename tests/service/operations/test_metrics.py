"""/metrics: who sees which namespace, and that the dashboard in deploy/ asks for what is there."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import torchrelay
import yaml
from service_parts import (
    TOOLCHAIN,
    RedisServer,
    Running,
    StartGateway,
    busy_pool,
    client_of,
    compiled,
    graph,
    post,
    registered,
)
from torchrelay.service.base.settings import ServiceSettings
from waiting import wait_until

DEPLOY = Path(torchrelay.__file__).parent / "deploy"


def _metrics(http: httpx2.Client) -> str:
    answer = http.get("/metrics")
    assert answer.status_code == 200
    return answer.text


def _namespaces(text: str) -> set[str]:
    return set(re.findall(r'namespace="([^"]*)"', text))


def _issue(http: httpx2.Client, namespace: str, *roles: str) -> str:
    body = {"name": "x", "roles": roles or ["read"], "namespace": namespace}
    return str(http.post("/v1/tokens", json=body).json()["token"])


def test_without_a_token_namespaces_are_shown_together(gateway: Running, http: httpx2.Client) -> None:
    with client_of(gateway.url, _issue(http, "red", "compile")) as red, gateway.http(None) as anyone:
        compiled(red, graph())
        compiled(http, graph())
        post(http, graph())
        http.post("/v1/report", json={"reason": "unsupported", "count": 2})
        told = 'torchrelay_shared_fallbacks_total{namespace="*",reason="unsupported"} 2.0'
        text = wait_until(lambda: found if told in (found := _metrics(anyone)) else "")  # written each second
    assert _namespaces(text) == {"*"}
    assert 'torchrelay_shared_compiles_total{namespace="*"} 2.0' in text


def test_whoever_has_no_token_costs_redis_two_round_trips_a_second(
    gateway: Running, http: httpx2.Client, redis_server: RedisServer
) -> None:
    for number in range(20):
        http.patch(f"/v1/namespaces/team-{number}", json={})
    with redis_server.client() as redis, gateway.http(None) as anyone:
        before = redis.info("commandstats").get("cmdstat_hkeys", {"calls": 0})["calls"]
        began = time.monotonic()
        with ThreadPoolExecutor(8) as threads:
            texts = list(threads.map(lambda _: _metrics(anyone), range(50)))
        seconds = time.monotonic() - began
        asked = redis.info("commandstats")["cmdstat_hkeys"]["calls"] - before
        assert asked <= seconds + 2
        assert all('torchrelay_shared_requests_total{namespace="*"}' in text for text in texts)


def test_a_token_for_all_namespaces_is_shown_each(gateway: Running, http: httpx2.Client) -> None:
    with client_of(gateway.url, _issue(http, "red", "compile")) as red:
        compiled(red, graph())
        post(red, graph())
        assert red.get("/metrics").status_code == 403
    for token in (_issue(http, "*"), None):
        with client_of(gateway.url, token) if token else gateway.http() as every:
            text = _metrics(every)
        assert _namespaces(text) == {"default", "red"}
        assert 'torchrelay_shared_hits_total{namespace="red"} 1.0' in text
        assert 'torchrelay_shared_hits_total{namespace="default"} 0.0' in text
    for wrong in (f"Bearer {'w' * 43}", "Bearer", "Basic dTpw"):
        with gateway.http(None) as anyone:
            assert anyone.get("/metrics", headers={"Authorization": wrong}).status_code == 401, wrong


def test_a_gateway_without_redis_still_tells_its_own(
    gateway: Running, http: httpx2.Client, redis_server: RedisServer
) -> None:
    redis_server.stop()
    text = _metrics(http)
    assert "torchrelay_http_requests_total" in text and "torchrelay_shared" not in text


def test_what_waits_is_counted_by_target_and_slots_by_state(
    settings: dict[str, Any], start_gateway: StartGateway
) -> None:
    alone = Running(ServiceSettings(**settings), None)
    alone.start()
    try:
        with alone.http() as http:
            post(http, graph(1))
            text = _metrics(http)
            assert 'torchrelay_shared_dispatchers{state="ready"} 0.0' in text
            # no worker is for it: a client may name any toolchain
            assert 'torchrelay_shared_waiting{device="cpu",toolchain="other"} 1.0' in text
            pool = busy_pool()
            registered(start_gateway(pool).http(), pool)
            wait_until(
                lambda: 'torchrelay_shared_dispatchers{state="ready"} 1.0' in _metrics(http), seconds=20
            )
            text = _metrics(http)
            kind = f'device="cpu",toolchain="cp311 torch {TOOLCHAIN.torch}"'
            assert f"torchrelay_shared_waiting{{{kind}}} 1.0" in text
            assert (
                f'torchrelay_shared_slots{{device="cpu",state="idle",{kind.partition(",")[2]}}} 1.0' in text
            )
            assert 'toolchain="other"' not in text
    finally:
        alone.stop()


def test_the_dashboard_asks_for_metrics_that_are_there(http: httpx2.Client) -> None:
    compiled(http, graph())
    http.post("/v1/report", json={"reason": "unsupported"})
    text = _metrics(http)
    there: dict[str, set[str]] = {}
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE):
        parts = [f"{name}_bucket", f"{name}_sum", f"{name}_count"] if kind == "histogram" else [name]
        labels = set(re.findall(rf"^{name}\w*{{(.*)}}", text, re.MULTILINE))
        for part in parts:
            there[part] = {label for found in labels for label in re.findall(r'(\w+)="', found)}
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["query"]["query"] for variable in dashboard["templating"]["list"][1:]]
    asked = {name for query in queries for name in re.findall(r"\btorchrelay_\w+", query)}
    assert len(asked) >= 20
    assert asked <= set(there), asked - set(there)
    for query in queries:
        for name, labels in re.findall(r"\b(torchrelay_\w+){([^}]*(?:{key}[^}]*)?)}", query):
            assert set(re.findall(r"(\w+)=", labels)) <= there[name], query
        # every gateway tells the same shared counters: adding them up would count them once for each
        assert not re.search(r"sum(?: by \([^)]*\))? ?\((?:rate|increase)\(torchrelay_shared", query), query
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_prometheus_is_told_where_to_look() -> None:
    jobs = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    assert targets == {"torchrelay": ["gateway:8642"], "torchrelay-dispatchers": ["dispatcher:8644"]}
