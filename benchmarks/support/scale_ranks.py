"""One training job with many ranks: does its driver keep up?; in: numbers of ranks, out: rows of the scale table.

The driver is the real actor on a real Ray, and all that ranks report goes through the code of their workers. Only the
ranks' own processes are simulated: each reports metrics twice a second, as the reporter of a real rank does, and a line
of output each second. The nodes' processes share this machine with the driver.
"""

from __future__ import annotations

import os
import random
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import ray
from torchrelay.compiler import decoding
from torchrelay.compiler.api.training.events import LogLines, NumberedEvent, StepMetrics, TrainEvent
from torchrelay.compiler.api.training.jobs import TrainSpec
from torchrelay.compiler.api.training.node_messages import TrainOrder
from torchrelay.workers.scheduling.ray_resources import NAMESPACE
from torchrelay.workers.training.job_driver import JobDriverActor
from torchrelay.workers.training.messages import StopOrder
from torchrelay.workers.training.ranks.environment import RankAssignment
from torchrelay.workers.training.ranks.relay import host_relay
from torchrelay.workers.training.ranks.reports import ReportSender, report_seconds

from .scale_rows import Row, at_most, exponent

_METRICS_SECONDS = 0.5
_LINE_SECONDS = 1.0
_PROCESSES = 2


class MeasuredDriver(JobDriverActor):
    """The driver, with an order that it does not run: the ranks are here already."""

    calls = 0

    def ready(self, order: bytes) -> int:
        """Its process."""
        self._train_order = decoding.from_msgpack(order, type=TrainOrder)
        return os.getpid()

    def record(self, attempt: int, reports: bytes) -> bytes:
        self.calls += 1
        return super().record(attempt, reports)

    def received(self) -> int:
        return self.calls

    def stop_all(self) -> None:
        with self._lock:
            self._order_ranks(StopOrder(60.0))


class SimulatedNodes:
    """The workers of some nodes, in one process and one thread. `nodes`: the ranks of each."""

    def __init__(self, driver: str, nodes: list[list[int]], world_size: int, all_nodes: int) -> None:
        handle, seconds = ray.get_actor(driver, namespace=NAMESPACE), report_seconds(all_nodes)
        self._senders: list[ReportSender] = []
        for ranks in nodes:
            relay = host_relay(driver, 0, seconds) if len(ranks) > 1 else ""
            for rank in ranks:
                place = RankAssignment(
                    rank=rank, world_size=world_size, local_rank=0, local_world_size=len(ranks), node_rank=0
                )
                self._senders.append(ReportSender(handle, place, relay=relay, seconds=seconds))

    def run(self, seconds: float) -> tuple[int, list[float]]:
        """Report for so long, then until ordered to stop: the lines of each rank, and when each one was ordered."""
        began = time.time()
        due = [
            [began + random.uniform(0, each) for each in (_METRICS_SECONDS, _LINE_SECONDS)]
            for _ in self._senders
        ]
        lines = [0] * len(self._senders)
        stopped: dict[int, float] = {}
        while len(stopped) < len(self._senders) and time.time() < began + seconds + 60:
            now = time.time()
            for at, sender in enumerate(self._senders):
                if now < began + seconds and (events := self._events(sender.rank, now, due[at])):
                    lines[at] += sum(isinstance(event, LogLines) for event in events)
                    sender.add(events)
                if sender.exchange() >= 0:
                    stopped.setdefault(at, time.time())
            time.sleep(max(0.0, now + 0.05 - time.time()))
        for sender in self._senders:
            sender.finish([])
        return sum(lines), list(stopped.values())

    @staticmethod
    def _events(rank: int, now: float, due: list[float]) -> list[TrainEvent]:
        """Each rank's lines hold when they were written."""
        events: list[TrainEvent] = []
        if now >= due[0]:
            due[0] += _METRICS_SECONDS
            values = {"loss": 1.0, "step_seconds": 0.1, "samples": 32.0, "memory_bytes": 1e9}
            events.append(StepMetrics(rank=rank, step=int(now), at=now, values=values))
        if now >= due[1]:
            due[1] += _LINE_SECONDS
            events.append(LogLines(rank=rank, stream="stdout", lines=[f"{now!r}"]))
        return events


class _Follower(threading.Thread):
    """Fetches the job's events as a dispatcher does; how late each line came."""

    def __init__(self, driver: Any) -> None:
        super().__init__(daemon=True)
        self._driver = driver
        self.after = 0
        self.late: list[tuple[float, float]] = []
        """Of each line: when it was written, and after how many seconds it was visible."""
        self.over = False
        self.start()

    def run(self) -> None:
        while not self.over:
            data = ray.get(self._driver.events.remote(self.after, 0.5))
            for each in decoding.from_msgpack(data, type=list[NumberedEvent]):
                self.after = each.number
                if isinstance(each.event, LogLines):
                    now = time.time()
                    self.late += [(float(line), now - float(line)) for line in each.event.lines]


