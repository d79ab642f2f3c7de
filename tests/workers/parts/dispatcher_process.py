"""A dispatcher's pool and its claims, in a process of their own. Run as a program it obeys lines on its input."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import engine
import msgspec
import psutil
import waiting
from pool_parts import RAY_TOKEN, compile_when_idle
from torchrelay.compiler.api.tuning.jobs import SearchJobSpec
from torchrelay.compiler.errors import RelayError
from torchrelay.compiler.tuning import queries
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.compile.slot_claims import SlotClaims
from torchrelay.service.storage.redis.connections import connect
from torchrelay.service.storage.redis.keys import Keys
from torchrelay.service.storage.redis.scripts import Scripts
from torchrelay.workers.pool import PoolSettings, WorkerPool

_MARK = "@dispatcher "
"""What its own lines begin with; Ray prints others."""


class DispatcherProcess:
    """The process, seen from a test."""

    def __init__(self, address: str, redis_url: str, *toolchains: str, **environment: str) -> None:
        path = [str(Path(waiting.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = psutil.Popen(
            [sys.executable, __file__, address, redis_url, *toolchains],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Any]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, what: str, **order: Any) -> Future[Any]:
        number, future = next(self._numbers), Future[Any]()
        self._asked[number] = future
        self.process.stdin.write(json.dumps([number, what, order]) + "\n")
        self.process.stdin.flush()
        return future

    def workers(self, state: str = "") -> set[str]:
        """Names of its workers, or of those in this state."""
        return {name for name, now in self.ask("workers").result(90) if state in ("", now)}

    def wait_for_idle(self, count: int, starting: int = 0) -> set[str]:
        """The names of its workers, once `count` are idle and `starting` are not yet."""
        waiting.wait_until(
            lambda: (len(self.workers("idle")), len(self.workers())) == (count, count + starting), 120
        )
        return self.workers("idle")

    def close(self) -> None:
        """As a dispatcher that is told to end."""
        self.process.stdin.close()
        self.process.wait(90)

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.startswith(_MARK):
                number, answer = json.loads(line.removeprefix(_MARK))
                self._asked.pop(number).set_result(answer)


async def _compile(pool: WorkerPool, order: dict[str, Any]) -> str:
    """The artifact, or the name of the error and its text."""
    try:
        artifact = await compile_when_idle(
            pool,
            msgspec.json.encode(order),
            key="key",
            toolchain=engine.TOOLCHAIN,
            target=engine.TARGET,
            deadline_seconds=60,
            on_progress=lambda *_: None,
        )
    except RelayError as error:
        return f"{type(error).__name__}: {error.message}"
    return artifact.decode()


async def _search(pool: WorkerPool, worker: str) -> str:
    """Hold the worker for searches of which none comes; the name of the error that ends it, and its text."""

    async def no_task(question: bytes) -> bytes:
        await asyncio.sleep(0.5)
        return msgspec.msgpack.encode(queries.TaskBatch([], over=False))

    try:
        await pool.search(
            msgspec.msgpack.encode(SearchJobSpec(engine.TOOLCHAIN, engine.TARGET, 1)),
            worker=worker,
            namespace="default",
            toolchain=engine.TOOLCHAIN,
            target=engine.TARGET,
            on_query=no_task,
            deadline_seconds=600,
        )
    except RelayError as error:
        return f"{type(error).__name__}: {error.message}"
    return "ended"


async def _obey(pool: WorkerPool, number: int, what: str, order: dict[str, Any]) -> None:
    answer: Any
    match what:
        case "workers":
            answer = [(worker.id, worker.state) for worker in pool.workers()]
        case "standby":
            answer = [pool.ready(), not pool.workers() and pool.elsewhere > 0]
        case "compile":
            answer = await _compile(pool, order)
        case "search":
            answer = await _search(pool, **order)
    print(f"\n{_MARK}{json.dumps([number, answer])}", flush=True)


async def _main(address: str, redis_url: str, *toolchains: str) -> None:
    settings = ServiceSettings(redis_url=redis_url, redis_timeout_seconds=1.0)
    redis = connect(settings)
    pool = WorkerPool(
        PoolSettings(ray_address=address, ray_token=RAY_TOKEN, engine="engine", toolchains=toolchains),
        claims=SlotClaims(Keys(settings.redis_prefix), Scripts(redis), settings),
    )
    try:
        await pool.start()
        async with asyncio.TaskGroup() as tasks:
            while line := await asyncio.to_thread(sys.stdin.readline):
                tasks.create_task(_obey(pool, *json.loads(line)))
    finally:
        await pool.close()
        await redis.aclose()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
