"""A rank, as its Ray Train worker sees it: the driver's name in; the rank's process run, its events told, its end out.

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


_TELL_SECONDS = 0.2
"""Between two tellings; also how soon a stop is heard."""


_HELD_BYTES = 4 << 20
"""What is not told yet; past it nothing more is read."""


_TOLD_LINES = 3


class RankFailed(Exception):
    """A rank's process ended with an error."""


def host_store(address: str, world_size: int) -> int:
    """In rank 0's worker: begin to serve the store through which ranks find each other; the port, at once."""
    listener = socket.create_server((address, 0), backlog=max(128, world_size))
    port: int = listener.getsockname()[1]
    threading.Thread(target=_serve_store, args=(listener, address, port), daemon=True, name="store").start()
    return port


def _serve_store(listener: socket.socket, address: str, port: int) -> None:
    # whoever connects meanwhile waits in the listener's queue: importing torch takes seconds
    from torch.distributed import TCPStore

    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    threading.Event().wait()  # it serves until this process ends
    del store


def meet(meeting: Rendezvous) -> None:
    """In every worker, before its rank: where this attempt's ranks meet."""
    os.environ[_RENDEZVOUS] = msgspec.json.encode(meeting).decode()


def run_rank(job: JobReference) -> None:
    """Run this worker's rank to its end. Raises RankFailed."""
    import ray
    import ray.train

    context = ray.train.get_context()
    meeting = decoding.from_json(os.environ[_RENDEZVOUS], type=Rendezvous)
    local = context.get_local_world_size()
    place = RankAssignment(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        local_rank=context.get_local_rank(),
        local_world_size=local,
        node_rank=context.get_node_rank(),
        nodes=-(-context.get_world_size() // max(1, local)),
        attempt=meeting.attempt,
        address=meeting.address,
        port=meeting.port,
    )
    driver = ray.get_actor(job.driver, namespace=NAMESPACE)
    node = ray.get_runtime_context().get_node_id()
    brief, warm = ray.get([driver.brief.remote(), driver.warm_process.remote(node)])
    order = decoding.from_msgpack(brief, type=TrainOrder)
    try:
        name = node_job_id(order.namespace, order.job)
        work = WorkingDirectory.open(name, lambda: ray.get(driver.package.remote()))
    except (OSError, RelayError) as error:
        raise RankFailed(
            f"rank {place.rank} has no working directory on {socket.gethostname()}: {error}"
        ) from None
    try:
        _run(driver, order, place, work.path, Path(job.folder), warm)
    finally:
        work.close()


def _run(driver: Any, order: TrainOrder, place: RankAssignment, work: Path, folder: Path, warm: str) -> None:
    environment = rank_environment(order, place, folder, os.environ)
    launch = RankLaunch(rank_command(order.spec), str(work), environment, channel=ANSWER_ENVIRONMENT)
    process = RankProcess(launch, place.rank, place.attempt, warm=warm)
    teller = _EventSender(driver, place)
    started = False
    try:
        more = True
        while more:
            if process.size < _HELD_BYTES:
                more = process.look(_TELL_SECONDS)
            else:
                time.sleep(_TELL_SECONDS)
            if process.pid and not started:
                started = True
                teller.tell([_started(place, process)])
            stop = teller.exchange(process)
            if stop >= 0:
                process.stop(stop)
        code = process.wait()
        detail = "" if code == 0 else error_line(process.last)
        ended = RankEnded(
            rank=place.rank, code=code, at=time.time(), attempt=place.attempt, detail=detail[:2000]
        )
        teller.finish([*process.taken(), ended])
    except BaseException:
        process.kill()
        raise
    if code != 0 and not teller.told_to_stop:
        lines = "\n".join(list(process.last)[-_TOLD_LINES:])
        raise RankFailed(f"rank {place.rank} {describe_exit(code)}" + (f":\n{lines}" if lines else ""))


def _started(place: RankAssignment, process: RankProcess) -> RankStarted:
    return RankStarted(
        rank=place.rank,
        world_size=place.world_size,
        pid=process.pid,
        host=socket.gethostname(),
        attempt=place.attempt,
        at=time.time(),
        warm=process.warm,
    )


class _EventSender:
    """Tells the driver what comes, one call at a time, and hears what it wants."""

    def __init__(self, driver: Any, place: RankAssignment) -> None:
        self._driver = driver
        self._place = place
        self._waiting: list[TrainEvent] = []
        self._call: Any = None
        self._next = 0.0
        self.told_to_stop = False

    def tell(self, events: list[TrainEvent]) -> None:
        self._waiting += events

    def exchange(self, process: RankProcess) -> float:
        """Give the driver what there is, unless it is still at the last; what it wants."""
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
            self._next = now + _TELL_SECONDS
            self._waiting += process.taken()
            self._send()
        if answer.stop >= 0:
            self.told_to_stop = True
        return answer.stop

    def finish(self, events: list[TrainEvent]) -> None:
        """All that is left, kept by the driver when this returns."""
        import ray

        if self._call is not None:
            answer = decoding.from_msgpack(ray.get(self._call), type=StopOrder)
            self.told_to_stop = self.told_to_stop or answer.stop >= 0
        self._waiting += events
        self._send()
        answer = decoding.from_msgpack(ray.get(self._call), type=StopOrder)
        self.told_to_stop = self.told_to_stop or answer.stop >= 0

    def _send(self) -> None:
        events, self._waiting = self._waiting, []
        self._call = self._driver.tell.remote(
            self._place.rank, self._place.attempt, msgspec.msgpack.encode(events)
        )
