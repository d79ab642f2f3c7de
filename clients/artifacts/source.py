"""Stages 4 and 10 together, the client's side: obtain a graph's artifact from the nearest source; load it.

The sources in order: prefetched artifacts, this machine's disk, the gateway. In a job of several processes one process
obtains the artifact for all (rank_agreement.py).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

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
from ...compiler.torch_internals.distributed import job_store
from ..capture.request import CapturedGraph
from ..gateway.compile_client import FetchResult, GatewayClient
from ..gateway.connection import rebuild
from ..reports.run_report import Outcome, RunReport
from ..settings import ClientSettings, LauncherInfo
from . import load
from .disk_cache import DiskCache
from .machine import Machine, offered
from .prefetch import Prefetch
from .rank_agreement import Agreement, AgreementStore, Decision, GatewayAgreement, StoreAgreement
from .shared_libraries import why_nothing_loads
from .trust_store import TrustStore

_STORE_SECONDS = 30.0
"""The longest that a job's store may take to answer."""
_FETCH_SECONDS = 60.0
"""An artifact that the job decided on, from the gateway."""
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
        canonical = codec.encode_request(request)
        captured = msgspec.structs.replace(self.captured, request=request)
        return ArtifactRequest(captured, canonical, key_of(request, canonical), self.inputs)


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
        self._gateway = gateway
        self._prefetch = prefetch
        self._launch = launch
        self._disk = DiskCache(settings.cache_dir, settings.disk_cache_bytes)
        self._trust = TrustStore(settings)
        self._owner = os.getpid()
        self._store_job: StoreAgreement | None = None
        self._left_job: JobUnreachable | None = None
        self._decided: dict[str, Decision] = {}

    def obtain(self, wanted: ArtifactRequest) -> LoadedArtifact:
        """An artifact that fits the example sizes. Raises RelayError, of whatever kind the failure was; the same one in
        every process of a job."""
        try:
            return self._obtain(wanted)
        except SizesDiffer:
            return self._obtain(wanted.with_exact_sizes())

    def _obtain(self, wanted: ArtifactRequest) -> LoadedArtifact:
        job = None
        if self._left_job is not None:
            self._report.alone(self._left_job)
        else:
            try:
                job = self._job()
            except JobUnreachable as error:
                self._leave_job(error)
        found = self._obtain_here(wanted) if job is None else self._obtain_for_job(job, wanted)
        if (
            self._prefetch is not None and found.outcome != "shared"
        ):  # else the process that obtained it reports it
            self._prefetch.used(wanted.key, early=found.early)
        return found

    # --- this process ----------------------------------------------------------------------------------------

    def _obtain_here(self, wanted: ArtifactRequest) -> LoadedArtifact:
        for source in (self._prefetched, self._stored):
            if (found := source(wanted)) is not None:
                return found
        if not self._settings.url:
            raise GatewayUnreachable("no gateway is configured")
        fetched = self._fetch(wanted)
        try:
            compiled = self._load(fetched.data, wanted)
        except (CannotLoad, SizesDiffer):
            self._disk.put(wanted.key, fetched.data)
            raise
        self._disk.put(wanted.key, fetched.data)
        outcome: Outcome = "hit" if fetched.hit else "coalesced" if fetched.coalesced else "miss"
        return LoadedArtifact(wanted.key, compiled, outcome, fetched.data)

    def _prefetched(self, wanted: ArtifactRequest) -> LoadedArtifact | None:
        with self._report.timed("wait"):
            early = None if self._prefetch is None else self._prefetch.take(wanted.key)
        if early is None:
            return None
        try:
            with self._report.timed("verify"):
                self._trust.trust().key_for(early.opened.statement)
                load.check_fit(early.opened, wanted.captured.request)
            compiled = self._load_opened(early.opened, wanted)
        except (CannotLoad, SizesDiffer):
            raise
        except _UNUSABLE:
            self._disk.remove(wanted.key)
            return None
        if early.fetched:
            self._report.prefetched()
        return LoadedArtifact(
            wanted.key, compiled, "hit" if early.fetched else "disk_hit", early.data, early.fetched
        )

    def _stored(self, wanted: ArtifactRequest) -> LoadedArtifact | None:
        stored = self._disk.get(wanted.key)
        if stored is None:
            return None
        if self._settings.url:
            self._trust.refresh_if_stale(self._gateway.trust_document)
        try:
            return LoadedArtifact(wanted.key, self._load(stored, wanted), "disk_hit", stored)
        except (CannotLoad, SizesDiffer):  # the service has the same one: do not download it at each start
            raise
        except _UNUSABLE:
            self._disk.remove(wanted.key)  # damaged, or signed by a key since withdrawn: ask the service
            return None

    def _fetch(self, wanted: ArtifactRequest) -> FetchResult:
        """Ask the gateway, in the caller's thread so that Ctrl-C ends the wait at once."""
        with _importing_loader():
            fetched = self._gateway.compile(
                codec.compress(wanted.canonical),
                wanted.key,
                cache_only=self._settings.mode == "cache",
                deadline=self._settings.deadline,
            )
        self._report.add_seconds("wait", fetched.wait_seconds)
        self._report.add_seconds("fetch", fetched.fetch_seconds)
        return fetched

    def _load(self, data: bytes, wanted: ArtifactRequest) -> Callable[..., Any]:
        self._trust.refresh_if_newer(self._gateway.trust_serial, self._gateway.trust_document)
        with self._report.timed("verify"):
            opened = load.verify(data, self._trust.trust(), key=wanted.key, request=wanted.captured.request)
        return self._load_opened(opened, wanted)

    def _load_opened(self, opened: Artifact, wanted: ArtifactRequest) -> Callable[..., Any]:
        with self._report.timed("load"):
            return load.load(opened, wanted.captured, wanted.inputs, self._settings.cache_dir)

    # --- in a job ------------------------------------------------------------------------------------------

    def _job(self) -> Agreement | None:
        """How this process agrees with the others of its job; None if it has none. Raises JobUnreachable."""
        launch, named = self._launch, self._settings.job
        if os.getpid() != self._owner:
            return None
        if self._store_job is None:
            self._store_job = self._join()
        if self._store_job is not None:
            return self._store_job
        if not self._settings.url or not (
            named or (launch is not None and launch.named and launch.world_size > 1)
        ):
            return None
        restart = launch.restart if launch is not None else 0
        name = f"{named}/{restart}" if named else launch.run if launch is not None else ""
        return GatewayAgreement(self._gateway, _digest(name))

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
            store = job_store.job_store(endpoint, timedelta(seconds=_STORE_SECONDS))
        except (RuntimeError, OSError) as error:
            text = str(error).partition("\n")[0]
            raise JobUnreachable(f"the job's store cannot be reached: {text}") from None
        if store is None:
            return None
        run = launch.run if launch is not None else ""
        prefix = f"torchrelay/{_digest(f'{self._settings.job}/{run}')[:16]}/"
        agreement = StoreAgreement(AgreementStore(store, prefix), size - 1)
        problem = why_nothing_loads(self._settings.cache_dir / "lib")
        agreement.machines.join(Machine(offered(), problem))
        return agreement

    def _obtain_for_job(self, job: Agreement, wanted: ArtifactRequest) -> LoadedArtifact:
        """The artifact that the job decides on; this process obtains it if it is the first to need it."""
        own: LoadedArtifact | None = None
        failure: RelayError | None = None

        def obtain() -> bytes:
            nonlocal own, failure
            try:
                own = self._obtain_here(wanted)
                job.check_needs(container.read_manifest(own.data).needs)
            except RelayError as error:
                failure = error
                raise
            return own.data

        repeated = wanted.key in self._decided
        try:
            decision = self._decided.get(wanted.key) or job.agree(wanted.key, self._settings.deadline, obtain)
        except JobUnreachable as error:
            self._leave_job(error)
            if failure is not None:
                raise failure from None
            return own or self._obtain_here(wanted)
        self._decided[wanted.key] = decision
        if decision.error is not None:
            same = failure is not None and failure.code == decision.error.code
            raise (failure if same and failure is not None else rebuild(decision.error)) from None
        if own is not None and own.digest == decision.digest:
            return own
        try:
            return self._load_decided(job, wanted, decision, repeated=repeated)
        except SizesDiffer:
            raise
        except RelayError as error:
            self._report.alone(error)
            raise

    def _load_decided(
        self, job: Agreement, wanted: ArtifactRequest, decision: Decision, *, repeated: bool
    ) -> LoadedArtifact:
        """Load exactly the artifact that was decided on, from disk, from the job or from the gateway."""
        stored = self._disk.get(wanted.key)
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
            data = self._gateway.artifact(wanted.key, deadline=_FETCH_SECONDS)
            if hashlib.sha256(data).hexdigest() != decision.digest:
                raise ArtifactError(
                    "the artifact that the job decided on is gone; there is another one by now"
                )
        compiled = self._load(data, wanted)
        if data is not stored:
            self._disk.put(wanted.key, data)
        return LoadedArtifact(wanted.key, compiled, "disk_hit" if repeated else "shared", data)

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


def _digest(text: str) -> str:
    return hashlib.sha256(b"torchrelay job v1\0" + text.encode()).hexdigest()
