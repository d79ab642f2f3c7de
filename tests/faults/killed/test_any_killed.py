"""kill -9 of any of three gateways, two dispatchers and two Redis, at any moment, while clients ask for new graphs and
begin jobs.

TORCHRELAY_TEST_KILLS=50 kills more often than the test does otherwise, every 5 seconds or so; -s shows figures.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
import redis
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from failover_parts import FailoverRedis, ListeningServer, redis_of
from fault_parts import public_key
from job_parts import JobClients, WorkingProcess
from service_parts import TOKEN, GatewayProcess, client_of, follow, graph, post
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact.signing import Trust
from torchrelay.compiler.request import codec, key
from waiting import wait_until

KILLS = int(os.environ.get("TORCHRELAY_TEST_KILLS", "7"))
CLIENTS = 6
COMPILE_SECONDS, LEASE_SECONDS = 1.5, 1.0
"""A lease is renewed several times in a compile."""
PATIENCE_SECONDS = 120.0
"""Of a client for one graph."""
DOWN_AFTER_MS = 3000
"""More than a primary may be kept waiting by processes that start: a failover then may choose an empty replica."""
DEMOTION_SECONDS = 15.0
"""After a failover, a primary that is still alive may take writes for so long, which are lost."""


class Compile(NamedTuple):
    """One that a dispatcher, process `pid`, has begun; times are CLOCK_MONOTONIC's."""

    key: str
    pid: int
    began: float
    ended: float | None


class Installation:
    """Seven servers. `outages`: how often a primary Redis was killed. `failovers`: when, as soon as it is noticed."""

    def __init__(self, folder: Path, failover: FailoverRedis) -> None:
        self.failover = failover
        self.outages = 0
        self.failovers: list[float] = []
        self._log = folder / "compiles"
        self._settings = {
            "redis_url": failover.url,
            "state_dir": str(folder / "state"),
            "token": TOKEN,
            "training": True,
            "lease_seconds": LEASE_SECONDS,
            "keepalive_seconds": 0.5,
            "redis_timeout_seconds": 1.0,
            "log_level": "error",
        }
        self.gateways: list[GatewayProcess] = []
        self.dispatchers: list[GatewayProcess] = []

    def start(self) -> None:
        for _ in range(3):
            self.gateways.append(self._start("gateway"))
        for _ in range(2):
            self.dispatchers.append(self._start("dispatcher"))

    def close(self) -> None:
        for each in self.gateways + self.dispatchers:
            each.kill()

    def _start(self, role: str, port: int = 0) -> GatewayProcess:
        return WorkingProcess(self._settings, COMPILE_SECONDS, role, str(self._log), port=port)

    def compiles(self) -> list[Compile]:
        found: dict[tuple[str, str], list[Compile]] = {}
        for line in self._log.read_text().splitlines():
            what, pid, name, at = line.split()
            of_both = found.setdefault((pid, name), [])
            if what == "begin":
                of_both.append(Compile(name, int(pid), float(at), None))
            else:
                of_both[-1] = of_both[-1]._replace(ended=float(at))
        return [each for several in found.values() for each in several]

    def kill_gateway(self, n: int) -> None:
        self.gateways[n].kill()
        self.gateways[n] = self._start("gateway", self.gateways[n].port)

    def kill_dispatcher(self, n: int, leases: LeaseWatch) -> None:
        self.dispatchers[n].kill()
        died, pid = time.monotonic(), self.dispatchers[n].process.pid
        ran = [each for each in self.compiles() if each.ended is None]
        elsewhere = {each.key for each in ran if each.pid == self.dispatchers[1 - n].process.pid}
        leases.orphans += [(each.key, died) for each in ran if each.pid == pid and each.key not in elsewhere]
        self.dispatchers[n] = self._start("dispatcher", self.dispatchers[n].port)

    def kill_redis(self, n: int) -> None:
        """Once the other one can take over: without both, all is lost. It starts again as the other one's replica."""
        self.failover.wait_until_ready()
        victim = self.failover.servers[n]
        self.outages += victim is self.failover.primary()
        victim.kill()
        wait_until(lambda: self.failover.primary() not in (None, victim), seconds=60)
        victim.start()


