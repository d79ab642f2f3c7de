"""Clients that begin training jobs and tuning jobs, one after another, while the service's processes are killed, and
the processes: their dispatchers compile, search and train themselves.

Run as a script it is one such process: `python job_parts.py <settings JSON> <seconds of a compile> <role> <log>`. The
log is ArtifactPool's; drivers of training jobs live in a folder beside it, and outlive the dispatchers.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx2
import training_parts
import tune_parts
import uvicorn
from service_parts import TOKEN, GatewayProcess, client_of, graph
from torchrelay.compiler import decoding
from torchrelay.compiler.api.training.events import StateChanged
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.gateway.server import create_server
from torchrelay.service.local.dispatcher import create_dispatcher_app
from waiting import wait_until

T = TypeVar("T")

PATIENCE_SECONDS = 180.0
"""Of a client for one job."""
EVENT_SECONDS, SEARCH_SECONDS = 0.1, 0.3
PROBLEMS = 8


class WorkingPool(training_parts.TrainingPool, tune_parts.SearchingPool):
    """Compiles, searches and trains."""

    def __init__(self, seconds: float, log: Path) -> None:
        folder = log.parent / "drivers"
        folder.mkdir(exist_ok=True)
        super().__init__(folder, EVENT_SECONDS)
        self.seconds, self._log = seconds, str(log)
        self.searchers.seconds = SEARCH_SECONDS
        self.captured = [graph(1), graph(2)]  # others ask for these too


class WorkingProcess(GatewayProcess):
    """A gateway or a dispatcher, in `arguments`, whose dispatchers have a WorkingPool."""

    script = __file__


class Gateways(Protocol):
    gateways: list[GatewayProcess]
    failovers: list[float]


class JobClients:
    """One thread begins training jobs, one tuning jobs, and each looks at its job until that has ended.

    done: how many jobs of each kind ended as they must, with each event told once; a dispatcher that is killed as it
    ends a job may tell of one more recovery. lost, wrong: what did not. replaced: jobs that a failover of Redis took,
    of those that were accepted shortly before it.
    """

    def __init__(self, service: Gateways, demotion_seconds: float) -> None:
        """demotion_seconds: what was accepted so long before a failover may be lost with the old primary."""
        self._service = service
        self._demotion = demotion_seconds
        self._over = threading.Event()
        self.done: Counter[str] = Counter()
        self.lost: list[str] = []
        self.wrong: list[str] = []
        self.replaced = 0
        threads = ThreadPoolExecutor(2)
        self._clients = [threads.submit(self._train), threads.submit(self._tune)]

    def close(self) -> None:
        """Once each job has ended."""
        self._over.set()
        for each in self._clients:
            each.result()

    def _train(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            job = self._asked(training_parts.begun)
            if job and self._ended("trains", job, began):
                told = [
                    each
                    for each in self._asked(lambda http, job=job: training_parts.told(http, job)) or []
                    if not isinstance(each, StateChanged) or each.state != "recovering"
                ]
                story = training_parts.story(0)
                different = [at for at, pair in enumerate(zip_longest(told, story)) if pair[0] != pair[1]][:1]
                self._judge("trains", job, told == story, told[: different[0] + 3] if different else "")

    def _tune(self) -> None:
        first = 1
        while not self._over.is_set():
            began = time.monotonic()
            sizes = range(first, first + PROBLEMS)
            items = [tune_parts.operator(16 * n + 8, line=n) for n in sizes]  # no ceiling is one of them
            first += PROBLEMS
            job = self._asked(lambda http, items=items: tune_parts.begun(http, *items))
            if job and self._ended("tunes", job, began):
                found = self._asked(lambda http, job=job: tune_parts.results(http, job)) or []
                items_of = Counter(each.entry.problem.text() for each in found)
                whole = len(items_of) == PROBLEMS + tune_parts.CEILINGS and set(items_of.values()) == {1}
                self._judge("tunes", job, whole, items_of)

    def _judge(self, kind: str, job: str, right: bool, told: object) -> None:
        if right:
            self.done[kind] += 1
        else:
            self.wrong.append(f"{kind} {job}: {told}")

    def _ended(self, kind: str, job: str, began: float) -> bool:
        """Whether it is done in the end; if not, why is noted."""
        until = time.monotonic() + PATIENCE_SECONDS
        shown: Any = None
        while time.monotonic() < until:
            answer = self._asked(lambda http: http.get(f"/v1/{kind}/{job}"))
            if answer is not None and answer.status_code == 404:
                time.sleep(1)  # until a failover is noticed
                if max(self._service.failovers, default=0.0) > began - self._demotion:
                    self.replaced += 1
                else:
                    self.lost.append(f"{kind} {job}: {answer.text}")
                return False
            if answer is not None and answer.status_code == 200:
                shown = answer.json()
                state = shown.get("state") or shown["job"]["state"]
                if state == "done":
                    return True
                if state in ("failed", "cancelled"):
                    break
            time.sleep(0.2)
        self.lost.append(f"{kind} {job}: {shown}")
        return False

    def _asked(self, call: Callable[[httpx2.Client], T]) -> T | None:
        """As a client does behind a load balancer: what breaks off goes to another gateway."""

        def asked() -> tuple[T] | None:
            port = random.choice(self._service.gateways).port
            with (
                contextlib.suppress(httpx2.TransportError, AssertionError),  # or it is refused: 503
                client_of(f"http://127.0.0.1:{port}", TOKEN) as http,
            ):
                answer = call(http)
                if not isinstance(answer, httpx2.Response) or answer.status_code < 500:
                    return (answer,)
            return None

        with contextlib.suppress(AssertionError):
            return wait_until(asked, PATIENCE_SECONDS, pause=0.1)[0]
        self.lost.append(f"no answer within {PATIENCE_SECONDS:g} s")
        return None


def _main(configuration: str, seconds: str, role: str, log: str) -> None:
    settings = ServiceSettings(**decoding.from_json(configuration))
    if role == "dispatcher":
        pool: Any = WorkingPool(float(seconds), Path(log))
        uvicorn.run(create_dispatcher_app(settings, pool), port=settings.port, log_level="warning")
    else:
        create_server(settings, None).run()


if __name__ == "__main__":
    _main(*sys.argv[1:])
