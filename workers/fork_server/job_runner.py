"""One job seen from the fork server: fork a child, watch it, and leave nothing of it behind.

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
from ...compiler.request import codec
from ..messages import (
    BadFrame,
    CancelJob,
    FrameDecoder,
    JobDone,
    JobFailed,
    JobQuery,
    QueryReply,
    StageEvent,
    WorkerJob,
    decode_from_child,
)
from ..process.process_tree import descendants, kill_below, reap, usage
from ..sandbox.isolation import Sandbox
from ..sandbox.visible_paths import VisiblePaths
from ..settings import Form, SlotSettings
from . import child
from .queries import QueryRelay, most_questions

_LOOK_SECONDS = 0.25
_EXITING_SECONDS = 0.005
"""Between two looks whether a child that has closed its pipe is gone."""
_EXIT_SECONDS = 5.0
"""How long a child may take to exit once it has answered."""
_LOG_TAIL = 4000


class JobCancelled(Exception):
    """The job's owner does not want it any more."""


class JobContext(Struct, frozen=True, kw_only=True):
    """What all jobs of a fork server have in common."""

    engine: ModuleType
    settings: SlotSettings
    jobs_dir: Path
    form: Form
    view: VisiblePaths
    kernels: KernelStore | None
    shared: Path | None
    """What the worker's own code prepares for all jobs; they only read it."""
    environment: Mapping[str, str]
    prepared: set[str]
    """Names of what is in `shared`."""


class JobOwner(Struct, frozen=True):
    """Who wants a job done. When the file descriptor `control` is readable, `listen` gives what has come by it."""

    tell: Callable[[StageEvent | JobQuery], None]
    control: int
    listen: Callable[[], list[CancelJob | QueryReply]]


def run(job: WorkerJob, around: JobContext, owner: JobOwner) -> JobDone | JobFailed:
    """Run `job` to its end, shut in. Raises Cancelled, and whatever `listen` raises, after the kill as well."""
    began = time.monotonic()
    kept = None if around.kernels is None else around.kernels.of(job.namespace)
    # What a job built that runs its caller's source is not what its name says: nobody else gets it.
    trusted = None if codec.holds_source(job.request) else kept
    with _folder(around) as work:
        log = work / "log"
        try:
            _prepare(job, around, owner)
            left = job.seconds - (time.monotonic() - began)
            body = functools.partial(
                child.do_job,
                around.engine,
                job=job,
                worker=around.settings.worker,
                seconds=left,
                work=work,
                limits=around.settings.limits,
                environment=around.environment,
                kernels=None if kept is None else kept.folder,
                shared=around.shared,
            )
            shown = [folder for folder in (kept and kept.folder, around.shared) if folder is not None]
            enclosure = Sandbox(around.form, around.view, work, shown)
            take_in = functools.partial(_take_in, trusted, work / child.OFFERS)
            with _started(lambda pipes: body(pipes=pipes), log, enclosure) as started:
                watch = _JobMonitor(job, left, started, around.settings, owner, take_in)
                answer = watch.to_the_end()
                take_in()
        except RelayError as error:
            answer = JobFailed.of(error)
        if isinstance(answer, JobFailed):
            _copy_log(job, answer, log)
        return answer


def _prepare(job: WorkerJob, around: JobContext, owner: JobOwner) -> None:
    """Have what jobs like this one share, made in a child that runs nothing but the worker's own code."""
    name = around.engine.preparation(job.request)
    if not name or around.shared is None or name in around.prepared:
        return
    owner.tell(StageEvent("queued", "preparing C++ headers"))
    with _folder(around) as work:
        body = functools.partial(
            child.prepare,
            around.engine,
            request=job.request,
            work=work,
            limits=around.settings.limits,
            environment=around.environment,
            shared=around.shared,
        )
        enclosure = Sandbox("none", around.view, work, [])
        with _started(lambda pipes: body(pipes=pipes), work / "log", enclosure) as started:
            _JobMonitor(job, job.seconds, started, around.settings, owner, lambda: None).to_the_end()
    around.prepared.add(name)