class FailoverWatch:
    """Looks for failovers all the time: what was written shortly before one may be lost, since replicas lag."""

    def __init__(self, installation: Installation) -> None:
        self._ended = threading.Event()
        self._watching = ThreadPoolExecutor(1).submit(self._watch, installation)

    def close(self) -> None:
        self._ended.set()
        self._watching.result()

    def _watch(self, installation: Installation) -> None:
        known = installation.failover.failovers()
        while not self._ended.wait(0.1):
            if (found := installation.failover.failovers()) > known:
                installation.failovers += [time.monotonic()] * (found - known)
                known = found


class LeaseWatch:
    """When each lease was last seen in Redis, looked for all the time. orphans: compiles whose dispatcher was killed,
    and when. slowest: seconds in which Redis answered; a dispatcher's last command may have waited as long."""

    def __init__(self, servers: list[ListeningServer]) -> None:
        self.orphans: list[tuple[str, float]] = []
        self.slowest = 0.0
        self._seen: dict[tuple[str, bytes], tuple[float, float]] = {}
        self._ended = threading.Event()
        self._watching = ThreadPoolExecutor(1).submit(self._watch, servers)

    def close(self) -> None:
        self._ended.set()
        self._watching.result()

    def _watch(self, servers: list[ListeningServer]) -> None:
        clients = [redis_of(server) for server in servers]
        while not self._ended.wait(0.02):
            for client in clients:
                with contextlib.suppress(redis.RedisError):
                    self._look(client)

    def _look(self, client: redis.Redis) -> None:
        now = time.monotonic()  # before it is asked: what is seen was there at this time or later
        names: Any = client.keys("torchrelay:lease:*")
        tokens: Any = client.mget(names) if names else []
        self.slowest = max(self.slowest, time.monotonic() - now)
        for name, token in zip(names, tokens, strict=True):
            if token is not None:
                place = name.decode().rpartition(":")[2], token.partition(b":")[0]
                self._seen[place] = self._seen.get(place, (now, now))[0], now

    def held(self) -> list[float]:
        """Seconds that each dispatcher's leases were there after its death."""
        return [
            max(0.0, last - died)
            for name, died in self.orphans
            for (of, _), (first, last) in self._seen.items()
            if of == name and first < died
        ]


class Clients:
    """They ask for one new graph after another, and for an earlier one again, and check what they are given."""

    def __init__(self, installation: Installation, signer: Ed25519PublicKey) -> None:
        self._installation = installation
        self._trust = Trust.of([signer])
        self._ended = threading.Event()
        self.artifacts: dict[int, tuple[bytes, float]] = {}
        """Of each graph; and when it was asked for."""
        self.lost: list[str] = []
        self.wrong: list[str] = []
        self.replaced = 0
        """Artifacts that an outage took from Redis, so that the graph was compiled again."""
        threads = ThreadPoolExecutor(CLIENTS)
        self._asking = [threads.submit(self._ask, n) for n in range(1, CLIENTS + 1)]

    def close(self) -> None:
        """Once each was served."""
        self._ended.set()
        for each in self._asking:
            each.result()

    def _ask(self, size: int) -> None:
        mine: list[int] = []
        while not self._ended.is_set():
            self.check(size)
            mine.append(size)
            self.check(random.choice(mine))
            size += CLIENTS

    def check(self, size: int) -> None:
        body = graph(size)
        asked = time.monotonic()
        data = self._answer(size, body)
        if data is None:
            return
        try:
            container.verify(data, self._trust, key=key.key_of(codec.unpack_request(body)))
        except Exception as error:  # whatever it is, the test is to fail with it
            self.wrong.append(f"{size}: {error!r}")
        known, before = self.artifacts.get(size, (data, asked))
        if data != known:
            self.replaced += 1
            time.sleep(1)  # until a failover is noticed
            if max(self._installation.failovers, default=0.0) < before - DEMOTION_SECONDS:
                self.wrong.append(f"{size}: two artifacts, and Redis had lost nothing")
        self.artifacts[size] = data, asked

    def _answer(self, size: int, body: bytes) -> bytes | None:
        """As a client does behind a load balancer: what breaks off goes to another gateway."""
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            port = random.choice(self._installation.gateways).port
            with (
                contextlib.suppress(httpx2.TransportError, AssertionError),  # or a stream is refused: 503
                client_of(f"http://127.0.0.1:{port}", TOKEN) as http,
            ):
                answer = post(http, body)
                if answer.status_code == 200:
                    return answer.content
                if answer.status_code == 202:
                    events = follow(http, answer.json()["key"])
                    self.lost += [f"{size}: {data}" for _, stage, data in events if stage == "failed"]
                elif answer.status_code != 503:
                    self.lost.append(f"{size}: {answer.text}")
                    return None
            time.sleep(0.1)
        self.lost.append(f"{size}: no artifact within {PATIENCE_SECONDS:g} s")
        return None


