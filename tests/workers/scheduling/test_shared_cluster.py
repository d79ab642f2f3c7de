"""Several dispatchers on one real Ray cluster share its slots, with a real Redis between them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import engine
import psutil
import pytest
from dispatcher_process import DispatcherProcess
from pool_parts import RAY_TOKEN
from ray_nodes import Nodes
from service_parts import RedisServer
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.compile.slot_claims import SlotClaims
from torchrelay.service.storage.redis.connections import connect
from torchrelay.service.storage.redis.keys import Keys
from torchrelay.service.storage.redis.scripts import Scripts
from torchrelay.workers.pool import ray_environment
from waiting import until, wait_until

LEASE_SECONDS = 10
START_SECONDS = 30
"""Of an actor with its fork server, on a busy machine."""

Start = Callable[..., DispatcherProcess]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Two nodes with two slots each."""
    path = [str(Path(engine.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        made = Nodes()
        try:
            made.head()
            made.add(2)
            made.add(2)
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.close()


@pytest.fixture
def start(nodes: Nodes, redis_server: RedisServer) -> Iterator[Start]:
    started: list[DispatcherProcess] = []

    def start(*toolchains: str, **environment: str) -> DispatcherProcess:
        started.append(DispatcherProcess(nodes.address, redis_server.url, *toolchains, **environment))
        return started[-1]

    yield start
    for each in started:
        if each.process.is_running():
            each.close()
    wait_until(lambda: not actors(nodes), 30)


def shares(*dispatchers: DispatcherProcess) -> list[set[str]]:
    """The names of each one's workers, once all four slots of the cluster are warm and shared among them."""

    def shared() -> bool:
        workers = [worker for each in dispatchers for worker in each.workers()]
        idle = [len(each.workers("idle")) for each in dispatchers]
        return len(workers) == len(set(workers)) == sum(idle) == 4 and max(idle) - min(idle) <= 1

    wait_until(shared, 120)
    return [each.workers() for each in dispatchers]


def actors(nodes: Nodes) -> set[int]:
    """Process ids of all slots' actors on the cluster."""
    found = set()
    for node in nodes.processes:
        for process in node.children(recursive=True):
            try:
                if "CompileSlot" in " ".join(process.cmdline()):
                    found.add(process.pid)
            except psutil.NoSuchProcess:
                continue
    return found


@pytest.mark.slow
def test_dispatchers_share_the_slots_and_one_that_joins_disturbs_no_job(start: Start, nodes: Nodes) -> None:
    first, second = dispatchers = [start(), start()]
    shares(*dispatchers)
    assert len(actors(nodes)) == 4
    jobs = {
        text: each.ask("compile", do="answer", text=text, sleep=12.0)
        for each, texts in ((first, "ab"), (second, "cd"))
        for text in texts
    }
    dispatchers.append(start())
    wait_until(dispatchers[2].workers, 120)
    assert any(job.done() for job in jobs.values()), "a slot goes to another once its job has ended"
    assert {text: job.result(60) for text, job in jobs.items()} == {text: text for text in "abcd"}
    assert sorted(len(share) for share in shares(*dispatchers)) == [1, 1, 2]
    assert [each.ask("compile", do="answer").result(60) for each in dispatchers] == ["artifact"] * 3


INTRUDER = """
import json, os, sys, time
from pathlib import Path
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torchrelay.workers.scheduling.ray_resources import NAMESPACE
from torchrelay.workers.training.job_driver import JobDriverActor as Real
from torchrelay.workers.training.messages import driver_name

address, folder = sys.argv[1], Path(sys.argv[2])

class Mark:  # who unpickles it leaves its process id
    def __reduce__(self):
        return os.system, (f"echo $PPID >> {folder}/unpickled",)

class Intruder:
    def run(self):
        with open(folder / "nodes", "a") as file:
            print(ray.get_runtime_context().get_node_id(), file=file)
        return str(os.getppid())

class Exported(Intruder):
    def held(self):
        return b""
    mark = Mark()

class Answering(Intruder):
    def held(self):
        with open(folder / "asked", "a") as file:
            print("asked", file=file)
        return Mark()

Answering.__module__, Answering.__qualname__ = Real.__module__, Real.__qualname__

def on(node, thing, **options):
    where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(thing).options(num_cpus=0, scheduling_strategy=where, **options)

ray.init(address=address, log_to_driver=False, logging_level="ERROR")
alive = [node for node in ray.nodes() if node["Alive"]]
(head,) = [node for node in alive if "node:__internal_head__" in node["Resources"]]
(dispatcher,) = [node for node in alive if node is not head and "torchrelay_worker" not in node["Resources"]]

environments = [
    {"env_vars": {"PYTHONPATH": "/tmp"}},
    {"py_executable": f"touch {folder}/py_executable;"},
    {"pip": [f"file://{folder}/nothing"]},
]
outcomes = []
for environment in environments:
    try:
        ray.get(on(dispatcher, Intruder, runtime_env=environment).remote().run.remote(), timeout=30)
    except ray.exceptions.RayError as error:
        outcomes.append(f"{type(error).__name__}: {error}")
    else:
        outcomes.append("it ran")
run = Intruder.run
waiting = [on(dispatcher, Intruder).remote().run.remote(), on(dispatcher, lambda: run(None)).remote()]
ready, _ = ray.wait(waiting, timeout=10)

names = dict(namespace=NAMESPACE, lifetime="detached")
there = [
    on(head, Exported, name=driver_name("a"), **names).remote(),
    on(head, Answering, name=driver_name("b"), **names).remote(),
]
ray.get([there[0].run.remote(), there[1].held.remote()])
while (folder / "asked").read_text().count("asked") < 4:
    time.sleep(0.5)
for actor in there:
    ray.kill(actor)
nodes = {"head": head["NodeID"], "dispatcher": dispatcher["NodeID"]}
print(json.dumps([outcomes, len(ready), os.getpid(), nodes]))
"""


@pytest.mark.slow
def test_whoever_has_rays_token_runs_nothing_on_a_dispatchers_node_nor_in_its_process(
    start: Start, nodes: Nodes, tmp_path: Path
) -> None:
    dispatcher = start(RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES=str(80 << 20))  # the least that Ray takes
    dispatcher.wait_for_idle(4)
    done = subprocess.run(
        [sys.executable, "-c", INTRUDER, nodes.address, str(tmp_path)],
        env={**os.environ, **ray_environment(RAY_TOKEN, nodes.address)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes, ready, intruder, ids = json.loads(done.stdout)

    assert all("nothing runs on the node of a dispatcher" in outcome for outcome in outcomes), outcomes
    assert not (tmp_path / "py_executable").exists() and ready == 0
    assert (tmp_path / "nodes").read_text().split() == [ids["head"]], "the head runs what it is sent"
    below = {part for process in dispatcher.process.children(recursive=True) for part in process.cmdline()}
    assert any(part.endswith("/raylet") for part in below)
    assert not [part for part in below if part.endswith(("worker.py", "agent.py", "agent/main.py"))]

    unpickled = {int(line) for line in (tmp_path / "unpickled").read_text().split()}
    assert intruder in unpickled and dispatcher.process.pid not in unpickled
    # more than its object store holds, which nothing could write to disk
    jobs = [dispatcher.ask("compile", do="answer", text="x" * (20 << 20), sleep=5.0) for _ in range(4)]
    assert [len(job.result(60)) for job in jobs] == [20 << 20] * 4


@pytest.mark.slow
def test_the_slots_of_a_killed_dispatcher_go_to_the_others(start: Start, nodes: Nodes) -> None:
    first, second = start(), start()
    shares(first, second)
    second.process.kill()
    killed = time.monotonic()
    first.wait_for_idle(4)
    assert time.monotonic() - killed < LEASE_SECONDS + START_SECONDS
    wait_until(lambda: len(actors(nodes)) == 4, 30)
    assert [job.result(60) for job in [first.ask("compile", do="answer") for _ in range(4)]] == [
        "artifact"
    ] * 4


@pytest.mark.slow
def test_a_redis_that_is_down_and_then_empty_moves_no_slot(
    start: Start, nodes: Nodes, redis_server: RedisServer
) -> None:
    first, second = start(), start()
    before = shares(first, second), actors(nodes)
    redis_server.stop()
    time.sleep(5)
    assert first.ask("compile", do="answer").result(60) == "artifact"
    redis_server.start()
    time.sleep(LEASE_SECONDS + 5)
    assert ([first.workers("idle"), second.workers("idle")], actors(nodes)) == before


def test_slots_of_a_python_that_one_dispatcher_has_are_its_own(start: Start) -> None:
    secrets = {"TORCHRELAY_SERVICE_TOKEN": "a secret" * 4, "AWS_SECRET_ACCESS_KEY": "a secret"}
    both, one = start("/no/such/python"), start(**secrets)
    one.wait_for_idle(2)
    both.wait_for_idle(2, starting=4)  # each slot is there once more for the other Python
    for each in (both, one):
        assert each.ask("compile", do="answer").result(60) == "artifact"
    assert secrets.items() <= one.process.environ().items()
    of_ray = [process.environ() for process in one.process.children(recursive=True)]
    assert of_ray and not [
        secrets.keys() & environ.keys() for environ in of_ray if secrets.keys() & environ.keys()
    ]


class Claimant:
    """Claims slots as the one dispatcher does that uses all of them, and runs nothing there."""

    def __init__(self, redis_server: RedisServer) -> None:
        self._settings = ServiceSettings(redis_url=redis_server.url, lease_seconds=120)
        with redis_server.client() as client:
            (key,) = [each.decode() for each in client.scan_iter("*slots:*", _type="HASH")]
            self.slots = sorted(slot.decode() for slot in client.hkeys(key))
        self._group = key.removeprefix(f"{self._settings.redis_prefix}slots:")
        self._redis = connect(self._settings)
        self._claims = SlotClaims(Keys(self._settings.redis_prefix), Scripts(self._redis), self._settings)

    async def claim(self) -> list[str]:
        return sorted(await self._claims.claim(self._group, self.slots, []))

    async def close(self) -> None:
        await self._claims.release()
        await self._redis.aclose()


@pytest.mark.slow
def test_a_dispatcher_for_which_no_slot_is_left_stands_by(start: Start, redis_server: RedisServer) -> None:
    first = start()
    first.wait_for_idle(4)
    other = Claimant(redis_server)
    first.close()

    async def scenario() -> None:
        assert await other.claim() == other.slots
        standing = start()
        await asyncio.to_thread(wait_until, lambda: standing.ask("standby").result(90) == [False, True])
        refused = standing.ask("compile", do="answer").result(30)
        assert refused.startswith("NoWorker: ") and "other dispatchers use 4 slots" in refused
        await other.close()
        await asyncio.to_thread(standing.wait_for_idle, 4)
        assert standing.ask("standby").result(30) == [True, False]

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_search_ends_where_another_dispatcher_gets_the_slot(
    start: Start, redis_server: RedisServer
) -> None:
    first = start()
    searches = [first.ask("search", worker=worker) for worker in first.wait_for_idle(4)]
    other = Claimant(redis_server)

    async def scenario() -> None:

        async def claimed() -> bool:
            return len(await other.claim()) == 2

        await until(claimed)
        ended = [search.result() for search in searches if search.done()]
        assert len(ended) == 2
        assert all(text.startswith("WorkerLost: ") and "left to another dispatcher" in text for text in ended)
        await other.close()

    asyncio.run(scenario())
    first.process.kill()
