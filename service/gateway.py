"""The gateway's parts, made once for each app and handed to the routes."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import structlog
from fastapi import Request
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import RedisError

from ..compiler.errors import Unavailable
from ..workers.pool import PoolSettings, WorkerPool
from . import signing
from .audit import Audit
from .auth import Tokens
from .blobs import open_store
from .connections import ConnectionsInTurn
from .crew import Crew
from .dispatch import CompilePool
from .events import WakeUps
from .intake import Intake
from .metrics import Metrics
from .namespaces import Namespaces
from .quotas import Quotas
from .scripts import Keys, Scripts
from .settings import ServiceSettings
from .signing import Keyring
from .tenants import Shared, Tenants
from .training import folders

log = structlog.get_logger(__name__)

_REDIS_CONNECTIONS = 64
_LEASE_CONNECTIONS = 4
_REDIS_RETRIES = 3
_QUEUE_TIMES = 3
_POOL_RESTART_SECONDS = 5.0
_SWEEP_SECONDS = 6 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Gateway:
    """Everything a route may use."""

    settings: ServiceSettings
    redis: Redis
    tokens: Tokens
    namespaces: Namespaces
    quotas: Quotas
    tenants: Tenants
    """What belongs to a namespace: `await gateway.tenants.of(grant.namespace)`."""
    intake: Intake
    wakes: WakeUps
    pool: CompilePool
    keyring: Keyring
    metrics: Metrics
    state: GatewayState


@dataclass
class GatewayState:
    """What changes while a gateway runs. `pool_error`: why the workers could not be started, or ''."""

    pool_started: bool = False
    pool_error: str = ""
    stopping: bool = False


def build(settings: ServiceSettings, pool: CompilePool) -> Gateway:
    """Wire the parts together; opens no connection yet. Raises SettingsError, OSError."""
    settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    redis = connect(settings)
    keys, scripts, metrics = Keys(settings.redis_prefix), Scripts(redis), Metrics()
    keyring = Keyring(settings.keys_location, signing.read_sites(settings.trusted_public_keys))
    intake = Intake(settings.limits, body_timeout_seconds=settings.body_timeout_seconds)
    namespaces, wakes = Namespaces(redis, keys), WakeUps(redis, keys)
    audit = Audit(redis, keys, entries=settings.audit_entries)
    tokens = Tokens(redis, keys, scripts, audit, settings)
    shared = Shared(
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
        crew=Crew(pool, metrics),
        keyring=keyring,
        metrics=metrics,
        tokens=tokens,
    )
    tenants = Tenants(shared, namespaces)
    return Gateway(
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


def connect(settings: ServiceSettings) -> Redis:
    """A client that reconnects by itself; no answer is waited for longer than `redis_timeout_seconds`, and a
    free connection not much longer than two answers that do not come: a burst waits its turn."""
    # redis-py before 6 takes a certificate for any name unless told otherwise
    tls = {"ssl_check_hostname": True} if settings.redis_url.startswith("rediss:") else {}
    pool = ConnectionsInTurn.from_url(
        settings.redis_url,
        **tls,
        max_connections=_REDIS_CONNECTIONS,
        for_leases=_LEASE_CONNECTIONS,
        timeout=_QUEUE_TIMES * settings.redis_timeout_seconds,
        socket_timeout=settings.redis_timeout_seconds,
        socket_connect_timeout=settings.redis_timeout_seconds,
        retry=Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.25), _REDIS_RETRIES),
    )
    return Redis.from_pool(pool)


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


async def start_pool(gateway: Gateway) -> None:
    """Start the workers beside the gateway, which answers hits meanwhile; try again until it works."""
    state = gateway.state
    while not state.pool_started:
        try:
            await gateway.pool.start()
            state.pool_started, state.pool_error = True, ""
        except Exception as error:  # whatever Ray raises: it is logged, shown by /readyz, and tried again
            state.pool_error = str(error)
            log.error("workers_not_started", error=str(error), exc_info=True)
            await asyncio.sleep(_POOL_RESTART_SECONDS)


async def sweep(gateway: Gateway) -> None:
    """Now and then, delete what crashes left in the blob store, and what training jobs left. Runs until cancelled."""
    while True:
        try:
            for tenant in await gateway.tenants.every():
                if gone := await tenant.cache.sweep():
                    log.info("orphans_deleted", namespace=tenant.namespace, count=gone)
                if gone := await tenant.trains.sweep():
                    log.info("train_files_deleted", namespace=tenant.namespace, count=gone)
            await _tidy_trains(gateway)
        except (RedisError, Unavailable) as error:
            log.warning("blobs_not_swept", error=str(error))
        await asyncio.sleep(_SWEEP_SECONDS)


async def _tidy_trains(gateway: Gateway) -> None:
    """Remove the folders of training jobs that nobody can go on with. Raises RedisError, Unavailable."""
    settings = gateway.settings
    if not settings.train_keep_seconds and not settings.train_keep_bytes:
        return
    needed = {
        Path(settings.train_folder(tenant.namespace)): folders.kept(await tenant.trains.jobs())
        for tenant in await gateway.tenants.every()
    }
    gone = await asyncio.to_thread(
        folders.tidy,
        Path(settings.train_location),
        needed,
        seconds=settings.train_keep_seconds,
        limit=settings.train_keep_bytes,
        stopping=lambda: gateway.state.stopping,
    )
    for folder in gone:
        log.info("train_folder_removed", folder=str(folder))


async def drive_tunes(gateway: Gateway) -> None:
    """Take up batch jobs that no gateway drives, of all namespaces. Runs until cancelled."""
    while not gateway.state.stopping:
        try:
            for tenant in await gateway.tenants.every():
                await tenant.driver.look()
        except (RedisError, Unavailable) as error:
            log.warning("tunes_not_looked_at", error=str(error))
        await asyncio.sleep(gateway.settings.lease_seconds)


async def drive_trains(gateway: Gateway) -> None:
    """Take up training jobs that no gateway drives, of all namespaces, and count them. Runs until cancelled."""
    while not gateway.state.stopping:
        try:
            tenants = await gateway.tenants.every()
            states: Counter[str] = Counter()
            for tenant in tenants:
                await tenant.train_driver.look()
                states.update(await tenant.trains.states())
            for state, count in states.items():
                gateway.metrics.trains.labels(state).set(count)
            gateway.metrics.trains_here.set(sum(tenant.train_driver.driven() for tenant in tenants))
        except (RedisError, Unavailable) as error:
            log.warning("trains_not_looked_at", error=str(error))
        await asyncio.sleep(gateway.settings.lease_seconds)


def gateway_of(request: Request) -> Gateway:
    """The FastAPI dependency behind every route."""
    gateway: Gateway = request.app.state.gateway
    return gateway
