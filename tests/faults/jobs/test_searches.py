"""Searches on a real Ray while its parts die: queue, scheduler and the pool. One cluster for all.

The engine is that of tests/workers: each search goes as its problem's settings say.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis.asyncio import Redis
from service_parts import RedisServer
from torchrelay.compiler.request import schema
from torchrelay.compiler.tuning import queries
from torchrelay.compiler.tuning.queries import SearchResult, TuningTask
from torchrelay.compiler.tuning.records import DeviceEnvironment, Operand, Problem
from torchrelay.service.admission.compile_request import CompileRequest
from torchrelay.service.base.async_tasks import TaskSupervisor
from torchrelay.service.base.metrics import GatewayMetrics
from torchrelay.service.compile.search.database import TuningDatabase
from torchrelay.service.compile.search.queue import SearchQueue
from torchrelay.service.compile.search.scheduler import SearchScheduler
from torchrelay.service.compile.search.task import LOSSES, SearchTarget
from torchrelay.service.storage.redis.keys import Keys
from torchrelay.service.storage.redis.scripts import Scripts
from torchrelay.workers.pool import PoolSettings, WorkerPool
from waiting import until

ENGINE = Path(__file__).parents[2] / "workers" / "parts"
RAY_TOKEN = "0123456789abcdef" * 4
TOOLCHAIN = schema.Toolchain(python="cp311", torch="0.0.0", triton="", cuda="", platform="linux-x86_64")
TARGET = schema.Target(kind="cpu", name="", capability="", units=0, cpu=["avx2"])
PLACE = DeviceEnvironment("a CPU", "", "", "0.0.0", "", "", threads=1)
AIM = SearchTarget(TOOLCHAIN, TARGET, 1)
ASK = CompileRequest("key", b"", TOOLCHAIN, TARGET, {}, [])


def of(size: int, **settings: str) -> Problem:
    side = Operand("float32", (size, size), (size, 1))
    return Problem("mm", (side, side), side, tuple(sorted(settings.items())))


def task(size: int, **settings: str) -> TuningTask:
    return TuningTask(id=f"t{size}", problem=of(size, **settings))


@dataclass
class Site:
    pool: WorkerPool
    queue: SearchQueue
    tunings: TuningDatabase

    def submit(self, *tasks: TuningTask) -> list[Watched]:
        return [Watched(self.queue, each) for each in tasks]

    def lane(self, worker: str) -> list[psutil.Process]:
        """The fork server that searches for `worker` and the actor that it belongs to; none while it starts."""
        for process in psutil.Process().children(recursive=True):
            try:
                slot = process.environ().get("TORCHRELAY_SLOT", "")
                if slot == f"{worker}-search" and "fork_server" in " ".join(process.cmdline()):
                    return [
                        process,
                        *(p for p in process.parents() if "CompileSlot" in " ".join(p.cmdline())),
                    ]
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return []


class Watched:
    """A batch task, and which workers had it."""

    def __init__(self, queue: SearchQueue, task: TuningTask) -> None:
        self.workers: list[str] = []
        self.search = queue.submit(task, AIM, self.workers.append)

    async def found(self) -> SearchResult:
        outcome = await asyncio.wait_for(self.search.outcome(), 90)
        assert isinstance(outcome, SearchResult), outcome
        return outcome


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def pool(loop: asyncio.AbstractEventLoop) -> Iterator[WorkerPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ENGINE), os.environ.get("PYTHONPATH", "")]))
        pool = WorkerPool(
            PoolSettings(cpu_slots=2, gpu_slots_per_gpu=0, engine="engine", ray_token=RAY_TOKEN)
        )
        try:
            loop.run_until_complete(pool.start())
            yield pool
        finally:
            loop.run_until_complete(pool.close())


@asynccontextmanager
async def site(pool: WorkerPool, server: RedisServer) -> AsyncIterator[Site]:
    await until(lambda: sum(worker.state == "idle" for worker in pool.workers()) >= 2)
    redis: Any = Redis.from_url(server.url)
    tunings = TuningDatabase(redis, Keys("torchrelay:", "default"), Scripts(redis), limit=1000)
    metrics = GatewayMetrics()
    scheduler = SearchScheduler(pool, metrics, TaskSupervisor(lambda task: None))
    try:
        yield Site(pool, scheduler.open("default", tunings), tunings)
    finally:
        await scheduler.close()
        await redis.aclose()
        await until(lambda: not any(worker.searching for worker in pool.workers()))


Scenario = Callable[[Site], Coroutine[None, None, None]]


@pytest.fixture
def run(
    loop: asyncio.AbstractEventLoop, pool: WorkerPool, redis_server: RedisServer
) -> Callable[[Scenario], None]:
    def run(scenario: Scenario) -> None:
        async def opened() -> None:
            async with site(pool, redis_server) as here:
                await scenario(here)

        loop.run_until_complete(asyncio.wait_for(opened(), 240))

    return run


def test_both_workers_search_and_everything_is_found_once(run: Callable[[Scenario], None]) -> None:
    async def scenario(here: Site) -> None:
        tasks = here.submit(*(task(size, sleep="0.3") for size in range(1, 13)))
        found = [await each.found() for each in tasks]
        assert [each.entry.winner.candidate for each in found] == ["a"] * 12
        assert all(len(each.workers) == 1 for each in tasks)
        assert {each.workers[0] for each in tasks} == {worker.id for worker in here.pool.workers()}
        assert len(await here.tunings.known(PLACE, [of(size, sleep="0.3") for size in range(1, 13)])) == 12

    run(scenario)


def test_two_compiles_want_the_same_and_it_is_searched_once(run: Callable[[Scenario], None]) -> None:
    async def scenario(here: Site) -> None:
        problems = [of(size, sleep="0.2") for size in range(1, 7)]

        async def known() -> queries.KnownEntries | None:
            found = await here.queue.want(PLACE, problems, ASK)
            return None if found.open else found

        one, other = await asyncio.gather(until(known), until(known))
        assert one.given_up == other.given_up == []
        assert sorted(e.problem.text() for e in one.entries) == sorted(p.text() for p in problems)
        assert one.entries == other.entries
        searches = here.queue._metrics.registry.get_sample_value
        assert searches("torchrelay_searches_total", {"outcome": "found"}) == 6

    run(scenario)


def test_a_candidate_that_ends_its_process_is_avoided(run: Callable[[Scenario], None]) -> None:
    async def scenario(here: Site) -> None:
        bad, good = here.submit(task(1, crash="a"), task(2))
        found = await bad.found()
        assert found.entry.winner.candidate == "b"
        assert [failure.candidate for failure in found.failures] == ["a"]
        assert len(bad.workers) == 2
        assert (await good.found()).failures == []

    run(scenario)


def test_a_killed_actors_task_goes_to_another_and_blames_no_candidate(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(here: Site) -> None:
        (held,) = here.submit(task(1, sleep="4"))
        await until(lambda: held.workers != [] and here.lane(held.workers[0]) != [])
        await asyncio.sleep(1.0)
        _, actor = here.lane(held.workers[0])
        actor.kill()
        found = await held.found()
        assert found.entry.winner.candidate == "a"
        assert len(held.workers) == 2
        assert held.search.task.avoid == ()

    run(scenario)


def test_a_lane_whose_server_is_killed_again_and_again_serves_on(run: Callable[[Scenario], None]) -> None:
    async def scenario(here: Site) -> None:
        tasks = here.submit(*(task(size, sleep="0.5") for size in range(1, 17)))

        def servers() -> list[psutil.Process]:
            """Those that search now; not for a task that has ended so many that the next would be its own fault."""
            searched = (each for each in tasks if each.search.state == "searching")
            at = [each.workers[-1] for each in searched if each.search.losses < LOSSES - 1]
            return [server for worker in at for server in here.lane(worker)[:1]]

        for _ in range(3):
            await until(lambda: servers() != [])
            for server in servers()[:1]:
                server.kill()
            await asyncio.sleep(1.0)
        outcomes = [await asyncio.wait_for(each.search.outcome(), 90) for each in tasks]
        assert all(isinstance(outcome, SearchResult) for outcome in outcomes)

    run(scenario)


def test_a_cancelled_task_frees_its_lane_for_the_next(run: Callable[[Scenario], None]) -> None:
    async def scenario(here: Site) -> None:
        tasks = here.submit(*(task(size, sleep="1") for size in range(1, 9)))
        await until(lambda: tasks[0].workers != [])
        for each in tasks:
            each.search.cancel()
        (after,) = here.submit(task(99))
        assert (await after.found()).entry.problem == of(99)
        assert sum(each.workers != [] for each in tasks) <= 6  # each of two has at most three in hand

    run(scenario)
