"""What comes later: an artifact that the service has yet to compile. Its graph runs eagerly until it takes over."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ...compiler.errors import JobUnreachable, RelayError
from ...compiler.graph.captured_graph import CapturedGraph
from ...compiler.process.fork_safe_lock import ForkSafeLock
from ...compiler.torch_internals.dynamo import tracing
from .ranks.agreement import CommonCall, StoreAgreement
from .ranks.job_source import JobSource
from .shared_libraries import store_libraries
from .source import ArtifactRequest, LoadedArtifact
from .verification import VerifiedArtifact

_log = logging.getLogger(__name__)

Graph = Callable[..., Any]

_FIRST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.01, 0.25
"""How often a rank looks whether the one that asks for all has found a miss."""


class PendingArtifact:
    """A graph's artifact, which a thread receives while the program runs the graph eagerly.

    receive: what the thread does. load: makes callable what that returned, in the program's own thread. is_due(call,
    ready): whether call number `call` of the graph, from 0, is compiled.
    """

    def __init__(
        self,
        receive: Callable[[], VerifiedArtifact],
        load: Callable[[VerifiedArtifact], LoadedArtifact],
        is_due: Callable[[int, bool], bool] = lambda _, ready: ready,
    ) -> None:
        self._receive = receive
        self._load = load
        self._is_due = is_due
        self._received: VerifiedArtifact | Exception | None = None
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to receive; where no thread can start, as at exit, receive here."""
        try:
            threading.Thread(target=self._run, name="torchrelay background", daemon=True).start()
        except RuntimeError:
            self._run()

    @property
    def ready(self) -> bool:
        """Whether `load` does not wait."""
        return self._ended.is_set()

    def is_due(self, call: int) -> bool:
        return self._is_due(call, self.ready)

    def load(self) -> LoadedArtifact:
        """Waits for the thread. Raises what went wrong there or goes wrong here."""
        self._ended.wait()
        if isinstance(self._received, Exception):
            raise self._received
        assert self._received is not None
        return self._load(self._received)

    def _run(self) -> None:
        try:
            self._received = self._receive()
        except Exception as error:
            self._received = error
        self._ended.set()


