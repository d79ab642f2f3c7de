"""The gateway's parts, made once for each app and handed to the routes."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request
from redis.asyncio import Redis

from ....workers.pool import PoolSettings, WorkerPool
from ...access.audit import AuditLog
from ...access.namespaces import Namespaces
from ...access.quotas import Quotas
from ...access.tokens import Tokens
from ...admission.admit import Admission
from ...base.metrics import GatewayMetrics
from ...base.worker_pools import CompilePool
from ...compile.search.scheduler import SearchScheduler
from ...settings import ServiceSettings
from ...signing import key_files
from ...signing.keyring import Keyring
from ...storage.blobs import open_store
from ...storage.redis.connections import connect
from ...storage.redis.keys import Keys
from ...storage.redis.notifications import Notifications
from ...storage.redis.scripts import Scripts
from .tenants import SharedParts, Tenants


@dataclass(frozen=True, kw_only=True)
class GatewayParts:
    """Everything a route may use."""

    settings: ServiceSettings
    redis: Redis
    tokens: Tokens
    namespaces: Namespaces
    quotas: Quotas
    tenants: Tenants
    """What belongs to a namespace: `await gateway.tenants.of(grant.namespace)`."""
    intake: Admission
    wakes: Notifications
    pool: CompilePool
    keyring: Keyring
    metrics: GatewayMetrics
    state: GatewayState


@dataclass
class GatewayState:
    """What changes while a gateway runs. `pool_error`: why the workers could not be started, or ''."""

    pool_started: bool = False
    pool_error: str = ""
    stopping: bool = False


def build(settings: ServiceSettings, pool: CompilePool) -> GatewayParts:
    """Wire the parts together; opens no connection yet. Raises SettingsError, OSError."""
    settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    redis = connect(settings)
    keys, scripts, metrics = Keys(settings.redis_prefix), Scripts(redis), GatewayMetrics()
    keyring = Keyring(settings.keys_location, key_files.read_trusted_keys(settings.trusted_public_keys))
    intake = Admission(settings.limits, body_timeout_seconds=settings.body_timeout_seconds)
    namespaces, wakes = Namespaces(redis, keys), Notifications(redis, keys)
    audit = AuditLog(redis, keys, entries=settings.audit_entries)
    tokens = Tokens(redis, keys, scripts, audit, settings)
    shared = SharedParts(
        settings=settings,
        redis=redis,
        keys=keys,
        scripts=scripts,
        store=open_store(
            settings.blob_location,
            timeout_seconds=settings.blob_timeout_seconds,
            allow_http=settings.blob_allow_http,
        ),
        intake=intake,
        wakes=wakes,
        pool=pool,
        crew=SearchScheduler(pool, metrics),
        keyring=keyring,
        metrics=metrics,
        tokens=tokens,
    )
    tenants = Tenants(shared, namespaces)
    return GatewayParts(
        settings=settings,
        redis=redis,
        tokens=tokens,
        namespaces=namespaces,
        quotas=Quotas(redis, keys, tenants.default.audit, settings),
        tenants=tenants,
        intake=intake,
        wakes=wakes,
        pool=pool,
        keyring=keyring,
        metrics=metrics,
        state=GatewayState(),
    )


def worker_pool(settings: ServiceSettings) -> CompilePool:
    """The Ray workers that the settings describe."""
    return WorkerPool(
        PoolSettings(
            ray_address=settings.ray_address,
            ray_token=settings.ray_token.get_secret_value() if settings.ray_token else None,
            temp_dir=settings.ray_temp_dir,
            cpu_slots=settings.cpu_slots,
            gpu_slots_per_gpu=settings.gpu_slots_per_gpu,
            queue_limit=settings.max_queued,
            memory_limit_bytes=settings.worker_memory_limit_bytes,
            request_limits=settings.limits,
            kernels_dir=settings.kernels_location,
            kernels_bytes=settings.kernels_limit_bytes,
        )
    )


def gateway_of(request: Request) -> GatewayParts:
    """The FastAPI dependency behind every route."""
    gateway: GatewayParts = request.app.state.gateway
    return gateway
