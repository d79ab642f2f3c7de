"""Training jobs on a pool's real Ray: begun, followed, and the processes that they have."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import textwrap
import threading
from pathlib import Path

import msgspec
import psutil
from pool_parts import RAY_TOKEN
from torchrelay.compiler.api.training import working_directory
from torchrelay.compiler.api.training.events import LogLines, NumberedEvent, RankStarted, StateChanged
from torchrelay.compiler.api.training.jobs import TRAIN_ENDED, TrainSpec
from torchrelay.compiler.api.training.node_messages import TrainOrder
from torchrelay.compiler.errors import Unavailable
from torchrelay.workers.pool import PoolSettings, WorkerPool
from waiting import wait_until

HANG_SECONDS = 600.0
"""What takes longer hangs: each start of a rank takes up to 50 s on a machine with two loaded processors."""

MEET = """
    import os, signal, sys, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total)
    print(f"attempt {attempt} rank {rank} of {world} sum {total.item():g} {sys.argv[1:]}", flush=True)
"""
FIRST_WAITS = """
    if attempt < int(os.environ.get("WAITS", "1")):
        signal.pause()
    dist.destroy_process_group()
"""


class Site:
    """A pool, the event loop that it lives on, and the news of its jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: list[Job] = []
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.pool = WorkerPool(
            PoolSettings(cpu_slots=0, gpu_slots_per_gpu=0, engine="engine", ray_token=RAY_TOKEN)
        )

    def call(self, coroutine, seconds=120):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(seconds)

    def begin(self, script: str, files: dict[str, str] | None = None, **spec) -> Job:
        self.jobs.append(Job(self, self.order(script, files, **spec)))
        return self.jobs[-1]

    def order(self, script: str, files: dict[str, str] | None = None, **spec) -> TrainOrder:
        name = secrets.token_hex(8)
        source = self.folder / f"source-{name}"
        source.mkdir()
        for file, text in {"script.py": script, **(files or {})}.items():
            (source / file).write_text(textwrap.dedent(text))
        package = working_directory.pack(source, sorted(path.name for path in source.iterdir()))
        given = {"script": "script.py", "workers": 2, "cpus": 0.5, "retries": 1, "compile": "off", **spec}
        return TrainOrder(
            job=name,
            namespace="default",
            spec=TrainSpec(name="test", **given),
            package=package,
            environment={"FROM_ORDER": "yes"},
            folder=str(self.folder / "jobs"),
        )


class Job:
    def __init__(self, site: Site, order: TrainOrder) -> None:
        self.site, self.order = site, order
        self.news: list[NumberedEvent] = []
        self.begin()

    def begin(self, **changes) -> None:
        self.order = msgspec.structs.replace(self.order, **changes)
        self.site.call(self.site.pool.training.begin(self.order))

    def poll(self, seconds: float = 1.0) -> None:
        after = self.news[-1].number if self.news else 0
        self.news += self.site.call(self.site.pool.training.events(self.order.job, after, seconds))

    def until(self, condition, seconds: float = 170):
        """What `condition` gives of the news, once it gives anything; before Ray forgets by itself, after 180 s."""
        return wait_until(lambda: condition(self) or self.poll(), seconds, pause=0, told=lambda: self.news)

    def until_told(self, condition, seconds: float = HANG_SECONDS):
        """As `until`, with a driver that may be away for a while."""

        def tells():
            with contextlib.suppress(Unavailable):
                self.poll()
            return condition(self)

        return wait_until(tells, seconds, pause=0.1, told=lambda: self.news)

    def of(self, kind):
        return [each.event for each in self.news if isinstance(each.event, kind)]

    def lines(self):
        return sorted(line for log in self.of(LogLines) if log.stream == "stdout" for line in log.lines)

    def end(self, seconds: float = 170) -> StateChanged:
        return self.until(
            lambda job: next((t for t in job.of(StateChanged) if t.state in TRAIN_ENDED), None), seconds
        )

    def started(self, attempt: int = 0, ranks: int = 2) -> dict[int, RankStarted]:
        def all_of(job):
            there = {e.rank: e for e in job.of(RankStarted) if e.attempt == attempt}
            return there if len(there) == ranks else None

        return self.until(all_of)

    def states(self):
        return [turned.state for turned in self.of(StateChanged)]

    def forget(self) -> None:
        self.site.call(self.site.pool.training.forget(self.order.job))


def alive(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def gone(pids, seconds=10.0):
    with contextlib.suppress(AssertionError):
        return wait_until(lambda: not any(map(alive, pids)), seconds)
    return False


def drivers():
    """Processes of the drivers that there are."""
    return below("JobDriverActor")


def captures():
    return [process.pid for process in below("graph_capture.main")]


def below(name):
    """Processes below this one that have `name` in their command line."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # nor one that waits to be collected
            if name in " ".join(process.cmdline()):
                found.append(process)
    return found
