"""Redis with sentinels fails over, and back, in the middle of everything."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx2
import pytest
from failover_parts import FailoverRedis, answered
from service_parts import TOKEN, ArtifactPool, Running, StartGateway, client_of, compiled, follow, graph, post
from torchrelay.compiler.errors import SettingsError
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.storage.redis.connections import connect
from waiting import wait_until


@pytest.fixture
def failover(tmp_path: Path) -> Iterator[FailoverRedis]:
    with contextlib.closing(FailoverRedis(tmp_path)) as made:
        made.start()
        yield made


def _taken(pools: list[ArtifactPool], key: str) -> bool:
    return any(key in pool.calls for pool in pools)


def _watch(http: httpx2.Client, key: str, stages: list[str]) -> None:
    stages.extend(stage for _, stage, _ in follow(http, key))


@pytest.mark.slow
def test_a_primary_that_is_killed_costs_no_job_no_restart_and_no_second_artifact(
    failover: FailoverRedis, start_gateway: StartGateway
) -> None:
    pools = [ArtifactPool(seconds=3.0), ArtifactPool(seconds=3.0)]
    gateways: list[Running] = [
        start_gateway(pool, redis_url=failover.url, lease_seconds=5.0, redis_timeout_seconds=1.0)
        for pool in pools
    ]
    statuses: set[int] = set()
    with gateways[0].http() as one, gateways[1].http() as two:
        hit = compiled(one, graph(1))
        for turn in (1, 2):
            begun = graph(10 * turn)
            key = post(one, begun).json()["key"]
            wait_until(partial(_taken, pools, key), seconds=20)
            stages: list[str] = []
            watching = threading.Thread(target=_watch, args=(two, key, stages))
            watching.start()
            dead = failover.kill_primary()
            killed = time.monotonic()
            assert answered(two, graph(1), statuses) == hit
            print(f"hits again after {time.monotonic() - killed:.1f} s")
            missed = [answered(http, graph(10 * turn + 1), statuses) for http in (one, two)]
            assert missed[0] == missed[1]
            watching.join(60)
            assert stages[-1] == "done"
            assert answered(one, begun, statuses) == answered(two, begun, statuses)
            assert sum(pool.calls.count(key) for pool in pools) == 1
            one.post("/v1/tokens", json={"name": "ada", "roles": ["read"]}).raise_for_status()
            wait_until(lambda: one.get("/readyz").status_code == 200, seconds=30)
            dead.start()
            failover.wait_until_ready()
        assert one.get("/v1/stats").json()["compiles"] == 5
    assert statuses <= {200, 202, 503}


@pytest.fixture
def undecided(tmp_path: Path) -> Iterator[FailoverRedis]:
    """Its sentinels wait for the primary."""
    with contextlib.closing(FailoverRedis(tmp_path, down_after_ms=600_000)) as made:
        made.start()
        yield made


def test_hits_are_read_from_a_replica_until_there_is_a_new_primary(
    undecided: FailoverRedis, start_gateway: StartGateway
) -> None:
    pool = ArtifactPool()
    gateway = start_gateway(pool, redis_url=undecided.url, redis_timeout_seconds=1.0)
    with gateway.http() as owner:
        made = owner.post("/v1/tokens", json={"name": "ada", "roles": ["compile"]}).json()
        small = compiled(owner, graph(1))
        pool.member_bytes = 1 << 20
        large = compiled(owner, graph(2))
        dead = undecided.kill_primary()
        for token in (made["token"], TOKEN):
            with client_of(gateway.url, token) as http:
                assert [post(http, graph(size)).content for size in (1, 2)] == [small, large]
                assert post(http, graph(3)).status_code == 503
        dead.start()
        wait_until(lambda: post(owner, graph(3)).status_code != 503, seconds=30)


def test_a_gateway_that_has_not_met_a_team_yet_reads_its_hits_from_a_replica_too(
    undecided: FailoverRedis, start_gateway: StartGateway
) -> None:
    met, new = (
        start_gateway(ArtifactPool(), redis_url=undecided.url, redis_timeout_seconds=1.0) for _ in range(2)
    )
    with met.http() as owner:
        made = owner.post(
            "/v1/tokens", json={"name": "ada", "roles": ["compile"], "namespace": "team"}
        ).json()
    with client_of(met.url, made["token"]) as http:
        known = compiled(http, graph(1))
    undecided.kill_primary()
    with client_of(new.url, made["token"]) as http:
        answer = post(http, graph(1))
        assert (answer.status_code, answer.content) == (200, known), answer.text


@pytest.mark.parametrize(
    ("url", "prefix", "problem"),
    [
        ("redis+sentinel://host:26379", "torchrelay:", "no redis\\+sentinel:// URL"),
        ("redis+sentinel://host:port/name", "torchrelay:", "cannot be read"),
        ("redis+sentinel://a,,b/name", "torchrelay:", "no redis\\+sentinel:// URL"),
        ("redis+cluster://host", "torchrelay:", "need a hash tag"),
        ("redis+cluster://host", "{}{torchrelay}:", "need a hash tag"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_at_the_start(url: str, prefix: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        connect(ServiceSettings(redis_url=url, redis_prefix=prefix))