class BackgroundSource:
    """Where a process obtains artifacts of which the gateway's may come later."""

    def __init__(self, source: JobSource) -> None:
        self._job_source = source
        self._local = source.local
        self._received: set[str] = set()
        """Keys whose artifacts threads receive for a job now."""

    def obtain(self, wanted: ArtifactRequest) -> LoadedArtifact | PendingArtifact:
        """The artifact, or one that is pending: a compile that the service has yet to finish is not waited for, unless
        the program needs the wait (`_why_wait`). Raises as JobSource.obtain does."""
        job = self._job_source.job()
        if reason := self._why_wait(wanted.captured, job):
            _log.info("torchrelay: a miss of %s is waited for: %s", wanted.key[:12], reason)
            return self._job_source.obtain_with(wanted, job)
        return self._begin_here(wanted) if job is None else self._begin_for_job(job, wanted)

    def _why_wait(self, captured: CapturedGraph, job: StoreAgreement | None) -> str:
        """Why a graph cannot run eagerly first; '' if it can. docs/decisions/0034 tells more."""
        if captured.request.symbols:
            return "its sizes are symbolic"
        if captured.floats:
            return "it takes Python numbers, which may have to become constants"
        if captured.cudagraphs and captured.request.target.kind == "cuda":
            return "it runs as a CUDA graph"
        if tracing.saves_through_hooks():
            return "it is called where autograd saves tensors through hooks, as torch.utils.checkpoint does"
        if job is None and self._job_source.is_one_of_several:
            return "the processes of its job share no store, in which they could agree when to change"
        return ""

    def _begin_here(self, wanted: ArtifactRequest) -> LoadedArtifact | PendingArtifact:
        found = self._local.at_hand(wanted, lambda fetched: self._local.loaded(fetched, wanted))
        if found is not None:
            return self._local.used(found)
        submitted = self._local.submit(wanted)
        if submitted.hit:
            return self._local.used(self._local.loaded(self._local.answered(submitted, wanted), wanted))
        later = wanted.without_inputs()  # so that none are kept
        pending = PendingArtifact(
            lambda: self._stored_libraries(self._local.answered(submitted, later, waits=False)),
            lambda fetched: self._load_later(fetched, later),
        )
        pending.start()
        return pending

    def _begin_for_job(
        self, job: StoreAgreement, wanted: ArtifactRequest
    ) -> LoadedArtifact | PendingArtifact:
        """The same for all ranks: the artifact, if the rank that asks for all finds it without a compile; else one that
        is pending."""
        pending, common = self._pending_for_job(job, wanted.without_inputs())
        pending.start()
        pause = _FIRST_LOOK_SECONDS
        try:
            while not pending.ready and not common.is_begun():
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_LOOK_SECONDS)
            later = common.begin(eager=not pending.ready)
        except JobUnreachable as error:
            self._job_source.leave_job(error)
            later = not pending.ready
        return pending if later else pending.load()

    def _pending_for_job(
        self, job: StoreAgreement, wanted: ArtifactRequest
    ) -> tuple[PendingArtifact, CommonCall]:
        """An artifact that is to be started, and the call at which all ranks change to it."""
        common = job.common_call(wanted.key)

        def is_due(call: int, ready: bool) -> bool:
            if not self._job_source.owns_job():
                return False
            if self._job_source.left_job is None:
                try:
                    return not common.is_eager(call, ready=ready)
                except JobUnreachable as error:
                    self._job_source.leave_job(error)
            return ready

        def load_here(fetched: VerifiedArtifact) -> LoadedArtifact:
            try:
                return self._load_later(fetched, wanted)
            except RelayError as error:  # the others have loaded it
                self._local.report.alone(error)
                raise

        pending = PendingArtifact(
            lambda: self._stored_libraries(self._receive_for_job(job, wanted, common)), load_here, is_due
        )
        return pending, common

    def _receive_for_job(
        self, job: StoreAgreement, wanted: ArtifactRequest, common: CommonCall
    ) -> VerifiedArtifact:
        def obtain() -> VerifiedArtifact:
            found = self._local.at_hand(wanted, lambda fetched: fetched)
            if found is None:
                submitted = self._local.submit(wanted)
                if not submitted.hit:
                    with contextlib.suppress(JobUnreachable):  # `agree` meets it too
                        common.begin(eager=True)
                found = self._local.answered(submitted, wanted, waits=False)
            return found

        if wanted.key in self._received:  # a graph like this one has begun eagerly: nobody asks for it again
            with contextlib.suppress(JobUnreachable):
                common.begin(eager=True)
        self._received.add(wanted.key)
        try:
            return self._job_source.agreed(
                job,
                wanted,
                obtain,
                lambda decision, repeated: self._job_source.decided_on(job, wanted, decision, repeated),
            )
        finally:
            self._received.discard(wanted.key)

    def _stored_libraries(self, fetched: VerifiedArtifact) -> VerifiedArtifact:
        store_libraries(fetched.opened, self._local.settings.cache_dir)
        return fetched

    def _load_later(self, fetched: VerifiedArtifact, wanted: ArtifactRequest) -> LoadedArtifact:
        with tracing.outside_dynamo():
            return self._local.used(self._local.loaded(fetched, wanted))


class ChangingGraph:
    """One graph, eager at first, then compiled. Safe for threads.

    eager: how it runs at first. is_due(call): whether call number `call` of the graph, from 0, is compiled. take(call,
    inputs): called then, by that call, in the program's thread, with its inputs; returns what runs from this call on.
    If it raises, the call raises that, and the next call tries again.

    A forward and its backward are of one version, since autograd records the forward that ran. A forward whose tensors
    are saved through hooks may run again in the backward (torch.utils.checkpoint), and must be of the same version
    then: after such a call the graph does not change any more.
    """

    def __init__(
        self, eager: Graph, is_due: Callable[[int], bool], take: Callable[[int, tuple[Any, ...]], Graph]
    ) -> None:
        self._eager = eager
        self._is_due = is_due
        self._take = take
        self._compiled: Graph | None = None
        self._lock = ForkSafeLock()
        self._calls = 0
        self._keeps = False

    def call(self, *inputs: Any) -> Any:
        """One call of the graph."""
        run = self._compiled or self._next(inputs)
        return run(*inputs)

    def _next(self, inputs: tuple[Any, ...]) -> Graph:
        with self._lock:
            if self._compiled is None and not self._stays() and self._is_due(self._calls):
                self._compiled = self._take(self._calls, inputs)
            self._calls += 1
            return self._compiled or self._eager

    def _stays(self) -> bool:
        self._keeps = self._keeps or tracing.saves_through_hooks()
        return self._keeps or _captures()


def _captures() -> bool:
    """Whether the program captures a CUDA graph now, into which nothing may be loaded."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
