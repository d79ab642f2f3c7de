"""What tests of a pool share: its Ray token, a GPU that no slot has, and waiting for a state or a slot."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import psutil
from torchrelay.compiler.request import schema
from torchrelay.workers.pool import PoolSettings, WorkerPool, WorkersBusy
from waiting import until

T = TypeVar("T")

RAY_TOKEN = "0123456789abcdef" * 4
"""Ray reads its token once in a process, and several clusters are started in one."""
GPU = schema.Target(kind="cuda", name="NVIDIA H200", capability="9.0", units=132, cpu=[])


class EmbeddedPool:
    """A pool of two CPU slots, and the event loop that it lives on."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.pool = WorkerPool(
            PoolSettings(cpu_slots=2, gpu_slots_per_gpu=0, engine="engine", ray_token=RAY_TOKEN)
        )

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)


async def compile_when_idle(pool: WorkerPool, request: bytes, **rest: Any) -> bytes:
    """As a dispatcher does, which leaves a compile in the queue until a worker is idle."""

    async def compiled() -> tuple[bytes] | None:
        with contextlib.suppress(WorkersBusy):
            return (await pool.compile(request, **rest),)
        return None

    return (await until(compiled, seconds=600, pause=0.05))[0]


def started_since(before: set[psutil.Process]) -> set[psutil.Process]:
    """The running processes below this one that neither are of `before` nor below those: a service that other tests
    share starts some whenever it likes."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and not before & {process, *process.parents()}:
                found.add(process)
    return found


def command_line(process: psutil.Process) -> str:
    """'' once it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


@contextlib.contextmanager
def no_process_left(seconds: float = 60) -> Iterator[set[psutil.Process]]:
    """After it no process runs that has been started inside, at most `seconds` later. Yields those before it."""
    before = set(psutil.Process().children(recursive=True))
    yield before
    _, left = psutil.wait_procs(started_since(before), timeout=seconds)
    assert not left, f"the pool left {[_line(process) for process in left]}"


def _line(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} {process.status()}: {' '.join(process.cmdline())}, of {process.parent()}"
    return f"{process.pid}, which has ended since"
