"""Runs one rank in its Ray Train worker: starts its process, sends its events to the driver, and waits for its end.

The functions here are what Ray Train calls in its workers. Each worker is one rank's; everything that it learns goes to
the driver at once, and the driver's answers say when to stop.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from ....compiler import decoding
from ....compiler.api.training.events import RankEnded, RankStarted, TrainEvent, describe_exit
from ....compiler.api.training.node_messages import TrainOrder, node_job_id
from ....compiler.api.training.rank_environment import ANSWER_ENVIRONMENT
from ....compiler.errors import RelayError
from ...scheduling.ray_resources import NAMESPACE
from ..messages import JobReference, Rendezvous, StopOrder
from .environment import RankAssignment, rank_command, rank_environment
from .process import RankProcess, error_line
from .reaper import RankLaunch
from .working_directory import WorkingDirectory

_RENDEZVOUS = "TORCHRELAY_TRAIN_MEETING"
"""Where, in a worker's environment, a Rendezvous waits for its rank."""


_SEND_SECONDS = 0.2
"""Between two messages to the driver; a stop order arrives as late as that."""


_UNSENT_BYTES = 4 << 20
"""Events not sent yet; past it nothing more is read from the rank."""


_ERROR_LINES = 3


class RankFailed(Exception):
    """A rank's process ended with an error."""


def host_store(address: str, world_size: int) -> int:
    """In rank 0's worker: begin to serve the store through which ranks find each other; the port, at once."""
    listener = socket.create_server((address, 0), backlog=max(128, world_size))
    port: int = listener.getsockname()[1]
    threading.Thread(target=_serve_store, args=(listener, address, port), daemon=True, name="store").start()
    return port


def _serve_store(listener: socket.socket, address: str, port: int) -> None:
    # connections meanwhile wait in the listener's queue: importing torch takes seconds
    from torch.distributed import TCPStore

    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    threading.Event().wait()  # it serves until this process ends
    del store


def set_rendezvous(rendezvous: Rendezvous) -> None:
    """In every worker, before its rank: store where the ranks of this attempt meet."""
    os.environ[_RENDEZVOUS] = msgspec.json.encode(rendezvous).decode()


def run_rank(job: JobReference) -> None:
    """Run this worker's rank to its end. Raises RankFailed."""
    import ray
    import ray.train

    context = ray.train.get_context()
    rendezvous = decoding.from_json(os.environ[_RENDEZVOUS], type=Rendezvous)
    local = context.get_local_world_size()
    assignment = RankAssignment(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        local_rank=context.get_local_rank(),
        local_world_size=local,
        node_rank=context.get_node_rank(),
        nodes=-(-context.get_world_size() // max(1, local)),
        attempt=rendezvous.attempt,
        address=rendezvous.address,
        port=rendezvous.port,
    )
    driver = ray.get_actor(job.driver, namespace=NAMESPACE)
    node = ray.get_runtime_context().get_node_id()
    order_bytes, warm = ray.get([driver.order.remote(), driver.warm_process.remote(node)])
    order = decoding.from_msgpack(order_bytes, type=TrainOrder)
    try:
        name = node_job_id(order.namespace, order.job)
        work = WorkingDirectory.open(name, lambda: ray.get(driver.package.remote()))
    except (OSError, RelayError) as error:
        raise RankFailed(
            f"rank {assignment.rank} has no working directory on {socket.gethostname()}: {error}"
        ) from None
    try:
        _run(driver, order, assignment, work.path, Path(job.folder), warm)
    finally:
        work.close()


def _run(
    driver: Any, order: TrainOrder, assignment: RankAssignment, work: Path, folder: Path, warm: str
) -> None:
    environment = rank_environment(order, assignment, folder, os.environ)
    launch = RankLaunch(rank_command(order.spec), str(work), environment, channel=ANSWER_ENVIRONMENT)
    process = RankProcess(launch, assignment.rank, assignment.attempt, warm=warm)
    sender = _EventSender(driver, assignment)
    started = False
    try:
        more = True
        while more:
            if process.size < _UNSENT_BYTES:
                more = process.poll(_SEND_SECONDS)
            else:
                time.sleep(_SEND_SECONDS)
            if process.pid and not started:
                started = True
                sender.add([_started(assignment, process)])
            stop = sender.exchange(process)
            if stop >= 0:
                process.stop(stop)
        code = process.wait()
        detail = "" if code == 0 else error_line(process.last)
        ended = RankEnded(
            rank=assignment.rank, code=code, at=time.time(), attempt=assignment.attempt, detail=detail[:2000]
        )
        sender.finish([*process.taken(), ended])
    except BaseException:
        process.kill()
        raise
    if code != 0 and not sender.stopping:
        lines = "\n".join(list(process.last)[-_ERROR_LINES:])
        raise RankFailed(f"rank {assignment.rank} {describe_exit(code)}" + (f":\n{lines}" if lines else ""))


def _started(assignment: RankAssignment, process: RankProcess) -> RankStarted:
    return RankStarted(
        rank=assignment.rank,
        world_size=assignment.world_size,
        pid=process.pid,
        host=socket.gethostname(),
        attempt=assignment.attempt,
        at=time.time(),
        warm=process.warm,
    )


class _EventSender:
    """Sends events to the driver, one call at a time; the answers are its orders."""

    def __init__(self, driver: Any, assignment: RankAssignment) -> None:
        self._driver = driver
        self._assignment = assignment
        self._waiting: list[TrainEvent] = []
        self._call: Any = None
        self._next = 0.0
        self.stopping = False

    def add(self, events: list[TrainEvent]) -> None:
        self._waiting += events

    def exchange(self, process: RankProcess) -> float:
        """Send all events, unless the last call is still running; the `stop` of the driver's last StopOrder."""
        import ray

        answer = StopOrder()
        if self._call is not None:
            done, _ = ray.wait([self._call], timeout=0)
            if not done:
                return answer.stop
            answer = decoding.from_msgpack(ray.get(self._call), type=StopOrder)
            self._call = None
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SEND_SECONDS
            self._waiting += process.taken()
            self._send()
        if answer.stop >= 0:
            self.stopping = True
        return answer.stop

    def finish(self, events: list[TrainEvent]) -> None:
        """Send all that is left; the driver has stored it when this returns."""
        import ray

        if self._call is not None:
            answer = decoding.from_msgpack(ray.get(self._call), type=StopOrder)
            self.stopping = self.stopping or answer.stop >= 0
        self._waiting += events
        self._send()
        answer = decoding.from_msgpack(ray.get(self._call), type=StopOrder)
        self.stopping = self.stopping or answer.stop >= 0

    def _send(self) -> None:
        events, self._waiting = self._waiting, []
        self._call = self._driver.record.remote(
            self._assignment.rank, self._assignment.attempt, msgspec.msgpack.encode(events)
        )
