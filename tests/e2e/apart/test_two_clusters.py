"""Two real Ray clusters behind one URL: one Redis, one gateway, and for each cluster a dispatcher, all processes.

Like test_up_apart.py, whose network namespace it uses, this file is the tests and the program in the namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path += [str(parts) for parts in Path(__file__).parents[2].glob("*/parts")]

import httpx2
import psutil
import pytest
from ray_nodes import Nodes, kill_families
from service_parts import RedisServer, client_of, free_port
from test_up_apart import loopback_up, run_alone
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.workers.pool import become_subreaper, kill_below, reap, short_directory
from waiting import wait_until

OTHER = os.environ.get("TORCHRELAY_TEST_TOOLCHAIN", "")
"""The Python of an environment with another torch and all that torchrelay needs (`make test-versions` makes some)."""
HANG_SECONDS = 180
LEASE_SECONDS = 5
CLIENT = """
import json, os, sys, time
from pathlib import Path

import torch, torchrelay
from torchrelay.compiler.graph.toolchain import local_toolchain

together, count, *widths = sys.argv[1:]
models = [torch.nn.Sequential(torch.nn.Linear(int(width), 32), torch.nn.GELU(), torch.nn.LayerNorm(32),
                              torch.nn.Linear(32, 8)) for width in widths]
torch.compile(models[0], backend="eager")(torch.randn(3, int(widths[0])))  # imports what a compile needs
(Path(together) / str(os.getpid())).touch()
while len(list(Path(together).iterdir())) < int(count):
    time.sleep(0.01)

def gradients(module, model, rows):
    model.zero_grad()
    module(rows).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]

for width, model in zip(widths, models, strict=True):
    torch.compiler.reset()
    rows = torch.randn(16, int(width))
    ours = gradients(torch.compile(model, backend="torchrelay"), model, rows)
    for one, eager in zip(ours, gradients(model, model, rows), strict=True):
        torch.testing.assert_close(one, eager, rtol=1e-4, atol=1e-6)
run, own = torchrelay.report(), local_toolchain()
print(json.dumps({"served": run.hits + run.misses + run.coalesced, "misses": run.misses, "torch": own.torch}))
"""
"""Arguments: a folder where clients wait for each other, how many they are, and the widths of its graphs."""


class Cluster:
    """A Ray cluster with one slot on one node, and its dispatcher, all of one Python."""

    def __init__(self, installation: Installation, name: str, python: str) -> None:
        self.log = installation.home / f"{name}.log"
        small = {"RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(80 << 20)}  # the least that Ray takes
        self.nodes = Nodes(
            python=python, token=secrets.token_hex(32), TMPDIR=str(installation.temporary), **small
        )
        self.nodes.head()
        self.node = self.nodes.add(1)
        arguments = [f"--ray={self.nodes.address}", f"--port={free_port()}"]
        token = {"TORCHRELAY_SERVICE_RAY_TOKEN": self.nodes.token}
        self.dispatcher = installation.start(
            self.log, "dispatcher", *arguments, python=python, **token, **small
        )

    def has(self, worker: dict[str, Any]) -> bool:
        """Whether the worker, one of /v1/workers, is here: it tells its name to its dispatcher's log."""
        return worker["id"] in self.log.read_text()

    def kill(self) -> None:
        kill_families(self.dispatcher, *self.nodes.processes)
        self.nodes.close()


