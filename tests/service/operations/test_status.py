"""Counters, workers, readiness, metrics, the API's own description, and settings."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Literal

import httpx2
import msgspec
import pytest
import schemathesis
from described_api import described_api
from hypothesis import HealthCheck, Phase, given, settings
from pydantic import ValidationError
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance
from service_parts import TOKEN, ArtifactPool, RedisServer, Running, StartGateway, compiled, graph, post
from torchrelay.compiler.api import compiles
from torchrelay.compiler.errors import BY_CODE, NoWorker, SettingsError, Unavailable, meanings
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.signing import keyring as signing_keyring
from waiting import wait_until


class SlowPool(ArtifactPool):
    """Cannot be started at first, then starts without a warm worker."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = True
        self.warm = False

    async def start(self) -> None:
        if self.broken:
            raise Unavailable("Ray cannot be reached")

    def workers(self) -> list[compiles.WorkerInfo]:
        state: Literal["idle", "starting"] = "idle" if self.warm else "starting"
        return [msgspec.structs.replace(worker, state=state) for worker in super().workers()]


def test_counters_tell_what_happened(http: httpx2.Client) -> None:
    compiled(http, graph())
    post(http, graph())
    post(http, graph(), wait="cache")
    post(http, graph(9), wait="cache")
    stats = http.get("/v1/stats").json()
    assert {
        name: stats[name]
        for name in ("requests", "hits", "misses", "compiles", "coalesced", "failures", "seconds_saved")
    } == {
        "requests": 4,
        "hits": 2,
        "misses": 2,
        "compiles": 1,
        "coalesced": 0,
        "failures": 0,
        "seconds_saved": 6.0,
    }


def test_clients_report_their_fallbacks(http: httpx2.Client) -> None:
    assert http.post("/v1/report", json={"reason": "unsupported", "count": 3}).status_code == 204
    assert http.post("/v1/report", json={"reason": "unsupported"}).status_code == 204
    assert http.get("/v1/stats").json()["fallbacks"] == {"unsupported": 4}
    for wrong in (
        {"reason": "made_up"},
        *({"reason": "unsupported", "count": count} for count in (0, 101, 1_000_000)),
        {"count": 1},
        [],
        "x" * 9000,
    ):
        assert http.post("/v1/report", json=wrong).json()["error"]["code"] in ("malformed", "limit_exceeded")


