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
import uuid
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import structlog
from redis.exceptions import RedisError

from ...compiler.errors import NotFound, Overloaded, RelayError, Unavailable
from ...compiler.train_records import (
    TRAIN_ENDED,
    Log,
    News,
    TrainEvent,
    TrainOrder,
    TrainState,
    Turned,
    at_nodes,
)
from ...compiler.trust import key_text
from ...workers.pool import WorkerLost
from ..auth import Grant, Issued, Tokens
from ..events import WakeUps
from ..outages import patiently
from ..settings import ServiceSettings
from ..signing import Keyring
from ..tasks import end
from .compile import TrainCompiler
from .pool import TrainPool
from .prepare import RETRY_MOST_SECONDS, RETRY_SECONDS, Preparation, once_there
from .progress import Progress
from .store import TrainStore
from .trains import SHELF, Held, Loaded, Trains, wake_name

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
_PERIOD_SECONDS = 1.0
_LOG_TAIL = 2000
_GATHER_SECONDS = 0.2
"""News are written down together that come within this."""
_MANY = 500
_METRICS_BYTES = 200
_UNSHELVED_BYTES = 4 << 20
"""Of metrics and logs that are left in Redis, about."""
_MOST_UNSHELVED_BYTES = 64 << 20
"""Past it, with the blob store away, the nodes keep what they have to tell: Redis is for all jobs."""


class Lost(Exception):
    """Another gateway drives the job, or it has ended."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What driving needs of the rest of the service."""

    namespace: str
    trains: Trains
    store: TrainStore
    pool: TrainPool
    compiler: TrainCompiler
    tokens: Tokens
    keyring: Keyring
    wakes: WakeUps
    settings: ServiceSettings


def token_name(job: str) -> str:
    """What the tokens of a job's ranks are called; only an administrator could call another one so."""
    return f"train job {job}"


