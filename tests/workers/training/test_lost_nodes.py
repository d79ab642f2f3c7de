"""Jobs whose nodes, or whose whole Ray, are lost and come: Ray's head and nodes are processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from pool_parts import RAY_TOKEN
from torchrelay.compiler.api.training.events import LogLines, RankEnded, RankStarted
from torchrelay.workers.pool import PoolSettings, WorkerPool, ray_environment, why_no_room
from train_engine_parts import FIRST_WAITS, HANG_SECONDS, MEET, Site, gone
from waiting import wait_until

STAYS = """
    import signal
    from pathlib import Path
    def told(*_):
        print(f"told rank {rank} of {world}", flush=True)
        sys.exit(143)
    signal.signal(signal.SIGTERM, told)
    while not Path(sys.argv[1]).exists():
        time.sleep(0.1)
    dist.destroy_process_group()
"""


def world(size):
    """Whether all ranks of the newest attempt have met, and are so many."""

    def condition(job):
        newest = max((event.attempt for event in job.of(RankStarted)), default=-1)
        return {f"attempt {newest} rank {rank} of {size}" for rank in range(size)} <= {
            line.partition(" sum")[0] for line in job.lines()
        }

    return condition


@pytest.mark.slow
def test_an_elastic_job_goes_on_with_fewer_ranks_and_takes_more_when_a_node_comes(nodes, tmp_path):
    first, second = nodes.add(), nodes.add()
    site = Site(tmp_path)
    site.pool = WorkerPool(
        PoolSettings(ray_address=nodes.address, ray_token=RAY_TOKEN, cpu_slots=0, gpu_slots_per_gpu=0)
    )
    finish = tmp_path / "finish"
    try:
        site.call(site.pool.start())
        needs = site.order("", workers=2, cpus=1.0).spec
        wait_until(lambda: not why_no_room(needs, site.pool.node_resources()), HANG_SECONDS)
        job = site.begin(MEET + STAYS, workers=2, min_workers=1, cpus=1.0, arguments=[str(finish)])
        job.until_told(world(2))
        (raylet,) = [p for p in second.children(recursive=True) if p.name() == "raylet"]
        raylet.kill()  # its workers notice, and end
        job.until_told(world(1))
        third = nodes.add()
        job.until_told(world(2))
        told = [line for log in job.of(LogLines) for line in log.lines if line.startswith("told")]
        assert told == ["told rank 0 of 1"]
        assert 143 in [event.code for event in job.of(RankEnded)]
        finish.touch()
        job.until_told(lambda job: "done" in job.states())
        assert [each.number for each in job.news] == list(range(1, len(job.news) + 1))
        assert first.is_running() and third.is_running()
        job.forget()
    finally:
        site.call(site.pool.close())
        site.loop.call_soon_threadsafe(site.loop.stop)


ASK = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
teller = ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator")  # ValueError: it has ended
while True:
    try:
        sys.exit(ray.get(teller.cancel_request.remote("nobody"), timeout=5))
    except ray.exceptions.ActorDiedError:
        raise
    except ray.exceptions.RayError:
        pass  # it is not back yet
"""


@pytest.mark.slow
def test_who_tells_elastic_jobs_what_is_free_outlives_the_node_of_the_first_job(nodes, tmp_path):
    """Ray Train's own is for all jobs, and is made by the first one's controller, on its node and no other."""
    first = nodes.add()
    site = Site(tmp_path)
    site.pool = WorkerPool(
        PoolSettings(ray_address=nodes.address, ray_token=RAY_TOKEN, cpu_slots=0, gpu_slots_per_gpu=0)
    )
    try:
        site.call(site.pool.start())
        needs = site.order("", workers=1).spec
        wait_until(lambda: not why_no_room(needs, site.pool.node_resources()), HANG_SECONDS)
        job = site.begin("print('ran')", workers=1)
        assert job.end().state == "done"
        job.forget()
        import ray  # it reads its environment as it is imported

        nodes.add()
        (raylet,) = [p for p in first.children(recursive=True) if p.name() == "raylet"]
        raylet.kill()
        wait_until(lambda: not all(node["Alive"] for node in ray.nodes()), HANG_SECONDS)
        subprocess.run(
            [sys.executable, "-c", ASK, nodes.address],
            env={**os.environ, **ray_environment(RAY_TOKEN, nodes.address)},
            timeout=HANG_SECONDS,
            check=True,
        )
    finally:
        site.call(site.pool.close())
        site.loop.call_soon_threadsafe(site.loop.stop)


@pytest.mark.slow
def test_a_job_goes_on_in_another_ray_when_its_own_has_ended(tmp_path):
    site = Site(tmp_path)
    site.call(site.pool.start())
    job = site.begin(MEET + FIRST_WAITS)
    first = job.started()
    job.until(lambda job: len(job.lines()) == 2)
    site.call(site.pool.close())
    assert gone([rank.pid for rank in first.values()], 30)
    job.site = Site(tmp_path)
    try:
        job.site.call(job.site.pool.start())
        job.begin(environment={"FROM_ORDER": "a new token"})
        assert job.end().state == "done"
        assert [each.number for each in job.news] == list(range(1, len(job.news) + 1))
        assert {event.attempt for event in job.of(RankStarted)} == {0, 1}
        assert job.states() == ["starting", "running", "recovering", "running", "done"]
        job.forget()
    finally:
        job.site.call(job.site.pool.close())
        for each in (site, job.site):
            each.loop.call_soon_threadsafe(each.loop.stop)
