"""Stage 6: one job seen from the fork server: fork a child, watch it, and leave nothing of it behind.

In: a WorkerJob and the engine. Out: StageEvents and JobQueries through a callback, then JobDone or JobFailed.
Whatever ends the job (its own answer, deadline, memory, a crash, garbage, a cancel), every process below the server is
dead and the job's directory is gone when `run` returns.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from msgspec import Struct

from ...compiler.errors import CompileKilled, CompileTimeout, RelayError
from ...compiler.kernel_store.libraries import KernelStore, NamespaceKernels
from ..messages import (
    BadFrame,
    CancelJob,
    EventRate,
    FrameDecoder,
    FromChild,
    JobDone,
    JobFailed,
    JobQuery,
    QueryReply,
    StageEvent,
    WorkerJob,
    decode_from_child,
)
from ..process.private_folders import disk_usage
from ..process.process_tree import descendants, kill_below, reap, usage
from ..sandbox.isolation import Sandbox
from ..sandbox.visible_paths import VisiblePaths
from ..settings import Form, SlotSettings
from . import child
from .queries import QueryRelay, query_limit

_USAGE_SECONDS = 0.25
_EXITING_SECONDS = 0.005
"""Between two checks whether a child that has closed its pipe has exited."""
_EXIT_SECONDS = 5.0
"""How long a child may take to exit once it has answered."""
_LOG_TAIL = 4000


class JobCancelled(Exception):
    """The job's owner cancelled it."""


class JobContext(Struct, frozen=True, kw_only=True):
    """What all jobs of a fork server share."""

    engine: ModuleType
    settings: SlotSettings
    jobs_dir: Path
    form: Form
    view: VisiblePaths
    kernels: KernelStore | None
    shared: Path | None
    """The folder of what the worker's own code makes for all jobs, which only read it."""
    environment: Mapping[str, str]
    prepared: set[str]
    """Names of the files in `shared`."""


class JobOwner(Struct, frozen=True):
    """Receives a job's messages. `listen` reads the commands once the file descriptor `control` is readable."""

    send: Callable[[StageEvent | JobQuery], None]
    control: int
    listen: Callable[[], list[CancelJob | QueryReply]]


def run(job: WorkerJob, context: JobContext, owner: JobOwner) -> JobDone | JobFailed:
    """Run `job` to its end in the sandbox. Raises JobCancelled and what `listen` raises, after the job was killed."""
    began = time.monotonic()
    stored = None if context.kernels is None else context.kernels.of(job.namespace)
    # A job that runs its caller's source can build anything under any name: its libraries are not shared.
    trusted = None if job.holds_source else stored
    kernels = None if stored is None else stored.folder
    with job_folder(context) as work:
        log = work / "log"
        try:
            _prepare(job, context, owner)
            left = job.seconds - (time.monotonic() - began)
            body = functools.partial(
                child.do_job,
                context.engine,
                job=job,
                worker=context.settings.worker,
                seconds=left,
                work=work,
                limits=context.settings.limits,
                environment=context.environment,
                kernels=kernels,
                equal_layers=context.settings.equal_layers,
                shared=context.shared,
            )
            shown = [folder for folder in (kernels, context.shared) if folder is not None]
            sandbox = Sandbox(context.form, context.view, work, shown)
            publish_kernels = functools.partial(_publish_kernels, trusted, work / child.OFFERS)
            with started_child(lambda pipes: body(pipes=pipes), log, sandbox) as started:
                monitor = _JobMonitor(job, work, left, started, context.settings, owner, publish_kernels)
                answer = monitor.run()
                publish_kernels()
        except RelayError as error:
            answer = JobFailed.of(error)
        if isinstance(answer, JobFailed):
            _copy_log(job, answer, log)
        return answer


