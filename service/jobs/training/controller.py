"""A namespace's training jobs: those that no gateway drives in; each run until it ends or its lease is lost, out."""

from __future__ import annotations

import asyncio
import contextlib
import uuid

import structlog
from redis.exceptions import RedisError

from ....compiler.errors import NotFound, Overloaded
from ...base.async_tasks import end
from ...storage.redis.retry import retry_while_down
from .records import notification_name
from .run import PERIOD_SECONDS, TrainingJobLost, TrainingJobParts, TrainingJobRun

log = structlog.get_logger(__name__)


class TrainingJobController:
    """Drives the training jobs of one namespace that this gateway has the lease of."""

    def __init__(self, parts: TrainingJobParts) -> None:
        self._parts = parts
        self._lease_seconds = parts.settings.lease_seconds
        self._driven: dict[str, asyncio.Task[None]] = {}
        self._looking: set[asyncio.Task[None]] = set()
        self._closed = False

    async def look(self) -> None:
        """Take up what nobody drives. Raises RedisError."""
        trains = self._parts.trains
        for job in await trains.open():
            if job in self._driven:
                continue
            owner = uuid.uuid4().hex
            held, _ = await trains.take(job, owner)
            if held == "held" and not self._closed:
                task = asyncio.create_task(self._drive(job, owner), name=f"train {job}")
                self._driven[job] = task
                task.add_done_callback(lambda done, job=job: self._landed(job, done))

    def driven(self) -> int:
        """How many jobs this gateway drives."""
        return len(self._driven)

    async def close(self) -> None:
        """Leave all jobs to other gateways; their ranks go on."""
        self._closed = True
        await end(*self._looking)
        await end(*self._driven.values())

    def _landed(self, job: str, done: asyncio.Task[None]) -> None:
        if self._driven.get(job) is done:
            del self._driven[job]
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("train_broke", job=job, exc_info=error)
        elif not self._closed:  # it may have been resumed meanwhile
            again = asyncio.create_task(self._look_again(), name="look at training jobs")
            self._looking.add(again)
            again.add_done_callback(self._looking.discard)

    async def _look_again(self) -> None:
        with contextlib.suppress(RedisError):
            await self.look()

    async def _drive(self, job: str, owner: str) -> None:
        log.info("train_driven", job=job)
        trains = self._parts.trains
        try:
            loaded = await retry_while_down(lambda: trains.load(job))
            drive = TrainingJobRun(loaded, owner, self._parts)
            keeper = asyncio.create_task(self._keep(drive))
            worker = asyncio.create_task(drive.run())
            try:
                await asyncio.wait({keeper, worker}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end(keeper)
                await end(worker)
            if worker.done() and not worker.cancelled() and (error := worker.exception()) is not None:
                raise error
        except (TrainingJobLost, NotFound):
            log.info("train_left", job=job)
        finally:
            try:
                await trains.release(job, owner)
            except RedisError as error:
                log.warning("train_not_released", job=job, error=str(error))  # it expires by itself

    async def _keep(self, drive: TrainingJobRun) -> None:
        """Keep the lease, and hear what is asked of the job; return once it is not ours any more."""
        job = drive.loaded.job.id
        async with self._parts.wakes.woken(notification_name(job)) as wake:
            while True:
                try:
                    if await drive.take() != "held":
                        return
                except (RedisError, Overloaded) as error:
                    log.warning("train_lease_not_renewed", job=job, error=str(error))
                wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._lease_seconds / 3):
                        await wake.wait()
                        await asyncio.sleep(min(PERIOD_SECONDS, self._lease_seconds / 30))  # ours wake us too
