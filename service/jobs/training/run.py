"""Training jobs on their way: those of a namespace that nobody drives in; their graphs compiled, their ranks run, out.

Whoever holds a job's lease has its script's graphs captured and compiled, gives the job to the nodes, and writes down
what they tell. Ranks need no gateway to go on: if this one dies, another takes the lease and asks for the news that it
has not seen. An outage of Redis is waited out, and the nodes hold the news; a Redis that comes back without the job is
given it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import structlog
from redis.exceptions import RedisError

from ....compiler.api.training.events import LogLines, NumberedEvent, StateChanged, TrainEvent
from ....compiler.api.training.jobs import TRAIN_ENDED, TrainState
from ....compiler.api.training.node_messages import TrainOrder, node_job_id
from ....compiler.artifact.signing import key_text
from ....compiler.errors import NotFound, Overloaded, RelayError, Unavailable
from ....workers.pool import WorkerLost
from ...access.tokens import Grant, IssuedToken, Tokens
from ...base.async_tasks import end
from ...base.worker_pools import TrainPool
from ...settings import ServiceSettings
from ...signing.keyring import Keyring
from ...storage.redis.retry import retry_while_down
from ..controller import JobLost, JobRun
from .files import TrainingFiles
from .graphs import TrainingGraphCompiler
from .precompile import RETRY_MOST_SECONDS, RETRY_SECONDS, Precompilation, retry_until_available
from .progress import TrainingJobProgress
from .records import ARCHIVE_ENTRIES, TrainingJobRecord, TrainingJobs

log = structlog.get_logger(__name__)


T = TypeVar("T")


_POLL_SECONDS = 2.0


_CANCEL_SECONDS = 20.0
"""Ranks that were told to end, and are killed after 5 s, have told of it by then; or their driver is ended."""


_DEAF_SECONDS = 6.0
"""So soon it is ended if it does not even hear."""


_HANG_SECONDS = 3.0
"""How long the nodes may take for an answer once the job is to end."""


_PACKAGE_SECONDS = 600.0


_LOST_TIMES = 8
"""A driver that is lost so often in a row, without any news, will not come."""


PERIOD_SECONDS = 1.0


_LOG_TAIL = 2000


_GATHER_SECONDS = 0.2
"""News are written down together that come within this."""


_MANY = 500


_METRICS_BYTES = 200


_UNSHELVED_BYTES = 4 << 20
"""Of metrics and logs that are left in Redis, about."""


_MOST_UNSHELVED_BYTES = 64 << 20
"""Past it, with the blob store away, the nodes keep what they have to tell: Redis is for all jobs."""


@dataclass(frozen=True, kw_only=True)
class TrainingJobParts:
    """What driving needs of the rest of the service."""

    namespace: str
    jobs: TrainingJobs
    store: TrainingFiles
    pool: TrainPool
    compiler: TrainingGraphCompiler
    tokens: Tokens
    keyring: Keyring
    settings: ServiceSettings


def token_name(job: str) -> str:
    """What the tokens of a job's ranks are called; only an administrator could call another one so."""
    return f"train job {job}"


