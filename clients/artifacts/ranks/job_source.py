"""What a job decides: one of its processes obtains an artifact for all; all use that one, or meet the same error."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed

from ....compiler.artifact import container, symbol_versions
from ....compiler.errors import ArtifactError, JobUnreachable, RelayError, SizesDiffer
from ....compiler.torch_internals.distributed import process_groups
from ...settings import LauncherInfo
from ..shared_libraries import why_nothing_loads
from ..source import A, ArtifactRequest, LoadedArtifact, LocalSource
from ..verification import VerifiedArtifact

if TYPE_CHECKING:
    from .agreement import Decision, StoreAgreement

STORE_SECONDS = 30.0
"""The longest that a job's store may take to answer."""
_FETCH_SECONDS = 60.0
"""An artifact that the job decided on, from the gateway."""


class JobSource:
    """Where a process obtains artifacts that may be one of a job."""

    def __init__(self, local: LocalSource, launch: LauncherInfo | None) -> None:
        self.local = local
        self._launch = launch
        self._owner = os.getpid()
        self._store_job: StoreAgreement | None = None
        self.left_job: JobUnreachable | None = None
        self._decided: dict[str, Decision] = {}

    def obtain(self, wanted: ArtifactRequest) -> LoadedArtifact:
        """An artifact that fits the example sizes. Raises RelayError, of whatever kind the failure was; the same one in
        every process of a job."""
        return self.obtain_with(wanted, self.job())

    def obtain_with(self, wanted: ArtifactRequest, job: StoreAgreement | None) -> LoadedArtifact:
        try:
            return self._obtain(wanted, job)
        except SizesDiffer:
            return self._obtain(wanted.with_exact_sizes(), self.job())

    def _obtain(self, wanted: ArtifactRequest, job: StoreAgreement | None) -> LoadedArtifact:
        if job is None:
            return self.local.used(self.local.obtain(wanted))

        def take(decision: Decision, repeated: bool) -> LoadedArtifact:
            return self.local.loaded(self.decided_on(job, wanted, decision, repeated), wanted)

        return self.local.used(self.agreed(job, wanted, lambda: self.local.obtain(wanted), take))

    @property
    def is_one_of_several(self) -> bool:
        """Whether the launcher started several processes, or this one is in a job, or was."""
        started = self._launch is not None and self._launch.world_size > 1
        return started or self.left_job is not None

    def may_begin_eagerly(self, background: bool | None) -> bool:
        """Whether this process is one of several that agree on the call from which on they run a graph compiled.
        background: as in RelayBackend.compile."""
        wanted = self.local.settings.background if background is None else background
        return wanted and (self.is_one_of_several or self.job() is not None)

    def owns_job(self) -> bool:
        """Whether this process may use its job's store: a forked child must not."""
        return os.getpid() == self._owner

    def job(self) -> StoreAgreement | None:
        """How this process agrees with the others of its job; None if it has none, or has left it."""
        if self.left_job is not None:
            self.local.report.alone(self.left_job)
            return None
        if not self.owns_job():
            return None
        try:
            self._store_job = self._store_job or self._join()
        except JobUnreachable as error:
            self.leave_job(error)
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
        from .agreement import AgreementStore, Machine, StoreAgreement

        try:
            store = process_groups.job_store(endpoint, timedelta(seconds=STORE_SECONDS))
        except (RuntimeError, OSError) as error:
            text = str(error).partition("\n")[0]
            raise JobUnreachable(f"the job's store cannot be reached: {text}") from None
        if store is None:
            return None
        run = launch.run if launch is not None else ""
        prefix = f"torchrelay/{hashlib.sha256(run.encode()).hexdigest()[:16]}/"
        agreement = StoreAgreement(AgreementStore(store, prefix), size - 1)
        problem = why_nothing_loads(self.local.settings.cache_dir)
        agreement.machines.join(Machine(symbol_versions.offered(), problem))
        return agreement

    def agreed(
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
            seconds = self.local.settings.deadline
            decision = self._decided.get(wanted.key) or job.agree(wanted.key, seconds, obtain)
        except JobUnreachable as error:
            self.leave_job(error)
            if failure is not None:
                raise failure from None
            return own or obtain_here()
        self._decided[wanted.key] = decision
        if decision.error is not None:
            from ...gateway.connection import rebuild

            same = failure is not None and failure.code == decision.error.code
            raise (failure if same and failure is not None else rebuild(decision.error)) from None
        if own is not None and own.digest == decision.digest:
            return own
        try:
            return take(decision, repeated)
        except SizesDiffer:
            raise
        except RelayError as error:
            self.local.report.alone(error)
            raise

    def decided_on(
        self, job: StoreAgreement, wanted: ArtifactRequest, decision: Decision, repeated: bool
    ) -> VerifiedArtifact:
        """Exactly the artifact that was decided on, from disk, from the job or from the gateway."""
        stored = self.local.disk.get(wanted.key)
        if stored is not None and hashlib.sha256(stored).hexdigest() != decision.digest:
            stored = None
        data = stored
        try:
            data = data or job.artifact(wanted.key, decision)
            if not repeated:
                job.done(wanted.key, decision)
        except JobUnreachable as error:
            self.leave_job(error)
        if data is None:
            data = self.local.gateway.artifact(wanted.key, deadline=_FETCH_SECONDS)
            if hashlib.sha256(data).hexdigest() != decision.digest:
                raise ArtifactError(
                    "the artifact that the job decided on is gone; there is another one by now"
                )
        opened = self.local.verifier.answers(data, wanted.key, wanted.captured.request)
        if data is not stored:
            self.local.disk.put(wanted.key, data)
        return VerifiedArtifact(data, opened, "disk_hit" if repeated else "shared")

    def leave_job(self, error: JobUnreachable) -> None:
        """Go on without the job: from now on this process obtains each artifact by itself."""
        self.left_job = error
        self.local.report.alone(error)