class Installation:
    """Redis, a gateway, and clusters."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.temporary = short_directory("tr-c-")
        """For what killed processes leave."""
        self.redis = RedisServer()
        self.redis.start()
        self.clusters: list[Cluster] = []
        self._threads = ThreadPoolExecutor(4)
        self._clients = 0
        port, credentials = free_port(), home / "config" / "torchrelay" / "credentials.json"
        arguments = [f"--port={port}", f"--credentials={credentials}"]
        quiet = {"TORCHRELAY_SERVICE_LOG_LEVEL": "warning"}
        self.gateway = self.start(home / "gateway.log", "gateway", *arguments, **quiet)
        self.wait(credentials.exists, "a gateway")
        self.http = client_of(f"http://127.0.0.1:{port}", json.loads(credentials.read_text())["token"])

    def start(
        self, log: Path, role: str, *arguments: str, python: str = sys.executable, **environment: str
    ) -> psutil.Popen:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHRELAY_", "RAY_"))}
        with log.open("wb") as file:
            return psutil.Popen(
                [
                    *(python, "-m", "torchrelay.service", role, *arguments),
                    *(f"--redis={self.redis.url}", f"--state={self.home / 'state'}"),
                ],
                env={
                    **kept,
                    **environment,
                    "TMPDIR": str(self.temporary),
                    "TORCHRELAY_SERVICE_LEASE_SECONDS": str(LEASE_SECONDS),
                },
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def add_cluster(self, name: str, python: str = sys.executable) -> Cluster:
        self.clusters.append(Cluster(self, name, python))
        return self.clusters[-1]

    def workers(self) -> list[dict[str, Any]]:
        return list(self.http.get("/v1/workers").json())

    def busy(self) -> list[Cluster]:
        working = [worker for worker in self.workers() if worker["state"] == "busy"]
        return [each for each in self.clusters if any(map(each.has, working))]

    def jobs_done(self) -> list[int]:
        """On each cluster."""
        workers = self.workers()
        return [sum(w["jobs_done"] for w in workers if each.has(w)) for each in self.clusters]

    def compiles(self) -> int:
        return int(self.http.get("/v1/stats").json()["compiles"])

    def ready(self) -> bool:
        return self.http.get("/readyz").status_code == 200

    def wait_for_idle(self, count: int) -> None:
        """Until the service has so many workers, all of them idle."""
        self.wait(lambda: [worker["state"] for worker in self.workers()] == ["idle"] * count, f"{count} idle")

    def clients(self, *graphs: list[int], pythons: Sequence[str] = ()) -> list[dict[str, Any]]:
        """What clients report that ask at the same time, each for the graphs of these widths."""
        return [each.result(HANG_SECONDS) for each in self.begin(*graphs, pythons=pythons)]

    def begin(self, *graphs: list[int], pythons: Sequence[str] = ()) -> list[Future[dict[str, Any]]]:
        self._clients += 1
        root = self.home / f"clients-{self._clients}"
        together = root / "together"
        together.mkdir(parents=True)

        def run(n: int, python: str) -> dict[str, Any]:
            found = {"XDG_CONFIG_HOME": str(self.home / "config"), "TORCHRELAY_MODE": "require"}
            done = subprocess.run(
                [python, "-c", CLIENT, *map(str, (together, len(graphs), *graphs[n]))],
                env=FreshMachine(root / str(n), compiler=False).environment(**found),
                capture_output=True,
                text=True,
                timeout=HANG_SECONDS,
            )
            assert done.returncode == 0, done.stderr + self.logs()
            return dict(json.loads(done.stdout.splitlines()[-1]))

        whose = pythons or [sys.executable] * len(graphs)
        return [self._threads.submit(run, n, python) for n, python in enumerate(whose)]

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            with contextlib.suppress(httpx2.TransportError):
                return condition()
            return False

        wait_until(holds, HANG_SECONDS, pause=0.1, told=lambda: f"{what}\n{self.logs()}")

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in self.home.glob("*.log"))

    def close(self) -> None:
        for each in self.clusters:
            each.kill()
        kill_families(self.gateway)
        self.redis.close()
        self._threads.shutdown()
        shutil.rmtree(self.temporary)


def share_what_is_asked(service: Installation) -> None:
    """Two clients ask for two graphs, each for the other's second: both clusters compile, each graph once."""
    service.wait_for_idle(2)
    told = service.clients([24, 40], [40, 24])
    assert [(each["served"], each["misses"]) for each in told] == [(2, 1)] * 2, told
    service.wait(lambda: sum(service.jobs_done()) >= 2, "two jobs")
    assert (service.compiles(), service.jobs_done()) == (2, [1, 1]), service.logs()


