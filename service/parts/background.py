"""A dispatcher's background tasks: start workers and say what they are, take compiles, take over tuning and training
jobs, sweep the stores."""

from __future__ import annotations

import asyncio
import functools
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import get_args

import structlog
from redis.exceptions import RedisError

from ...compiler.api.training.jobs import TRAIN_ENDED, TrainState
from ...compiler.errors import NotFound, ProtocolMismatch, Unavailable
from ...workers.pool import WorkerPool
from ..access import audit
from ..base.async_tasks import end, is_set_within, measure_lag
from ..jobs.training import retention
from ..storage.redis.keys import COMPILES_WAIT, JOBS_WAIT, PROTOCOL_RAISED
from ..storage.redis.protocol import join
from ..storage.redis.retry import redis_errors_logged, retry_while_down
from .dispatcher import DispatcherParts, DispatcherTenant
from .shared import SharedParts

log = structlog.get_logger(__name__)

_JOIN_SECONDS = 2.0
"""How long a start waits for Redis."""
POOL_RESTART_SECONDS = 5.0
_TOGETHER_SECONDS = 0.1
"""Changes within this time are written once."""
_WORKERS_CHANGED = "workers"
"""A notification inside this process."""
_POOLS_TASKS = ("nodes", "workers", "searches", "ray")
"""Tasks of the pool and of its searches, which tell of their errors."""
SWEEP_SECONDS = 6 * 3600.0
_SWEEP_LOOK_SECONDS = 600.0
"""Between two checks whether that time is over."""
_OPEN_STATES = [state for state in get_args(TrainState) if state not in TRAIN_ENDED]
_YOUNG_INDEX = timedelta(days=1)
_LITTLE_FREE = 0.1
_HINT = (
    "Remove old folders of jobs, or set TORCHRELAY_SERVICE_TRAIN_KEEP_BYTES, or a shorter _TRAIN_KEEP_SECONDS"
)


@asynccontextmanager
async def running(shared: SharedParts, pool: WorkerPool | None) -> AsyncIterator[DispatcherParts | None]:
    """What runs in the background of a process while the context lasts: a dispatcher too if it has a pool. Raises
    ProtocolMismatch."""
    run = shared.supervisor.run
    joining = await _join(shared)
    listening = asyncio.create_task(run("notifications", shared.notifications.listen), name="notifications")
    counting = asyncio.create_task(run("uses", shared.uses.run), name="uses")
    lag = functools.partial(measure_lag, shared.metrics.event_loop_lag.observe)
    measuring = asyncio.create_task(run("event loop lag", lag), name="event loop lag")
    dispatcher = DispatcherParts(shared, pool) if pool is not None else None
    tasks = _start_tasks(dispatcher) if dispatcher is not None else []
    try:
        yield dispatcher
    finally:
        shared.stopping = True
        await end(measuring, *tasks, *joining)
        if dispatcher is not None:
            await dispatcher.close()
        await end(listening, counting)
        with redis_errors_logged("uses_lost"):
            await shared.uses.write()
        await shared.redis.aclose()
        if shared.replicas is not None:
            await shared.replicas.aclose()
        shared.keyring.close()
        await asyncio.to_thread(shared.tracer.close)


async def _join(shared: SharedParts) -> list[asyncio.Task[None]]:
    """Whether this release may use Redis, if that can be known soon. Raises ProtocolMismatch. Returns a task that ends
    the process once it may not."""

    async def watch() -> None:
        async with shared.notifications.woken(PROTOCOL_RAISED) as raised:  # also at each new connection
            while True:
                raised.clear()
                try:
                    await retry_while_down(lambda: join(shared.keys, shared.scripts), errors=(RedisError,))
                except ProtocolMismatch as error:
                    log.error("redis_not_usable", reason=str(error))
                    signal.raise_signal(signal.SIGTERM)
                    return
                await raised.wait()

    try:
        async with asyncio.timeout(_JOIN_SECONDS):
            await join(shared.keys, shared.scripts)
    except ProtocolMismatch as error:
        log.error("redis_not_usable", reason=str(error))
        raise
    except (RedisError, TimeoutError):
        pass
    return [asyncio.create_task(shared.supervisor.run("protocol", watch), name="protocol")]


def _start_tasks(dispatcher: DispatcherParts) -> list[asyncio.Task[None]]:
    """All of them run until cancelled."""
    lease_seconds = dispatcher.shared.settings.lease_seconds
    register_seconds = dispatcher.shared.registry.expiry_seconds / 3
    works: dict[str, Callable[[], Awaitable[None]]] = {
        "start workers": lambda: _start_pool(dispatcher),
        "registry": lambda: _repeat("registry", _register, dispatcher, register_seconds, _WORKERS_CHANGED),
        "compiles": dispatcher.intake.run,
        "sweep": lambda: _repeat("sweep", sweep_tenants, dispatcher, min(SWEEP_SECONDS, _SWEEP_LOOK_SECONDS)),
        "jobs": lambda: _repeat("jobs", take_over_jobs, dispatcher, lease_seconds, JOBS_WAIT),
    }
    run = dispatcher.shared.supervisor.run
    for name in (*works, *_POOLS_TASKS):  # so that a rate sees the first failure
        dispatcher.shared.metrics.background_failures.labels(name)
    return [asyncio.create_task(run(name, work), name=name) for name, work in works.items()]


