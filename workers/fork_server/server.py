"""Stage 6: a process with torch and Inductor imported that runs jobs in children of itself, one at a time.

Run by prestart.py as `python -m torchrelay.workers.fork_server.server --engine MODULE`. The actor sends its order and
workers/messages.py over a socket. It is a new interpreter and no fork of the actor, because Ray's threads do not
survive a fork. CUDA is never initialised here: a forked child could not use it then. When the socket closes, the
running job is killed and the server ends.
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

from ...compiler.api.protocols import WORKERS
from ...compiler.errors import CompileKilled, RelayError
from ...compiler.kernel_store.libraries import KernelStore
from ...compiler.request.schema import REVISION
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
from ..settings import SlotOrder, SlotSettings
from . import job_runner, prestart, sandbox_probe, warm_up


class Disconnected(Exception):
    """The actor has closed the socket, or died."""


class ForkServer:
    """Reads commands from the actor and runs one job at a time."""

    def __init__(self, connection: socket.socket, slot_order: SlotOrder, engine: ModuleType) -> None:
        self._connection = connection
        settings = slot_order.settings
        environment = dict(os.environ)
        self._context = job_runner.JobContext(
            engine=engine,
            settings=settings,
            jobs_dir=Path(slot_order.jobs_dir),
            form="none",
            view=visible_paths_of(settings.kind, environment),
            kernels=_kernel_store(settings),
            shared=None if slot_order.shared is None else Path(slot_order.shared),
            environment=environment,
            prepared=set(),
        )
        self._frames = FrameDecoder(Command)
        self._commands: list[Command] = []

    def serve(self) -> None:
        """Run jobs until the actor closes the socket."""
        try:
            self._send(self._greeting())
            # a job that comes meanwhile waits; without it, each would take that time
            with warm_up.limited(self._context.settings.limits.memory_bytes):
                self._context.engine.warm_up(self._context.jobs_dir)
            gc.collect()
            gc.freeze()  # children that collect do not touch, and so copy, the server's pages
            gc.enable()
            while True:
                command = self._next_command()
                if isinstance(command, WorkerJob):
                    self._send(self._run(command))
                # a CancelJob or a QueryReply between jobs came too late for its job
        except Disconnected:
            return

    def _run(self, job: WorkerJob) -> Answer:
        try:
            owner = job_runner.JobOwner(self._send, self._connection.fileno(), self._listen)
            return job_runner.run(job, self._context, owner)
        except job_runner.JobCancelled:
            return JobFailed.of(
                CompileKilled(f"the {job.work} was cancelled", hint="Nobody waits for it any more")
            )
        except (OSError, ValueError) as error:  # no room on the disk, say, or no such namespace
            return JobFailed.of(CompileKilled(f"the worker could not give the job a folder: {error}"))

    def _greeting(self) -> Answer:
        """Probe the isolation in children, because naming a GPU initialises CUDA."""
        context = self._context
        try:
            found = sandbox_probe.strongest(context)
        except RelayError as error:
            return JobFailed.of(error)
        self._context = msgspec.structs.replace(context, form=found.form)
        layers = isolation.layers(found.form, context.settings.isolation)
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "") if context.settings.kind == "cuda" else ""
        return ForkServerReady(
            os.getpid(),
            found.toolchain,
            found.target,
            str(context.jobs_dir),
            layers,
            found.missing,
            gpu,
            len(os.sched_getaffinity(0)),
            WORKERS.number,
            REVISION,
            found.others,
        )

    def _next_command(self) -> Command:
        while not self._commands:
            self._receive()
        return self._commands.pop(0)

    def _listen(self) -> list[CancelJob | QueryReply]:
        """The commands that concern the running job."""
        self._receive()
        messages = [command for command in self._commands if not isinstance(command, WorkerJob)]
        self._commands = [command for command in self._commands if isinstance(command, WorkerJob)]
        return messages

    def _receive(self) -> None:
        try:
            data = self._connection.recv(1 << 20)
        except ConnectionError:
            raise Disconnected from None
        if not data:
            raise Disconnected
        self._commands += [decode_command(body) for body in self._frames.feed(data)]

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
        print(f"kernels are not stored for later compiles: {error}", file=sys.stderr, flush=True)
        return None


def main() -> None:
    """Entry point. Exits 0 when the actor goes away."""
    parser = argparse.ArgumentParser(prog="torchrelay.workers.fork_server.server")
    parser.add_argument("--engine", required=True)
    for name in ("--socket", "--listener", "--owner"):
        parser.add_argument(name, type=int)
    arguments = parser.parse_args()
    # Ctrl-C is for the supervisor; this ends when the actor does
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    become_subreaper()
    engine = _imported(arguments.engine)
    connection: socket.socket | None
    if arguments.listener is None:
        connection = socket.socket(fileno=arguments.socket)
        slot_order = prestart.received_order(connection)
    else:
        with socket.socket(fileno=arguments.listener) as listener:
            connection, slot_order = prestart.await_adoption(listener, arguments.owner)
    if connection is not None and slot_order is not None:
        with connection:
            _serve(connection, slot_order, engine)


def _imported(engine: str) -> ModuleType:
    gc.disable()  # almost nothing that is loaded is garbage, and collecting took a sixth of the start
    module = importlib.import_module(engine)
    module.preload()
    return module


def _serve(connection: socket.socket, slot_order: SlotOrder, engine: ModuleType) -> None:
    """Leaves no process and no folder behind."""
    try:
        ForkServer(connection, slot_order, engine).serve()
    finally:
        kill_below(os.getpid())
        shutil.rmtree(slot_order.jobs_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
