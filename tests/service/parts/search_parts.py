"""A search queue on a real Redis, and a pool whose searches run in this process: each goes as its problem says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from redis.asyncio import Redis
from service_parts import TARGET, TOOLCHAIN, RedisServer
from torchrelay.compiler import decoding
from torchrelay.compiler.api.tuning.jobs import SearchJobSpec
from torchrelay.compiler.errors import CompileKilled, NoWorker, Overloaded
from torchrelay.compiler.request import schema
from torchrelay.compiler.tuning import queries
from torchrelay.compiler.tuning.queries import (
    CandidateAttempt,
    SearchResult,
    TaskReassigned,
    TaskRequest,
    TuningTask,
    UnsupportedTask,
)
from torchrelay.compiler.tuning.records import (
    CandidateFailure,
    DeviceEnvironment,
    Problem,
    Timing,
    TuningEntry,
)
from torchrelay.service.admission.compile_request import CompileRequest
from torchrelay.service.base.async_tasks import TaskSupervisor
from torchrelay.service.base.metrics import GatewayMetrics
from torchrelay.service.compile.search.database import TuningDatabase
from torchrelay.service.compile.search.queue import SearchQueue
from torchrelay.service.compile.search.scheduler import SearchScheduler
from torchrelay.service.compile.search.task import SearchTarget
from torchrelay.service.storage.redis.keys import Keys
from torchrelay.service.storage.redis.scripts import Scripts
from torchrelay.workers.pool import SearchDevice, WorkerLost
from tuning_parts import PLACE, problem
from waiting import until

AIM = SearchTarget(TOOLCHAIN, TARGET, 1)
ASK = CompileRequest("key", b"", TOOLCHAIN, TARGET, {}, [])


def of(size: int, **settings: str) -> Problem:
    """A problem; `settings` say how its search goes (SearchPool)."""
    return msgspec.structs.replace(problem(size), settings=tuple(sorted(settings.items())))


def task(size: int, **settings: str) -> TuningTask:
    return TuningTask(id=f"t{size}", problem=of(size, **settings))


@dataclass
class SearchPool:
    """A pool. A search session tries a, b and c of each problem; settings: `crash`: candidates that end its process,
    `lose`: that lose its worker, `hold`: it waits for `release` before it reports, `unfit`, `other`: it reports another
    problem than the task's, `die`: it ends before it tries anything.
    """

    up: dict[str, DeviceEnvironment] = field(default_factory=lambda: {"a": PLACE, "b": PLACE})
    compiling: set[str] = field(default_factory=set)
    queued: int = 0
    broken: set[str] = field(default_factory=set)
    """Workers whose sessions do not start."""
    ahead: int = 1
    """Tasks that a session has at hand."""

    def __post_init__(self) -> None:
        self.searching: dict[str, asyncio.Future[None]] = {}
        self.began: list[tuple[str, str]] = []
        """Worker and text of the problem's sizes, in the order in which their searches began."""
        self.namespaces: list[str] = []
        self.starts = 0
        self.release = asyncio.Event()

    def search_devices(self, toolchain: schema.Toolchain, target: schema.Target) -> list[SearchDevice]:
        if toolchain != TOOLCHAIN:
            raise NoWorker("no worker for that toolchain")
        return [SearchDevice(name, name in self.searching, name in self.compiling) for name in self.up]

    def lose(self, worker: str, *, gone: bool = True) -> None:
        """Its actor dies."""
        if gone:
            self.up.pop(worker)
        if worker in self.searching:
            self.searching[worker].set_exception(WorkerLost(f"worker {worker} died with the job"))

    async def search(
        self,
        order: bytes,
        *,
        worker: str,
        namespace: str,
        on_query: Callable[[bytes], Awaitable[bytes]],
        **_: Any,
    ) -> None:
        self.starts += 1
        if worker not in self.up:
            raise NoWorker(f"worker {worker} is not there")
        if worker in self.searching:
            raise Overloaded("its device is searched")
        threads = decoding.from_msgpack(order, type=SearchJobSpec).threads
        self.searching[worker] = ended = asyncio.get_running_loop().create_future()
        self.namespaces.append(namespace)
        body = asyncio.create_task(self._serve(worker, threads, on_query))
        try:
            await asyncio.wait({body, ended}, return_when=asyncio.FIRST_COMPLETED)
            await (ended if ended.done() else body)
        finally:
            body.cancel()
            await asyncio.gather(body, return_exceptions=True)
            del self.searching[worker]

    async def _serve(self, worker: str, threads: int, on_query: Callable[[bytes], Awaitable[bytes]]) -> None:
        async def ask(question: queries.TuningQuery) -> queries.TuningReply:
            answer: queries.TuningReply = decoding.from_msgpack(
                await on_query(msgspec.msgpack.encode(question)), type=queries.TuningReply
            )
            return answer

        await asyncio.sleep(0.01)
        if worker in self.broken:
            raise CompileKilled("the worker cannot start: there is no disk")
        place = msgspec.structs.replace(self.up[worker], threads=threads)
        held: list[TuningTask] = []
        while True:
            work = await ask(TaskRequest(place, len(held)))
            assert isinstance(work, queries.TaskBatch)
            held += work.tasks
            if work.over and not held:
                return
            if held and (not work.tasks or len(held) >= self.ahead):
                await self._search(worker, place, held.pop(0), ask)

    async def _search(
        self,
        worker: str,
        place: DeviceEnvironment,
        task: TuningTask,
        ask: Callable[[queries.TuningQuery], Coroutine[Any, Any, queries.TuningReply]],
    ) -> None:
        how = dict(task.problem.settings)
        if isinstance(await ask(CandidateAttempt(task.id, "")), TaskReassigned):
            return
        self.began.append((worker, task.problem.shape()))
        if "die" in how:
            raise CompileKilled("the search process ended with exit status 9")
        if "unfit" in how:
            await ask(UnsupportedTask(task.id, how["unfit"]))
            return
        timings = []
        for name in "abc":
            if name in task.avoid:
                continue
            await ask(CandidateAttempt(task.id, name))
            if name in how.get("crash", ""):
                raise CompileKilled("the search process was ended by SIGSEGV")
            if name in how.get("lose", ""):
                raise WorkerLost(f"worker {worker} died with the job")
            timings.append(Timing(name, 1.0 + len(timings), 1.0, 4.0, 10))
        await asyncio.sleep(0.01)
        if "hold" in how:
            await self.release.wait()
        searched = of(99) if "other" in how else task.problem
        entry = TuningEntry(problem=searched, place=place, winner=timings[0], candidates=3)
        failures = [CandidateFailure(name, "it ends the process") for name in task.avoid]
        await ask(SearchResult(entry, task.id, timings, failures))