class TrainingJobRun(JobRun):
    """One job under one lease."""

    def __init__(self, parts: TrainingJobParts, loaded: TrainingJobRecord, owner: str) -> None:
        super().__init__(parts.jobs, loaded.job.id, owner, loaded.turn)
        self.loaded = loaded
        self.cancelled = asyncio.Event()
        """It was asked for."""
        self._parts = parts
        self._there = node_job_id(parts.namespace, loaded.job.id)
        self._spec = loaded.job.spec
        self._progress: TrainingJobProgress = loaded.progress
        self._state: TrainState = loaded.job.state
        self._detail = loaded.job.detail
        self._cancelled_by = ""
        self._told = loaded.told
        self._tellings = loaded.tellings
        self._events = loaded.events
        self._over_time = False
        self._to_end = asyncio.Event()
        """It was cancelled, or is over its time."""
        self._driverless = False
        self._unshelved = ARCHIVE_ENTRIES
        self._unshelved_bytes = 0
        self._last = 0
        """Number of the news that ends the job."""
        self._made: TrainOrder | None = None
        self._making = asyncio.Lock()
        self._issued: list[IssuedToken] = []
        """Its ranks' tokens, as far as they were made here."""
        self._aside: list[TrainEvent] = []
        """For the next telling."""
        self._beside: asyncio.Task[None] | None = None
        if loaded.progress.begun != loaded.resumes:
            loaded.progress.begin_anew()

    async def restore(self) -> None:
        for issued in self._issued:
            await self._parts.tokens.restore(issued)

    def cancel(self, by: str) -> None:
        if not self.cancelled.is_set():
            self._cancelled_by = self._detail = by
            self.cancelled.set()

    def snapshot(self) -> TrainingJobRecord:
        return TrainingJobRecord(
            job=self._progress.shown(self.loaded.job, self._state, 0.0, self._detail),
            progress=self._progress,
            source=self.loaded.source,
            told=self._told,
            tellings=self._tellings,
            events=max(self._events, 1),
            turn=self.loaded.turn,
            resumes=self.loaded.resumes,
            wish=self._cancelled_by,
        )

    async def run(self) -> None:
        """The job to its end. Raises Lost."""
        try:
            if not self._progress.prepared and not self._progress.started:
                await self._unless_cancelled(self._preparation().before())
            ended = await self._engine()
        except _Cancelled:
            ended = self._turned("cancelled", self._cancelled_by)
        except JobLost:
            raise
        except RelayError as error:
            ended = self._turned("failed", error.message)
        await self._end(ended)

    # --- before ranks are placed ---------------------------------------------------------------------------

    def _preparation(self) -> Precompilation:
        parts = self._parts
        return Precompilation(
            self._spec,
            self._progress,
            pool=parts.pool,
            compiler=parts.compiler,
            order=self._order,
            source=self.loaded.source,
            seconds=parts.settings.train_capture_seconds,
            tell=self._tell,
            aside=self._aside.append,
        )

    async def _unless_cancelled(self, work: Awaitable[None]) -> None:
        """Raises _Cancelled if that is asked for meanwhile, and what `work` raises."""
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self.cancelled.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return
            raise _Cancelled
        finally:
            await end(task, asked)

    # --- ranks ---------------------------------------------------------------------------------------------

    async def _engine(self) -> StateChanged:
        """Have the nodes run the job, and write down what they tell; the last of it is returned, not written."""
        stopper = asyncio.create_task(self._stop_when_asked(), name=f"stop train {self.id}")
        try:
            return await self._follow(stopper)
        finally:
            await end(stopper, *([self._beside] if self._beside else []))

    async def _follow(self, stopper: asyncio.Task[None]) -> StateChanged:
        pool, progress, resumes = self._parts.pool, self._progress, self.loaded.resumes
        lost, pause = 0, RETRY_SECONDS
        while True:
            if stopper.done() and not stopper.cancelled():
                return self._stopped()
            try:
                if progress.begun != resumes or self._driverless:
                    if self.cancelled.is_set():
                        raise _Cancelled
                    await self._begin()
                if self._unshelved_bytes > _MOST_UNSHELVED_BYTES and not self._to_end.is_set():
                    await self._shelve([])
                    if self._unshelved_bytes:
                        raise Unavailable("the blob store takes no metrics and logs")
                news = await self._unless_it_hangs(
                    pool.train_news(self._there, self._told, seconds=_POLL_SECONDS)
                )
            except WorkerLost as error:
                lost += 1
                if self.cancelled.is_set():
                    return self._stopped()
                if lost >= _LOST_TIMES:
                    return self._turned(
                        "failed", f"the job's driver was lost again and again: {error.message}"
                    )
                self._driverless = True
                log.warning("train_driver_lost", job=self.id, error=error.message)
            except (Unavailable, Overloaded) as error:
                log.warning("train_news_wait", job=self.id, error=error.message)
            else:
                pause = RETRY_SECONDS
                if news:
                    lost = 0
                    if (last := await self._heard(news)) is not None:
                        return last
                    if len(news) < _MANY:
                        await asyncio.sleep(_GATHER_SECONDS)
                continue
            await self._nap(pause)
            pause = min(2 * pause, RETRY_MOST_SECONDS)

    async def _nap(self, seconds: float) -> None:
        """Wait; once the job is to end there is no more patience."""
        if self._to_end.is_set():
            await asyncio.sleep(RETRY_SECONDS)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._to_end.wait()

    async def _unless_it_hangs(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives. Raises Unavailable if it goes on for long once the job is to end."""
        task = asyncio.create_task(work)
        asked = asyncio.create_task(self._to_end.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({task}, timeout=_HANG_SECONDS)
            if task.done():
                return task.result()
            raise Unavailable("the job is to end, and its nodes do not answer")
        finally:
            await end(task, asked)

    async def _begin(self) -> None:
        """Give the job to the nodes. Raises Unavailable, NotFound."""
        progress, resumes = self._progress, self.loaded.resumes
        progress.ranks = 0
        if progress.begun == resumes:
            await self._tell([], state="recovering", detail="its driver was lost and starts again")
        else:
            await self._tell([], state="starting", detail="ranks are being placed")
        await self._unless_it_hangs(self._give(anew=resumes > 0 and progress.begun != resumes))
        self._made, self._driverless = None, False
        if progress.begun != resumes:
            progress.begun = resumes
            await self._tell([])

    async def _give(self, *, anew: bool) -> None:
        if anew:
            await self._parts.pool.train_forget(self._there)
        await self._parts.pool.train_begin(await self._order())

    async def _heard(self, news: Sequence[NumberedEvent]) -> StateChanged | None:
        """Write down what is new. The Turned that ends the job is left for `_end`, and asked for again by whoever
        takes over before."""
        events: list[TrainEvent] = []
        state, detail, last, told = self._state, self._detail, None, self._told
        for each in news:
            if each.number <= told:
                continue
            if isinstance(each.event, StateChanged) and each.event.state in TRAIN_ENDED:
                last, self._last = each.event, each.number
                break
            told = each.number
            self._progress.hear(each.event)
            events.append(each.event)
            if isinstance(each.event, StateChanged):
                state, detail = each.event.state, each.event.detail
        self._told = told
        if events:
            events += self._taken_aside()
            await self._tell(events, state=state, detail=detail, quiet=True)
            await self._shelve(events)
        if self._state == "running" and self._beside is None:
            self._beside = asyncio.create_task(self._preparation().beside(), name=f"capture {self.id}")
        return last

    async def _stop_when_asked(self) -> None:
        """Once the job is cancelled, or over its time: tell its ranks, and return when they ought to have ended."""
        while not self.cancelled.is_set() and not self._look_at_time():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_SECONDS):
                    await self.cancelled.wait()
        self._to_end.set()
        began, heard = time.monotonic(), False
        while time.monotonic() < began + (_CANCEL_SECONDS if heard else _DEAF_SECONDS):
            try:  # again and again: a driver may be on its way
                async with asyncio.timeout(_HANG_SECONDS):
                    await self._parts.pool.train_cancel(self._there)
                heard = True
            except TimeoutError:
                log.warning("train_not_cancelled", job=self.id, error="its driver does not answer")
            except RelayError as error:
                log.warning("train_not_cancelled", job=self.id, error=error.message)
            await asyncio.sleep(PERIOD_SECONDS)

    def _look_at_time(self) -> bool:
        limit, since = self._spec.timeout_seconds, self._progress.since
        self._over_time = bool(limit and since and time.time() - since > limit)
        return self._over_time

    def _stopped(self) -> StateChanged:
        if self._over_time and not self.cancelled.is_set():
            return self._turned("failed", _over_time(self._spec.timeout_seconds))
        return self._turned("cancelled", self._cancelled_by)

    # --- the end -------------------------------------------------------------------------------------------

    async def _end(self, ended: StateChanged) -> None:
        """Take back what the job's ranks were given, end its driver, and end the job. Raises Lost."""
        if self._over_time and ended.state == "cancelled" and not self.cancelled.is_set():
            ended = self._turned("failed", _over_time(self._spec.timeout_seconds))
        self._progress.hear(ended)
        await self._tell(self._taken_aside())
        await retry_while_down(self._revoke)
        for _ in range(3):
            try:
                await self._parts.pool.train_forget(self._there)
                break
            except RelayError as error:
                log.warning("train_not_forgotten", job=self.id, error=error.message)
                await asyncio.sleep(RETRY_SECONDS)
        with contextlib.suppress(Unavailable, RedisError):  # Redis has them then
            await self._parts.jobs.shelve(self.id, self.owner, all_of_it=True)
        detail = (self._cancelled_by if ended.state == "cancelled" else "") or ended.detail
        ended = msgspec.structs.replace(ended, detail=detail[:_LOG_TAIL])
        told = max(self._told, self._last)
        await retry_while_down(lambda: self._parts.jobs.end(self.id, self.owner, ended, told=told))
        log.info("train_ended", job=self.id, state=ended.state)

    async def _revoke(self) -> None:
        tokens, by = self._parts.tokens, self._owner_grant()
        for record in await tokens.records(by=by):
            if record.name == token_name(self.id) and record.revoked is None:
                await tokens.revoke(record.id, by=by)

    # --- telling -------------------------------------------------------------------------------------------

    async def _tell(
        self,
        events: Sequence[TrainEvent],
        *,
        state: TrainState | None = None,
        detail: str | None = None,
        quiet: bool = False,
    ) -> None:
        """Write down how far the job is. A change of state is an event of its own, unless `quiet`. Raises Lost."""
        if state is not None and state != self._state and not quiet:
            events = [StateChanged(state=state, at=time.time(), detail=detail or ""), *events]
        if detail is not None and not self.cancelled.is_set():
            self._detail = detail[:_LOG_TAIL]
        self._state = state or self._state
        jobs, progress = self._parts.jobs, self._progress
        while True:
            kept = await retry_while_down(
                lambda: jobs.record_events(
                    self.id,
                    self.owner,
                    events,
                    before=self._tellings,
                    told=self._told,
                    progress=progress,
                    state=self._state,
                    detail=self._detail,
                )
            )
            if kept:
                break
            # the lease had run out while Redis was away, or Redis had lost the job
            if await retry_while_down(self.renew) != "held":
                raise JobLost
            loaded = await retry_while_down(lambda: jobs.load(self.id))
            if loaded.tellings != self._tellings:
                raise JobLost
        self._tellings += 1
        self._events += len(events)

    async def _shelve(self, events: Sequence[TrainEvent]) -> None:
        """Now and then, after these were written down: take metrics and logs out of Redis."""
        self._unshelved += len(events)
        self._unshelved_bytes += sum(
            sum(map(len, each.lines)) if isinstance(each, LogLines) else _METRICS_BYTES for each in events
        )
        large = self._unshelved_bytes > _UNSHELVED_BYTES
        if not large and self._unshelved < ARCHIVE_ENTRIES:
            return
        try:
            await self._parts.jobs.shelve(self.id, self.owner, all_of_it=large)
            self._unshelved = self._unshelved_bytes = 0
        except (Unavailable, RedisError) as error:
            log.warning(
                "train_not_shelved", job=self.id, error=str(error)
            )  # Redis has it; the next tries again

    def _taken_aside(self) -> list[TrainEvent]:
        events = self._aside.copy()
        self._aside.clear()
        return events

    def _turned(self, state: TrainState, detail: str) -> StateChanged:
        return StateChanged(state=state, at=time.time(), detail=detail, restarts=self._progress.restarts)

    # --- what nodes are given ------------------------------------------------------------------------------

    async def _order(self) -> TrainOrder:
        """The same one, whoever asks: nodes are warmed with the environment that its ranks have. Raises Unavailable;
        NotFound where the package has gone."""
        async with self._making:
            if self._made is None:
                self._made = await self._make_order()
            return self._made

    async def _make_order(self) -> TrainOrder:
        parts, package = self._parts, b""
        if self._spec.package:
            found = await retry_until_available(
                lambda: parts.store.package(self._spec.package), _PACKAGE_SECONDS
            )
            if found is None:
                raise NotFound("the job's packed working directory is gone", hint="Begin the job again")
            package = found
        issued = await retry_while_down(
            lambda: parts.tokens.issue(
                token_name(self.id),
                frozenset({"compile"}),
                by=self._owner_grant(),
                namespace=parts.namespace,
                allow_source=self.loaded.source,
            )
        )
        self._issued.append(issued)
        keys = ",".join(key_text(key) for key in parts.keyring.public)
        return TrainOrder(
            job=self.id,
            namespace=parts.namespace,
            spec=self._spec,
            package=package,
            environment={
                "TORCHRELAY_URL": parts.settings.rank_url,
                "TORCHRELAY_TOKEN": issued.secret,
                "TORCHRELAY_PUBLIC_KEYS": keys,
                "TORCHRELAY_NAMESPACE": parts.namespace,
            },
            folder=parts.settings.train_folder(parts.namespace),
            resumes=self.loaded.resumes,
        )

    def _owner_grant(self) -> Grant:
        return Grant(self.loaded.job.by, frozenset(), "", self._parts.namespace)


class _Cancelled(Exception):
    """The job was cancelled before it had ranks."""


def _over_time(seconds: float) -> str:
    return f"it ran for longer than its timeout of {seconds:g} s"
