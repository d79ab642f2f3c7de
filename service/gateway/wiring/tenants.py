"""What one namespace has of its own: a namespace in; its cache, compiles, watches, counters and audit log out.

Each part is made with the namespace's own Redis keys and its own folder of the blob store, and is given no other:
what reaches a tenant's part cannot name what belongs to another tenant.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from obstore.store import ObjectStore
from redis.asyncio import Redis

from ...access.audit import AuditLog
from ...access.namespaces import Namespaces
from ...access.tokens import Grant, Tokens
from ...admission.admit import Admission
from ...admission.saved_requests import SavedRequests
from ...base.metrics import GatewayMetrics
from ...base.worker_pools import CompilePool
from ...cache.admin import CacheAdmin
from ...cache.artifact_cache import ArtifactCache
from ...cache.misses import Misses
from ...cache.rank_agreement import RankVerdicts
from ...cache.script_history import ScriptHistory
from ...compile.dispatcher import Dispatcher
from ...compile.events import CompileEvents
from ...compile.followers import Followers
from ...compile.search.database import TuningDatabase
from ...compile.search.queue import SearchQueue
from ...compile.search.scheduler import SearchScheduler
from ...compile.single_flight import Leases
from ...jobs.controller import JobController
from ...jobs.training.admission import TrainingJobAdmission
from ...jobs.training.files import TrainingFiles
from ...jobs.training.graphs import TrainingGraphCompiler
from ...jobs.training.records import TrainingJobs
from ...jobs.training.run import TrainingJobParts, TrainingJobRun
from ...jobs.tuning.admission import TuningJobAdmission
from ...jobs.tuning.records import TuningJobs
from ...jobs.tuning.run import TuningJobParts, TuningJobRun
from ...settings import ServiceSettings
from ...signing.keyring import Keyring
from ...storage.blobs import BlobStore
from ...storage.redis.counter_store import CounterStore
from ...storage.redis.keys import DEFAULT_NAMESPACE, Keys
from ...storage.redis.notifications import Notifications
from ...storage.redis.scripts import Scripts


@dataclass(frozen=True, kw_only=True)
class SharedParts:
    """What the tenants of a gateway have in common."""

    settings: ServiceSettings
    redis: Redis
    keys: Keys
    scripts: Scripts
    store: ObjectStore
    intake: Admission
    wakes: Notifications
    pool: CompilePool
    crew: SearchScheduler
    keyring: Keyring
    metrics: GatewayMetrics
    tokens: Tokens


@dataclass(frozen=True, kw_only=True)
class TenantParts:
    """One namespace, in this gateway."""

    namespace: str
    keys: Keys
    audit: AuditLog
    cache: ArtifactCache
    contents: CacheAdmin
    misses: Misses
    events: CompileEvents
    watches: Followers
    dispatcher: Dispatcher
    stats: CounterStore
    jobs: RankVerdicts
    used: ScriptHistory
    tunings: TuningDatabase
    farm: SearchQueue
    kept: SavedRequests
    tunes: TuningJobs
    tune_intake: TuningJobAdmission
    driver: JobController
    trains: TrainingJobs
    train_store: TrainingFiles
    train_intake: TrainingJobAdmission
    train_driver: JobController


class Tenants:
    """The tenants of a gateway, each made when it is first asked for."""

    def __init__(self, shared: SharedParts, namespaces: Namespaces) -> None:
        self._shared = shared
        self._namespaces = namespaces
        self.default = _build(shared, DEFAULT_NAMESPACE)
        self._open = {DEFAULT_NAMESPACE: self.default}

    async def of(self, namespace: str) -> TenantParts:
        """Raises NotFound for a namespace that does not exist, RedisError when it is not known here yet."""
        if namespace not in self._open:
            await self._namespaces.check(namespace)
            self._open.setdefault(namespace, _build(self._shared, namespace))
        return self._open[namespace]

    async def every(self) -> list[TenantParts]:
        """One for each namespace that exists, by name. Raises RedisError."""
        return [await self.of(name) for name in await self._namespaces.names()]

    async def administered(self, grant: Grant) -> list[TenantParts]:
        """Those of whom `grant` may hear: its own, or all. Raises NotFound, RedisError."""
        return await self.every() if grant.everywhere else [await self.of(grant.namespace)]

    def wake_all(self) -> None:
        """Make whoever follows a compile in this process look up (the gateway stops)."""
        for tenant in self._open.values():
            tenant.watches.wake_all()

    async def close(self) -> None:
        """Leave batch and training jobs to others, stop all compiles and give their leases back, stop all searches."""
        await asyncio.gather(*(tenant.driver.close() for tenant in self._open.values()))
        await asyncio.gather(*(tenant.train_driver.close() for tenant in self._open.values()))
        await asyncio.gather(*(tenant.dispatcher.close() for tenant in self._open.values()))
        await asyncio.gather(*(tenant.farm.close() for tenant in self._open.values()))
        await self._shared.crew.close()


def _build(shared: SharedParts, namespace: str) -> TenantParts:
    settings, redis, scripts = shared.settings, shared.redis, shared.scripts
    keys = shared.keys.of(namespace)
    audit = AuditLog(redis, keys, entries=settings.audit_entries)
    blobs = BlobStore(
        redis,
        keys,
        shared.store,
        inline_bytes=settings.blob_inline_bytes,
        inline_limit_bytes=settings.redis_blob_limit_bytes,
    )
    cache = ArtifactCache(
        redis,
        keys,
        scripts,
        blobs,
        shared.metrics,
        audit,
        keyring=shared.keyring,
        quota_bytes=settings.namespace_bytes,
        limit_bytes=settings.cache_limit_bytes,
        progress_ttl_seconds=settings.progress_ttl_seconds,
    )
    leases = Leases(redis, keys, scripts, settings)
    events = CompileEvents(redis, keys)
    tunings = TuningDatabase(redis, keys, scripts, limit=settings.tunings_limit)
    farm = SearchQueue(namespace, tunings, shared.crew, shared.metrics)
    dispatcher = Dispatcher(
        settings,
        namespace,
        leases,
        cache,
        tunings,
        farm,
        shared.intake,
        shared.pool,
        shared.keyring,
        shared.metrics,
    )
    watches = Followers(events, shared.wakes, dispatcher, settings)
    kept = SavedRequests(redis, keys, scripts)
    tunes = TuningJobs(redis, keys, scripts, lease_seconds=settings.lease_seconds)
    tuning_parts = TuningJobParts(
        jobs=tunes,
        queue=farm,
        dispatcher=dispatcher,
        followers=watches,
        cache=cache,
        tunings=tunings,
        admission=shared.intake,
        pool=shared.pool,
    )
    train_store = TrainingFiles(shared.store, namespace)
    trains = TrainingJobs(
        redis,
        keys,
        scripts,
        train_store,
        lease_seconds=settings.lease_seconds,
        most_open=settings.train_open_jobs,
        files_bytes=settings.train_files_bytes,
    )
    training_parts = TrainingJobParts(
        namespace=namespace,
        jobs=trains,
        store=train_store,
        pool=shared.pool,
        compiler=TrainingGraphCompiler(cache, dispatcher, watches, shared.intake, kept),
        tokens=shared.tokens,
        keyring=shared.keyring,
        settings=settings,
    )
    lease_seconds = settings.lease_seconds
    return TenantParts(
        namespace=namespace,
        keys=keys,
        audit=audit,
        cache=cache,
        contents=CacheAdmin(redis, keys, scripts, blobs, audit),
        misses=Misses(redis, keys, scripts),
        events=events,
        watches=watches,
        dispatcher=dispatcher,
        stats=CounterStore(redis, keys),
        jobs=RankVerdicts(redis, keys, scripts),
        used=ScriptHistory(redis, keys, scripts),
        tunings=tunings,
        farm=farm,
        kept=kept,
        tunes=tunes,
        tune_intake=TuningJobAdmission(settings.limits, shared.intake, kept, shared.pool, farm),
        driver=JobController(
            tunes, partial(TuningJobRun, tuning_parts), shared.wakes, lease_seconds=lease_seconds
        ),
        trains=trains,
        train_store=train_store,
        train_intake=TrainingJobAdmission(train_store, shared.pool),
        train_driver=JobController(
            trains, partial(TrainingJobRun, training_parts), shared.wakes, lease_seconds=lease_seconds
        ),
    )
