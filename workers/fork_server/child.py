"""Stage 6: inside a job's process, just forked: shut it in, run the engine, write what comes of it to the pipe."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
import os
import resource
import signal
import stat
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import msgspec

from ...compiler.api import compiles
from ...compiler.errors import CompileFailed, CompileKilled, RelayError
from ...compiler.kernel_store.libraries import KernelExchange
from ...compiler.request import schema
from ..messages import Answer, JobDone, JobFailed, StageEvent, WorkerJob, encode
from ..process import process_tree
from ..sandbox.isolation import Sandbox
from ..settings import EqualLayers, JobLimits, SlotSettings
from .environment import job_environment
from .queries import QueryClient, query_limit

OFFERS = "kernels"
"""The folder, in a job's directory, for the libraries that it built."""

_DESCRIBE_SECONDS = 600.0

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of the worker, not of the graph: another worker, or this one later, may succeed."""


class ChildProcess(NamedTuple):
    """A process that was forked, as its parent sees it."""

    pid: int
    pipe: int
    """The reading end of its output."""
    replies: int
    """The writing end of the pipe from which it reads QueryReplies; does not block."""
    idle: frozenset[int]
    """Processes that only hold the child's namespaces: forks of the server that do nothing else."""

    def close(self) -> None:
        os.close(self.pipe)
        os.close(self.replies)


class ChildPipes(NamedTuple):
    """The child's own ends."""

    output: int
    replies: int


def fork(body: Callable[[ChildPipes], None], log: Path | None, sandbox: Sandbox) -> ChildProcess:
    """Run `body` in a child with a session of its own, inside `sandbox`.

    The child writes to `log` instead of the server's output, and ends without unwinding the server's stack.
    """
    server = os.getpid()
    reading, writing = os.pipe()
    replies_reading, replies_writing = os.pipe()
    pid_reading, pid_writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()

    def in_the_child() -> None:
        nonlocal pid_writing
        os.setsid()
        process_tree.die_with_parent(server)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with contextlib.suppress(
            OSError
        ):  # some sandboxes lack the file; the server's watch on memory remains
            Path("/proc/self/oom_score_adj").write_text("1000")
        if log is not None:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
        if sandbox.form != "namespaces":
            os.close(pid_writing)
            pid_writing = writing
        _close_all_but(writing, replies_reading, pid_writing)
        pipes = ChildPipes(writing, replies_reading)
        sandbox.run(functools.partial(body, pipes), inherited=pipes, pid_pipe=pid_writing)

    pid = process_tree.fork(in_the_child)
    for descriptor in (writing, replies_reading, pid_writing):
        os.close(descriptor)
    os.set_blocking(replies_writing, False)
    with os.fdopen(pid_reading, "rb") as stream:
        first = stream.read()
    return ChildProcess(pid, reading, replies_writing, frozenset({pid, int(first)}) if first else frozenset())


def _close_all_but(*descriptors: int) -> None:
    """Close what the server has open past standard error: its socket first of all."""
    begin = 3
    for descriptor in sorted(descriptors):
        os.closerange(begin, descriptor)
        begin = descriptor + 1
    os.closerange(begin, os.sysconf("SC_OPEN_MAX"))


def make_folders(work: Path) -> None:
    for name in ("home", "tmp", "inductor", "triton", "cuda", "compile", OFFERS):
        (work / name).mkdir()


def read_log(log: Path, most: int) -> str:
    """The last `most` bytes of a child's output. The child owns the file and may have replaced it by anything."""
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return ""
        stream.seek(max(0, status.st_size - most))
        return stream.read(most).decode(errors="replace")


def describe(
    engine: ModuleType, settings: SlotSettings, work: Path, environment: Mapping[str, str], pipes: ChildPipes
) -> None:
    """Write the engine's toolchain, its target, its other targets and the first tool that does not work as MessagePack,
    or a JobFailed."""
    try:
        _apply_limits(work, _DESCRIBE_SECONDS, settings.limits, environment)
        described = (
            *engine.describe(settings.kind),
            engine.others(settings.kind),
            engine.missing(settings.kind),
        )
        data = msgspec.msgpack.encode(described)
    except Exception as error:
        traceback.print_exc()
        data = msgspec.msgpack.encode(JobFailed.of(CompileFailed(_one_line(error))))
    _write(pipes.output, data)


def prepare(
    engine: ModuleType,
    *,
    target: schema.Target,
    work: Path,
    limits: JobLimits,
    environment: Mapping[str, str],
    shared: Path,
    pipes: ChildPipes,
) -> None:
    """Have the engine make what jobs for `target` share. Writes JobDone even if that fails: jobs do without it."""
    _apply_limits(work, _DESCRIBE_SECONDS, limits, environment)
    try:
        engine.prepare(target, shared)
    except Exception:
        traceback.print_exc()
    _write(pipes.output, encode(JobDone(b"")))


def do_job(
    engine: ModuleType,
    *,
    job: WorkerJob,
    worker: str,
    seconds: float,
    work: Path,
    limits: JobLimits,
    environment: Mapping[str, str],
    kernels: Path | None,
    equal_layers: EqualLayers,
    shared: Path | None,
    pipes: ChildPipes,
) -> None:
    """Apply the limits and run the engine; write StageEvents, JobQueries, then JobDone or JobFailed."""
    faulthandler.enable()  # where a compiler crashes is then in the job's output
    _apply_limits(work, seconds, limits, environment)
    lock = threading.Lock()

    def send(message: Answer) -> None:
        with lock:  # progress may come from any of the engine's threads
            _write(pipes.output, encode(message))

    def progress(stage: compiles.Stage, detail: str = "") -> None:
        send(StageEvent.of(stage, detail))

    answer: Answer
    if job.work == "search":
        do = functools.partial(engine.search, job.request)
    else:
        do = functools.partial(
            engine.compile_graph,
            job.request,
            key=job.key,
            equal_layers=equal_layers,
            memory=limits.memory_bytes,
        )
    try:
        result = do(
            worker=worker,
            workdir=work / "compile",
            limits=limits.request,
            progress=progress,
            kernels=None if kernels is None else KernelExchange(kernels, work / OFFERS),
            shared=shared,
            ask=QueryClient(send, pipes.replies, query_limit(job)),
        )
        answer = JobDone(result)
    except RelayError as error:
        traceback.print_exc()
        answer = JobFailed.of(error)
    except MemoryError:
        traceback.print_exc()
        answer = JobFailed.of(CompileKilled(f"the {job.work} ran out of memory"))
    except Exception as error:  # whatever the compiler raises is the answer to this request
        traceback.print_exc()
        no_room = isinstance(error, OSError) and error.errno in _NO_ROOM
        answer = JobFailed.of((CompileKilled if no_room else CompileFailed)(_one_line(error)))
    send(answer)


def _one_line(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:500].removesuffix(": ")


def _apply_limits(work: Path, seconds: float, limits: JobLimits, environment: Mapping[str, str]) -> None:
    processor_seconds = int(seconds * (os.cpu_count() or 1)) + 60
    for what, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_CPU, processor_seconds),
        (resource.RLIMIT_NOFILE, limits.open_files),
    ):
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))
    private = job_environment(environment, work)
    for name in set(os.environ) - set(private):
        del os.environ[name]
    os.environ.update(private)
    tempfile.tempdir = None  # the server's choice, cached by the module
    os.chdir(work / "compile")


def _write(pipe: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view) :]
