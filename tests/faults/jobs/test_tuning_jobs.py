"""A batch job whose gateway, Redis, worker or client dies goes on, and measures nothing again that it had."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fault_parts import RedisProxy
from service_parts import TOKEN, RedisServer, Running, follow, graph, post
from torchrelay.clients.gateway.jobs import TuningJobsClient, TuningJobStateChange
from torchrelay.clients.settings import load_settings
from torchrelay.compiler.api.tuning.jobs import ENDED
from tune_parts import SearchingGateway, SearchingPool, begun, ended, events, operator, results, shown
from waiting import wait_until

PROBLEMS = 12
ALL = PROBLEMS + 2
"""With the two ceilings."""

StartGateway = Callable[..., Running]
Start = Callable[[], SearchingGateway]
PERSISTENT = True
"""Redis' data outlive it."""


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """What the gateways' searchers have measured, a problem a line."""
    path = tmp_path / "measured"
    path.touch()
    return path


@pytest.fixture
def start(settings: dict[str, Any], measured: Path) -> Iterator[Start]:
    started: list[SearchingGateway] = []

    def begin() -> SearchingGateway:
        started.append(SearchingGateway(settings, 0.15, measured))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


def problems(*, first: int = 1) -> list[Any]:
    return [operator(16 * n, line=n) for n in range(first, first + PROBLEMS)]


def have(http: httpx2.Client, job: str) -> set[str]:
    """Problems that the job has results for."""
    return {each.entry.problem.text() for each in results(http, job)}


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_another_gateway_goes_on_when_one_is_killed(start: Start, measured: Path) -> None:
    one, two = start(), start()
    with one.http() as http:
        job = begun(http, *problems())
    with two.http() as http:
        wait_until(lambda: len(have(http, job)) >= 3, seconds=60)
        before = have(http, job)
        # whichever of the two drives it: the first to look does
        one.kill()
        two_sees = ended(http, job)
        assert _found(two_sees["items"]) == ALL
        assert len(have(http, job)) == ALL
        told = [data for _, name, data in events(http, job) if name == "item"]
        assert Counter(data["item"] for data in told if data["state"] in ("done", "known")) == dict.fromkeys(
            range(ALL), 1
        )
    counts = Counter(lines(measured))
    assert {text for text, count in counts.items() if count > 1}.isdisjoint(before)


def test_a_compile_whose_searches_wait_goes_on_elsewhere_and_nothing_is_measured_again(
    settings: dict[str, Any], measured: Path
) -> None:
    sizes = [16 * n for n in range(1, PROBLEMS + 1)]
    started = [SearchingGateway(settings, 0.3, measured, wanted=sizes)]
    try:
        with started[0].http() as http:
            key = post(http, graph(1)).json()["key"]
            wait_until(lambda: len(lines(measured)) >= 4, seconds=60)
        started[0].kill()
        assert len(lines(measured)) < PROBLEMS, "some wait, and some are being searched"
        started.append(SearchingGateway(settings, 0.3, measured, wanted=sizes))
        with started[1].http() as http:
            *_, (_, stage, data) = follow(http, key)
            assert stage == "done", data
    finally:
        for process in started:
            process.kill()
    counts = Counter(lines(measured))
    assert len(counts) == PROBLEMS
    assert sum(counts.values()) <= PROBLEMS + 2, "at most what each of two devices was measuring"


