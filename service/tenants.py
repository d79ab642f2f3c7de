"""What one namespace has of its own: a namespace in; its cache, compiles, watches, counters and audit log out.

Each part is made with the namespace's own Redis keys and its own folder of the blob store, and is given no other:
what reaches a tenant's part cannot name what belongs to another tenant.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from obstore.store import ObjectStore
from redis.asyncio import Redis

from .audit import Audit
from .auth import Grant, Tokens
from .blobs import Blobs
from .cache import Cache
from .contents import Contents
from .crew import Crew
from .dispatch import CompilePool, Dispatcher
from .events import Events, WakeUps
from .farm import Farm
from .intake import Intake
from .jobs import Jobs
from .kept_requests import KeptRequests
from .leases import Leases
from .metrics import Metrics
from .namespaces import Namespaces
from .nearest import Misses
from .scripts import DEFAULT, Keys, Scripts
from .settings import ServiceSettings
from .signing import Keyring
from .stats import Stats
from .training.compile import TrainCompiler
from .training.drive import Parts, TrainDriver
from .training.intake import TrainIntake
from .training.store import TrainStore
from .training.trains import Trains
from .tune_drive import Driver
from .tune_intake import TuneIntake
from .tunes import Tunes
from .tunings import Tunings
from .used import Used
from .watch import Watches


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What the tenants of a gateway have in common."""

    settings: ServiceSettings
    redis: Redis
    keys: Keys
    scripts: Scripts
    store: ObjectStore
    intake: Intake
    wakes: WakeUps
    pool: CompilePool
    crew: Crew
    keyring: Keyring
    metrics: Metrics
    tokens: Tokens


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """One namespace, in this gateway."""

    namespace: str
    keys: Keys
    audit: Audit
    cache: Cache
    contents: Contents
    misses: Misses
    events: Events
    watches: Watches
    dispatcher: Dispatcher
    stats: Stats
    jobs: Jobs
    used: Used
    tunings: Tunings
    farm: Farm
    kept: KeptRequests
    tunes: Tunes
    tune_intake: TuneIntake
    driver: Driver
    trains: Trains
    train_store: TrainStore
    train_intake: TrainIntake
    train_driver: TrainDriver


class Tenants:
    """The tenants of a gateway, each made when it is first asked for."""

    def __init__(self, shared: Shared, namespaces: Namespaces) -> None:
        self._shared = shared
        self._namespaces = namespaces
        self.default = _tenant(shared, DEFAULT)
        self._open = {DEFAULT: self.default}

    async def of(self, namespace: str) -> Tenant:
        """Raises NotFound for a namespace that does not exist, RedisError when it is not known here yet."""
        if namespace not in self._open:
            await self._namespaces.check(namespace)
            self._open.setdefault(namespace, _tenant(self._shared, namespace))
        return self._open[namespace]

    async def every(self) -> list[Tenant]:
        """One for each namespace that exists, by name. Raises RedisError."""
        return [await self.of(name) for name in await self._namespaces.names()]

    async def administered(self, grant: Grant) -> list[Tenant]:
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


def _tenant(shared: Shared, namespace: str) -> Tenant:
    settings, redis, scripts = shared.settings, shared.redis, shared.scripts
    keys = shared.keys.of(namespace)
    audit = Audit(redis, keys, entries=settings.audit_entries)
    blobs = Blobs(
        redis,
        keys,
        shared.store,
        inline_bytes=settings.blob_inline_bytes,
        inline_limit_bytes=settings.redis_blob_limit_bytes,
    )
    cache = Cache(
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
    events = Events(redis, keys)
    tunings = Tunings(redis, keys, scripts, limit=settings.tunings_limit)
    farm = Farm(namespace, tunings, shared.crew, shared.metrics)
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
    watches = Watches(events, shared.wakes, dispatcher, settings)
    kept = KeptRequests(redis, keys, scripts)
    tunes = Tunes(redis, keys, scripts, lease_seconds=settings.lease_seconds)
    driver = Driver(
        tunes,
        farm=farm,
        dispatcher=dispatcher,
        watches=watches,
        wakes=shared.wakes,
        cache=cache,
        tunings=tunings,
        intake=shared.intake,
        pool=shared.pool,
        lease_seconds=settings.lease_seconds,
    )
    train_store = TrainStore(shared.store, namespace)
    trains = Trains(
        redis,
        keys,
        scripts,
        train_store,
        lease_seconds=settings.lease_seconds,
        most_open=settings.train_open_jobs,
        files_bytes=settings.train_files_bytes,
    )
    train_driver = TrainDriver(
        Parts(
            namespace=namespace,
            trains=trains,
            store=train_store,
            pool=shared.pool,
            compiler=TrainCompiler(cache, dispatcher, watches, shared.intake, kept),
            tokens=shared.tokens,
            keyring=shared.keyring,
            wakes=shared.wakes,
            settings=settings,
        )
    )
    return Tenant(
        namespace=namespace,
        keys=keys,
        audit=audit,
        cache=cache,
        contents=Contents(redis, keys, scripts, blobs, audit),
        misses=Misses(redis, keys, scripts),
        events=events,
        watches=watches,
        dispatcher=dispatcher,
        stats=Stats(redis, keys),
        jobs=Jobs(redis, keys, scripts),
        used=Used(redis, keys, scripts),
        tunings=tunings,
        farm=farm,
        kept=kept,
        tunes=tunes,
        tune_intake=TuneIntake(settings.limits, shared.intake, kept, shared.pool, farm),
        driver=driver,
        trains=trains,
        train_store=train_store,
        train_intake=TrainIntake(train_store, shared.pool),
        train_driver=train_driver,
    )