def lose_a_node(service: Installation) -> None:
    """The node that compiles goes, its dispatcher stays: the other cluster compiles."""
    with compiled_by_the_other(service, 48) as loser:
        kill_families(loser.node)
    loser.node = loser.nodes.add(1)


def lose_a_cluster(service: Installation) -> None:
    """The cluster that compiles is killed, with its dispatcher: the other one takes the compile over."""
    with compiled_by_the_other(service, 56) as loser:
        loser.kill()
    (winner,) = (each for each in service.clusters if each is not loser)
    assert "compile_taken_over" in winner.log.read_text()
    service.wait_for_idle(1)


@contextlib.contextmanager
def compiled_by_the_other(service: Installation, width: int) -> Iterator[Cluster]:
    """The cluster that compiles a client's graph, for the block to harm: the other one makes the artifact, once."""
    service.wait_for_idle(2)
    (client,) = service.begin([width])
    service.wait(lambda: bool(service.busy()), "a compile")
    (loser,) = service.busy()
    jobs, compiles = service.jobs_done(), service.compiles()
    yield loser
    assert client.result(HANG_SECONDS)["served"] == 1
    (n,) = (n for n, each in enumerate(service.clusters) if each is not loser)
    service.wait(lambda: service.jobs_done()[n] > jobs[n], "a job")
    assert service.jobs_done()[n] == jobs[n] + 1
    assert service.compiles() == compiles + 1, service.logs()
    assert service.ready()


def one_toolchain(service: Installation) -> None:
    for name in ("a", "b"):
        service.add_cluster(name)
    share_what_is_asked(service)
    lose_a_node(service)
    lose_a_cluster(service)


def two_toolchains(service: Installation) -> None:
    """Both clusters compile the same graph for clients of their own torch. When one of them is gone, the other takes
    nothing of what was its."""
    own, other = service.add_cluster("own"), service.add_cluster("other", OTHER)
    service.wait_for_idle(2)
    told = service.clients([24], [24], pythons=(sys.executable, OTHER))
    assert [(each["served"], each["misses"]) for each in told] == [(1, 1)] * 2, told
    service.wait(lambda: sum(service.jobs_done()) >= 2, "two jobs")
    assert (service.compiles(), service.jobs_done()) == (2, [1, 1]), service.logs()
    offered = [w["toolchain"]["torch"] for each in (own, other) for w in service.workers() if each.has(w)]
    assert offered == [each["torch"] for each in told] and offered[0] != offered[1]
    own.kill()
    service.wait_for_idle(1)
    refused, served = service.begin([32], [32], pythons=(sys.executable, OTHER))
    assert served.result(HANG_SECONDS)["misses"] == 1
    assert "NoWorker: no worker for CPU" in str(refused.exception(HANG_SECONDS))
    service.wait(lambda: service.jobs_done()[1] >= 2, "a job")
    assert (service.compiles(), service.jobs_done()) == (3, [0, 2]), service.logs()


SCENARIOS = {each.__name__: each for each in (one_toolchain, two_toolchains)}


@pytest.mark.slow
def test_two_clusters_of_one_toolchain_share_compiles_and_each_may_die(tmp_path: Path) -> None:
    run_alone(__file__, tmp_path, one_toolchain.__name__)


@pytest.mark.slow
@pytest.mark.skipif(not OTHER, reason="TORCHRELAY_TEST_TOOLCHAIN names no second environment")
def test_each_of_two_clusters_compiles_for_its_own_toolchain_alone(tmp_path: Path) -> None:
    run_alone(__file__, tmp_path, two_toolchains.__name__)


def main(home: str, network: str, scenario: str) -> None:
    if network == "alone":
        loopback_up()
    become_subreaper()
    service = Installation(Path(home))
    try:
        SCENARIOS[scenario](service)
    finally:
        service.close()
        kill_below(os.getpid())  # what was started while its parents were killed
        reap()


if __name__ == "__main__":
    main(*sys.argv[1:])
