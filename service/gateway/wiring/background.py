"""What a gateway does beside answering: starts workers, sweeps the stores, drives tuning and training jobs."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import structlog
from redis.exceptions import RedisError

from ....compiler.errors import Unavailable
from ...jobs.training import retention
from .gateway import GatewayParts

log = structlog.get_logger(__name__)


_POOL_RESTART_SECONDS = 5.0


_SWEEP_SECONDS = 6 * 3600.0


async def start_pool(gateway: GatewayParts) -> None:
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


async def sweep(gateway: GatewayParts) -> None:
    """Now and then, delete what crashes left in the blob store, and what training jobs left. Runs until cancelled."""
    while True:
        try:
            for tenant in await gateway.tenants.every():
                if gone := await tenant.cache.sweep():
                    log.info("orphans_deleted", namespace=tenant.namespace, count=gone)
                if gone := await tenant.trains.sweep():
                    log.info("train_files_deleted", namespace=tenant.namespace, count=gone)
            await _remove_old_folders(gateway)
        except (RedisError, Unavailable) as error:
            log.warning("blobs_not_swept", error=str(error))
        await asyncio.sleep(_SWEEP_SECONDS)


async def _remove_old_folders(gateway: GatewayParts) -> None:
    """Remove the folders of training jobs that nobody can go on with. Raises RedisError, Unavailable."""
    settings = gateway.settings
    if not settings.train_keep_seconds and not settings.train_keep_bytes:
        return
    needed = {
        Path(settings.train_folder(tenant.namespace)): retention.resumable(await tenant.trains.jobs())
        for tenant in await gateway.tenants.every()
    }
    gone = await asyncio.to_thread(
        retention.remove_old,
        Path(settings.train_location),
        needed,
        seconds=settings.train_keep_seconds,
        limit=settings.train_keep_bytes,
        stopping=lambda: gateway.state.stopping,
    )
    for folder in gone:
        log.info("train_folder_removed", folder=str(folder))


async def drive_tuning_jobs(gateway: GatewayParts) -> None:
    """Take up batch jobs that no gateway drives, of all namespaces. Runs until cancelled."""
    while not gateway.state.stopping:
        try:
            for tenant in await gateway.tenants.every():
                await tenant.driver.take_over()
        except (RedisError, Unavailable) as error:
            log.warning("tunes_not_looked_at", error=str(error))
        await asyncio.sleep(gateway.settings.lease_seconds)


async def drive_training_jobs(gateway: GatewayParts) -> None:
    """Take up training jobs that no gateway drives, of all namespaces, and count them. Runs until cancelled."""
    while not gateway.state.stopping:
        try:
            tenants = await gateway.tenants.every()
            states: Counter[str] = Counter()
            for tenant in tenants:
                await tenant.train_driver.take_over()
                states.update(await tenant.trains.states())
            for state, count in states.items():
                gateway.metrics.trains.labels(state).set(count)
            gateway.metrics.trains_here.set(sum(tenant.train_driver.running() for tenant in tenants))
        except (RedisError, Unavailable) as error:
            log.warning("trains_not_looked_at", error=str(error))
        await asyncio.sleep(gateway.settings.lease_seconds)
