"""Gateways and dispatchers apart: any number of both on one Redis, and each may come and go."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from service_parts import (
    TOKEN,
    ArtifactPool,
    GatewayProcess,
    RedisServer,
    StartGateway,
    busy_pool,
    client_of,
    compiled,
    follow,
    free_port,
    graph,
    post,
)
from torchrelay.compiler.errors import NoWorker
from torchrelay.compiler.request import schema
from waiting import wait_until

StartRole = Callable[..., GatewayProcess]
OTHER_TOOLCHAIN = schema.Toolchain(
    python="cp312", torch="2.13.0+cpu", triton="", cuda="", platform="linux-x86_64"
)


@pytest.fixture
def start_role(settings: dict[str, Any]) -> Iterator[StartRole]:
    started: list[GatewayProcess] = []

    def start(role: str, seconds: float = 0.0, port: int = 0) -> GatewayProcess:
        process = GatewayProcess(settings, seconds, role, port=port)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


def test_a_gateway_without_a_dispatcher_answers_hits_and_queues_the_rest(start_role: StartRole) -> None:
    gateway, dispatcher = start_role("gateway"), start_role("dispatcher")
    with gateway.http() as http, client_of(dispatcher.url, None) as probe:
        wait_until(lambda: http.get("/readyz").status_code == 200, seconds=30)
        assert probe.get("/readyz").json()["ready"] is True
        assert b"torchrelay_compiles_in_progress" in probe.get("/metrics").content
        known = compiled(http, graph(1))
        dispatcher.kill()
        wait_until(lambda: http.get("/readyz").json()["parts"]["workers"] == "no dispatcher runs", seconds=30)
        assert post(http, graph(1)).content == known
        answer = post(http, graph(2))
        assert (answer.status_code, answer.json()["stage"]) == (202, "queued")
        stream = follow(http, answer.json()["key"])
        assert next(stream)[1] == "queued"
        start_role("dispatcher")
        stages = [stage for _, stage, _ in stream]
        assert stages[-4:] == ["aot", "inductor", "publish", "done"]
        assert set(stages[:-4]) <= {"queued"}  # its place in the queue


def test_what_is_queued_outlives_a_redis_that_loses_its_memory(
    start_role: StartRole, redis_server: RedisServer
) -> None:
    with start_role("gateway").http() as http:
        stream = follow(http, post(http, graph()).json()["key"])
        next(stream)
        redis_server.client().flushall()
        start_role("dispatcher")
        assert [stage for _, stage, _ in stream][-1] == "done"


def test_a_compile_waits_for_the_dispatcher_that_has_its_workers(start_gateway: StartGateway) -> None:
    wrong, right = busy_pool(), busy_pool()
    wrong.idle, wrong.toolchain = None, OTHER_TOOLCHAIN
    wrong.errors = [NoWorker("none for this toolchain")]
    one, other = start_gateway(wrong), start_gateway(right)
    with one.http() as http:
        wait_until(lambda: len(http.get("/v1/workers").json()) == 2, seconds=30)
        stream = follow(http, post(http, graph()).json()["key"])
        next(stream)
        time.sleep(1)  # the wrong dispatcher sees it several times
        right.idle = 1
        assert [stage for _, stage, _ in stream][-1] == "done"
        assert (len(wrong.calls), len(right.calls)) == (0, 1)
        other.stop()
        wait_until(lambda: len(http.get("/v1/workers").json()) == 1, seconds=30)
        *_, (_, stage, told) = follow(http, post(http, graph(2)).json()["key"])
        assert (stage, told["error"]["code"]) == ("failed", "no_worker")


def test_a_compile_waits_for_a_dispatcher_whose_entry_was_lost(
    start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    wrong, right = busy_pool(), busy_pool()
    wrong.idle, wrong.toolchain = None, OTHER_TOOLCHAIN
    wrong.errors = [NoWorker("none for this toolchain")]
    one, _ = start_gateway(wrong), start_gateway(right)
    with one.http() as http, redis_server.client() as redis:
        wait_until(lambda: len(http.get("/v1/workers").json()) == 2, seconds=30)
        stream = follow(http, post(http, graph()).json()["key"])
        next(stream)
        for _ in range(3):
            time.sleep(0.5)  # what was read last is not fresh any more
            redis.delete(*redis.keys("torchrelay:dispatcher*"))
            wrong.changed()
        right.idle = 1
        assert [stage for _, stage, _ in stream][-1] == "done"
        assert (len(wrong.calls), len(right.calls)) == (0, 1)


class LosingPool(ArtifactPool):
    """Its only worker goes during the first compile, and no other comes."""

    async def compile(self, *arguments: Any, **options: Any) -> bytes:
        self.calls.append(options["key"])
        self.idle = None
        raise NoWorker("none here any more")


def test_a_compile_whose_worker_goes_for_good_is_left_to_the_dispatcher_that_has_one(
    start_gateway: StartGateway,
) -> None:
    losing, other = LosingPool(), busy_pool()
    losing.idle = 1
    one, _ = start_gateway(losing), start_gateway(other)
    with one.http() as http:
        wait_until(lambda: len(http.get("/v1/workers").json()) == 2, seconds=30)
        stream = follow(http, post(http, graph()).json()["key"])
        wait_until(lambda: bool(losing.calls), seconds=30)
        other.idle = 1
        assert [stage for _, stage, _ in stream][-1] == "done"
    assert (len(losing.calls), len(other.calls)) == (1, 1)


def test_a_compile_whose_worker_goes_for_good_fails_where_nobody_has_one(
    start_gateway: StartGateway,
) -> None:
    pool = LosingPool()
    pool.idle = 1
    with start_gateway(pool).http() as http:
        *_, (_, stage, told) = follow(http, post(http, graph()).json()["key"])
    assert (stage, told["error"]["code"]) == ("failed", "no_worker")
    assert len(pool.calls) == 2  # the second time as one that is for nowhere


def test_what_no_dispatcher_of_a_shared_cluster_has_workers_for_fails_after_a_while(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrelay.service.compile.intake.HANDOVER_SECONDS", 1.0)
    pool = busy_pool()
    pool.idle, pool.elsewhere, pool.toolchain = None, 1, OTHER_TOOLCHAIN
    pool.errors = [NoWorker("none for this toolchain; another dispatcher uses 1 slot")]
    with start_gateway(pool).http() as http:
        began = time.monotonic()
        *_, (_, stage, told) = follow(http, post(http, graph()).json()["key"])
        assert time.monotonic() - began >= 1.0  # a slot may be on its way from the other dispatcher
    assert (stage, told["error"]["code"]) == ("failed", "no_worker")


def test_dispatchers_take_what_their_idle_workers_can_begin(start_gateway: StartGateway) -> None:
    pools = [ArtifactPool(seconds=1.0) for _ in range(2)]
    for pool in pools:
        pool.idle = 1
    gateway, _ = [start_gateway(pool) for pool in pools]
    with gateway.http() as http:
        keys = [post(http, graph(n)).json()["key"] for n in range(1, 9)]
        for key in keys:
            *_, (_, stage, _) = follow(http, key)
            assert stage == "done"
    assert sorted(pools[0].calls + pools[1].calls) == sorted(keys)
    assert min(len(pool.calls) for pool in pools) >= 2


def test_a_compile_that_waited_until_its_deadline_fails(start_gateway: StartGateway) -> None:
    pool = busy_pool()
    with start_gateway(pool, compile_deadline_seconds=1).http() as http:
        stream = follow(http, post(http, graph()).json()["key"])
        next(stream)
        time.sleep(1.1)
        pool.idle = 1
        *_, (_, stage, told) = stream
    assert (stage, told["error"]["code"]) == ("failed", "compile_timeout")
    assert pool.calls == []


def test_what_no_job_waits_for_any_more_is_not_compiled(start_gateway: StartGateway) -> None:
    pool = busy_pool()
    gateway = start_gateway(pool, abandon_seconds=0.5)
    with gateway.http() as http:
        status = f"/v1/compiles/{gateway.queue_for_job(graph())}"
        time.sleep(1)
        pool.idle = 1
        wait_until(lambda: http.get(status).json()["stage"] != "queued", seconds=30)
        told = http.get(status).json()
    assert (told["stage"], told["error"]["code"]) == ("failed", "compile_killed")
    assert pool.calls == []


def _gateway_processes(settings: dict[str, Any], folder: Path, port: int, count: int) -> psutil.Popen:
    """`torchrelay gateway --workers`; its temporary files, credentials and log are in `folder`."""
    given = {f"TORCHRELAY_SERVICE_{name.upper()}": str(value) for name, value in settings.items()}
    with (folder / "log").open("ab") as log:
        return psutil.Popen(
            [
                *(sys.executable, "-m", "torchrelay.service", "gateway", "--workers", str(count)),
                *("--port", str(port), "--credentials", str(folder / "credentials.json")),
            ],
            env={**os.environ, **given, "TMPDIR": str(folder)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def test_one_port_is_answered_by_several_processes_and_a_killed_one_is_replaced(
    settings: dict[str, Any], start_role: StartRole, tmp_path: Path
) -> None:
    port = free_port()
    service = _gateway_processes(settings, tmp_path, port, 3)
    try:
        url = f"http://127.0.0.1:{port}"

        def answering() -> list[psutil.Process]:
            (keeper,) = service.children()
            return keeper.children()

        with client_of(url, TOKEN) as http:
            wait_until(lambda: _answers(http), seconds=60)
        start_role("dispatcher")
        wait_until(lambda: len(answering()) == 3, seconds=30)
        victim = answering()[0]
        for n in range(1, 40):
            if n == 10:
                victim.kill()
            with contextlib.suppress(httpx2.TransportError), client_of(url, TOKEN) as http:
                compiled(http, graph(n % 5 + 1))
        wait_until(lambda: len(answering()) == 3 and victim not in answering(), seconds=30)
        with client_of(url, TOKEN) as http:
            text = http.get("/metrics").text
            requests = [
                float(line.split()[-1])
                for line in text.splitlines()
                if line.startswith("torchrelay_http_requests_total{") and 'route="/v1/compile"' in line
            ]
        assert sum(requests) >= 36  # of all three processes, whichever answered
        (lags,) = re.findall(r"^torchrelay_event_loop_lag_seconds_count (\S+)$", text, re.MULTILINE)
        assert float(lags) >= 3
        for gauge in ("redis_up", "signer_up", 'shared_dispatchers{state="ready"}'):
            assert text.count(f"\ntorchrelay_{gauge} 1.0\n") == 1
    finally:
        service.send_signal(signal.SIGTERM)
        assert service.wait(30) == 0


def test_the_metrics_of_a_killed_gateway_are_removed_by_the_next(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    def held() -> list[Path]:
        return list(tmp_path.glob("torchrelay-metrics-*"))

    for last in (False, True):
        port = free_port()
        service = _gateway_processes(settings, tmp_path, port, 2)
        with client_of(f"http://127.0.0.1:{port}", TOKEN) as http:
            wait_until(lambda http=http: _answers(http), seconds=60)
        assert len(held()) == 1
        started = service.children(recursive=True)
        for each in [service] if last else [*started, service]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended with another
                each.send_signal(signal.SIGTERM if last else signal.SIGKILL)
        service.wait(30)
        psutil.wait_procs(started, timeout=30)
    assert held() == []


def _answers(http: httpx2.Client) -> bool:
    with contextlib.suppress(httpx2.TransportError):
        return http.get("/livez").status_code == 200
    return False
