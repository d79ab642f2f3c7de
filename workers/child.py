"""Inside a job's process, just forked: shut it in, run the engine, write what comes of it to the pipe."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import msgspec

from ..compiler import wire
from ..compiler.errors import CompileFailed, CompileKilled, RelayError
from ..compiler.kernel_store import Exchange
from .environment import job_environment
from .messages import Answer, Done, Event, Failed, encode
from .processes import die_with_parent
from .settings import JobLimits

OFFERS = "kernels"
"""The folder of a job's directory in which it lays the libraries that it built."""

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The worker's trouble and not the graph's: another worker, or this one later, may well succeed."""


def fork(body: Callable[[int], None], log: Path | None) -> tuple[int, int]:
    """Run `body(pipe)` in a child with a session of its own; return its pid and the pipe's reading end.

    The child writes to `log` instead of the server's output, and ends without unwinding the server's stack.
    """
    server = os.getpid()
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    status = 70
    try:
        os.setsid()
        die_with_parent(server)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if log is not None:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
        _close_all_but(writing)
        body(writing)
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        _end(status)


def _end(status: int) -> NoReturn:
    os._exit(status)


def _close_all_but(kept: int) -> None:
    """Close what the server has open past standard error: its socket first of all."""
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def describe(engine: ModuleType, kind: str, pipe: int) -> None:
    """Write the engine's (toolchain, target) as MessagePack, or Failed."""
    try:
        data = msgspec.msgpack.encode(engine.describe(kind))
    except Exception as error:
        traceback.print_exc()
        data = msgspec.msgpack.encode(Failed.of(CompileFailed(f"{type(error).__name__}: {error}")))
    _write(pipe, data)


def compile_job(
    engine: ModuleType,
    *,
    request: bytes,
    key: str,
    worker: str,
    seconds: float,
    work: Path,
    limits: JobLimits,
    environment: Mapping[str, str],
    kernels: Path | None,
    pipe: int,
) -> None:
    """Shut this process in and run the engine in it; Events, then Done or Failed, go to `pipe`."""
    _shut_in(work, seconds, limits, environment)
    lock = threading.Lock()

    def send(message: Answer) -> None:
        with lock:  # progress may come from any of the engine's threads
            _write(pipe, encode(message))

    def progress(stage: wire.Stage, detail: str = "") -> None:
        send(Event(stage, detail))

    answer: Answer
    try:
        artifact = engine.compile_graph(
            request,
            key=key,
            worker=worker,
            workdir=work / "compile",
            limits=limits.request,
            progress=progress,
            kernels=None if kernels is None else Exchange(kernels, work / OFFERS),
        )
        answer = Done(artifact)
    except RelayError as error:
        traceback.print_exc()
        answer = Failed.of(error)
    except MemoryError:
        traceback.print_exc()
        answer = Failed.of(CompileKilled("the compile ran out of memory"))
    except Exception as error:  # whatever the compiler raises is the answer to this request
        traceback.print_exc()
        no_room = isinstance(error, OSError) and error.errno in _NO_ROOM
        answer = Failed.of((CompileKilled if no_room else CompileFailed)(_one_line(error)))
    send(answer)


def _one_line(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:500].removesuffix(": ")


def _shut_in(work: Path, seconds: float, limits: JobLimits, environment: Mapping[str, str]) -> None:
    with contextlib.suppress(OSError):  # some sandboxes lack the file; the server's watch on memory remains
        Path("/proc/self/oom_score_adj").write_text("1000")
    processor_seconds = int(seconds * (os.cpu_count() or 1)) + 60
    for what, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_CPU, processor_seconds),
    ):
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))
    for name in ("home", "tmp", "inductor", "triton", "cuda", "compile", OFFERS):
        (work / name).mkdir()
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