@dataclass
class Site:
    """A gateway's searches. queue: of the default namespace."""

    pool: SearchPool
    scheduler: SearchScheduler
    queue: SearchQueue
    tunings: TuningDatabase
    metrics: GatewayMetrics
    redis: Any

    def another(self, namespace: str) -> SearchQueue:
        tunings = TuningDatabase(self.redis, Keys("torchrelay:", namespace), Scripts(self.redis), limit=1000)
        return self.scheduler.open(namespace, tunings)

    async def wanted(
        self, *problems: Problem, place: DeviceEnvironment = PLACE, queue: SearchQueue | None = None
    ) -> queries.KnownEntries:
        """What a compile hears that asks until nothing is open."""

        async def known() -> queries.KnownEntries | None:
            found = await (queue or self.queue).want(place, problems, ASK)
            return None if found.open else found

        return await until(known)

    async def counted(self, outcome: str) -> float:
        """Once what was found is finished: it is told from Redis before it is counted."""
        await self.until(lambda: not self.queue._storing)
        return (
            self.metrics.registry.get_sample_value("torchrelay_searches_total", {"outcome": outcome}) or 0.0
        )

    until = staticmethod(until)


@asynccontextmanager
async def site(
    server: RedisServer, pool: SearchPool | None = None, **redis_options: Any
) -> AsyncIterator[Site]:
    pool = pool or SearchPool()
    lanes: Any = pool
    redis: Any = Redis.from_url(server.url, **redis_options)
    tunings = TuningDatabase(redis, Keys("torchrelay:", "default"), Scripts(redis), limit=1000)
    metrics = GatewayMetrics()
    scheduler = SearchScheduler(lanes, metrics, TaskSupervisor(lambda task: None))
    try:
        yield Site(pool, scheduler, scheduler.open("default", tunings), tunings, metrics, redis)
    finally:
        await scheduler.close()
        await redis.aclose()


def winners(known: queries.KnownEntries) -> dict[Problem, str]:
    return {entry.problem: entry.winner.candidate for entry in known.entries}


Scenario = Callable[[Site], Coroutine[None, None, None]]


def run(
    server: RedisServer, scenario: Scenario, pool: Callable[[], SearchPool] = SearchPool, **options: Any
) -> None:
    async def opened() -> None:
        async with site(server, pool(), **options) as here:
            async with asyncio.timeout(60):
                await scenario(here)

    asyncio.run(opened())
