"""A dispatcher's background tasks: start workers and say what they are, take compiles, take over tuning and training
jobs, sweep the stores."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path

import structlog
from redis.exceptions import RedisError

from ...compiler.errors import Unavailable
from ...workers.pool import WorkerPool
from ..base.async_tasks import end, is_set_within
from ..jobs.training import retention
from ..storage.redis.keys import COMPILES_WAIT, JOBS_WAIT
from .dispatcher import DispatcherParts, DispatcherTenant
from .shared import SharedParts

log = structlog.get_logger(__name__)

_POOL_RESTART_SECONDS = 5.0
_REGISTER_SECONDS = 1.0
_TOGETHER_SECONDS = 0.1
"""Changes within this time are written once."""
_WORKERS_CHANGED = "workers"
"""A notification inside this process."""
_SWEEP_SECONDS = 6 * 3600.0
_YOUNG_INDEX = timedelta(days=1)
_LITTLE_FREE = 0.1
_HINT = (
    "Jobs' folders stay: remove old ones, or set TORCHRELAY_SERVICE_TRAIN_KEEP_SECONDS or _TRAIN_KEEP_BYTES"
)


@asynccontextmanager
async def running(shared: SharedParts, pool: WorkerPool | None) -> AsyncIterator[DispatcherParts | None]:
    """What runs in the background of a process while the context lasts: a dispatcher too if it has a pool."""
    run = shared.supervisor.run
    listening = asyncio.create_task(run("notifications", shared.notifications.listen), name="notifications")
    dispatcher = DispatcherParts(shared, pool) if pool is not None else None
    tasks = _start_tasks(dispatcher) if dispatcher is not None else []
    try:
        yield dispatcher
    finally:
        shared.stopping = True
        await end(*tasks)
        if dispatcher is not None:
            await dispatcher.close()
        await end(listening)
        await shared.redis.aclose()
        shared.keyring.close()


def _start_tasks(dispatcher: DispatcherParts) -> list[asyncio.Task[None]]:
    """All of them run until cancelled."""
    lease_seconds = dispatcher.shared.settings.lease_seconds
    register_seconds = min(_REGISTER_SECONDS, lease_seconds / 3)
    works: dict[str, Callable[[], Awaitable[None]]] = {
        "start workers": lambda: _start_pool(dispatcher),
        "registry": lambda: _repeat("registry", _register, dispatcher, register_seconds, _WORKERS_CHANGED),
        "compiles": dispatcher.intake.run,
        "sweep": lambda: _repeat("sweep", _sweep, dispatcher, _SWEEP_SECONDS),
        "jobs": lambda: _repeat("jobs", _take_over_jobs, dispatcher, lease_seconds, JOBS_WAIT),
    }
    run = dispatcher.shared.supervisor.run
    return [asyncio.create_task(run(name, work), name=name) for name, work in works.items()]


async def _start_pool(dispatcher: DispatcherParts) -> None:
    """Starts the workers; tries again until it works."""
    notifications = dispatcher.shared.notifications

    def on_change() -> None:
        notifications.wake(COMPILES_WAIT)
        notifications.wake(_WORKERS_CHANGED)

    dispatcher.pool.on_change(on_change)
    while not dispatcher.pool_started:
        try:
            await dispatcher.pool.start()
            dispatcher.pool_started, dispatcher.pool_error = True, ""
            on_change()
        except Exception as error:  # whatever Ray raises: it is logged, shown by /readyz, and tried again
            dispatcher.pool_error = str(error)
            on_change()
            log.error("workers_not_started", error=str(error), exc_info=True)
            await asyncio.sleep(_POOL_RESTART_SECONDS)


async def _register(dispatcher: DispatcherParts) -> None:
    """Writes what workers there are. Raises RedisError."""
    await dispatcher.shared.registry.write(dispatcher.info())
    await asyncio.sleep(_TOGETHER_SECONDS)


async def _repeat(
    name: str,
    work: Callable[[DispatcherParts], Awaitable[None]],
    dispatcher: DispatcherParts,
    seconds: float,
    notification: str = "",
) -> None:
    """Does `work` now and every `seconds`, and at each notification of this name."""
    shared = dispatcher.shared
    async with shared.notifications.woken(notification) as wake:
        while not shared.stopping:
            wake.clear()
            with shared.supervisor.guard(name):
                try:
                    await work(dispatcher)
                except (RedisError, Unavailable) as error:
                    log.warning("background_task_delayed", task=name, error=str(error))
            await is_set_within(wake, seconds)


async def _of_each(
    tenants: list[DispatcherTenant], work: Callable[[DispatcherTenant], Awaitable[None]]
) -> None:
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


async def _sweep(dispatcher: DispatcherParts) -> None:
    """Deletes what crashes and training jobs left in the blob store; one dispatcher counts the cache again."""
    await dispatcher.shared.recount.run_once_in(_SWEEP_SECONDS, await dispatcher.shared.namespaces.names())

    async def sweep(tenant: DispatcherTenant) -> None:
        if gone := await tenant.cache.sweep():
            log.info("orphans_deleted", namespace=tenant.namespace, count=gone)
        if gone := await tenant.training_jobs.sweep():
            log.info("train_files_deleted", namespace=tenant.namespace, count=gone)

    await _of_each(await dispatcher.tenants.every(), sweep)
    await _remove_old_folders(dispatcher)


async def _remove_old_folders(dispatcher: DispatcherParts) -> None:
    """Removes the folders of training jobs that cannot be resumed."""
    settings = dispatcher.shared.settings
    if not settings.train_keep_seconds and not settings.train_keep_bytes:
        with suppress(OSError):  # no job has had a folder yet
            if (share := retention.free_share(Path(settings.train_location))) < _LITTLE_FREE:
                log.warning(
                    "train_disk_nearly_full", folder=settings.train_location, free=f"{share:.0%}", hint=_HINT
                )
        return
    if not await dispatcher.shared.installation.may_delete(_YOUNG_INDEX):
        return
    needed = {
        Path(settings.train_folder(tenant.namespace)): retention.resumable(await tenant.training_jobs.jobs())
        for tenant in await dispatcher.tenants.every()
    }
    gone = await asyncio.to_thread(
        retention.remove_old,
        Path(settings.train_location),
        needed,
        seconds=settings.train_keep_seconds,
        limit=settings.train_keep_bytes,
        stopping=lambda: dispatcher.shared.stopping,
    )
    for folder in gone:
        log.info("train_folder_removed", folder=str(folder))


async def _take_over_jobs(dispatcher: DispatcherParts) -> None:
    """Takes over the jobs of all namespaces that no dispatcher runs, and counts the training jobs."""
    tenants = await dispatcher.tenants.every()
    states: Counter[str] = Counter()

    async def take_over(tenant: DispatcherTenant) -> None:
        await tenant.tuning_controller.take_over()
        if dispatcher.shared.settings.training:
            await tenant.training_controller.take_over()
        states.update(await tenant.training_jobs.states())

    await _of_each(tenants, take_over)
    for state, count in states.items():
        dispatcher.shared.metrics.trains.labels(state).set(count)
    dispatcher.shared.metrics.trains_here.set(sum(tenant.training_controller.running() for tenant in tenants))
