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
from torchrelay.service.compile.slot_claims import SlotClaims
from torchrelay.service.settings import ServiceSettings
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
    first, second = start(), start()
    own, others = first.wait_for_idle(2), second.wait_for_idle(2)
    assert not own & others
    assert len(actors(nodes)) == 4
    dispatchers = [first, second]
    jobs = {
        text: each.ask("compile", do="answer", text=text, sleep=12.0)
        for each, texts in ((first, "ab"), (second, "cd"))
        for text in texts
    }
    dispatchers.append(start())
    wait_until(dispatchers[2].workers, 120)
    assert any(job.done() for job in jobs.values()), "a slot goes to another once its job has ended"
    assert {text: job.result(60) for text, job in jobs.items()} == {text: text for text in "abcd"}
    wait_until(lambda: sorted(len(each.workers("idle")) for each in dispatchers) == [1, 1, 2], 120)
    assert len(set.union(*(each.workers() for each in dispatchers))) == 4
    assert [each.ask("compile", do="answer").result(60) for each in dispatchers] == ["artifact"] * 3


INTRUDER = """
import json, sys
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
seen = {}
for node in ray.nodes():
    if node["Alive"]:
        where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        seen[node["NodeID"]] = ray.get(Intruder.options(scheduling_strategy=where).remote().look.remote(), timeout=120)
print(json.dumps([list(seen.values()), [n["NodeID"] for n in ray.nodes() if "torchrelay_worker" in n["Resources"]]]))
"""


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
    first.wait_for_idle(2)
    second.wait_for_idle(2)
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
    own, others, before = first.wait_for_idle(2), second.wait_for_idle(2), actors(nodes)
    redis_server.stop()
    time.sleep(5)
    assert first.ask("compile", do="answer").result(60) == "artifact"
    redis_server.start()
    time.sleep(LEASE_SECONDS + 5)
    assert (first.workers("idle"), second.workers("idle"), actors(nodes)) == (own, others, before)


def test_slots_of_a_python_that_one_dispatcher_has_are_its_own(start: Start) -> None:
    both, one = start("/no/such/python"), start()
    one.wait_for_idle(2)
    both.wait_for_idle(2)
    assert len(both.workers("starting")) == 4, "each slot is there once more for the other Python"
    for each in (both, one):
        assert each.ask("compile", do="answer").result(60) == "artifact"


def test_a_dispatcher_for_which_no_slot_is_left_stands_by(start: Start, redis_server: RedisServer) -> None:
    first = start()
    first.wait_for_idle(4)
    with redis_server.client() as client:
        (key,) = [each.decode() for each in client.scan_iter("*slots:*", _type="HASH")]
        slots = [slot.decode() for slot in client.hkeys(key)]
    first.close()
    settings = ServiceSettings(redis_url=redis_server.url, lease_seconds=120)

    async def scenario() -> None:
        redis = connect(settings)
        keys = Keys(settings.redis_prefix)
        other = SlotClaims(keys, Scripts(redis), settings)
        group = key.removeprefix(f"{settings.redis_prefix}slots:")
        assert sorted(await other.claim(group, slots, [])) == sorted(slots)
        standing = start()
        await asyncio.to_thread(wait_until, lambda: standing.ask("standby").result(90) == [False, True])
        refused = standing.ask("compile", do="answer").result(30)
        assert refused.startswith("SlotsElsewhere: ") and "other dispatchers use 4 slots" in refused
        await other.release()
        await redis.aclose()
        await asyncio.to_thread(standing.wait_for_idle, 4)
        assert standing.ask("standby").result(30) == [True, False]

    asyncio.run(scenario())