@pytest.mark.slow
def test_any_gateway_dispatcher_or_redis_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    dice = random.Random(KILLS)
    with (
        contextlib.closing(FailoverRedis(tmp_path, DOWN_AFTER_MS)) as failover,
        contextlib.closing(Installation(tmp_path, failover)) as installation,
        contextlib.closing(FailoverWatch(installation)),
    ):
        failover.start()
        installation.start()
        with installation.gateways[0].http() as http:
            signer = public_key(http)
        began = time.monotonic()
        with (
            contextlib.closing(LeaseWatch(failover.servers)) as leases,
            contextlib.closing(JobClients(installation, DEMOTION_SECONDS)) as jobs,
            contextlib.closing(Clients(installation, signer)) as clients,
        ):
            kills: list[Callable[[], None]] = [
                *(partial(installation.kill_gateway, n) for n in range(3)),
                *(partial(installation.kill_dispatcher, n, leases) for n in range(2)),
                *(partial(installation.kill_redis, n) for n in range(2)),
            ]
            for n in range(KILLS):
                if n % len(kills) == 0:
                    dice.shuffle(kills)
                time.sleep(dice.uniform(0.1, 1.5))
                kills[n % len(kills)]()
        failover.wait_until_ready()
        for size in clients.artifacts:
            clients.check(size)
        held, graphs, compiles = leases.held(), len(clients.artifacts), len(installation.compiles())
        print(
            f"{KILLS} kills, {installation.outages} of them of a primary Redis, in {time.monotonic() - began:.0f} s, "
            f"{len(installation.failovers)} failovers: "
            f"{graphs} graphs, {compiles} compiles, {len(clients.wrong)} wrong answers, {len(clients.lost)} lost, "
            f"{clients.replaced} compiled again since Redis lost them; {len(held)} leases of killed dispatchers, "
            f"held for {max(held, default=0):.2f} s at most; {dict(jobs.done)} jobs, {len(jobs.wrong)} wrong, "
            f"{len(jobs.lost)} lost, {jobs.replaced} begun again since Redis lost them"
        )
        assert (clients.wrong, clients.lost) == ([], [])
        assert not jobs.wrong + jobs.lost, "\n".join(jobs.wrong + jobs.lost)
        assert jobs.done["trains"] and jobs.done["tunes"]
        assert max(held, default=0.0) <= LEASE_SECONDS + leases.slowest
        assert graphs <= compiles <= graphs + clients.replaced + KILLS * CLIENTS
        with failover.client() as client:
            wait_until(lambda: client.zcard("torchrelay:pending") == 0, seconds=30)
            assert client.keys("torchrelay:lease:*") == []
