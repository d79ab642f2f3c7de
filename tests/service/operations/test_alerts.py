"""deploy/alerts.yml: each alert fires at its fault, made to happen to a real process, and is quiet without one."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from alert_parts import DEPLOY, RULES, assert_fires, promtool, scrape, scrapes
from service_parts import (
    ArtifactPool,
    GatewayProcess,
    RedisServer,
    Running,
    StartGateway,
    compiled,
    graph,
    post,
    registered,
)
from signer_parts import ADMIN_TOKEN, SignerProcess
from torchrelay.compiler.api import compiles
from torchrelay.service.base.settings import ServiceSettings
from waiting import wait_until

needs_promtool = pytest.mark.skipif(promtool() is None, reason="Prometheus' promtool is not installed")
pytestmark = needs_promtool


class BusyPool(ArtifactPool):
    """`states`: of its workers."""

    def __init__(self, *states: Any) -> None:
        super().__init__()
        self.states = states

    def workers(self) -> list[compiles.WorkerInfo]:
        (worker,) = super().workers()
        return [
            compiles.WorkerInfo(f"w{n}", worker.toolchain, worker.target, state, 0)
            for n, state in enumerate(self.states)
        ]


class BlockingPool(ArtifactPool):
    """Its compiles stop the event loop."""

    async def compile(self, *arguments: Any, **options: Any) -> bytes:
        time.sleep(0.6)
        return await super().compile(*arguments, **options)


def test_prometheus_accepts_the_rules_and_each_says_what_to_do() -> None:
    for kind, file in (("rules", RULES), ("config", DEPLOY / "prometheus.yml")):
        flags = ["--syntax-only"] if kind == "config" else []
        done = subprocess.run(
            [str(promtool()), "check", kind, *flags, str(file)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    page = (DEPLOY.parent / "docs" / "operate.md").read_text()
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    alerts = [rule for rule in group["rules"] if "alert" in rule]
    for rule in alerts:
        assert rule["annotations"]["action"].endswith(f"docs/operate.md#{rule['alert'].lower()}")
        assert f"### {rule['alert']}\n" in page
        assert rule["labels"]["severity"] in ("page", "ticket")
    tests = Path(__file__).read_text()
    assert [rule["alert"] for rule in alerts if f'"{rule["alert"]}"' not in tests] == []


def test_a_dispatcher_that_is_killed(settings: dict[str, Any], tmp_path: Path) -> None:
    gateway = Running(ServiceSettings(**settings), None)
    gateway.start()
    dispatcher = GatewayProcess(settings, 0, "dispatcher")
    urls = gateway.url, dispatcher.url
    try:
        with gateway.http() as http:
            wait_until(lambda: http.get("/readyz").status_code == 200, seconds=20)
            before = scrapes(1, *urls)
            dispatcher.kill()
            wait_until(lambda: http.get("/readyz").status_code == 503, seconds=20)
        both = "TorchrelayProcessDown", "TorchrelayNoDispatcher"
        assert_fires(tmp_path, *both, before=before, during=scrapes(1, *urls), hold=4)
    finally:
        dispatcher.kill()
        gateway.stop()


def test_a_queue_that_nobody_takes_from_and_then_is_full(
    start_gateway: StartGateway, redis_server: RedisServer, tmp_path: Path
) -> None:
    pool = BusyPool("busy", "busy")
    pool.idle = 0
    gateway = start_gateway(pool, max_queued=2)
    with gateway.http() as http, redis_server.client() as redis:
        registered(http, pool)
        before = scrapes(1, gateway.url)
        assert [post(http, graph(size)).status_code for size in (1, 2)] == [202, 202]
        waits = scrapes(1, gateway.url)
        assert_fires(tmp_path, "TorchrelayNoIdleSlot", before=before, during=waits, hold=12)
        for lease in redis.zrange("torchrelay:pending", 0, -1):
            redis.zincrby("torchrelay:pending", -600_000, lease)  # queued ten minutes earlier
        late = scrapes(1, gateway.url)
        assert_fires(tmp_path, "TorchrelayCompilesWait", before=before, during=late, hold=3)
        assert post(http, graph(3)).status_code == 429
        full = scrapes(1, gateway.url, each=lambda: redis.delete("torchrelay:summed"))  # made again each 2 s
        assert_fires(
            tmp_path, "TorchrelayCompilesWait", "TorchrelayQueueFull", before=before, during=full, hold=3
        )


def test_workers_that_are_lost(start_gateway: StartGateway, tmp_path: Path) -> None:
    pool = BusyPool("idle", "busy", "idle", "idle")
    gateway = start_gateway(pool)
    with gateway.http() as http:
        registered(http, pool)
        before = scrapes(1, gateway.url)
        pool.states = ("idle", "busy")
        registered(http, pool)
        assert_fires(
            tmp_path, "TorchrelayWorkersLost", before=before, during=scrapes(1, gateway.url), hold=12
        )


def test_hits_that_become_misses(start_gateway: StartGateway, tmp_path: Path) -> None:
    gateway = start_gateway()
    with gateway.http() as http:
        compiled(http, graph())
        before = scrapes(3, gateway.url, each=lambda: [post(http, graph()) for _ in range(20)])
        sizes = iter(range(100, 1000))
        during = scrapes(
            3,
            gateway.url,
            each=lambda: [post(http, graph(next(sizes)), wait="cache") for _ in range(20)],
        )
        assert_fires(tmp_path, "TorchrelayHitRateFell", before=before, during=during, hold=12)


def test_a_redis_that_is_killed(
    start_gateway: StartGateway, redis_server: RedisServer, tmp_path: Path
) -> None:
    gateway = start_gateway()
    before = scrapes(1, gateway.url)
    redis_server.stop()
    during = scrapes(1, gateway.url, redis_up=False)
    assert_fires(tmp_path, "TorchrelayRedisUnreachable", before=before, during=during, hold=3)


def test_a_redis_that_answers_late_once(
    start_gateway: StartGateway, redis_server: RedisServer, tmp_path: Path
) -> None:
    gateway = start_gateway(lease_seconds=30)  # it stays registered meanwhile
    with redis_server.client() as redis:
        before = scrapes(1, gateway.url, each=lambda: redis.client_pause(6000))
    assert_fires(tmp_path, before=before, during=before)


def test_a_store_that_cannot_be_written(start_gateway: StartGateway, tmp_path: Path) -> None:
    gateway = start_gateway(blob_inline_bytes=0)
    with gateway.http() as http:
        compiled(http, graph())
        before = scrapes(1, gateway.url)
        folder = gateway.settings.state_dir / "blobs" / "artifacts"
        shutil.rmtree(folder)
        folder.write_text("where the folder was")
        sizes = iter(range(100, 1000))
        during = scrapes(8, gateway.url, each=lambda: post(http, graph(next(sizes))), seconds=0.2)
        assert_fires(tmp_path, "TorchrelayBlobStoreErrors", before=before, during=during)


def test_an_artifact_that_is_damaged(start_gateway: StartGateway, tmp_path: Path) -> None:
    with start_gateway(blob_inline_bytes=0).http() as http:
        compiled(http, graph())
    gateway = start_gateway(blob_inline_bytes=0)  # has nothing in memory
    before = scrapes(1, gateway.url)
    folder = gateway.settings.state_dir / "blobs" / "artifacts"
    (blob,) = (path for path in folder.rglob("*") if path.is_file())
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    with gateway.http() as http:
        assert post(http, graph()).status_code == 202
    assert_fires(
        tmp_path, "TorchrelayArtifactsDamaged", before=before, during=scrapes(1, gateway.url), hold=3
    )


def test_a_signer_that_is_killed(start_gateway: StartGateway, tmp_path: Path) -> None:
    signer = SignerProcess(tmp_path)
    try:
        signer.start()
        gateway = start_gateway(signer_url=signer.url, signer_admin_token=ADMIN_TOKEN)
        before = scrapes(1, gateway.url)
        signer.kill()
        wait_until(lambda: 0.0 in _values(scrape(gateway.url), "torchrelay_signer_up"), seconds=20)
        assert_fires(tmp_path, "TorchrelaySignerAway", before=before, during=scrapes(1, gateway.url), hold=3)
    finally:
        signer.kill()


def _values(found: dict[str, float], name: str) -> list[float]:
    return [value for series, value in found.items() if series.startswith(f"{name}{{")]


def test_an_event_loop_that_is_blocked(start_gateway: StartGateway, tmp_path: Path) -> None:
    gateway = start_gateway(BlockingPool())
    with gateway.http() as http:
        before = scrapes(3, gateway.url, seconds=0.6)
        sizes = iter(range(100, 1000))
        during = scrapes(8, gateway.url, each=lambda: post(http, graph(next(sizes))), seconds=0.8)
        assert_fires(tmp_path, "TorchrelayEventLoopLags", before=before, during=during)


def test_a_background_task_that_fails(
    start_gateway: StartGateway, redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrelay.service.parts.background.SWEEP_SECONDS", 0.1)
    gateway = start_gateway()
    before = scrapes(1, gateway.url)
    with redis_server.client() as redis:  # a job that cannot be read
        redis.hset("torchrelay:train:broken", mapping={"job": "{}", "state": "done"})
        redis.zadd("torchrelay:trains", {"broken": 1})
        during = scrapes(3, gateway.url, seconds=0.5)
    assert_fires(tmp_path, "TorchrelayBackgroundTaskFails", before=before, during=during)
