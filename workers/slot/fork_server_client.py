"""Stage 6: the client of a fork server, in a slot's actor. It starts the server and sends it one job at a time.

Requests are bytes and answers are encoded messages (workers/messages.py without the length), so that no exception type
crosses Ray. torch is imported in the fork server, never here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from ...compiler.errors import CompileFailed, CompileKilled, CompileTimeout, RelayError
from ..fork_server import prestart
from ..fork_server.environment import server_environment, slot_mark
from ..messages import (
    HEAD_BYTES,
    Answer,
    BadFrame,
    CancelJob,
    Command,
    ForkServerReady,
    JobDone,
    JobFailed,
    QueryReply,
    StageEvent,
    WorkerJob,
    check_length,
    decode_answer,
    encode,
    frame_length,
)
from ..process import private_folders
from ..process.process_tree import ForeignProcess, become_subreaper, kill_below
from ..sandbox import isolation
from ..settings import SlotOrder, SlotSettings

_WARM_SECONDS = 300.0
"""Importing torch from a cold, shared disk takes minutes at worst."""
_GRACE_SECONDS = 15.0
"""How long past a job's deadline the fork server may take to answer before it counts as hung."""


class ForkServerLost(Exception):
    """The fork server has died, hung or written garbage."""


class _ForkServerProcess:
    def __init__(
        self,
        settings: SlotSettings,
        process: subprocess.Popen[bytes] | ForeignProcess,
        jobs_dir: Path,
        lock: int,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._settings = settings
        self._process = process
        self._jobs_dir = jobs_dir
        self._lock = lock
        self._reader, self._writer = streams
        self.ready: ForkServerReady | None = None
        self.gone = asyncio.Event()

    @classmethod
    async def start(cls, settings: SlotSettings) -> _ForkServerProcess:
        """Adopt the early server, or start one, and send its order; `receive` gives its greeting. Raises OSError."""
        jobs_dir, lock = private_folders.make(settings.jobs_root)
        process: subprocess.Popen[bytes] | ForeignProcess
        try:
            if settings.early_server is not None:
                process, connection = prestart.adopt(settings.early_server)
            else:
                process, connection = _start_process(settings, jobs_dir)
            prestart.send_order(connection, _order(settings, jobs_dir), lock)
            connection.setblocking(False)
            streams = await asyncio.open_connection(sock=connection)
        except OSError:
            shutil.rmtree(jobs_dir, ignore_errors=True)
            os.close(lock)
            raise
        return cls(settings, process, jobs_dir, lock, streams)

    async def send(self, command: Command) -> None:
        self._writer.write(encode(command))
        try:
            await self._writer.drain()
        except ConnectionError:
            raise self._lost() from None

    async def receive(self) -> Answer:
        try:
            length = frame_length(await self._reader.readexactly(4))
            head = await self._reader.readexactly(min(length, HEAD_BYTES))
            check_length(length, head, Answer)
            return decode_answer(head + await self._reader.readexactly(length - len(head)))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise self._lost() from None
        except BadFrame as error:
            raise ForkServerLost(f"the fork server wrote garbage ({error})") from None

    def _lost(self) -> ForkServerLost:
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return ForkServerLost("the fork server closed its socket")
        return ForkServerLost(f"the fork server ended with status {code}")

    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Kill the server and its processes: once one that this process started is dead, they are its children."""
        self._writer.close()
        if self.alive():
            self._process.kill()
        self._process.wait()
        if isinstance(self._process, ForeignProcess):  # its orphans may be anybody's children
            assert self._settings.early_server is not None
            kill_below(0, mark=slot_mark(prestart.mark_of(self._settings.early_server.socket)))
        else:
            kill_below(os.getpid(), mark=slot_mark(self._settings.worker))
        shutil.rmtree(self._jobs_dir, ignore_errors=True)
        os.close(self._lock)
        self.gone.set()


def _start_process(settings: SlotSettings, jobs_dir: Path) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A new server, and the connection to it. Raises OSError."""
    gpu = settings.gpu if settings.kind == "cuda" else None
    path = prestart.python_path() if settings.python is None else str(_package_folder(jobs_dir))
    environment = server_environment(os.environ, path, settings.worker, gpu)
    if settings.python is not None:
        environment.pop("VIRTUAL_ENV", None)  # it names the actor's environment
    python = settings.python or sys.executable
    here, there = socket.socketpair()
    with there:
        return prestart.start(settings.engine, environment, python=python, socket=there.fileno()), here


def _order(settings: SlotSettings, jobs_dir: Path) -> SlotOrder:
    """The same for a server that is started and for one that is adopted."""
    shared = private_folders.shared(settings.shared_dir)
    return SlotOrder(settings, str(jobs_dir), None if shared is None else str(shared))


def _package_folder(jobs_dir: Path) -> Path:
    """A folder from which another Python imports this very package, and nothing else of the actor's environment: the
    service and all of its workers run the same code."""
    folder = jobs_dir / "package"
    folder.mkdir()
    (folder / "torchrelay").symlink_to(Path(__file__).resolve().parents[2])
    return folder


class ForkServerClient:
    """One job at a time, each in a fresh child of a warm fork server."""

    def __init__(self, settings: SlotSettings) -> None:
        self._settings = settings
        self._server: _ForkServerProcess | None = None
        self._starting = asyncio.Lock()
        self._running: str | None = None
        self._watching: asyncio.Task[None] | None = None
        self._cancelled: dict[str, asyncio.Event] = {}
        """By job that waits for the server to start; set: the job was cancelled."""

    async def start(self) -> bytes:
        """Start a fork server if there is none; return its ForkServerReady, or a JobFailed, encoded."""
        async with self._starting:
            if self._server is None:
                server, answer = await self._started()
                if server is None or not isinstance(answer, ForkServerReady):
                    return msgspec.msgpack.encode(answer)
                layers = isolation.describe(answer.isolation)
                # Ray shows it in the service's log
                print(
                    f"worker {self._settings.worker} isolates its jobs by: {layers}",
                    file=sys.stderr,
                    flush=True,
                )
                server.ready = answer
                self._server = server
                self._watching = asyncio.create_task(self._watch(server))
            return msgspec.msgpack.encode(self._server.ready)

    async def _started(self) -> tuple[_ForkServerProcess | None, Answer]:
        """A server and its greeting, or a JobFailed: the server that was started before this actor, or if that is of
        no use a new one."""
        become_subreaper()
        early, self._settings = self._settings, msgspec.structs.replace(self._settings, early_server=None)
        reason = ""
        for settings in ([early] if early.early_server is not None else []) + [self._settings]:
            server = None
            try:
                server = await _ForkServerProcess.start(settings)
                answer = await self._greeting(server)
                if settings is early and isinstance(answer, ForkServerReady):
                    prestart.share_limits(answer.pid)
                return server, answer
            except (OSError, ForkServerLost) as error:
                reason = str(error)
                if settings is early:
                    print(f"the early fork server is of no use: {reason}", file=sys.stderr, flush=True)
                if server is not None:
                    server.stop()
        return None, self._cannot_start(reason)

    @staticmethod
    async def _greeting(server: _ForkServerProcess) -> Answer:
        """Its ForkServerReady, or a JobFailed; then, or if this is cancelled, the server is stopped. Raises
        ForkServerLost."""
        try:
            async with asyncio.timeout(_WARM_SECONDS):
                answer = await server.receive()
        except TimeoutError:
            answer = JobFailed.of(CompileTimeout(f"the worker was not warm after {_WARM_SECONDS:.0f} s"))
        except asyncio.CancelledError:
            server.stop()
            raise
        if not isinstance(answer, ForkServerReady):
            server.stop()
        return answer

    def _cannot_start(self, reason: str) -> JobFailed:
        python, hint = self._settings.python, "See the worker's log"
        if python is None:
            return JobFailed.of(CompileFailed(f"the worker cannot start: {reason}", hint=hint))
        hint += f", and run `{python} -c 'import torch, msgspec, cryptography'` on its node"
        return JobFailed.of(CompileFailed(f"the worker cannot start with {python}: {reason}", hint=hint))

    async def _watch(self, server: _ForkServerProcess) -> None:
        """Notice the death of an idle server; a running job notices it by itself."""
        while server.alive():
            await asyncio.sleep(0.5)
        if self._server is server and self._running is None:
            self._drop(server)

    def _drop(self, server: _ForkServerProcess) -> None:
        if self._server is server:
            self._server = None
        if not server.gone.is_set():
            server.stop()

    async def lost(self) -> None:
        """Return once there is no fork server; `start` starts a new one."""
        if self._server is not None:
            await self._server.gone.wait()

    def busy(self) -> bool:
        return self._running is not None

    async def run(self, job_id: str, job: WorkerJob) -> AsyncIterator[bytes]:
        """Encoded StageEvents and JobQueries, then one encoded JobDone or JobFailed."""
        greeting = await self._started_for(job_id)  # at once, if the server is warm
        server = self._server
        if server is None or greeting is None:
            yield greeting or msgspec.msgpack.encode(
                JobFailed.of(CompileKilled(f"the {job.work} was cancelled"))
            )
            return
        if self._running is not None:
            error = CompileKilled(f"worker {self._settings.worker} runs another job", hint="Try again")
            yield msgspec.msgpack.encode(JobFailed.of(error))
            return
        self._running = job_id
        answered = False
        try:
            async for answer in self._exchange(server, job):
                if isinstance(answer, JobDone | JobFailed):
                    answered = True
                    self._running = (
                        None  # before the yield: the next job may come before the generator resumes
                    )
                yield msgspec.msgpack.encode(answer)
        except TimeoutError:
            self._drop(server)
            failure: RelayError = CompileTimeout(
                f"worker {self._settings.worker} did not answer at the job's deadline"
            )
        except ForkServerLost as lost:
            self._drop(server)
            failure = CompileKilled(f"worker {self._settings.worker} lost its job: {lost}", hint="Try again")
        except (GeneratorExit, asyncio.CancelledError):
            if not answered:
                self._running = None
                self._drop(server)  # its answer to this job must not reach the next one
            raise
        else:
            return
        self._running = None
        yield msgspec.msgpack.encode(JobFailed.of(failure))

    async def _started_for(self, job_id: str) -> bytes | None:
        """What `start` returns; None if the job is cancelled meanwhile: the server still starts, for the next."""
        starting = asyncio.ensure_future(self.start())
        self._cancelled[job_id] = asyncio.Event()
        cancelled = asyncio.ensure_future(self._cancelled[job_id].wait())
        try:
            await asyncio.wait({starting, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            return None if cancelled.done() else starting.result()
        finally:
            del self._cancelled[job_id]
            cancelled.cancel()

    @staticmethod
    async def _exchange(server: _ForkServerProcess, job: WorkerJob) -> AsyncIterator[Answer]:
        deadline = asyncio.get_running_loop().time() + job.seconds + _GRACE_SECONDS
        await server.send(job)
        answer: Answer = StageEvent("queued")
        while not isinstance(answer, JobDone | JobFailed):
            async with asyncio.timeout_at(deadline):
                answer = await server.receive()
            if isinstance(answer, ForkServerReady):
                raise ForkServerLost("the fork server answered a job with a second ForkServerReady")
            yield answer

    async def cancel(self, job_id: str) -> None:
        """Kill job `job_id` if it still runs; its `run` then ends with a JobFailed."""
        if job_id in self._cancelled:
            self._cancelled[job_id].set()
        if self._running == job_id and self._server is not None:
            await self._server.send(CancelJob())

    async def reply(self, job_id: str, question: int, answer: bytes) -> None:
        if self._running == job_id and self._server is not None:
            with contextlib.suppress(ForkServerLost):  # `run` reports it
                await self._server.send(QueryReply(question, answer))

    def close(self) -> None:
        """Stop the fork server and its job."""
        if self._server is not None:
            self._drop(self._server)
