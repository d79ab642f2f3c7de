"""Dispatchers of different Ray clusters on one Redis: a training job goes to the cluster that has room for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from service_parts import Running
from training_parts import TrainingPool, begin, begun, ended, request, sent_package, shown
from waiting import wait_until

StartGateway = Callable[..., Running]


def node(cpus: float, gpus: float = 0.0) -> dict[str, float]:
    return {"torchrelay_worker": 1.0, "CPU": cpus, "GPU": gpus, "memory": float(1 << 40)}


@pytest.fixture
def pools(tmp_path: Path) -> tuple[TrainingPool, TrainingPool]:
    """The second has GPUs too."""
    made = []
    for name, gpus in (("a", 0.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        made.append(TrainingPool(tmp_path / name))
        made[-1].cluster = name
        made[-1].nodes = [node(8.0, gpus)]
    return made[0], made[1]


@pytest.fixture
def http(start_gateway: StartGateway, pools: tuple[TrainingPool, TrainingPool]) -> Iterator[httpx2.Client]:
    """The first of two gateways, each with a dispatcher and a pool; each knows both pools."""
    running = [start_gateway(pool) for pool in pools]
    for each in running:
        with each.http() as client:
            wait_until(lambda http=client: len(http.get("/v1/workers").json()) == 2, seconds=60)  # type: ignore[misc]
    with running[0].http() as client:
        yield client


def ran(pool: TrainingPool) -> set[str]:
    return {order.job for order in pool.orders}


def test_jobs_go_to_the_cluster_that_has_room(
    http: httpx2.Client, pools: tuple[TrainingPool, TrainingPool]
) -> None:
    full, empty = pools
    full.free = [node(1.0)]
    jobs = {begun(http, capture=False) for _ in range(4)}
    assert {ended(http, job)["state"] for job in jobs} == {"done"}
    assert (ran(full), ran(empty)) == (set(), jobs)


def test_a_job_that_only_one_cluster_could_ever_hold_goes_there_and_waits_in_ray(
    http: httpx2.Client, pools: tuple[TrainingPool, TrainingPool]
) -> None:
    small, large = pools
    large.free = [node(8.0)]
    jobs = {begun(http, capture=False, device="cuda") for _ in range(4)}
    assert {ended(http, job)["state"] for job in jobs} == {"done"}
    assert (ran(small), ran(large)) == (set(), jobs)


def test_a_job_waits_until_some_cluster_has_room(
    http: httpx2.Client, pools: tuple[TrainingPool, TrainingPool]
) -> None:
    for pool in pools:
        pool.free = [node(1.0)]
    job = begun(http, capture=False)
    wait_until(lambda: all(pool.asked_for_room >= 3 for pool in pools), seconds=60)
    assert shown(http, job)["state"] == "waiting"
    assert not ran(pools[0]) | ran(pools[1])
    pools[1].free = [node(2.0)]
    assert ended(http, job)["state"] == "done"
    assert (ran(pools[0]), ran(pools[1])) == (set(), {job})


def test_room_that_was_given_to_a_job_whose_ranks_do_not_run_yet_is_not_given_again(
    http: httpx2.Client, pools: tuple[TrainingPool, TrainingPool]
) -> None:
    for pool in pools:
        pool.free, pool.pace = [node(3.0)], 60.0
    jobs = [begun(http, capture=False) for _ in range(2)]
    wait_until(lambda: all(shown(http, job)["state"] == "starting" for job in jobs), seconds=60)
    third = begun(http, capture=False)
    asked = [pool.asked_for_room for pool in pools]
    wait_until(
        lambda: all(pool.asked_for_room >= n + 3 for pool, n in zip(pools, asked, strict=True)), seconds=60
    )
    assert sorted(len(ran(pool)) for pool in pools) == [1, 1]
    assert shown(http, third)["state"] == "waiting"
    for job in (third, *jobs):
        http.post(f"/v1/trains/{job}/cancel")
    assert {ended(http, job)["state"] for job in (third, *jobs)} == {"cancelled"}


def test_a_job_that_no_cluster_can_hold_is_refused_with_the_reason(
    http: httpx2.Client, pools: tuple[TrainingPool, TrainingPool]
) -> None:
    answer = begin(http, request(sent_package(http), workers=9))
    assert answer.status_code == 422
    assert "and the job needs 9" in answer.json()["error"]["message"]


def test_a_job_goes_on_where_its_ranks_are_when_its_dispatcher_was_away(
    start_gateway: StartGateway, pools: tuple[TrainingPool, TrainingPool]
) -> None:
    here, there = pools
    here.pace = 0.3
    first = start_gateway(here)
    with first.http() as http:
        job = begun(http, capture=False)
        wait_until(lambda: shown(http, job)["state"] == "running", seconds=60)
    other = start_gateway(there)
    first.stop()
    with other.http() as http:
        later = begun(http, capture=False)
        assert ended(http, later)["state"] == "done"  # so `there` has looked at the job before it, too
        assert ran(there) == {later}
        start_gateway(here)
        assert ended(http, job)["state"] == "done"
    assert ran(there) == {later}
    assert len(here.orders) == 1


def test_a_job_begins_again_elsewhere_when_its_cluster_is_gone(
    start_gateway: StartGateway, pools: tuple[TrainingPool, TrainingPool]
) -> None:
    gone, there = pools
    gone.pace = 60.0
    first = start_gateway(gone)
    with first.http() as http:
        job = begun(http, capture=False)
        wait_until(lambda: shown(http, job)["state"] == "starting", seconds=60)
        wait_until(lambda: ran(gone) == {job}, seconds=60)
    with start_gateway(there).http() as http:
        first.stop()
        assert ended(http, job)["state"] == "done"
    assert ran(there) == {job}
