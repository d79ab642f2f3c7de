"""The composition of a gateway: every part of it, and of each namespace, is made here, in the order of this file.

The parts of a namespace get only its own Redis keys and its own folder of the blob store, so they cannot name what
belongs to another namespace.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from functools import partial

from fastapi import Request

from ....compiler.api.admin import REINDEX_PARTS
from ....workers.pool import WorkerPool
from ...access.audit import AuditLog
from ...access.namespaces import PATTERN, Namespaces
from ...access.quotas import Quotas
from ...access.tokens import Grant, Tokens
from ...admission.admit import Admission
from ...admission.saved_requests import SavedRequests
from ...base.async_tasks import Recent, TaskSupervisor
from ...base.counters import Counters
from ...base.metrics import GatewayMetrics
from ...cache.admin import CacheAdmin
from ...cache.artifact_cache import ArtifactCache
from ...cache.misses import Misses
from ...cache.rank_agreement import RankVerdicts
from ...cache.recount import Recount
from ...cache.script_history import ScriptHistory
from ...compile.dispatcher import Dispatcher
from ...compile.events import CompileEvents
from ...compile.followers import Followers
from ...compile.search.autotunes import AutotuneEntries
from ...compile.search.database import TuningDatabase
from ...compile.search.queue import SearchQueue
from ...compile.search.scheduler import SearchScheduler
from ...compile.single_flight import Leases
from ...jobs.controller import JobController
from ...jobs.training.admission import TrainingJobAdmission
from ...jobs.training.files import FOLDER, TrainingFiles
from ...jobs.training.precompile import TrainingGraphCompiler
from ...jobs.training.records import TrainingJobs
from ...jobs.training.run import TrainingJobParts, TrainingJobRun
from ...jobs.tuning.admission import TuningJobAdmission
from ...jobs.tuning.records import TuningJobs
from ...jobs.tuning.run import TuningJobParts, TuningJobRun
from ...settings import ServiceSettings
from ...signing import key_files
from ...signing.keyring import Keyring
from ...storage.blobs import FOLDERS, BlobStore, open_store
from ...storage.byte_cache import ByteCache
from ...storage.installation import Installation
from ...storage.redis.connections import connect
from ...storage.redis.counter_store import CounterStore
from ...storage.redis.keys import DEFAULT_NAMESPACE, Keys
from ...storage.redis.notifications import Notifications
from ...storage.redis.scripts import Scripts
from ..http.event_stream import EventStreams

_COUNTERS_SECONDS = 1.0
"""How old counters may be that whoever has no token gets."""


@dataclass
class GatewayState:
    """What changes while a gateway runs. `pool_error`: why the workers could not be started, or ''."""

    pool_started: bool = False
    pool_error: str = ""
    stopping: bool = False


class GatewayParts:
    """Everything a route may use. Opens no connection yet. Raises SettingsError, OSError."""

    def __init__(self, settings: ServiceSettings, pool: WorkerPool) -> None:
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.settings = settings
        self.pool = pool
        self.state = GatewayState()
        self.metrics = GatewayMetrics()
        self.supervisor = TaskSupervisor(lambda task: self.metrics.background_failures.labels(task).inc())

        self.redis = connect(settings)
        self.keys = Keys(settings.redis_prefix)
        self.scripts = Scripts(self.redis)
        self.notifications = Notifications(self.redis, self.keys)
        self.store = open_store(
            settings.blob_location,
            timeout_seconds=settings.blob_timeout_seconds,
            allow_http=settings.blob_allow_http,
        )

        self.installation = Installation(self.redis, self.keys, self.store)
        self.memory = ByteCache(settings.memory_cache_bytes)

        audit = AuditLog(self.redis, self.keys, entries=settings.audit_entries)
        self.tokens = Tokens(self.redis, self.keys, self.scripts, audit, settings)
        self.namespaces = Namespaces(self.redis, self.keys)
        self.recount = Recount(self.redis, self.keys, self.scripts)
        self.admission = Admission(settings.limits, body_timeout_seconds=settings.body_timeout_seconds)
        self.keyring = Keyring(
            settings.keys_location, key_files.read_trusted_keys(settings.trusted_public_keys)
        )
        self.search_scheduler = SearchScheduler(pool, self.metrics)

        self.event_streams = EventStreams(
            self.metrics.streams, settings.keepalive_seconds, lambda: self.state.stopping
        )

        self.tenants = Tenants(self)
        self.counters_for_anyone: Recent[dict[str, Counters]] = Recent(_COUNTERS_SECONDS)
        self.quotas = Quotas(self.redis, self.keys, self.tenants.default.audit, settings)


class TenantParts:
    """One namespace, in this gateway."""

    def __init__(self, gateway: GatewayParts, namespace: str) -> None:
        settings, redis, scripts = gateway.settings, gateway.redis, gateway.scripts
        pool, admission, notifications = gateway.pool, gateway.admission, gateway.notifications
        keys = gateway.keys.of(namespace)
        self.namespace = namespace
        self.keys = keys
        self.audit = AuditLog(redis, keys, entries=settings.audit_entries)
        self.counters = CounterStore(redis, keys)

        blobs = BlobStore(redis, keys, gateway.store, gateway.installation, settings)
        self.cache = ArtifactCache(
            redis,
            keys,
            scripts,
            blobs,
            gateway.memory,
            gateway.metrics,
            self.audit,
            gateway.keyring,
            settings,
        )
        self.cache_admin = CacheAdmin(redis, keys, scripts, blobs, self.audit)
        self.misses = Misses(redis, keys, scripts)
        self.script_history = ScriptHistory(redis, keys, scripts)
        self.rank_verdicts = RankVerdicts(redis, keys, scripts)
        self.saved_requests = SavedRequests(redis, keys, scripts)

        self.tunings = TuningDatabase(redis, keys, scripts, limit=settings.tunings_limit)
        self.autotunes = AutotuneEntries(keys, scripts, limit=settings.tunings_limit)
        self.searches = SearchQueue(namespace, self.tunings, gateway.search_scheduler, gateway.metrics)

        self.events = CompileEvents(redis, keys)
        self.dispatcher = Dispatcher(
            settings,
            namespace,
            Leases(keys, scripts, settings),
            self.cache,
            self.tunings,
            self.searches,
            admission,
            pool,
            gateway.keyring,
            gateway.metrics,
        )
        self.followers = Followers(self.events, notifications, self.dispatcher, settings)

        self.tuning_jobs = TuningJobs(redis, keys, scripts, self.audit, lease_seconds=settings.lease_seconds)
        self.tuning_admission = TuningJobAdmission(
            settings.limits, admission, self.saved_requests, pool, self.searches
        )
        tuning_parts = TuningJobParts(
            jobs=self.tuning_jobs,
            queue=self.searches,
            dispatcher=self.dispatcher,
            followers=self.followers,
            cache=self.cache,
            tunings=self.tunings,
            admission=admission,
            pool=pool,
        )
        self.tuning_controller = JobController(
            self.tuning_jobs,
            partial(TuningJobRun, tuning_parts),
            notifications,
            lease_seconds=settings.lease_seconds,
        )

        self.training_files = TrainingFiles(gateway.store, namespace, gateway.installation)
        self.training_jobs = TrainingJobs(
            redis,
            keys,
            scripts,
            self.audit,
            self.training_files,
            lease_seconds=settings.lease_seconds,
            most=settings.train_keep_jobs,
            most_open=settings.train_open_jobs,
            files_bytes=settings.train_files_bytes,
        )
        self.training_admission = TrainingJobAdmission(self.training_files, pool)
        training_parts = TrainingJobParts(
            namespace=namespace,
            jobs=self.training_jobs,
            store=self.training_files,
            pool=pool,
            compiler=TrainingGraphCompiler(
                self.cache, self.dispatcher, self.followers, admission, self.saved_requests
            ),
            tokens=gateway.tokens,
            keyring=gateway.keyring,
            settings=settings,
        )
        self.training_controller = JobController(
            self.training_jobs,
            partial(TrainingJobRun, training_parts),
            notifications,
            lease_seconds=settings.lease_seconds,
        )


class Tenants:
    """The namespaces of a gateway; the parts of each are made at its first use."""

    def __init__(self, gateway: GatewayParts) -> None:
        self._gateway = gateway
        self.default = TenantParts(gateway, DEFAULT_NAMESPACE)
        self._open = {DEFAULT_NAMESPACE: self.default}

    async def of(self, namespace: str) -> TenantParts:
        """Raises NotFound for a namespace that does not exist, RedisError when it is not known here yet."""
        if namespace not in self._open:
            await self._gateway.namespaces.check(namespace)
            self._open.setdefault(namespace, TenantParts(self._gateway, namespace))
        return self._open[namespace]

    async def every(self) -> list[TenantParts]:
        """One for each namespace that exists, by name. Raises RedisError."""
        return [await self.of(name) for name in await self._gateway.namespaces.names()]

    async def reindex(self, part: int, *, by: Grant) -> int:
        """Offers again what the blob store holds of one of REINDEX_PARTS. After the last, Redis and the store belong
        together. Returns how many artifacts came back. Raises Unavailable, RedisError."""
        gateway = self._gateway
        found = {*await gateway.installation.folders(FOLDERS), *await gateway.installation.folders(FOLDER)}
        async with gateway.redis.pipeline(transaction=True) as pipe:
            for name in found:
                if re.fullmatch(PATTERN, name) and name != DEFAULT_NAMESPACE:
                    gateway.namespaces.add(name, within=pipe)
            await pipe.execute()
        indexed = sum([await tenant.cache.reindex(part, by=by) for tenant in await self.every()])
        if part == REINDEX_PARTS - 1:
            await gateway.installation.adopt()
        return indexed

    async def administered(self, grant: Grant) -> list[TenantParts]:
        """Those that `grant` may see: its own, or all. Raises NotFound, RedisError."""
        return await self.every() if grant.everywhere else [await self.of(grant.namespace)]

    def wake_all(self) -> None:
        """Wake all followers of compiles in this process, when the gateway stops."""
        for tenant in self._open.values():
            tenant.followers.wake_all()

    async def close(self) -> None:
        """Leaves tuning and training jobs to other gateways, then stops all compiles and releases their leases, then
        stops all searches."""
        tenants = list(self._open.values())
        await asyncio.gather(*(tenant.tuning_controller.close() for tenant in tenants))
        await asyncio.gather(*(tenant.training_controller.close() for tenant in tenants))
        await asyncio.gather(*(tenant.dispatcher.close() for tenant in tenants))
        await asyncio.gather(*(tenant.searches.close() for tenant in tenants))
        await self._gateway.search_scheduler.close()


def gateway_of(request: Request) -> GatewayParts:
    """The FastAPI dependency of every route."""
    gateway: GatewayParts = request.app.state.gateway
    return gateway