def _prepare(job: WorkerJob, context: JobContext, owner: JobOwner) -> None:
    """Make what jobs for this target share, in a child that runs only the worker's own code. It is not in the sandbox,
    so it gets nothing of the request."""
    target = job.target
    if context.shared is None:
        return
    name = context.engine.preparation(target)
    if not name or name in context.prepared:
        return
    owner.send(StageEvent("queued", "preparing C++ headers"))
    with job_folder(context) as work:
        body = functools.partial(
            child.prepare,
            context.engine,
            target=target,
            work=work,
            limits=context.settings.limits,
            environment=context.environment,
            shared=context.shared,
        )
        sandbox = Sandbox("none", context.view, work, [])
        with started_child(lambda pipes: body(pipes=pipes), work / "log", sandbox) as started:
            _JobMonitor(job, work, job.seconds, started, context.settings, owner, lambda: None).run()
    context.prepared.add(name)


@contextlib.contextmanager
def started_child(
    body: Callable[[child.ChildPipes], None], log: Path, sandbox: Sandbox
) -> Iterator[child.ChildProcess]:
    """A child that runs `body`; on exit all its processes are killed."""
    started = child.fork(body, log, sandbox)
    try:
        yield started
    finally:
        started.close()
        kill_below(os.getpid())
        reap()


@contextlib.contextmanager
def job_folder(context: JobContext) -> Iterator[Path]:
    """A child's private folder; it is removed on exit, whatever the child did to it."""
    work = Path(tempfile.mkdtemp(prefix="job-", dir=context.jobs_dir))
    try:
        child.make_folders(work)
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if work.exists():  # a folder that its own user may not enter
            for folder, names, _ in os.walk(work):
                for name in names:
                    _open_up(Path(folder, name))
            shutil.rmtree(work, ignore_errors=True)


