"""A compile child in foreign hands, in a real pool behind a gateway with Redis: its own job ends, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import hostile_engine
import httpx2
import psutil
import pytest
import service_parts
from hostile_engine import ATTACKS, FIRST
from service_parts import RedisServer, StartGateway, client_of, compiled, follow, graph, post
from torchrelay.workers.pool import PoolSettings, WorkerPool
from waiting import wait_until

pytestmark = pytest.mark.slow


def test_whatever_a_child_tries_its_job_fails_and_another_teams_do_not(
    start_gateway: StartGateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {
        str(Path(module.__file__).parent) for module in (hostile_engine, service_parts) if module.__file__
    }
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]))
    settings = PoolSettings(
        cpu_slots=2, gpu_slots_per_gpu=0, engine="hostile_engine", ray_token="test-ray-token-" + "0" * 32
    )
    pool = WorkerPool(settings)
    gateway = start_gateway(pool)
    wait_until(lambda: [each.state for each in pool.workers()] == ["idle"] * 2, seconds=120)
    with gateway.http() as http:
        token = http.post("/v1/tokens", json={"name": "x", "roles": ["compile"], "namespace": "red"}).json()
        honest = compiled(http, graph(1))
        before = psutil.Process().memory_info().rss
        with client_of(gateway.url, token["token"]) as red:
            failed: dict[str, str] = {}
            for number, what in enumerate(ATTACKS):
                name = post(red, graph(FIRST + number)).json()["key"]
                assert compiled(http, graph(2 + number)), what
                failed[what] = _failure(red, name)
                assert red.get(f"/v1/artifacts/{name}").status_code == 404, what
        frames = [
            failed.pop(what) for what in list(failed) if "frame" in what or "Pack" in what or "type" in what
        ]
        assert failed.pop("an error without an end") == "verify_failed"
        assert set(failed.values()) == {"service"}  # the signer refuses them
        assert set(frames) == {"compile_killed"}
        assert post(http, graph(1)).content == honest
        wait_until(lambda: [each.state for each in pool.workers()] == ["idle"] * 2, seconds=60)
        ready = http.get("/readyz")
        assert (ready.status_code, ready.json()["failing"]) == (200, {})
    assert psutil.Process().memory_info().rss - before < 100 << 20
    with redis_server.client() as redis:
        assert redis.info("memory")["used_memory"] < 20 << 20


def _failure(http: httpx2.Client, name: str) -> str:
    *_, (_, stage, data) = follow(http, name)
    assert stage == "failed", data
    assert len(data["error"]["message"]) < 17_000
    return str(data["error"]["code"])