def test_redis_is_killed_and_comes_back_with_what_it_had(
    start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    pool = SearchingPool()
    pool.searchers.seconds = 0.15
    gateway = start_gateway(pool)
    with gateway.http() as http:
        job = begun(http, *problems())
        wait_until(lambda: len(pool.searchers.measured) >= 3, seconds=60)
        redis_server.stop()
        wait_until(lambda: len(pool.searchers.measured) >= 6, seconds=60)
        redis_server.start()
        wait_until(lambda: _answers(http, job), seconds=60)
        done = ended(http, job)
        assert _found(done["items"]) == ALL
        assert len(have(http, job)) == ALL
    assert set(pool.searchers.measured.values()) == {1}


def test_redis_that_comes_back_empty_is_given_the_job_again(
    start_gateway: StartGateway, settings: dict[str, Any]
) -> None:
    forgetful = RedisServer()
    forgetful.start()
    pool = SearchingPool()
    pool.searchers.seconds = 0.15
    gateway = start_gateway(pool, redis_url=forgetful.url)
    try:
        with gateway.http() as http:
            job = begun(http, *problems())
            wait_until(lambda: len(pool.searchers.measured) >= 4, seconds=60)
            forgetful.stop()
            forgetful.start()
            wait_until(lambda: _answers(http, job), seconds=60)
            ended(http, job)
            assert len(have(http, job)) == ALL
        assert max(pool.searchers.measured.values()) <= 2  # one that was reported while Redis was away
        assert sum(pool.searchers.measured.values()) <= ALL + 2
    finally:
        gateway.stop()
        forgetful.close()


def test_a_gateway_that_is_cut_off_and_comes_back_does_not_tell_what_another_has_told(
    start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    proxy = RedisProxy(redis_server.socket)
    proxy.start()
    cut, sound = SearchingPool(), SearchingPool()
    cut.searchers.seconds = sound.searchers.seconds = 0.3
    try:
        gateway = start_gateway(cut, redis_url=proxy.url, redis_timeout_seconds=1.0)
        with gateway.http() as http:
            job = begun(http, *problems())
            wait_until(lambda: len(cut.searchers.measured) >= 2, seconds=60)
        proxy.hold()
        other = start_gateway(sound)
        with other.http() as http:
            wait_until(lambda: len(sound.searchers.measured) >= 2, seconds=60)
            proxy.let_go()
            done = ended(http, job)
            assert sum(done["items"].values()) == ALL
            assert len(have(http, job)) == ALL
            told = [
                data["item"]
                for _, name, data in events(http, job)
                if name == "item" and data["state"] in ENDED
            ]
            assert sorted(told) == list(range(ALL))
    finally:
        proxy.let_go()
        proxy.stop()


def test_a_worker_that_is_lost_costs_nothing_that_was_measured(start_gateway: StartGateway) -> None:
    pool = SearchingPool()
    pool.searchers.seconds = 0.15
    gateway = start_gateway(pool)
    with gateway.http() as http:
        job = begun(http, *problems())
        wait_until(lambda: len(pool.searchers.measured) >= 3, seconds=60)
        loop = pool.searchers.searching["a"].get_loop()
        loop.call_soon_threadsafe(pool.searchers.lose, "a")
        assert ended(http, job)["items"] == {"done": ALL}
    assert set(pool.searchers.measured.values()) == {1}
    assert list(pool.searchers.up) == ["b"]


def test_a_killed_client_leaves_its_job_running_and_another_follows_it(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    pool = SearchingPool()
    pool.searchers.seconds = 0.15
    gateway = start_gateway(pool)
    (tmp_path / "job.yaml").write_text(
        "threads: 1\noperators:\n- {op: mm, m: {from: 16, to: 192, step: 16}, n: 16, k: 16, dtype: bf16}\n"
    )
    environment = {**os.environ, "TORCHRELAY_URL": gateway.url, "TORCHRELAY_TOKEN": TOKEN}
    environment["XDG_CONFIG_HOME"] = str(tmp_path)
    command = [sys.executable, "-m", "torchrelay.clients.cli", "tune"]
    client = subprocess.Popen([*command, str(tmp_path / "job.yaml")], env=environment)
    try:
        wait_until(lambda: len(pool.searchers.measured) >= 2, seconds=60)
    finally:
        client.send_signal(signal.SIGKILL)
        client.wait()
    with gateway.http() as http:
        (listed,) = http.get("/v1/tunes").json()["jobs"]
        follower = subprocess.run(
            [*command, "logs", "-f", listed["id"]],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert follower.returncode == 0, follower.stderr
        assert f"{ALL} done" in follower.stdout
        assert shown(http, listed["id"])["state"] == "done"


def test_a_client_that_follows_goes_on_when_its_gateway_comes_back(
    start: Start, settings: dict[str, Any], measured: Path, tmp_path: Path
) -> None:
    one = start()
    with one.http() as http:
        job = begun(http, *problems())
    told: list[Any] = []
    troubles: list[str] = []
    with TuningJobsClient(load_settings(url=one.url, token=TOKEN)) as tunes:

        def follow() -> None:
            for event in tunes.follow(job, on_trouble=lambda error: troubles.append(error.code)):
                told.append(event)

        thread = threading.Thread(target=follow)
        thread.start()
        wait_until(lambda: len(told) > 5, seconds=60)
        one.kill()
        wait_until(lambda: bool(troubles), seconds=60)
        again = SearchingGateway(settings, 0.05, measured, port=one.port)
        try:
            thread.join(90)
            assert not thread.is_alive()
        finally:
            again.kill()
    changes = [event.state for event in told if isinstance(event, TuningJobStateChange)]
    ends = [
        event.item for event in told if not isinstance(event, TuningJobStateChange) and event.state in ENDED
    ]
    assert sorted(ends) == list(range(ALL))
    assert changes == ["waiting", "running", "done"]


def _found(items: dict[str, int]) -> int:
    """How many were: measured for the job, or by a search of which it had not heard."""
    assert items.keys() <= {"done", "known"}
    return sum(items.values())


def _answers(http: httpx2.Client, job: str) -> bool:
    return http.get(f"/v1/tunes/{job}").status_code == 200