def _open_up(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if not folder.is_symlink():
            folder.chmod(0o700)


def _publish_kernels(kernels: NamespaceKernels | None, offers: Path) -> None:
    """Share with other jobs what this one has built so far. If the store fails, later compiles take longer."""
    if kernels is not None:
        try:
            kernels.collect(offers)
        except OSError as error:
            print(f"kernels were not stored: {error}", file=sys.stderr, flush=True)


def _copy_log(job: WorkerJob, answer: JobFailed, log: Path) -> None:
    """Copy the end of the job's output to the server's log; the client gets only the line in `answer`."""
    text = f"failed: {answer.code}: {answer.message}\n{child.read_log(log, _LOG_TAIL)}"
    # Each line names the job and its trace, and none can control a terminal or look like another's.
    lines = (line if line.isprintable() else repr(line)[1:-1] for line in text.splitlines())
    head = f"job {job.key[:16]} trace_id={job.trace_id}" if job.trace_id else f"job {job.key[:16]}"
    print("\n".join(f"{head} | {line}" for line in lines), file=sys.stderr, flush=True)


class _JobMonitor:
    """Monitors a child's pipe, exit, memory, processes and deadline, and its owner's commands."""

    def __init__(
        self,
        job: WorkerJob,
        folder: Path,
        seconds: float,
        started: child.ChildProcess,
        settings: SlotSettings,
        owner: JobOwner,
        publish_kernels: Callable[[], None],
    ) -> None:
        self._job = job
        self._folder = folder
        self._publish_kernels = publish_kernels
        self._pid = started.pid
        self._pipe = started.pipe
        self._idle = started.idle
        self._limits = settings.limits
        self._replies = started.replies
        self._relay = QueryRelay(started.replies, query_limit(job))
        self._owner = owner
        self._deadline = time.monotonic() + seconds
        self._frames = FrameDecoder(FromChild)
        self._events = EventRate()
        self._answer: JobDone | JobFailed | None = None

    def run(self) -> JobDone | JobFailed:
        poll = select.poll()
        for descriptor in (self._pipe, self._owner.control):
            poll.register(descriptor, select.POLLIN)
        pause = _USAGE_SECONDS
        check_at = time.monotonic()
        status: int | None = None
        while True:
            # before the pipe is read: all that the child wrote before its exit is then in the pipe
            status = self._exit_status() if status is None else status
            ready = self._ready(poll, pause if status is None else 0.0)
            if self._owner.control in ready:
                self._handle_commands()
            if self._replies in ready:
                self._relay.flush()
            if self._pipe in ready and not self._read():
                poll.unregister(self._pipe)
                pause = _EXITING_SECONDS
            if self._pipe not in ready and status is not None:
                return self._answer or _died(self._job, status)
            now = time.monotonic()
            if now >= self._deadline:
                return self._answer or self._overdue()
            if now >= check_at and self._answer is None:
                self._check_usage()
                # the check takes less than a twentieth of a processor, however many processes the machine has
                check_at = now + max(_USAGE_SECONDS, 20 * (time.monotonic() - now))

    def _ready(self, poll: select.poll, seconds: float) -> set[int]:
        """The descriptors that are ready; waits at most `seconds`."""
        pending = self._relay.pending
        if pending:
            poll.register(self._replies, select.POLLOUT)
        ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
        if pending:  # it would always be ready once the child has closed its end
            poll.unregister(self._replies)
        return ready

    def _handle_commands(self) -> None:
        for command in self._owner.listen():
            if isinstance(command, CancelJob):
                raise JobCancelled
            self._relay.answer(command)

    def _read(self) -> bool:
        """Read and handle the child's messages; False once it has closed the pipe."""
        data = os.read(self._pipe, 1 << 20)
        if not data:
            return False
        try:
            for body in self._frames.feed(data):
                message = decode_from_child(body)
                if self._answer is not None:
                    raise BadFrame("a message follows the answer")
                if isinstance(message, JobDone | JobFailed):
                    self._answer = message
                    self._deadline = min(self._deadline, time.monotonic() + _EXIT_SECONDS)
                    continue
                if isinstance(message, JobQuery):
                    self._relay.ask(message)
                elif not self._events.allows():
                    continue
                self._owner.send(message)
        except BadFrame as error:
            raise CompileKilled(
                f"the {self._job.work} process wrote an invalid message and was killed ({error})",
                hint="Compile this graph locally, and report it",
            ) from None
        return True

    def _check_usage(self) -> None:
        self._publish_kernels()
        pids = [pid for pid in descendants(os.getpid()) if pid not in self._idle]
        held = usage(pids)
        if held.memory > self._limits.memory_bytes:
            raise CompileKilled(
                f"the {self._job.work} held {held.memory >> 20} MiB of memory, over its limit of "
                f"{self._limits.memory_bytes >> 20} MiB, and was killed"
            )
        if held.processes > self._limits.processes:
            raise CompileKilled(
                f"the {self._job.work} had {held.processes} processes, over its limit of {self._limits.processes}, "
                "and was killed",
                hint="Compile this graph locally",
            )

        self._check_disk()

    def _check_disk(self) -> None:
        most = self._limits.disk_bytes
        try:
            held = disk_usage(self._folder, most)
        except PermissionError:
            raise CompileKilled(
                f"the {self._job.work} made a folder that cannot be measured, and was killed"
            ) from None
        if held > most:
            raise CompileKilled(
                f"the {self._job.work} wrote more than {most >> 20} MiB, its limit, and was killed",
                hint="Compile this graph locally",
            )

    def _exit_status(self) -> int | None:
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def _overdue(self) -> JobFailed:
        raise CompileTimeout(
            f"the {self._job.work} was still running after {self._job.seconds:.0f} s, its deadline, and was killed"
        )


def _died(job: WorkerJob, code: int) -> JobFailed:
    if code >= 0:
        raise CompileKilled(f"the {job.work} process ended with exit status {code} and no answer")
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    crashed = name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")
    hint = "Compile locally, and report it: the worker's log says where it crashed" if crashed else None
    raise CompileKilled(f"the {job.work} process was ended by {name}", hint=hint)
