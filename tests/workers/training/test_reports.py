"""What ranks report reaches the job's driver once, in one call for all of a node, whoever of the node dies."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torchrelay.compiler import decoding
from torchrelay.compiler.api.training.events import LogLines, NumberedEvent, TrainEvent
from torchrelay.compiler.api.training.jobs import TrainSpec
from torchrelay.compiler.api.training.node_messages import TrainOrder
from torchrelay.workers.scheduling.ray_cluster import ray_environment
from torchrelay.workers.scheduling.ray_resources import NAMESPACE
from torchrelay.workers.training.job_driver import JobDriverActor
from torchrelay.workers.training.messages import RankReport, StopOrder
from torchrelay.workers.training.ranks.environment import RankAssignment
from torchrelay.workers.training.ranks.relay import host_relay
from torchrelay.workers.training.ranks.reports import DriverLost, ReportSender

_HANG_SECONDS = 120.0


class Driver(JobDriverActor):
    """With an order that it does not run: the ranks are here already."""

    calls = 0

    def know(self, order: bytes) -> int:
        """Its process."""
        self._train_order = decoding.from_msgpack(order, type=TrainOrder)
        return os.getpid()

    def record(self, attempt: int, reports: bytes) -> bytes:
        self.calls += 1
        return super().record(attempt, reports)

    def called(self) -> int:
        return self.calls

    def stop_ranks(self) -> None:
        with self._lock:
            self._order_ranks(StopOrder(7.0))


class Host:
    """The worker whose process the relay is in."""

    def relay(self, driver: str) -> tuple[str, int]:
        return host_relay(driver, 0, 0.2), os.getpid()


def _get(reference: Any) -> Any:
    import ray

    return ray.get(reference)


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, 0

    def driver(self, world_size: int) -> Job:
        self.made += 1
        return Job(f"reports-{self.made}", self.folder, world_size)


class Job:
    def __init__(self, name: str, folder: Path, world_size: int) -> None:
        import ray

        options: dict[str, Any] = {"name": name, "namespace": NAMESPACE, "max_concurrency": 16, "num_cpus": 0}
        self.name, self.actor = name, ray.remote(Driver).options(**options).remote(name, str(folder / name))
        spec = TrainSpec(name=name)
        order = TrainOrder(
            job=name, namespace="default", spec=spec, package=b"", environment={}, folder=str(folder)
        )
        self.pid = _get(self.actor.know.remote(msgspec.msgpack.encode(order)))
        _get(self.actor.attempt.remote(world_size, []))
        self.host = ray.remote(Host).options(num_cpus=0).remote()
        self.relay, self.relay_pid = _get(self.host.relay.remote(name))

    def sender(self, rank: int, *, relay: bool = True) -> ReportSender:
        place = RankAssignment(rank=rank, world_size=4, local_rank=rank, local_world_size=4, node_rank=0)
        return ReportSender(self.actor, place, relay=self.relay if relay else "", seconds=0.1)

    def lines(self) -> list[str]:
        """All lines so far, in the order of their numbers."""
        found: list[str] = []
        after = 0
        while news := decoding.from_msgpack(
            _get(self.actor.events.remote(after, 0.0)), type=list[NumberedEvent]
        ):
            after = news[-1].number
            found += [line for each in news if isinstance(each.event, LogLines) for line in each.event.lines]
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    from pool_parts import RAY_TOKEN  # not where actors are imported: their path lacks it

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ray_environment(RAY_TOKEN, None).items():
            patch.setenv(name, value)
        import ray  # it reads its environment as it is imported

        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, namespace=NAMESPACE)
        yield Cluster(tmp_path_factory.mktemp("reports"))
        ray.shutdown()


def line(rank: int, number: int) -> list[TrainEvent]:
    return [LogLines(rank=rank, stream="stdout", lines=[f"{rank}:{number}"])]


def expected(ranks: int, lines: int) -> list[str]:
    return sorted(f"{rank}:{number}" for rank in range(ranks) for number in range(lines))


def in_order(found: list[str], rank: int) -> list[int]:
    return [int(each.partition(":")[2]) for each in found if each.startswith(f"{rank}:")]


def test_all_ranks_of_a_node_share_the_calls_and_each_hears_of_the_order_to_stop(cluster: Cluster) -> None:
    job = cluster.driver(4)
    senders = [job.sender(rank) for rank in range(4)]
    for number in range(20):
        for sender in senders:
            sender.add(line(sender.rank, number))
            sender.next_send = 0.0
            sender.exchange()
    _get(job.actor.stop_ranks.remote())
    from waiting import wait_until  # Ray's workers import this module too, and have no such path

    wait_until(lambda: all(sender.exchange() == 7.0 for sender in senders), _HANG_SECONDS)
    for sender in senders:
        sender.finish(line(sender.rank, 20))
        assert sender.unstored == 0
    found = job.lines()
    assert sorted(found) == expected(4, 21)
    assert all(in_order(found, rank) == list(range(21)) for rank in range(4))


def test_many_ranks_cost_no_more_calls_than_one(cluster: Cluster) -> None:
    job = cluster.driver(40)
    senders = [job.sender(rank) for rank in range(40)]
    for sender in senders:
        for number in range(5):
            sender.add(line(sender.rank, number))
            sender.next_send = 0.0  # at once
            sender.exchange()
    until = time.monotonic() + _HANG_SECONDS
    while any(sender.unstored for sender in senders):
        assert time.monotonic() < until
        for sender in senders:
            sender.exchange()
    assert _get(job.actor.called.remote()) < 100  # without a relay each report is a call
    assert sorted(job.lines()) == expected(40, 5)


def test_nothing_is_lost_or_doubled_when_the_worker_with_the_relay_is_killed(cluster: Cluster) -> None:
    job = cluster.driver(4)
    senders = [job.sender(rank) for rank in range(4)]
    for number in range(40):
        if number == 20:
            os.kill(job.relay_pid, signal.SIGKILL)
        for sender in senders:
            sender.add(line(sender.rank, number))
            sender.exchange()
        time.sleep(0.05)
    for sender in senders:
        sender.finish([])
    found = job.lines()
    assert sorted(found) == expected(4, 40)
    assert all(in_order(found, rank) == list(range(40)) for rank in range(4))


def test_a_report_that_is_sent_again_counts_once(cluster: Cluster) -> None:
    job = cluster.driver(1)
    report = RankReport(0, 1, msgspec.msgpack.encode(line(0, 0)))
    for reports in ([report], [report, RankReport(0, 2, msgspec.msgpack.encode(line(0, 1)))]):
        _get(job.actor.record.remote(0, msgspec.msgpack.encode(reports)))
    assert job.lines() == ["0:0", "0:1"]
    _get(job.actor.attempt.remote(1, []))  # its reports begin at 1 again
    _get(job.actor.record.remote(1, msgspec.msgpack.encode([report])))
    assert job.lines() == ["0:0", "0:1", "0:0"]


@pytest.mark.parametrize("relay", [True, False])
def test_a_rank_learns_that_its_driver_has_died(cluster: Cluster, relay: bool) -> None:
    job = cluster.driver(2)
    sender = job.sender(0, relay=relay)
    sender.finish(line(0, 0))
    os.kill(job.pid, signal.SIGKILL)
    from ray.exceptions import RayActorError

    with pytest.raises((DriverLost, RayActorError)):
        sender.finish(line(0, 1))
