"""What every process of the service has, whatever its role; and what it has of each namespace.

The parts of a namespace get only its own Redis keys and its own folder of the blob store, so they cannot name what
belongs to another namespace.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Generic, TypeVar

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from ...compiler import VERSION, install_hint
from ...compiler.errors import NotFound
from ...compiler.request import schema
from ..access.audit import AuditLog
from ..access.namespaces import Namespaces
from ..access.tokens import Tokens
from ..admission.admit import Admission
from ..admission.saved_requests import SavedRequests
from ..base.async_tasks import Recent, TaskSupervisor
from ..base.budgets import Budgets
from ..base.counters import Counters
from ..base.metrics import GatewayMetrics, Load, TargetLoad
from ..base.settings import ServiceSettings
from ..base.tracing import Tracer
from ..cache.artifact_cache import ArtifactCache
from ..cache.components import EntryComponents
from ..cache.recount import Recount
from ..cache.use_counts import UseCounts
from ..compile.events import CompileEvents
from ..compile.pending import PendingCompiles
from ..compile.registry import DispatcherRegistry
from ..compile.search.database import TuningDatabase
from ..compile.single_flight import Leases, Priority
from ..jobs.training.files import TrainingFiles
from ..jobs.training.records import TrainingJobs
from ..jobs.tuning import records as tuning_records
from ..jobs.tuning.records import TuningJobs
from ..signing.open import open_keyring
from ..storage.blobs import BlobStore, open_store
from ..storage.byte_cache import ByteCache
from ..storage.installation import Installation
from ..storage.outages import StoreOutages
from ..storage.redis.connections import RedisClient, connect, connect_replicas
from ..storage.redis.keys import DEFAULT_NAMESPACE, Keys
from ..storage.redis.notifications import Notifications
from ..storage.redis.scripts import Scripts

_LOAD_SECONDS = 1.0
"""How old the load may be that a scrape shows."""
_SCRAPE_SECONDS = _READY_SECONDS = 2.0
KNOWN_SECONDS = 5.0
"""A namespace that existed is not asked for again for so long."""
_STATES = ("idle", "busy", "starting", "dead")
_OTHER = "other"
"""The toolchain of whatever no worker is for. Clients name toolchains and GPUs, and Prometheus keeps each name."""

log = structlog.get_logger(__name__)


class SharedParts:
    """Opens no connection yet. Raises SettingsError, OSError; Unavailable if a signer does not answer."""

    def __init__(self, settings: ServiceSettings) -> None:
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.settings = settings
        self.stopping = False
        self.metrics = GatewayMetrics()
        self.tracer = _exporting_tracer() if settings.exports_traces else Tracer()
        self.supervisor = TaskSupervisor(lambda task: self.metrics.background_failures.labels(task).inc())

        def count_error(kind: str) -> None:
            self.metrics.redis_errors.labels(kind).inc()

        self.redis = connect(settings, count_error)
        self.keys = Keys(settings.redis_prefix)
        self.replicas = connect_replicas(settings, count_error)
        self.scripts = Scripts(self.redis, self.replicas)
        self.notifications = Notifications(self.redis, self.keys)
        self.store = open_store(
            settings.blob_location,
            timeout_seconds=settings.blob_timeout_seconds,
            allow_http=settings.blob_allow_http,
        )
        outages = StoreOutages(lambda operation: self.metrics.store_errors.labels(operation).inc())
        self.installation = Installation(self.redis, self.keys, self.store, outages)
        self.memory = ByteCache(settings.memory_cache_bytes)
        self.uses = UseCounts(self.keys, self.scripts)

        audit = AuditLog(self.redis, self.keys, entries=settings.audit_entries)
        self.tokens = Tokens(self.redis, self.keys, self.scripts, audit, settings)
        self.namespaces = Namespaces(self.redis, self.keys, self.scripts)
        self.recount = Recount(self.redis, self.keys, self.scripts)
        self.budgets = Budgets(settings)
        self.admission = Admission(
            settings.limits,
            self.budgets.work,
            body_timeout_seconds=settings.body_timeout_seconds,
            on_parse=self.metrics.request_parses.inc,
        )
        self.keyring = open_keyring(settings)
        self.registry = DispatcherRegistry(
            self.redis, self.keys, expiry_seconds=max(3.0, 2 * settings.lease_seconds)
        )
        self.pending = PendingCompiles(self.redis, self.keys, most=settings.max_queued)
        self._load: Recent[Load] = Recent(_LOAD_SECONDS)

    async def redis_problem(self, client: RedisClient | Redis | None = None) -> str:
        """Why Redis does not answer, or ''. client: default that of the primary."""
        try:
            async with asyncio.timeout(_READY_SECONDS):
                await (client or self.redis).ping()
        except (RedisError, TimeoutError, OSError) as error:
            return str(error) or "no answer"
        return ""

    async def render_metrics(self, counters: Mapping[str, Counters] | None) -> bytes:
        """What Prometheus reads; without the installation's load while Redis cannot be asked."""
        load = None
        with suppress(RedisError, TimeoutError):
            async with asyncio.timeout(_SCRAPE_SECONDS):
                load = await self._load.get(lambda: _read_load(self.pending, self.registry))
        return self.metrics.render(
            counters, load, redis_up=load is not None, signer_up=self.keyring.reachable
        )


