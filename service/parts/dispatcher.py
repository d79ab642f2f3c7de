"""The composition of a dispatcher: the pool of workers, and what gives them work: compiles, searches and jobs."""

from __future__ import annotations

import asyncio
import uuid
from functools import partial

import structlog

from ...compiler.api.training.jobs import TrainSpec
from ...compiler.request.schema import REVISION
from ...workers.pool import WorkerPool
from ..compile.compile_queue import CompileQueue, QueuedRequests
from ..compile.flights import Flights
from ..compile.followers import Followers
from ..compile.intake import CompileIntake
from ..compile.registry import STARTING, DispatcherInfo
from ..compile.search.scheduler import SearchScheduler
from ..compile.single_flight import Priority
from ..jobs.compiles import JobCompiles
from ..jobs.controller import JobController
from ..jobs.open_jobs import OpenJobs
from ..jobs.training.placement import TrainingPlacement, room_asked
from ..jobs.training.precompile import TrainingGraphCompiler
from ..jobs.training.run import TrainingJobParts, TrainingJobRun
from ..jobs.tuning.run import TuningJobParts, TuningJobRun
from ..storage.redis.retry import redis_errors_logged
from .shared import SharedParts, TenantParts, Tenants

log = structlog.get_logger(__name__)

_CLUSTER_GONE_LEASES = 6
"""A Ray cluster that has had no dispatcher for the time of so many leases is gone: its jobs begin again elsewhere."""


class DispatcherTenant(TenantParts):
    def __init__(self, dispatcher: DispatcherParts, namespace: str) -> None:
        shared, pool = dispatcher.shared, dispatcher.pool
        super().__init__(shared, namespace)
        settings, notifications = shared.settings, shared.notifications
        self.searches = dispatcher.search_scheduler.open(namespace, self.tunings)
        self.flights = Flights(
            settings,
            namespace,
            self.leases,
            self.cache,
            self.tunings,
            self.searches,
            shared.admission,
            pool,
            shared.keyring,
            shared.metrics,
            shared.tracer,
        )
        queue = CompileQueue(namespace, self.leases, dispatcher.queued)
        followers = Followers(self.events, notifications, settings, queue.ask_again)
        compiles = partial(JobCompiles, queue, followers, self.cache)
        tuning = JobController(
            self.tuning_jobs,
            partial(
                TuningJobRun,
                TuningJobParts(
                    namespace=namespace,
                    jobs=self.tuning_jobs,
                    queue=self.searches,
                    compiles=compiles(Priority.BATCH, dispatcher.id),
                    listening=self.flights.listening,
                    cache=self.cache,
                    tunings=self.tunings,
                    admission=shared.admission,
                ),
            ),
            notifications,
            lease_seconds=settings.lease_seconds,
        )
        training = JobController(
            self.training_jobs,
            partial(
                TrainingJobRun,
                TrainingJobParts(
                    namespace=namespace,
                    jobs=self.training_jobs,
                    store=self.training_files,
                    pool=pool,
                    compiler=TrainingGraphCompiler(
                        namespace,
                        compiles(Priority.DEVICES),
                        shared.admission,
                        self.saved_requests,
                        settings.compile_deadline_seconds,
                    ),
                    tokens=shared.tokens,
                    keyring=shared.keyring,
                    settings=settings,
                ),
            ),
            notifications,
            lease_seconds=settings.lease_seconds,
            may_take=dispatcher.placement.may_take,
        )
        self.controllers: dict[str, JobController] = {"tune": tuning, "train": training}


class DispatcherParts:
    """`pool_error`: why there are no workers, or ''."""

    def __init__(self, shared: SharedParts, pool: WorkerPool) -> None:
        self.shared = shared
        self.pool = pool
        self.id = uuid.uuid4().hex
        self.pool_started = False
        self.pool_error = ""
        self.search_scheduler = SearchScheduler(pool, shared.metrics, shared.supervisor)
        self.placement = TrainingPlacement(
            self.id,
            pool,
            shared.registry,
            self._promised,
            gone_seconds=_CLUSTER_GONE_LEASES * shared.settings.lease_seconds,
        )
        self.intake = CompileIntake(
            self.id,
            shared.pending,
            shared.registry,
            pool,
            self._flights_of,
            shared.notifications,
            shared.installation.problem,
            poll_seconds=shared.settings.lease_seconds / 3,
        )
        self.queued = QueuedRequests()
        self.tenants = Tenants(shared.namespaces, lambda namespace: DispatcherTenant(self, namespace))
        self.open_jobs = OpenJobs(shared.redis, shared.keys)

    def info(self) -> DispatcherInfo:
        """What gateways are to know of it."""
        if not self.pool_started or self.pool_error:
            return DispatcherInfo(self.id, self.pool_error or STARTING, [], [], REVISION)
        nodes = [dict(resources) for resources in self.pool.node_resources()]
        promised = [room_asked(spec) for spec in self._promised()]
        return DispatcherInfo(
            self.id,
            "",
            self.pool.workers(),
            nodes,
            REVISION,
            cluster=self.placement.cluster,
            promised=promised,
        )

    def _promised(self) -> list[TrainSpec]:
        """The training jobs that were taken and have no ranks yet."""
        runs = [run for tenant in self.tenants.opened() for run in tenant.controllers["train"].runs()]
        return [spec for run in runs if isinstance(run, TrainingJobRun) for spec in run.promised()]

    async def close(self) -> None:
        """Leaves tuning and training jobs to other dispatchers, then stops all compiles and releases their leases, then
        stops all searches and the workers."""
        with redis_errors_logged("dispatcher_not_removed"):  # it expires by itself
            await self.shared.registry.remove(self.id)
        tenants = self.tenants.opened()
        controllers = [each for tenant in tenants for each in tenant.controllers.values()]
        await asyncio.gather(*(controller.close() for controller in controllers))
        await asyncio.gather(*(tenant.flights.close() for tenant in tenants))
        await self.search_scheduler.close()
        await self.pool.close()

    async def _flights_of(self, namespace: str) -> Flights:
        """Raises NotFound, RedisError."""
        return (await self.tenants.of(namespace)).flights