class Measured(msgspec.Struct, frozen=True):
    """calls: of the driver, a second. cpu: its share of one core. late, late_99: seconds until a line was visible,
    median and 99th percentile. stop: seconds until the last rank had the order to stop. lost: lines."""

    calls: float
    cpu: float
    late: float
    late_99: float
    stop: float
    lost: int


def measure(ranks: int, on_node: int, seconds: float, settle: float, folder: Path) -> Measured:
    """Ray is initialized. on_node: ranks of a node. settle: seconds before what is measured."""
    name = f"measured-{ranks}-{os.urandom(3).hex()}"
    options: dict[str, Any] = {"name": name, "namespace": NAMESPACE, "max_concurrency": 64, "num_cpus": 0}
    driver: Any = ray.remote(MeasuredDriver).options(**options).remote(name, str(folder / name))
    order = TrainOrder(
        job=name,
        namespace="default",
        spec=TrainSpec(name=name),
        package=b"",
        environment={},
        folder=str(folder),
    )
    process = psutil.Process(ray.get(driver.ready.remote(msgspec.msgpack.encode(order))))
    ray.get(driver.attempt.remote(ranks, []))
    nodes = [list(range(first, min(first + on_node, ranks))) for first in range(0, ranks, on_node)]
    shares = [share for n in range(_PROCESSES) if (share := nodes[n::_PROCESSES])]
    actors: list[Any] = [
        ray.remote(SimulatedNodes).options(num_cpus=0).remote(name, share, ranks, len(nodes))
        for share in shares
    ]
    ray.get([actor.__ray_ready__.remote() for actor in actors])
    follower = _Follower(driver)
    running = [actor.run.remote(seconds + settle) for actor in actors]
    time.sleep(settle)
    began, calls, spent = time.time(), ray.get(driver.received.remote()), process.cpu_times()
    time.sleep(seconds)
    ended, more, used = time.time(), ray.get(driver.received.remote()), process.cpu_times()
    ordered = time.time()
    ray.get(driver.stop_all.remote())
    results = ray.get(running)
    deadline = time.time() + 60
    written = sum(lines for lines, _ in results)
    while len(follower.late) < written and time.time() < deadline:
        time.sleep(0.1)
    follower.over = True
    follower.join()
    for actor in [*actors, driver]:
        ray.kill(actor)
    late = sorted(after for at, after in follower.late if began <= at < ended)
    return Measured(
        calls=(more - calls) / (ended - began),
        cpu=(used.user + used.system - spent.user - spent.system) / (ended - began),
        late=statistics.median(late),
        late_99=late[int(0.99 * (len(late) - 1))],
        stop=max(at for _, stopped in results for at in stopped) - ordered,
        lost=written - len(follower.late),
    )


def rows(
    sizes: Sequence[int] = (10, 100, 1000), *, on_node: int = 8, seconds: float = 8.0, settle: float = 4.0
) -> list[Row]:
    """Bars hold for the largest size: the driver has a core of its own on a real node."""
    found: list[Measured] = []
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray would write one to this user's home
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        namespace=NAMESPACE,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = [measure(size, on_node, seconds, settle, Path(folder)) for size in sizes]
    finally:
        ray.shutdown()

    def law(values: list[float]) -> str:
        grown = ", ".join(f"{value:.3g}" for value in values)
        power = f"ranks^{exponent(sizes, values):.2f}: " if len(sizes) > 1 else ""
        return f"{power}{grown} with {', '.join(f'{size:,}' for size in sizes)}"

    last, who = found[-1], f"{sizes[-1]:,} ranks of one job"
    return [
        Row(f"{who}: calls to the driver", last.calls, "1/s", law=law([each.calls for each in found])),
        at_most(f"{who}: driver's share of a core", last.cpu, "", 0.5, law([each.cpu for each in found])),
        at_most(f"{who}: report to visible, median", last.late, "s", 0.5, law([each.late for each in found])),
        at_most(f"{who}: 99th percentile", last.late_99, "s", 2.0, law([each.late_99 for each in found])),
        at_most(f"{who}: order to stop, last rank", last.stop, "s", 2.0, law([each.stop for each in found])),
        at_most(f"{who}: lines lost or doubled", abs(last.lost), "", 0),
    ]


if __name__ == "__main__":
    from .scale_rows import table

    print(table(rows()))
