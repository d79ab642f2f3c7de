"""One job seen from the fork server: fork a child, watch it, and leave nothing of it behind.

In: a Job and the engine. Out: Events through a callback, then one Done or Failed. Whatever ends the job (its
own answer, deadline, memory, a crash, garbage, a cancel), every process below the server is dead and the
job's directory is gone when `run` returns.
"""

from __future__ import annotations

import functools
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from ..compiler.errors import CompileKilled, CompileTimeout, RelayError
from ..compiler.kernel_store import KernelStore, NamespaceStore
from . import child
from .messages import BadFrame, Done, Event, Failed, Frames, Job, decode_from_child
from .processes import descendants, kill_below, reap, usage
from .settings import SlotSettings

_LOOK_SECONDS = 0.25
_EXITING_SECONDS = 0.005
"""Between two looks whether a child that has closed its pipe is gone."""
_EXIT_SECONDS = 5.0
"""How long a child may take to exit once it has answered."""
_LOG_TAIL = 4000


class Cancelled(Exception):
    """The job's owner does not want it any more."""


def run(
    job: Job,
    *,
    engine: ModuleType,
    settings: SlotSettings,
    jobs_dir: Path,
    kernels: KernelStore | None,
    environment: Mapping[str, str],
    on_event: Callable[[Event], None],
    control: int,
    cancelled: Callable[[], bool],
) -> Done | Failed:
    """Run `job` to its end. When the file descriptor `control` is readable, `cancelled` says whether to stop.

    Raises Cancelled, and whatever `cancelled` raises, after the kill as well.
    """
    kept = None if kernels is None else kernels.of(job.namespace)
    work = Path(tempfile.mkdtemp(prefix="job-", dir=jobs_dir))
    log = work / "log"
    try:
        pid, pipe = child.fork(
            functools.partial(_in_child, job, engine, settings, work, kept, environment),
            log,
        )
        try:
            take_in = functools.partial(_take_in, kept, work / child.OFFERS)
            answer = _Watch(job, pid, pipe, settings, on_event, control, cancelled, take_in).to_the_end()
            take_in()
        except RelayError as error:
            answer = Failed.of(error)
        finally:
            os.close(pipe)
            kill_below(os.getpid())
            reap()
        if isinstance(answer, Failed):
            _copy_log(job, answer, log)
        return answer
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _in_child(
    job: Job,
    engine: ModuleType,
    settings: SlotSettings,
    work: Path,
    kernels: NamespaceStore | None,
    environment: Mapping[str, str],
    pipe: int,
) -> None:
    child.compile_job(
        engine,
        request=job.request,
        key=job.key,
        worker=settings.worker,
        seconds=job.seconds,
        work=work,
        limits=settings.limits,
        environment=environment,
        kernels=None if kernels is None else kernels.folder,
        pipe=pipe,
    )


def _take_in(kernels: NamespaceStore | None, offers: Path) -> None:
    """Give other jobs what this one has built so far; a store that cannot take it costs later compiles time."""
    if kernels is not None and offers.is_dir():
        try:
            kernels.take_in(offers)
        except OSError as error:
            print(f"kernels were not kept: {error}", file=sys.stderr, flush=True)


def _copy_log(job: Job, answer: Failed, log: Path) -> None:
    """The end of what the job printed, to the server's own log: the client gets the one line in `answer`."""
    text = log.read_bytes()[-_LOG_TAIL:].decode(errors="replace") if log.exists() else ""
    print(f"job {job.key[:16]} failed: {answer.code}: {answer.message}\n{text}", file=sys.stderr, flush=True)


class _Watch:
    """The loop over a child's pipe, its exit, its use of the machine, its deadline and its owner's wishes."""

    def __init__(
        self,
        job: Job,
        pid: int,
        pipe: int,
        settings: SlotSettings,
        on_event: Callable[[Event], None],
        control: int,
        cancelled: Callable[[], bool],
        take_in: Callable[[], None],
    ) -> None:
        self._job = job
        self._take_in = take_in
        self._pid = pid
        self._pipe = pipe
        self._limits = settings.limits
        self._on_event = on_event
        self._control = control
        self._cancelled = cancelled
        self._deadline = time.monotonic() + job.seconds
        self._frames = Frames()
        self._answer: Done | Failed | None = None

    def to_the_end(self) -> Done | Failed:
        poll = select.poll()
        for descriptor in (self._pipe, self._control):
            poll.register(descriptor, select.POLLIN)
        pause = _LOOK_SECONDS
        look_at = time.monotonic()
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(pause * 1000)}
            if self._control in ready and self._cancelled():
                raise Cancelled
            if self._pipe in ready and not self._read():
                poll.unregister(self._pipe)
                pause = _EXITING_SECONDS
            # what it wrote before it ended is still in the pipe: read first, then ask
            if self._pipe not in ready and (status := self._exit_status()) is not None:
                return self._answer or _died(status)
            now = time.monotonic()
            if now >= self._deadline:
                return self._answer or self._overdue()
            if now >= look_at and self._answer is None:
                self._look()
                # the look itself stays below a twentieth of a processor on a machine with many processes
                look_at = now + max(_LOOK_SECONDS, 20 * (time.monotonic() - now))

    def _read(self) -> bool:
        """Take in what the child wrote; False once it has closed the pipe."""
        data = os.read(self._pipe, 1 << 20)
        if not data:
            return False
        try:
            for body in self._frames.feed(data):
                message = decode_from_child(body)
                if self._answer is not None:
                    raise BadFrame("a message follows the answer")
                if isinstance(message, Event):
                    self._on_event(message)
                else:
                    self._answer = message
                    self._deadline = min(self._deadline, time.monotonic() + _EXIT_SECONDS)
        except BadFrame as error:
            raise CompileKilled(
                f"the compile process wrote something that is no message and was killed ({error})",
                hint="Compile this graph locally, and report it",
            ) from None
        return True

    def _look(self) -> None:
        self._take_in()
        pids = descendants(os.getpid())
        held = usage(pids)
        if held.memory > self._limits.memory_bytes:
            raise CompileKilled(
                f"the compile held {held.memory >> 20} MiB of memory, over its limit of "
                f"{self._limits.memory_bytes >> 20} MiB, and was killed"
            )
        if held.processes > self._limits.processes:
            raise CompileKilled(
                f"the compile had {held.processes} processes, over its limit of {self._limits.processes}, "
                "and was killed",
                hint="Compile this graph locally",
            )

    def _exit_status(self) -> int | None:
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def _overdue(self) -> Failed:
        raise CompileTimeout(
            f"the compile was still running after {self._job.seconds:.0f} s, its deadline, and was killed"
        )


def _died(code: int) -> Failed:
    if code >= 0:
        raise CompileKilled(f"the compile process ended with exit status {code} and no answer")
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    raise CompileKilled(f"the compile process was ended by {name}")