def test_readiness_names_the_part_that_is_not_ready(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrelay.service.parts.background.POOL_RESTART_SECONDS", 0.05)
    pool = SlowPool()
    gateway = start_gateway(pool)
    with gateway.http(token=None) as http, gateway.http() as owner:
        wait_until(lambda: "Ray" in owner.get("/readyz").json()["parts"]["workers"], seconds=30)
        assert http.get("/readyz").json()["parts"] == {"redis": "ok", "workers": "cannot be started"}
        pool.broken = False
        wait_until(lambda: "warm" in http.get("/readyz").json()["parts"]["workers"], seconds=30)
        assert http.get("/readyz").status_code == 503
        assert http.get("/readyz?workers=false").status_code == 200  # hits need none
        pool.warm = True
        wait_until(lambda: http.get("/readyz").status_code == 200, seconds=30)
        assert http.get("/readyz").json()["ready"] is True


@pytest.mark.parametrize("token", [None, "wrong", "w" * 43])
def test_who_is_not_the_owner_does_not_see_what_redis_says(
    gateway: Running, redis_server: RedisServer, token: str | None
) -> None:
    redis_server.stop()
    with gateway.http(token) as http, gateway.http() as owner:
        assert http.get("/readyz?workers=false").status_code == 503
        assert http.get("/readyz").json()["parts"]["redis"] == "cannot be reached"
        assert str(redis_server.socket) in owner.get("/readyz").json()["parts"]["redis"]


def test_the_names_of_hosts_are_for_tokens_of_all_namespaces(
    gateway: Running, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = gateway.pool.workers()
    known = msgspec.structs.replace(worker, host="node-7.example.org")
    monkeypatch.setattr(gateway.pool, "workers", lambda: [known])
    wait_until(lambda: http.get("/v1/workers").json()[0].get("host"), seconds=30)
    shown = {}
    for namespace in ("default", "red", "*"):
        body = {"name": "x", "roles": ["admin"], "namespace": namespace}
        with gateway.http(http.post("/v1/tokens", json=body).json()["token"]) as other:
            (shown[namespace],) = other.get("/v1/workers").json()
    assert [each.get("host", "") for each in shown.values()] == ["", "", "node-7.example.org"]
    assert {each["id"] for each in shown.values()} == {"w0"}


def test_workers_and_info(http: httpx2.Client) -> None:
    (worker,) = http.get("/v1/workers").json()
    assert (worker["id"], worker["state"]) == ("w0", "idle")
    info = http.get("/v1/info").json()
    assert len(base64.b64decode(info["public_keys"][0])) == 32


def test_metrics_count_requests_by_route(gateway: Running, http: httpx2.Client) -> None:
    compiled(http, graph())
    with gateway.http(token=None) as anyone:
        anyone.get("/any/path/at/all")
        text = anyone.get("/metrics").text
    assert 'torchrelay_http_requests_total{method="POST",route="/v1/compile",status="202"} 1.0' in text
    assert 'route="(none)",status="404"' in text
    assert 'torchrelay_shared_compiles_total{namespace="*"} 1.0' in text
    assert "/any/path" not in text


def test_everyone_reads_what_each_error_code_means(gateway: Running) -> None:
    answer = gateway.http(None).get("/errors")
    assert answer.status_code == 200 and "default-src 'none'" in answer.headers["content-security-policy"]
    assert re.findall('<section id="([a-z_]+)">', answer.text) == [each.code for each in meanings()]
    assert set(BY_CODE.values()) == set(meanings())
    assert all(meanings().values())
    assert NoWorker.hint in answer.text


def test_docs_are_served(http: httpx2.Client) -> None:
    answer = http.get("/docs")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "//" not in re.sub("https?://[^<]*</", "", answer.text)  # nothing is loaded from elsewhere
    document = http.get("/openapi.json").json()
    named = set(re.findall(' id="([^"]+)"', answer.text))
    assert named >= {*document["components"]["schemas"], *re.findall('href="#([^"]+)"', answer.text)}
    paths = document["paths"]
    for path, methods in paths.items():
        assert all(f"<code>{method.upper()} {path}</code>" in answer.text for method in methods)
    assert "/v1/compiles/{key}/events" in paths
    body = paths["/v1/compile"]["post"]["requestBody"]["content"]
    assert list(body) == ["application/vnd.torchrelay.graph+msgpack"]


def test_the_service_keeps_to_its_own_description(gateway: Running, http: httpx2.Client) -> None:
    schema = described_api(gateway.url)
    # 503 is an answer here, and which bytes are a graph is beyond a JSON schema.
    excluded = [not_a_server_error, positive_data_acceptance]
    tried: set[str] = set()
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=20,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def agrees(case: schemathesis.Case) -> None:
            answer = case.call(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=10)
            assert answer.status_code < 500 or answer.status_code == 503
            case.validate_response(answer, excluded_checks=excluded)

        given(case=operation.as_strategy())(agrees)()
        tried.add(operation.label)
    operations = http.get("/openapi.json").json()["paths"].values()
    assert len(tried) == sum(map(len, operations)) > 30


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHRELAY_SERVICE_CACHE_LIMIT_BYTES", "12345")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = ServiceSettings()
    assert found.cache_limit_bytes == 12345
    assert found.keys_location == tmp_path / "torchrelay" / "keys"
    with pytest.raises(ValidationError):
        ServiceSettings(token="short")


def test_a_signing_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    keyring = signing_keyring.Keyring(tmp_path, {})
    assert signing_keyring.Keyring(tmp_path, {}).current == keyring.current
    (tmp_path / f"{keyring.current}.pem").chmod(0o644)
    with pytest.raises(SettingsError, match="readable by others"):
        signing_keyring.Keyring(tmp_path, {})
