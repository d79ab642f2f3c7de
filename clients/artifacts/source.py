"""Stages 4 and 10 together, the client's side: obtain a graph's artifact from the nearest source; load it.

The sources in order: prefetched artifacts, this machine's disk, the gateway. In a job of several processes one process
obtains the artifact for all (ranks/agreement.py).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch.distributed
from msgspec import Struct

from ...compiler.artifact import container
from ...compiler.artifact.container import Artifact
from ...compiler.errors import (
    ArtifactError,
    CannotLoad,
    GatewayUnreachable,
    JobUnreachable,
    RelayError,
    SignatureError,
    SizesDiffer,
    ToolchainMismatch,
)
from ...compiler.request import codec
from ...compiler.request.key import key_of
from ...compiler.torch_internals.distributed import process_groups
from ...compiler.torch_internals.dynamo import tracing
from ..capture.request import CapturedGraph
from ..gateway.compile_client import GatewayClient, SubmittedCompile
from ..gateway.connection import rebuild
from ..reports.run_report import Outcome, RunReport
from ..reports.start_trace import About
from ..settings import ClientSettings, LauncherInfo
from . import load
from .disk_cache import DiskCache
from .prefetch import Prefetch
from .ranks.agreement import AgreementStore, CommonCall, Decision, StoreAgreement
from .ranks.machine import Machine, offered
from .shared_libraries import store_libraries, why_nothing_loads
from .takeover import Pending
from .trust_store import TrustStore

_log = logging.getLogger(__name__)

_STORE_SECONDS = 30.0
"""The longest that a job's store may take to answer."""
_FETCH_SECONDS = 60.0
"""An artifact that the job decided on, from the gateway."""
_FIRST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.01, 0.25
"""How often a rank looks whether the one that asks for all has found a miss."""
_UNUSABLE = (ArtifactError, SignatureError, ToolchainMismatch)


class ArtifactRequest(Struct, frozen=True):
    """A captured graph, its canonical bytes, its key, and the example inputs."""

    captured: CapturedGraph
    canonical: bytes
    key: str
    inputs: Sequence[Any]

    def with_exact_sizes(self) -> ArtifactRequest:
        """The same for no sizes but those of the example inputs."""
        request = msgspec.structs.replace(self.captured.request, exact_sizes=True)
        captured = msgspec.structs.replace(self.captured, request=request)
        canonical = codec.encode_request(request)
        return ArtifactRequest(captured, canonical, key_of(request, canonical), self.inputs)

    def without_inputs(self) -> ArtifactRequest:
        return msgspec.structs.replace(self, inputs=())