@contextlib.contextmanager
def _started(
    body: Callable[[child.ChildPipes], None], log: Path, enclosure: Sandbox
) -> Iterator[child.ChildProcess]:
    """A child that runs `body`; nothing of it is left afterwards."""
    started = child.fork(body, log, enclosure)
    try:
        yield started
    finally:
        started.close()
        kill_below(os.getpid())
        reap()


@contextlib.contextmanager
def _folder(around: JobContext) -> Iterator[Path]:
    """A folder of one child's own, laid out; gone afterwards, whatever the child did to it."""
    work = Path(tempfile.mkdtemp(prefix="job-", dir=around.jobs_dir))
    try:
        child.lay_out(work)
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


def _take_in(kernels: NamespaceKernels | None, offers: Path) -> None:
    """Give other jobs what this one has built so far; a store that cannot take it costs later compiles time."""
    if kernels is not None:
        try:
            kernels.take_in(offers)
        except OSError as error:
            print(f"kernels were not kept: {error}", file=sys.stderr, flush=True)


def _copy_log(job: WorkerJob, answer: JobFailed, log: Path) -> None:
    """The end of what the job printed, to the server's own log: the client gets the one line in `answer`."""
    text = child.read_log(log, _LOG_TAIL)
    print(f"job {job.key[:16]} failed: {answer.code}: {answer.message}\n{text}", file=sys.stderr, flush=True)


class _JobMonitor:
    """The loop over a child's pipe, its exit, its use of the machine, its deadline and its owner's wishes."""

    def __init__(
        self,
        job: WorkerJob,
        seconds: float,
        started: child.ChildProcess,
        settings: SlotSettings,
        owner: JobOwner,
        take_in: Callable[[], None],
    ) -> None:
        self._job = job
        self._take_in = take_in
        self._pid = started.pid
        self._pipe = started.pipe
        self._idle = started.idle
        self._limits = settings.limits
        self._replies = started.replies
        self._relay = QueryRelay(started.replies, most_questions(job))
        self._owner = owner
        self._deadline = time.monotonic() + seconds
        self._frames = FrameDecoder()
        self._answer: JobDone | JobFailed | None = None

    def to_the_end(self) -> JobDone | JobFailed:
        poll = select.poll()
        for descriptor in (self._pipe, self._owner.control):
            poll.register(descriptor, select.POLLIN)
        pause = _LOOK_SECONDS
        look_at = time.monotonic()
        status: int | None = None
        while True:
            # asked before the pipe is looked at: what it wrote before it ended is then in there
            status = self._exit_status() if status is None else status
            ready = self._ready(poll, pause if status is None else 0.0)
            if self._owner.control in ready:
                self._listen()
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
            if now >= look_at and self._answer is None:
                self._look()
                # the look itself stays below a twentieth of a processor on a machine with many processes
                look_at = now + max(_LOOK_SECONDS, 20 * (time.monotonic() - now))

    def _ready(self, poll: select.poll, seconds: float) -> set[int]:
        """The descriptors that something can be done with, after `seconds` at the latest."""
        pending = self._relay.pending
        if pending:
            poll.register(self._replies, select.POLLOUT)
        ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
        if pending:  # it would be ready for ever once the child has closed its end
            poll.unregister(self._replies)
        return ready

    def _listen(self) -> None:
        for order in self._owner.listen():
            if isinstance(order, CancelJob):
                raise JobCancelled
            self._relay.answer(order)

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
                if isinstance(message, JobDone | JobFailed):
                    self._answer = message
                    self._deadline = min(self._deadline, time.monotonic() + _EXIT_SECONDS)
                    continue
                if isinstance(message, JobQuery):
                    self._relay.ask(message)
                self._owner.tell(message)
        except BadFrame as error:
            raise CompileKilled(
                f"the {self._job.work} process wrote something that is no message and was killed ({error})",
                hint="Compile this graph locally, and report it",
            ) from None
        return True

    def _look(self) -> None:
        self._take_in()
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
    raise CompileKilled(f"the {job.work} process was ended by {name}")
