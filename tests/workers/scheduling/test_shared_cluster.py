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
from pool_parts import RAY_TOKEN, wait_until
from ray_nodes import Nodes
from service_parts import RedisServer
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.compile.slot_claims import SlotClaims
from torchrelay.service.storage.redis.connections import connect
from torchrelay.service.storage.redis.keys import Keys
from torchrelay.service.storage.redis.scripts import Scripts
from torchrelay.workers.pool import ray_environment

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
import json, sys, time
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

@ray.remote(num_cpus=0)
class Intruder:
    def look(self):
        import os
        from pathlib import Path
        raylet = os.getppid()  # of the node that started this actor's process
        while Path(f"/proc/{raylet}/comm").read_text().strip() != "raylet":
            raylet = int(Path(f"/proc/{raylet}/stat").read_text().rpartition(")")[2].split()[1])
        seen = [entry.partition("=")[0] for entry in Path(f"/proc/{raylet}/environ").read_text().split(chr(0))]
        return [*seen, *os.environ]

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
until = time.monotonic() + 120
while sum(node["Alive"] for node in ray.nodes()) < 4 and time.monotonic() < until:
    time.sleep(0.5)
seen = {}
for node in ray.nodes():
    if node["Alive"]:
        where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        seen[node["NodeID"]] = ray.get(Intruder.options(scheduling_strategy=where).remote().look.remote(), timeout=120)
print(json.dumps([list(seen.values()), [n["NodeID"] for n in ray.nodes() if "torchrelay_worker" in n["Resources"]]]))
"""


@pytest.mark.slow
def test_whoever_runs_code_on_a_dispatchers_node_finds_no_secret_of_the_service(
    start: Start, nodes: Nodes
) -> None:
    """Ray's token is enough to run an actor without CPUs there."""
    secrets = {
        f"TORCHRELAY_SERVICE_{name}": "a secret of thirty-two characters" for name in ("TOKEN", "SIGNER_KEY")
    }
    dispatcher = start(**secrets)
    dispatcher.wait_for_idle(4)
    done = subprocess.run(
        [sys.executable, "-c", INTRUDER, nodes.address],
        env={**os.environ, **ray_environment(RAY_TOKEN, nodes.address)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen, offering = json.loads(done.stdout)
    assert len(seen) == 4 and len(offering) == 2, "the head, two nodes with slots, and the dispatcher's own"
    for names in seen:
        assert "RAY_AUTH_TOKEN" in names
        assert not [name for name in names if name.startswith("TORCHRELAY_SERVICE_")]


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
    both, one = start("/no/such/python"), start()
    one.wait_for_idle(2)
    both.wait_for_idle(2, starting=4)  # each slot is there once more for the other Python
    for each in (both, one):
        assert each.ask("compile", do="answer").result(60) == "artifact"


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
        assert refused.startswith("SlotsElsewhere: ") and "other dispatchers use 4 slots" in refused
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
        async with asyncio.timeout(60):
            while len(await other.claim()) < 2:
                await asyncio.sleep(0.2)
        ended = [search.result() for search in searches if search.done()]
        assert len(ended) == 2
        assert all(text.startswith("WorkerLost: ") and "left to another dispatcher" in text for text in ended)
        await other.close()

    asyncio.run(scenario())
    first.process.kill()
