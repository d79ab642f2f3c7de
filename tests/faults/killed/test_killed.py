"""kill -9 of one part of a whole service under fifty requests: every client has an answer that it can use.

An answer is either an artifact that verifies or a typed error, upon which the client compiles locally
(tests/service/compile/test_fallbacks.py shows that it does, and that the result is right).
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import msgspec
import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from service_parts import graph
from torchrelay.clients.gateway.compile_client import GatewayClient
from torchrelay.clients.settings import load_settings
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact.signing import Trust
from torchrelay.compiler.errors import RelayError
from torchrelay.compiler.request import codec, key
from torchrelay.examples.harness.private_service import PrivateService
from waiting import wait_until

CLIENTS, GRAPHS = 50, 5
COMPILERS = {"g++", "cc1plus", "as", "ld", "collect2", "c++"}


class Family:
    """Every process that a service ever had, as a thread sees it that looks ten times a second."""

    def __init__(self, root: psutil.Process) -> None:
        self.members: dict[int, psutil.Process] = {root.pid: root}
        self._root = root
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._ended.wait(0.1):
            self.look()

    def look(self) -> None:
        for parent in [self._root, *self.named("")]:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in parent.children(recursive=True):
                    self.members.setdefault(child.pid, child)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def named(self, *words: str) -> list[psutil.Process]:
        """Those alive whose command line has all `words`."""
        found = []
        for process in list(self.members.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
                if alive and all(word in " ".join(process.cmdline()) for word in words):
                    found.append(process)
        return found

    def compilers(self) -> list[psutil.Process]:
        found = []
        for process in self.named(""):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() in COMPILERS:
                    found.append(process)
        return found


def _worker(family: Family) -> psutil.Process:
    (actor,) = family.named("ray::CompileSlot")
    return actor


def _compile_child(family: Family) -> psutil.Process:
    """The job's process is a fork of the server and looks like it, as do those that hold its namespaces above it."""
    forks = family.named("workers.fork_server")
    (server,) = (p for p in forks if p.ppid() not in {fork.pid for fork in forks})
    below = [p for p in server.children(recursive=True) if p in forks]
    (child,) = (p for p in below if p.pid not in {fork.ppid() for fork in below})
    return child


def _ray_head(family: Family) -> psutil.Process:
    (head,) = family.named("gcs_server")
    return head


def gateway_of(family: Family) -> psutil.Process:
    """The guard's one child."""
    return family.named("torchrelay.service", "up")[-1]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[PrivateService]:
    with PrivateService(tmp_path, arguments=("--cpu-slots", "1")) as running:
        yield running


@pytest.fixture
def family(service: PrivateService) -> Iterator[Family]:
    made = Family(psutil.Process(service.pid))
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [_worker, _compile_child, _ray_head, gateway_of])
def test_every_client_gets_a_right_answer_and_no_compiler_is_left(
    victim: Callable[[Family], psutil.Process], service: PrivateService, family: Family
) -> None:
    folder = Path(service.environment["XDG_CONFIG_HOME"]) / "torchrelay"
    credentials = json.loads((folder / "credentials.json").read_text())
    trusted = [Ed25519PublicKey.from_public_bytes(base64.b64decode(k)) for k in credentials["public_keys"]]
    settings = load_settings(url=credentials["url"], token=credentials["token"])
    with GatewayClient(settings) as gateway, ThreadPoolExecutor(CLIENTS) as threads:
        (info,) = gateway.workers()
        requests = []
        for n in range(GRAPHS):
            request = msgspec.structs.replace(
                codec.unpack_request(graph(1000 + n)), toolchain=info.toolchain, target=info.target
            )
            requests.append((codec.pack_request(request), key.key_of(request)))

        def client(n: int) -> str:
            body, name = requests[n % GRAPHS]
            try:
                found = gateway.submit(body, name, cache_only=False, deadline=150).result()
            except RelayError as error:
                return error.code
            container.verify(found.data, Trust.of(trusted), key=name)
            return "remote"

        answers = [threads.submit(client, n) for n in range(CLIENTS)]
        wait_until(family.compilers, 60)
        target = victim(family)
        print("killed:", " ".join(target.cmdline())[:100])
        target.kill()
        outcome = Counter(answer.result(200) for answer in answers)
        print(victim.__name__, dict(outcome))
        assert sum(outcome.values()) == CLIENTS
        if victim in (_worker, _compile_child):
            assert outcome == {"remote": CLIENTS}
            stats = gateway.stats()
            assert stats["compiles"] == GRAPHS
            for _, name in requests:
                history = httpx2.get(
                    f"{credentials['url']}/v1/compiles/{name}",
                    headers={"Authorization": f"Bearer {credentials['token']}"},
                ).json()["history"]
                assert history
                assert sum(each["detail"].startswith("trying again") for each in history) <= 1
    wait_until(lambda: not family.compilers(), 30)
    service.stop()
    _, left = psutil.wait_procs(list(family.members.values()), timeout=60)
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