async def _start_pool(dispatcher: DispatcherParts) -> None:
    """Starts the workers; tries again until it works."""
    notifications = dispatcher.shared.notifications

    def on_change() -> None:
        notifications.wake(COMPILES_WAIT)
        notifications.wake(_WORKERS_CHANGED)

    dispatcher.pool.on_change(on_change)

    def on_failure(task: str, error: Exception | None) -> None:
        dispatcher.shared.supervisor.note(task, error)
        if task == "ray":
            dispatcher.pool_error = "" if error is None else str(error)
            on_change()

    dispatcher.pool.on_failure(on_failure)
    while not dispatcher.pool_started:
        try:
            await dispatcher.pool.start()
            dispatcher.pool_started, dispatcher.pool_error = True, ""
            on_change()
        except Exception as error:  # whatever Ray raises: it is logged, shown by /readyz, and tried again
            dispatcher.pool_error = str(error)
            on_change()
            log.error("workers_not_started", error=str(error), exc_info=True)
            await asyncio.sleep(POOL_RESTART_SECONDS)


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


async def sweep_tenants(dispatcher: DispatcherParts) -> None:
    """Removes old folders of training jobs, which may be on a disk of this dispatcher's cluster alone. Deletes what
    crashes and training jobs left in the blob store, and counts the cache again, unless a dispatcher has begun to
    within SWEEP_SECONDS."""
    await _remove_old_folders(dispatcher)
    redis, swept = dispatcher.shared.redis, dispatcher.shared.keys.swept
    if not await redis.set(swept, dispatcher.id, nx=True, px=int(SWEEP_SECONDS * 1000)):
        return
    try:
        await sweep_all(dispatcher)
    except BaseException:  # the end of this dispatcher too
        await redis.delete(swept)  # it is tried again, here or by another dispatcher
        raise


async def sweep_all(dispatcher: DispatcherParts) -> None:
    shared = dispatcher.shared
    names = await shared.namespaces.names()
    await shared.recount.run(names)
    await shared.tokens.forget_old()
    await audit.trim(shared.redis, [*map(shared.keys.of, names)], entries=shared.settings.audit_entries)

    async def sweep(tenant: DispatcherTenant) -> None:
        if gone := await tenant.cache.sweep():
            log.info("orphans_deleted", namespace=tenant.namespace, count=gone)
        if gone := await tenant.training_jobs.sweep():
            log.info("train_files_deleted", namespace=tenant.namespace, count=gone)

    await _of_each(await dispatcher.tenants.every(), sweep)


async def _remove_old_folders(dispatcher: DispatcherParts) -> None:
    """Removes the folders of training jobs that cannot be resumed."""
    settings = dispatcher.shared.settings
    if not settings.train_keep_bytes:
        with suppress(OSError):  # no job has had a folder yet
            share = await asyncio.to_thread(retention.free_share, Path(settings.train_location))
            if share < _LITTLE_FREE:
                log.warning(
                    "train_disk_nearly_full", folder=settings.train_location, free=f"{share:.0%}", hint=_HINT
                )
    if not settings.train_keep_seconds and not settings.train_keep_bytes:
        return
    if not await asyncio.to_thread(retention.holds_any, Path(settings.train_location)):
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


async def take_over_jobs(dispatcher: DispatcherParts) -> None:
    """Takes over the jobs of all namespaces that no dispatcher runs, and counts the training jobs."""
    shared, open_jobs = dispatcher.shared, dispatcher.open_jobs
    jobs = await open_jobs.read()
    for job in jobs:
        if job.due and (job.kind == "tune" or shared.settings.training):
            with suppress(NotFound):  # the namespace is being deleted
                controller = (await dispatcher.tenants.of(job.namespace)).controllers[job.kind]
                running = controller.running()
                await controller.take_over(job.id)
                if controller.running() > running:
                    shared.notifications.wake(_WORKERS_CHANGED)  # less room is left
    trains = [job for job in jobs if job.kind == "train"]
    counted = Counter(await open_jobs.states(trains)) if trains else Counter[str]()
    for state in _OPEN_STATES:
        shared.metrics.trains.labels(state).set(counted[state])
    here = (tenant.controllers["train"].running() for tenant in dispatcher.tenants.opened())
    shared.metrics.trains_here.set(sum(here))