class FetchedArtifact(Struct, frozen=True):
    """A verified artifact, its file, and where it came from."""

    data: bytes
    opened: Artifact
    outcome: Outcome
    early: bool = False
    """It was fetched before it was needed."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


class LoadedArtifact(Struct, frozen=True):
    """What a graph runs as, the key it is under, where it came from, and the artifact's file."""

    key: str
    compiled: Callable[..., Any]
    outcome: Outcome
    data: bytes
    early: bool = False
    """It was fetched before it was needed."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


PendingArtifact = Pending[FetchedArtifact, LoadedArtifact]
A = TypeVar("A", FetchedArtifact, LoadedArtifact)


class ArtifactSource:
    """The sources of artifacts of one process."""

    def __init__(
        self,
        settings: ClientSettings,
        report: RunReport,
        gateway: GatewayClient,
        prefetch: Prefetch | None,
        launch: LauncherInfo | None,
    ) -> None:
        self._settings = settings
        self._report = report
        self.gateway = gateway
        self._prefetch = prefetch
        self._launch = launch
        self.disk = DiskCache(settings.cache_dir, settings.disk_cache_bytes)
        self._trust = TrustStore(settings)
        self._owner = os.getpid()
        self._store_job: StoreAgreement | None = None
        self._left_job: JobUnreachable | None = None
        self._decided: dict[str, Decision] = {}
        self._received: set[str] = set()
        """Keys whose artifacts threads receive for a job now."""

    def obtain(self, wanted: ArtifactRequest) -> LoadedArtifact:
        """An artifact that fits the example sizes. Raises RelayError, of whatever kind the failure was; the same one in
        every process of a job."""
        return self._obtain_fitting(wanted, self._job_or_none())

    def _obtain_fitting(self, wanted: ArtifactRequest, job: StoreAgreement | None) -> LoadedArtifact:
        try:
            return self._obtain(wanted, job)
        except SizesDiffer:
            return self._obtain(wanted.with_exact_sizes(), self._job_or_none())

    def _obtain(self, wanted: ArtifactRequest, job: StoreAgreement | None) -> LoadedArtifact:
        found = self._obtain_here(wanted) if job is None else self._obtain_for_job(job, wanted)
        return self._used(found, wanted.key)

    def _used(self, found: LoadedArtifact, key: str) -> LoadedArtifact:
        if found.early:
            self._report.prefetched()
        if (
            self._prefetch is not None and found.outcome != "shared"
        ):  # else the process that obtained it reports it
            self._prefetch.used(key, early=found.early)
        return found

    # --- while the graph runs eagerly --------------------------------------------------------------------------

    def obtain_or_begin(self, wanted: ArtifactRequest) -> LoadedArtifact | PendingArtifact:
        """As `obtain`, but a compile that the service has yet to finish is not waited for, unless the program needs
        the wait (`_why_wait`). Raises as `obtain` does."""
        job = self._job_or_none()
        if reason := self._why_wait(wanted.captured, job):
            _log.info("torchrelay: a miss of %s is waited for: %s", wanted.key[:12], reason)
            return self._obtain_fitting(wanted, job)
        return self._begin_here(wanted) if job is None else self._begin_for_job(job, wanted)

    def may_begin_eagerly(self, background: bool | None) -> bool:
        """Whether this process is one of several that agree on the call from which on they run a graph compiled: each
        must get it by `obtain_or_begin`. background: as in RelayBackend.compile."""
        wanted = self._settings.background if background is None else background
        several = self._launch is not None and self._launch.world_size > 1
        return wanted and (several or self._left_job is not None or self._job_or_none() is not None)

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
        several = self._launch is not None and self._launch.world_size > 1
        if job is None and (several or self._left_job is not None):
            return "the processes of its job share no store, in which they could agree when to change"
        return ""

    def _begin_here(self, wanted: ArtifactRequest) -> LoadedArtifact | PendingArtifact:
        found = self._at_hand(wanted, lambda fetched: self._loaded(fetched, wanted))
        if found is not None:
            return self._used(found, wanted.key)
        submitted = self._submit(wanted)
        if submitted.hit:
            return self._used(self._loaded(self._answered(submitted, wanted), wanted), wanted.key)
        later = wanted.without_inputs()  # so that none are kept
        pending = PendingArtifact(
            lambda: self._stored_libraries(self._answered(submitted, later, waits=False)),
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
            self._leave_job(error)
            later = not pending.ready
        return pending if later else pending.load()

    def _pending_for_job(
        self, job: StoreAgreement, wanted: ArtifactRequest
    ) -> tuple[PendingArtifact, CommonCall]:
        """An artifact that is to be started, and the call at which all ranks change to it."""
        common = job.common_call(wanted.key)

        def is_due(call: int, ready: bool) -> bool:
            if os.getpid() != self._owner:  # a forked child must not use the job's store
                return False
            if self._left_job is None:
                try:
                    return not common.is_eager(call, ready=ready)
                except JobUnreachable as error:
                    self._leave_job(error)
            return ready

        def load_here(fetched: FetchedArtifact) -> LoadedArtifact:
            try:
                return self._load_later(fetched, wanted)
            except RelayError as error:  # the others have loaded it
                self._report.alone(error)
                raise

        pending = PendingArtifact(
            lambda: self._stored_libraries(self._receive_for_job(job, wanted, common)), load_here, is_due
        )
        return pending, common

    def _receive_for_job(
        self, job: StoreAgreement, wanted: ArtifactRequest, common: CommonCall
    ) -> FetchedArtifact:
        def obtain() -> FetchedArtifact:
            found = self._at_hand(wanted, lambda fetched: fetched)
            if found is None:
                submitted = self._submit(wanted)
                if not submitted.hit:
                    with contextlib.suppress(JobUnreachable):  # `agree` meets it too
                        common.begin(eager=True)
                found = self._answered(submitted, wanted, waits=False)
            return found

        if wanted.key in self._received:  # a graph like this one has begun eagerly: nobody asks for it again
            with contextlib.suppress(JobUnreachable):
                common.begin(eager=True)
        self._received.add(wanted.key)
        try:
            return self._agreed(
                job,
                wanted,
                obtain,
                lambda decision, repeated: self._decided_on(job, wanted, decision, repeated),
            )
        finally:
            self._received.discard(wanted.key)

    def _stored_libraries(self, fetched: FetchedArtifact) -> FetchedArtifact:
        store_libraries(fetched.opened, self._settings.cache_dir)
        return fetched

    def _load_later(self, fetched: FetchedArtifact, wanted: ArtifactRequest) -> LoadedArtifact:
        with tracing.outside_dynamo():
            return self._used(self._loaded(fetched, wanted), wanted.key)

    # --- this process ----------------------------------------------------------------------------------------

    def _obtain_here(self, wanted: ArtifactRequest) -> LoadedArtifact:
        found = self._at_hand(wanted, lambda fetched: self._loaded(fetched, wanted))
        if found is None:
            with _importing_loader():
                fetched = self._answered(self._submit(wanted), wanted)
            found = self._loaded(fetched, wanted)
        return found

    def _at_hand(self, wanted: ArtifactRequest, use: Callable[[FetchedArtifact], A]) -> A | None:
        """`use` of what needs no request. Raises GatewayUnreachable if there is no gateway to send one to."""
        for source in (self._prefetched, self._stored):
            try:
                if (found := source(wanted)) is not None:
                    return use(found)
            except (CannotLoad, SizesDiffer):  # the service has the same one: do not download it again
                raise
            except _UNUSABLE:
                self.disk.remove(wanted.key)  # damaged, or signed by a key since withdrawn: ask the service
        if not self._settings.url:
            raise GatewayUnreachable("no gateway is configured")
        return None

    def _prefetched(self, wanted: ArtifactRequest) -> FetchedArtifact | None:
        with self._report.timed("wait"):
            early = None if self._prefetch is None else self._prefetch.take(wanted.key)
        if early is None:
            return None
        with self._report.timed("verify"):
            self._trust.trust().key_for(early.opened.statement)
            load.check_fit(early.opened, wanted.captured.request)
        outcome: Outcome = "hit" if early.fetched else "disk_hit"
        return FetchedArtifact(early.data, early.opened, outcome, early.fetched)

    def _stored(self, wanted: ArtifactRequest) -> FetchedArtifact | None:
        stored = self.disk.get(wanted.key)
        if stored is None:
            return None
        if self._settings.url:
            self._trust.refresh_if_stale(self.gateway.trust_document)
        return FetchedArtifact(stored, self._verified(stored, wanted), "disk_hit")

    def _submit(self, wanted: ArtifactRequest) -> SubmittedCompile:
        """Ask the gateway, in the caller's thread so that Ctrl-C ends the wait at once."""
        return self.gateway.submit(
            codec.compress(wanted.canonical),
            wanted.key,
            cache_only=self._settings.mode == "cache",
            deadline=self._settings.deadline,
        )

    def _answered(
        self, submitted: SubmittedCompile, wanted: ArtifactRequest, *, waits: bool = True
    ) -> FetchedArtifact:
        """The gateway's artifact, on the disk from now on. waits: the program does."""
        answer = submitted.result()
        if waits:
            about: About = {"trace_id": submitted.trace_id}
            self._report.add_seconds("wait", answer.wait_seconds, ago=answer.fetch_seconds, about=about)
            self._report.add_seconds("fetch", answer.fetch_seconds, about=about)
        try:
            opened = self._verified(answer.data, wanted)
        except CannotLoad:  # the service has the same one: do not download it at each start
            self.disk.put(wanted.key, answer.data)
            raise
        self.disk.put(wanted.key, answer.data)
        outcome: Outcome = "hit" if answer.hit else "coalesced" if answer.coalesced else "miss"
        return FetchedArtifact(answer.data, opened, outcome)

    def signed(self, data: bytes, key: str) -> Artifact:
        """Any file of the gateway's or the disk's, under what is trusted now. Raises SignatureError, ArtifactError."""
        if self._settings.url:
            self._trust.refresh_if_stale(self.gateway.trust_document)
        self._trust.refresh_if_newer(self.gateway.trust_serial, self.gateway.trust_document)
        return container.verify(data, self._trust.trust(), key=key)

    def _verified(self, data: bytes, wanted: ArtifactRequest) -> Artifact:
        self._trust.refresh_if_newer(self.gateway.trust_serial, self.gateway.trust_document)
        with self._report.timed("verify"):
            return load.verify(data, self._trust.trust(), key=wanted.key, request=wanted.captured.request)

    def _loaded(self, fetched: FetchedArtifact, wanted: ArtifactRequest) -> LoadedArtifact:
        try:
            with self._report.timed("load"):
                compiled = load.load(fetched.opened, wanted.captured, wanted.inputs, self._settings.cache_dir)
        except (CannotLoad, SizesDiffer):
            raise
        except _UNUSABLE:
            self.disk.remove(wanted.key)
            raise
        compiled = self._report.first_call(wanted.key, compiled)
        return LoadedArtifact(wanted.key, compiled, fetched.outcome, fetched.data, fetched.early)

    # --- in a job ------------------------------------------------------------------------------------------

    def _job_or_none(self) -> StoreAgreement | None:
        if self._left_job is not None:
            self._report.alone(self._left_job)
            return None
        try:
            return self._job()
        except JobUnreachable as error:
            self._leave_job(error)
            return None

    def _job(self) -> StoreAgreement | None:
        """How this process agrees with the others of its job; None if it has none. Raises JobUnreachable."""
        if os.getpid() != self._owner:
            return None
        if self._store_job is None:
            self._store_job = self._join()
        return self._store_job

    def _join(self) -> StoreAgreement | None:
        """The job that shares a c10d store: the launcher's own, or the default process group's once there is one."""
        launch, group = self._launch, torch.distributed
        if launch is not None and launch.store is not None:
            size, endpoint = launch.world_size, launch.store
        elif group.is_available() and group.is_initialized():
            size, endpoint = group.get_world_size(), None
        else:
            return None
        if size < 2:
            return None
        try:
            store = process_groups.job_store(endpoint, timedelta(seconds=_STORE_SECONDS))
        except (RuntimeError, OSError) as error:
            text = str(error).partition("\n")[0]
            raise JobUnreachable(f"the job's store cannot be reached: {text}") from None
        if store is None:
            return None
        run = launch.run if launch is not None else ""
        prefix = f"torchrelay/{hashlib.sha256(run.encode()).hexdigest()[:16]}/"
        agreement = StoreAgreement(AgreementStore(store, prefix), size - 1)
        problem = why_nothing_loads(self._settings.cache_dir)
        agreement.machines.join(Machine(offered(), problem))
        return agreement

    def _obtain_for_job(self, job: StoreAgreement, wanted: ArtifactRequest) -> LoadedArtifact:
        return self._agreed(
            job,
            wanted,
            lambda: self._obtain_here(wanted),
            lambda decision, repeated: self._loaded(
                self._decided_on(job, wanted, decision, repeated), wanted
            ),
        )

    def _agreed(
        self,
        job: StoreAgreement,
        wanted: ArtifactRequest,
        obtain_here: Callable[[], A],
        take: Callable[[Decision, bool], A],
    ) -> A:
        """The artifact that the job decides on; this process obtains it if it is the first to need it, and else takes
        it. take(decision, repeated): repeated, if this process has taken it before."""
        own: A | None = None
        failure: RelayError | None = None

        def obtain() -> bytes:
            nonlocal own, failure
            try:
                own = obtain_here()
                job.check_needs(container.read_manifest(own.data).needs)
            except RelayError as error:
                failure = error
                raise
            return own.data

        repeated = wanted.key in self._decided
        try:
            seconds = self._settings.deadline
            decision = self._decided.get(wanted.key) or job.agree(wanted.key, seconds, obtain)
        except JobUnreachable as error:
            self._leave_job(error)
            if failure is not None:
                raise failure from None
            return own or obtain_here()
        self._decided[wanted.key] = decision
        if decision.error is not None:
            same = failure is not None and failure.code == decision.error.code
            raise (failure if same and failure is not None else rebuild(decision.error)) from None
        if own is not None and own.digest == decision.digest:
            return own
        try:
            return take(decision, repeated)
        except SizesDiffer:
            raise
        except RelayError as error:
            self._report.alone(error)
            raise

    def _decided_on(
        self, job: StoreAgreement, wanted: ArtifactRequest, decision: Decision, repeated: bool
    ) -> FetchedArtifact:
        """Exactly the artifact that was decided on, from disk, from the job or from the gateway."""
        stored = self.disk.get(wanted.key)
        if stored is not None and hashlib.sha256(stored).hexdigest() != decision.digest:
            stored = None
        data = stored
        try:
            data = data or job.artifact(wanted.key, decision)
            if not repeated:
                job.done(wanted.key, decision)
        except JobUnreachable as error:
            self._leave_job(error)
        if data is None:
            data = self.gateway.artifact(wanted.key, deadline=_FETCH_SECONDS)
            if hashlib.sha256(data).hexdigest() != decision.digest:
                raise ArtifactError(
                    "the artifact that the job decided on is gone; there is another one by now"
                )
        opened = self._verified(data, wanted)
        if data is not stored:
            self.disk.put(wanted.key, data)
        return FetchedArtifact(data, opened, "disk_hit" if repeated else "shared")

    def _leave_job(self, error: JobUnreachable) -> None:
        """Go on without the job: from now on this process obtains each artifact by itself."""
        self._left_job = error
        self._report.alone(error)


@contextlib.contextmanager
def _importing_loader() -> Iterator[None]:
    """Import meanwhile, in a thread, what loading an artifact needs. Where no thread can start, as at exit, loading
    imports it."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):
            pool = stack.enter_context(
                concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="torchrelay")
            )
            pool.submit(load.preload)
        yield
