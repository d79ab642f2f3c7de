"""A process with torch and Inductor imported that runs jobs in children of itself, one at a time.

Run as `python -m torchrelay.workers.fork_server.server --socket FD --settings JSON --jobs DIR` by the actor, which
speaks workers/messages.py over the socket. It is a fresh interpreter rather than a fork of the actor, because Ray's
threads do not survive a fork. CUDA is never initialised here: a forked child could not use it any more. When
the socket closes, the running job is killed and the server ends.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType

import msgspec

from ...compiler import decoding
from ...compiler.errors import CompileKilled, RelayError
from ...compiler.kernel_store.libraries import KernelStore
from ..messages import (
    Answer,
    CancelJob,
    Command,
    ForkServerReady,
    FrameDecoder,
    JobFailed,
    QueryReply,
    WorkerJob,
    decode_command,
    encode,
)
from ..process.process_tree import become_subreaper, kill_below
from ..sandbox import isolation
from ..sandbox.visible_paths import visible_paths_of
from ..settings import SlotSettings
from . import job_runner, sandbox_probe


class Disconnected(Exception):
    """The actor has closed the socket, or died."""


class ForkServer:
    """The loop: an order in, a job run, an answer out."""

    def __init__(
        self, connection: socket.socket, settings: SlotSettings, engine: ModuleType, jobs_dir: Path
    ) -> None:
        self._connection = connection
        environment = dict(os.environ)
        self._around = job_runner.JobContext(
            engine=engine,
            settings=settings,
            jobs_dir=jobs_dir,
            form="none",
            view=visible_paths_of(settings.kind, environment),
            kernels=_kernel_store(settings),
            shared=None if settings.shared_dir is None else Path(settings.shared_dir),
            environment=environment,
            prepared=set(),
        )
        self._frames = FrameDecoder()
        self._orders: list[Command] = []

    def serve(self) -> None:
        """Until the actor goes away."""
        try:
            self._send(self._come_up())
            while True:
                order = self._next_order()
                if isinstance(order, WorkerJob):
                    self._send(self._run(order))
                # a CancelJob or a QueryReply between jobs came too late for the one it meant
        except Disconnected:
            return

    def _run(self, order: WorkerJob) -> Answer:
        try:
            owner = job_runner.JobOwner(self._send, self._connection.fileno(), self._listen)
            return job_runner.run(order, self._around, owner)
        except job_runner.JobCancelled:
            return JobFailed.of(
                CompileKilled(f"the {order.work} was cancelled", hint="Nobody waits for it any more")
            )
        except (OSError, ValueError) as error:  # no room on the disk, say, or no such namespace
            return JobFailed.of(CompileKilled(f"the worker could not give the job a folder: {error}"))

    def _come_up(self) -> Answer:
        """Tried in children, because naming a GPU initialises CUDA."""
        around = self._around
        try:
            found = sandbox_probe.strongest(
                around.engine, around.settings, around.view, around.jobs_dir, around.environment
            )
        except RelayError as error:
            return JobFailed.of(error)
        self._around = msgspec.structs.replace(around, form=found.form)
        layers = isolation.layers(found.form, around.settings.isolation)
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "") if around.settings.kind == "cuda" else ""
        return ForkServerReady(
            os.getpid(),
            found.toolchain,
            found.target,
            str(around.jobs_dir),
            layers,
            found.missing,
            gpu,
            len(os.sched_getaffinity(0)),
        )

    def _next_order(self) -> Command:
        while not self._orders:
            self._receive()
        return self._orders.pop(0)

    def _listen(self) -> list[CancelJob | QueryReply]:
        """What has come that concerns the running job."""
        self._receive()
        heard = [order for order in self._orders if not isinstance(order, WorkerJob)]
        self._orders = [order for order in self._orders if isinstance(order, WorkerJob)]
        return heard

    def _receive(self) -> None:
        try:
            data = self._connection.recv(1 << 20)
        except ConnectionError:
            raise Disconnected from None
        if not data:
            raise Disconnected
        self._orders += [decode_command(body) for body in self._frames.feed(data)]

    def _send(self, message: Answer) -> None:
        try:
            self._connection.sendall(encode(message))
        except ConnectionError:
            raise Disconnected from None


def _kernel_store(settings: SlotSettings) -> KernelStore | None:
    if settings.kernels_dir is None:
        return None
    try:
        return KernelStore(Path(settings.kernels_dir), settings.kernels_bytes)
    except OSError as error:
        print(f"kernels are not kept for later compiles: {error}", file=sys.stderr, flush=True)
        return None


def main() -> None:
    """Entry point. Exits 0 when the actor goes away."""
    parser = argparse.ArgumentParser(prog="torchrelay.workers.fork_server.server")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--settings", required=True)
    parser.add_argument("--jobs", required=True, type=Path)
    arguments = parser.parse_args()
    settings = decoding.from_json(arguments.settings, type=SlotSettings)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the supervisor; this ends when the actor does
    become_subreaper()
    jobs_dir: Path = arguments.jobs
    try:
        gc.disable()  # next to nothing of what is loaded is garbage: to look for it took a sixth of the start
        engine = importlib.import_module(settings.engine)
        engine.preload()
        gc.collect()
        gc.freeze()  # children that collect do not touch, and so copy, the server's pages
        gc.enable()
        with socket.socket(fileno=arguments.socket) as connection:
            ForkServer(connection, settings, engine, jobs_dir).serve()
    finally:
        kill_below(os.getpid())
        shutil.rmtree(jobs_dir, ignore_errors=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