class TrainDriver:
    """Drives the training jobs of one namespace that this gateway has the lease of."""

    def __init__(self, parts: Parts) -> None:
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
            loaded = await patiently(lambda: trains.load(job))
            drive = Drive(loaded, owner, self._parts)
            keeper = asyncio.create_task(self._keep(drive))
            worker = asyncio.create_task(drive.run())
            try:
                await asyncio.wait({keeper, worker}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end(keeper)
                await end(worker)
            if worker.done() and not worker.cancelled() and (error := worker.exception()) is not None:
                raise error
        except (Lost, NotFound):
            log.info("train_left", job=job)
        finally:
            try:
                await trains.release(job, owner)
            except RedisError as error:
                log.warning("train_not_released", job=job, error=str(error))  # it expires by itself

    async def _keep(self, drive: Drive) -> None:
        """Keep the lease, and hear what is asked of the job; return once it is not ours any more."""
        job = drive.loaded.job.id
        async with self._parts.wakes.woken(wake_name(job)) as wake:
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
                        await asyncio.sleep(
                            min(_PERIOD_SECONDS, self._lease_seconds / 30)
                        )  # ours wake us too


class Drive:
    """One job under one lease."""

    def __init__(self, loaded: Loaded, owner: str, parts: Parts) -> None:
        self.loaded = loaded
        self.owner = owner
        self.cancelled = asyncio.Event()
        """It was asked for."""
        self._parts = parts
        self._id = loaded.job.id
        self._there = at_nodes(parts.namespace, loaded.job.id)
        self._spec = loaded.job.spec
        self._progress: Progress = loaded.progress
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
        self._unshelved = SHELF
        self._unshelved_bytes = 0
        self._last = 0
        """Number of the news that ends the job."""
        self._made: TrainOrder | None = None
        self._making = asyncio.Lock()
        self._issued: list[Issued] = []
        """Its ranks' tokens, as far as they were made here."""
        self._aside: list[TrainEvent] = []
        """For the next telling."""
        self._beside: asyncio.Task[None] | None = None
        if loaded.progress.begun != loaded.resumes:
            loaded.progress.begin_anew()

    async def take(self) -> Held:
        """Keep the lease. Raises RedisError, Overloaded."""
        trains, turn = self._parts.trains, self.loaded.turn
        held, wish = await trains.take(self._id, self.owner, turn)
        if held == "gone":
            log.warning("train_written_again", job=self._id)
            for issued in self._issued:
                await self._parts.tokens.restore(issued)
            await trains.create(self._snapshot())
            held, wish = await trains.take(self._id, self.owner, turn)
        if held == "held" and wish and not self.cancelled.is_set():
            self._cancelled_by = self._detail = wish
            self.cancelled.set()
        return held

    def _snapshot(self) -> Loaded:
        """The job as far as it is. Raises nothing."""
        return Loaded(
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
        except Lost:
            raise
        except RelayError as error:
            ended = self._turned("failed", error.message)
        await self._end(ended)

    # --- before ranks are placed ---------------------------------------------------------------------------

    def _preparation(self) -> Preparation:
        parts = self._parts
        return Preparation(
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

    async def _engine(self) -> Turned:
        """Have the nodes run the job, and write down what they tell; the last of it is returned, not written."""
        stopper = asyncio.create_task(self._stop_when_asked(), name=f"stop train {self._id}")
        try:
            return await self._follow(stopper)
        finally:
            await end(stopper, *([self._beside] if self._beside else []))

    async def _follow(self, stopper: asyncio.Task[None]) -> Turned:
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
                log.warning("train_driver_lost", job=self._id, error=error.message)
            except (Unavailable, Overloaded) as error:
                log.warning("train_news_wait", job=self._id, error=error.message)
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

    async def _heard(self, news: Sequence[News]) -> Turned | None:
        """Write down what is new. The Turned that ends the job is left for `_end`, and asked for again by whoever
        takes over before."""
        events: list[TrainEvent] = []
        state, detail, last, told = self._state, self._detail, None, self._told
        for each in news:
            if each.number <= told:
                continue
            if isinstance(each.event, Turned) and each.event.state in TRAIN_ENDED:
                last, self._last = each.event, each.number
                break
            told = each.number
            self._progress.hear(each.event)
            events.append(each.event)
            if isinstance(each.event, Turned):
                state, detail = each.event.state, each.event.detail
        self._told = told
        if events:
            events += self._taken_aside()
            await self._tell(events, state=state, detail=detail, quiet=True)
            await self._shelve(events)
        if self._state == "running" and self._beside is None:
            self._beside = asyncio.create_task(self._preparation().beside(), name=f"capture {self._id}")
        return last

    async def _stop_when_asked(self) -> None:
        """Once the job is cancelled, or over its time: tell its ranks, and return when they ought to have ended."""
        while not self.cancelled.is_set() and not self._look_at_time():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PERIOD_SECONDS):
                    await self.cancelled.wait()
        self._to_end.set()
        began, heard = time.monotonic(), False
        while time.monotonic() < began + (_CANCEL_SECONDS if heard else _DEAF_SECONDS):
            try:  # again and again: a driver may be on its way
                async with asyncio.timeout(_HANG_SECONDS):
                    await self._parts.pool.train_cancel(self._there)
                heard = True
            except TimeoutError:
                log.warning("train_not_cancelled", job=self._id, error="its driver does not answer")
            except RelayError as error:
                log.warning("train_not_cancelled", job=self._id, error=error.message)
            await asyncio.sleep(_PERIOD_SECONDS)

    def _look_at_time(self) -> bool:
        limit, since = self._spec.timeout_seconds, self._progress.since
        self._over_time = bool(limit and since and time.time() - since > limit)
        return self._over_time

    def _stopped(self) -> Turned:
        if self._over_time and not self.cancelled.is_set():
            return self._turned("failed", _over_time(self._spec.timeout_seconds))
        return self._turned("cancelled", self._cancelled_by)

    # --- the end -------------------------------------------------------------------------------------------

    async def _end(self, ended: Turned) -> None:
        """Take back what the job's ranks were given, end its driver, and end the job. Raises Lost."""
        if self._over_time and ended.state == "cancelled" and not self.cancelled.is_set():
            ended = self._turned("failed", _over_time(self._spec.timeout_seconds))
        self._progress.hear(ended)
        await self._tell(self._taken_aside())
        await patiently(self._revoke)
        for _ in range(3):
            try:
                await self._parts.pool.train_forget(self._there)
                break
            except RelayError as error:
                log.warning("train_not_forgotten", job=self._id, error=error.message)
                await asyncio.sleep(RETRY_SECONDS)
        with contextlib.suppress(Unavailable, RedisError):  # Redis has them then
            await self._parts.trains.shelve(self._id, self.owner, all_of_it=True)
        detail = (self._cancelled_by if ended.state == "cancelled" else "") or ended.detail
        ended = msgspec.structs.replace(ended, detail=detail[:_LOG_TAIL])
        trains, told = self._parts.trains, max(self._told, self._last)
        await patiently(
            lambda: trains.turn(
                self._id, "end", owner=self.owner, turned=ended, detail=ended.detail, told=told
            )
        )
        log.info("train_ended", job=self._id, state=ended.state)

    async def _revoke(self) -> None:
        tokens, by = self._parts.tokens, self._owner_grant()
        for record in await tokens.records(by=by):
            if record.name == token_name(self._id) and record.revoked is None:
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
            events = [Turned(state=state, at=time.time(), detail=detail or ""), *events]
        if detail is not None and not self.cancelled.is_set():
            self._detail = detail[:_LOG_TAIL]
        self._state = state or self._state
        trains, progress = self._parts.trains, self._progress
        while True:
            kept = await patiently(
                lambda: trains.tell(
                    self._id,
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
            if await patiently(self.take) != "held":
                raise Lost
            loaded = await patiently(lambda: trains.load(self._id))
            if loaded.tellings != self._tellings:
                raise Lost
        self._tellings += 1
        self._events += len(events)

    async def _shelve(self, events: Sequence[TrainEvent]) -> None:
        """Now and then, after these were written down: take metrics and logs out of Redis."""
        self._unshelved += len(events)
        self._unshelved_bytes += sum(
            sum(map(len, each.lines)) if isinstance(each, Log) else _METRICS_BYTES for each in events
        )
        large = self._unshelved_bytes > _UNSHELVED_BYTES
        if not large and self._unshelved < SHELF:
            return
        try:
            await self._parts.trains.shelve(self._id, self.owner, all_of_it=large)
            self._unshelved = self._unshelved_bytes = 0
        except (Unavailable, RedisError) as error:
            log.warning(
                "train_not_shelved", job=self._id, error=str(error)
            )  # Redis has it; the next tries again

    def _taken_aside(self) -> list[TrainEvent]:
        events = self._aside.copy()
        self._aside.clear()
        return events

    def _turned(self, state: TrainState, detail: str) -> Turned:
        return Turned(state=state, at=time.time(), detail=detail, restarts=self._progress.restarts)

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
            found = await once_there(lambda: parts.store.package(self._spec.package), _PACKAGE_SECONDS)
            if found is None:
                raise NotFound("the job's packed working directory is gone", hint="Begin the job again")
            package = found
        issued = await patiently(
            lambda: parts.tokens.issue(
                token_name(self._id),
                frozenset({"compile"}),
                by=self._owner_grant(),
                namespace=parts.namespace,
                allow_source=self.loaded.source,
            )
        )
        self._issued.append(issued)
        keys = ",".join(key_text(key) for key in parts.keyring.public)
        return TrainOrder(
            job=self._id,
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
