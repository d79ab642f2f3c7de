"""What every process of the service has, whatever its role; and what it has of each namespace.

The parts of a namespace get only its own Redis keys and its own folder of the blob store, so they cannot name what
belongs to another namespace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from ..access.audit import AuditLog
from ..access.namespaces import Namespaces
from ..access.tokens import Tokens
from ..admission.admit import Admission
from ..admission.saved_requests import SavedRequests
from ..base.async_tasks import TaskSupervisor
from ..base.metrics import GatewayMetrics
from ..base.settings import ServiceSettings
from ..cache.artifact_cache import ArtifactCache
from ..cache.recount import Recount
from ..compile.events import CompileEvents
from ..compile.registry import DispatcherRegistry
from ..compile.search.database import TuningDatabase
from ..compile.single_flight import Leases
from ..jobs.training.files import TrainingFiles
from ..jobs.training.records import TrainingJobs
from ..jobs.tuning.records import TuningJobs
from ..signing.open import open_keyring
from ..storage.blobs import BlobStore, open_store
from ..storage.byte_cache import ByteCache
from ..storage.installation import Installation
from ..storage.redis.connections import connect
from ..storage.redis.counter_store import CounterStore
from ..storage.redis.keys import DEFAULT_NAMESPACE, Keys
from ..storage.redis.notifications import Notifications
from ..storage.redis.scripts import Scripts


class SharedParts:
    """Opens no connection yet. Raises SettingsError, OSError; Unavailable if a signer does not answer."""

    def __init__(self, settings: ServiceSettings) -> None:
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.settings = settings
        self.stopping = False
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
        self.keyring = open_keyring(settings)
        self.registry = DispatcherRegistry(
            self.redis, self.keys, expiry_seconds=max(3.0, 2 * settings.lease_seconds)
        )


class TenantParts:
    """One namespace, in this process."""

    def __init__(self, shared: SharedParts, namespace: str) -> None:
        settings, redis, scripts = shared.settings, shared.redis, shared.scripts
        keys = shared.keys.of(namespace)
        self.namespace = namespace
        self.keys = keys
        self.audit = AuditLog(redis, keys, entries=settings.audit_entries)
        self.counters = CounterStore(redis, keys)

        self.blobs = BlobStore(redis, keys, shared.store, shared.installation, settings)
        self.cache = ArtifactCache(
            redis,
            keys,
            scripts,
            self.blobs,
            shared.memory,
            shared.metrics,
            self.audit,
            shared.keyring,
            settings,
        )
        self.saved_requests = SavedRequests(redis, keys, scripts)
        self.tunings = TuningDatabase(redis, keys, scripts, limit=settings.tunings_limit)
        self.leases = Leases(keys, scripts, settings)
        self.events = CompileEvents(redis, keys)

        self.tuning_jobs = TuningJobs(redis, keys, scripts, self.audit, lease_seconds=settings.lease_seconds)
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
    """The namespaces in this process; the parts of each are made at its first use."""

    def __init__(self, namespaces: Namespaces, make: Callable[[str], T]) -> None:
        self._namespaces = namespaces
        self._make = make
        self.default = make(DEFAULT_NAMESPACE)
        self._open = {DEFAULT_NAMESPACE: self.default}

    async def of(self, namespace: str) -> T:
        """Raises NotFound for a namespace that does not exist, RedisError when it is not known here yet."""
        if namespace not in self._open:
            await self._namespaces.check(namespace)
            if namespace not in self._open:
                self._open[namespace] = self._make(namespace)
        return self._open[namespace]

    async def every(self) -> list[T]:
        """One for each namespace that exists, by name. Raises RedisError."""
        return [await self.of(name) for name in await self._namespaces.names()]

    def opened(self) -> list[T]:
        """Those that were used here."""
        return list(self._open.values())
