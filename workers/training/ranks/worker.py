"""Runs one rank in its Ray Train worker: starts its process, sends its events to the driver, and waits for its end.

The functions here are what Ray Train calls in its workers. Each worker is one rank's; everything that it learns goes to
the driver at once, and the driver's answers say when to stop.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ....compiler import decoding
from ....compiler.api.training.events import RankEnded, RankStarted, describe_exit
from ....compiler.api.training.node_messages import TrainOrder, node_job_id
from ....compiler.api.training.rank_environment import ANSWER_ENVIRONMENT
from ....compiler.errors import RelayError
from ...scheduling.ray_resources import NAMESPACE
from ..messages import JobReference, Rendezvous
from .environment import RankAssignment, rank_command, rank_environment
from .process import RankProcess, error_line
from .reaper import RankLaunch
from .reports import SEND_SECONDS, ReportSender
from .working_directory import WorkingDirectory

_RENDEZVOUS = "TORCHRELAY_TRAIN_MEETING"
"""Where, in a worker's environment, a Rendezvous waits for its rank."""
_UNSTORED_BYTES = 4 << 20
"""Events that the driver has not stored yet; past it nothing more is read from the rank."""
_ERROR_LINES = 3


class RankFailed(Exception):
    """A rank's process ended with an error."""


def host_store(address: str, world_size: int) -> int:
    """Begin, in rank 0's worker, to serve the store through which ranks find each other; the port, at once."""
    listener = socket.create_server((address, 0), backlog=max(128, world_size))
    port: int = listener.getsockname()[1]
    threading.Thread(target=_serve_store, args=(listener, address, port), daemon=True, name="store").start()
    return port


def _serve_store(listener: socket.socket, address: str, port: int) -> None:
    # connections meanwhile wait in the listener's queue: importing torch takes seconds
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, and not in its __all__

    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    threading.Event().wait()  # it serves until this process ends
    del store


def set_rendezvous(rendezvous: Rendezvous, relays: Mapping[str, str]) -> None:
    """Store, in every worker before its rank, where the ranks of this attempt meet. relays: sockets, by node."""
    import ray

    relay = relays.get(ray.get_runtime_context().get_node_id(), "")
    rendezvous = msgspec.structs.replace(rendezvous, relay=relay)
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
    driver: Any = ray.get_actor(job.driver, namespace=NAMESPACE)
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
        sender = ReportSender(driver, assignment, relay=rendezvous.relay, seconds=rendezvous.seconds)
        _run(sender, order, assignment, work.path, Path(job.folder), warm)
    finally:
        work.close()


def _run(
    sender: ReportSender,
    train_order: TrainOrder,
    assignment: RankAssignment,
    work: Path,
    folder: Path,
    warm: str,
) -> None:
    environment = rank_environment(train_order, assignment, folder, os.environ)
    launch = RankLaunch(rank_command(train_order.spec), str(work), environment, channel=ANSWER_ENVIRONMENT)
    process = RankProcess(launch, assignment.rank, assignment.attempt, warm=warm)
    started = False
    try:
        more = True
        while more:
            if sender.unstored < _UNSTORED_BYTES:
                more = process.poll(sender.poll_seconds())
            else:
                time.sleep(SEND_SECONDS)
            if process.pid and not started:
                started = True
                sender.add(
                    [
                        RankStarted(
                            rank=assignment.rank,
                            world_size=assignment.world_size,
                            pid=process.pid,
                            host=socket.gethostname(),
                            attempt=assignment.attempt,
                            at=time.time(),
                            warm=process.warm,
                        )
                    ]
                )
            size = process.size
            sender.add(process.taken(), size)
            stop = sender.exchange()
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
