"""The actor of a capture run: runs a script as rank 0 of a simulated world and returns the graphs of its first step."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import msgspec

from ...compiler import decoding
from ...compiler.api.training.events import describe_exit
from ...compiler.api.training.node_messages import CapturedGraphs, TrainOrder, node_job_id
from ...compiler.errors import RelayError
from .ranks.environment import RankAssignment, capture_command, rank_environment
from .ranks.process import RankProcess
from .ranks.reaper import RankLaunch
from .ranks.working_directory import WorkingDirectory

_POLL_SECONDS = 0.2


class CaptureActor:
    """One capture run; killing the actor kills the script."""

    def placed(self) -> None:
        """Answers once the actor has a node."""

    def run(self, train_order: bytes, world: int, seconds: float) -> bytes:
        """The CapturedGraphs, encoded, of rank 0 of `world`. `train_order`: a TrainOrder, encoded."""
        given = decoding.from_msgpack(train_order, type=TrainOrder)
        return msgspec.msgpack.encode(_capture(given, world, time.monotonic() + seconds))


def _capture(train_order: TrainOrder, world: int, deadline: float) -> CapturedGraphs:
    try:
        work = WorkingDirectory.open(
            node_job_id(train_order.namespace, train_order.job), lambda: train_order.package
        )
    except (OSError, RelayError) as error:
        return CapturedGraphs(bodies=[], ended=f"failed: no working directory: {error}")
    try:
        with tempfile.TemporaryDirectory(prefix="torchrelay-capture-") as folder:
            return _run(train_order, world, work.path, Path(folder) / "captured", deadline)
    finally:
        work.close()


def _run(train_order: TrainOrder, world: int, work: Path, output: Path, deadline: float) -> CapturedGraphs:
    assignment = RankAssignment(rank=0, world_size=world, local_rank=0, local_world_size=world, node_rank=0)
    environment = rank_environment(train_order, assignment, output.parent, os.environ)
    process = RankProcess(RankLaunch(capture_command(train_order.spec, output), str(work), environment), 0, 0)
    while process.poll(_POLL_SECONDS):
        process.taken()
        if time.monotonic() > deadline:
            process.kill()
    code = process.wait()
    tail = "\n".join(process.tail)
    try:
        captured = decoding.from_msgpack(output.read_bytes(), type=CapturedGraphs)
    except (OSError, msgspec.MsgspecError):
        return CapturedGraphs(
            bodies=[], ended=f"failed: the script's process {describe_exit(code)}", log=tail
        )
    return captured if captured.log else msgspec.structs.replace(captured, log=tail)