async def _read_load(pending: PendingCompiles, registry: DispatcherRegistry) -> Load:
    """The load of the whole installation. Raises RedisError."""
    dispatchers = await registry.dispatchers()
    slots: dict[tuple[str, str], Counter[str]] = {}
    for worker in (worker for each in dispatchers for worker in each.workers):
        slots.setdefault(_kind(worker.toolchain, worker.target), Counter())[worker.state] += 1
    waits: dict[tuple[str, str], list[float]] = {kind: [] for kind in slots}
    for compile in await pending.due():
        if compile.priority is not Priority.PERSON:  # jobs may wait for hours
            continue
        kind = _kind(compile.needs.toolchain, compile.needs.target)
        waits.setdefault(kind if kind in slots else (compile.needs.target.kind, _OTHER), []).append(
            compile.waited
        )
    ready = sum(each.ready for each in dispatchers)
    return Load(
        {"ready": ready, "not ready": len(dispatchers) - ready},
        [
            TargetLoad(
                *kind,
                waiting=len(waited),
                oldest_wait=max(waited, default=0.0),
                slots={state: slots.get(kind, Counter())[state] for state in _STATES},
            )
            for kind, waited in sorted(waits.items())
        ],
    )


def _kind(toolchain: schema.Toolchain, target: schema.Target) -> tuple[str, str]:
    """The kind as an operator names it. A worker that starts has no toolchain yet."""
    software = f"{toolchain.python} torch {toolchain.torch}" if toolchain.torch else ""
    return target.name or target.kind, software


def _exporting_tracer() -> Tracer:
    """Whoever exports no spans need not have, nor import, OpenTelemetry's SDK."""
    try:
        from ..base.span_exporter import exporting_tracer
    except ImportError as error:
        log.warning("traces_not_exported", error=str(error), hint=install_hint("server,otel"))
        return Tracer()
    return exporting_tracer(VERSION)


class TenantParts:
    def __init__(self, shared: SharedParts, namespace: str) -> None:
        settings, redis, scripts = shared.settings, shared.redis, shared.scripts
        keys = shared.keys.of(namespace)
        self.namespace = namespace
        self.keys = keys
        self.audit = AuditLog(redis, keys, entries=settings.audit_entries)

        self.blobs = BlobStore(redis, keys, shared.store, shared.installation, settings)
        self.components = EntryComponents(redis, keys, scripts, limit=settings.explain_bytes)
        self.cache = ArtifactCache(
            redis,
            keys,
            scripts,
            self.blobs,
            shared.memory,
            shared.uses,
            shared.metrics,
            self.audit,
            shared.keyring,
            self.components,
            settings,
        )
        self.saved_requests = SavedRequests(redis, keys, scripts)
        self.tunings = TuningDatabase(redis, keys, scripts, limit=settings.tunings_limit)
        self.leases = Leases(keys, scripts, settings)
        self.events = CompileEvents(redis, keys, scripts)

        self.tuning_jobs = TuningJobs(
            redis,
            keys,
            scripts,
            self.audit,
            lease_seconds=settings.lease_seconds,
            most=tuning_records.MOST,
            most_open=tuning_records.MOST_OPEN,
        )
        self.training_files = TrainingFiles(shared.store, namespace, shared.installation)
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


T = TypeVar("T", bound=TenantParts)


class Tenants(Generic[T]):
    """The namespaces in this process; the parts of each are made at its first use, and dropped once it is deleted."""

    def __init__(self, namespaces: Namespaces, make: Callable[[str], T]) -> None:
        self._namespaces = namespaces
        self._make = make
        self.default = make(DEFAULT_NAMESPACE)
        self._open = {DEFAULT_NAMESPACE: self.default}
        self._known: dict[str, float] = {DEFAULT_NAMESPACE: math.inf}  # until when it need not be asked for

    async def of(self, namespace: str) -> T:
        """Raises NotFound for a namespace that does not exist, RedisError when that was not asked for
        KNOWN_SECONDS."""
        if self._known.get(namespace, 0.0) < time.monotonic():
            try:
                await self._namespaces.check(namespace)
            except NotFound:
                self._drop(namespace)
                raise
            self._known[namespace] = time.monotonic() + KNOWN_SECONDS
        return self._opened(namespace)

    async def every(self) -> list[T]:
        """One for each namespace that exists, by name. Raises RedisError."""
        names = await self._namespaces.names()
        for gone in self._open.keys() - set(names):
            self._drop(gone)
        return [self._opened(name) for name in names]

    def _drop(self, namespace: str) -> None:
        self._open.pop(namespace, None)
        self._known.pop(namespace, None)

    def _opened(self, namespace: str) -> T:
        if namespace not in self._open:
            self._open[namespace] = self._make(namespace)
        return self._open[namespace]

    def opened(self) -> list[T]:
        """Those that were used here."""
        return list(self._open.values())
