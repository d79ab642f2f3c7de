"""A gateway's background tasks: start workers, sweep the stores, take over tuning and training jobs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import structlog
from redis.exceptions import RedisError

from ....compiler.errors import Unavailable
from ...jobs.training import retention
from .gateway import GatewayParts, TenantParts

log = structlog.get_logger(__name__)

_POOL_RESTART_SECONDS = 5.0
_SWEEP_SECONDS = 6 * 3600.0
_YOUNG_INDEX = timedelta(days=1)
_LITTLE_FREE = 0.1
_HINT = (
    "Jobs' folders stay: remove old ones, or set TORCHRELAY_SERVICE_TRAIN_KEEP_SECONDS or _TRAIN_KEEP_BYTES"
)


def start_background_tasks(gateway: GatewayParts) -> list[asyncio.Task[None]]:
    """All of them run until cancelled."""
    lease_seconds = gateway.settings.lease_seconds
    works: dict[str, Callable[[], Awaitable[None]]] = {
        "notifications": gateway.notifications.listen,
        "start workers": lambda: _start_pool(gateway),
        "sweep": lambda: _repeat("sweep", _sweep, gateway, _SWEEP_SECONDS),
        "jobs": lambda: _repeat("jobs", _take_over_jobs, gateway, lease_seconds),
    }
    run = gateway.supervisor.run
    return [asyncio.create_task(run(name, work), name=name) for name, work in works.items()]


async def _start_pool(gateway: GatewayParts) -> None:
    """Starts the workers while the gateway answers hits already; tries again until it works."""
    state = gateway.state
    while not state.pool_started:
        try:
            await gateway.pool.start()
            state.pool_started, state.pool_error = True, ""
        except Exception as error:  # whatever Ray raises: it is logged, shown by /readyz, and tried again
            state.pool_error = str(error)
            log.error("workers_not_started", error=str(error), exc_info=True)
            await asyncio.sleep(_POOL_RESTART_SECONDS)


async def _repeat(
    name: str, work: Callable[[GatewayParts], Awaitable[None]], gateway: GatewayParts, seconds: float
) -> None:
    """Does `work` now and every `seconds`."""
    while not gateway.state.stopping:
        with gateway.supervisor.guard(name):
            try:
                await work(gateway)
            except (RedisError, Unavailable) as error:
                log.warning("background_task_delayed", task=name, error=str(error))
        await asyncio.sleep(seconds)


async def _of_each(tenants: list[TenantParts], work: Callable[[TenantParts], Awaitable[None]]) -> None:
    """Does `work` for every namespace, whatever it raises for another one. Raises RedisError, Unavailable, and an
    ExceptionGroup of all else."""
    errors = []
    for tenant in tenants:
        try:
            await work(tenant)
        except (RedisError, Unavailable):
            raise
        except Exception as error:
            errors.append(error)
    if errors:
        raise ExceptionGroup("some namespaces failed", errors)


async def _sweep(gateway: GatewayParts) -> None:
    """Deletes what crashes left in the blob store, and what training jobs left; one gateway counts the cache again."""
    await gateway.recount.run_once_in(_SWEEP_SECONDS, await gateway.namespaces.names())

    async def sweep(tenant: TenantParts) -> None:
        if gone := await tenant.cache.sweep():
            log.info("orphans_deleted", namespace=tenant.namespace, count=gone)
        if gone := await tenant.training_jobs.sweep():
            log.info("train_files_deleted", namespace=tenant.namespace, count=gone)

    await _of_each(await gateway.tenants.every(), sweep)
    await _remove_old_folders(gateway)


async def _remove_old_folders(gateway: GatewayParts) -> None:
    """Removes the folders of training jobs that cannot be resumed."""
    settings = gateway.settings
    if not settings.train_keep_seconds and not settings.train_keep_bytes:
        with suppress(OSError):  # no job has had a folder yet
            if (share := retention.free_share(Path(settings.train_location))) < _LITTLE_FREE:
                log.warning(
                    "train_disk_nearly_full", folder=settings.train_location, free=f"{share:.0%}", hint=_HINT
                )
        return
    if not await gateway.installation.may_delete(_YOUNG_INDEX):
        return
    needed = {
        Path(settings.train_folder(tenant.namespace)): retention.resumable(await tenant.training_jobs.jobs())
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


async def _take_over_jobs(gateway: GatewayParts) -> None:
    """Takes over the jobs of all namespaces that no gateway runs, and counts the training jobs."""
    tenants = await gateway.tenants.every()
    states: Counter[str] = Counter()

    async def take_over(tenant: TenantParts) -> None:
        await tenant.tuning_controller.take_over()
        await tenant.training_controller.take_over()
        states.update(await tenant.training_jobs.states())

    await _of_each(tenants, take_over)
    for state, count in states.items():
        gateway.metrics.trains.labels(state).set(count)
    gateway.metrics.trains_here.set(sum(tenant.training_controller.running() for tenant in tenants))
