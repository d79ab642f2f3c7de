"""Runs one training job: compiles its graphs, has the nodes run its ranks, and records their events.

Ranks need no gateway to go on. If this gateway dies, another takes the lease and requests the events that are not
recorded yet. The nodes keep events while Redis is down.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Sequence
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
"""For ranks to end and report it, before their driver is ended. Nodes kill ranks 5 s after a request to end."""
_UNREACHABLE_SECONDS = 6.0
"""The same where the driver does not answer the request."""
_HANG_SECONDS = 3.0
"""How long the nodes may take for an answer once the job is to end."""
_PACKAGE_SECONDS = 600.0
_MOST_DRIVER_LOSSES = 8
"""The job fails if its driver is lost so often in a row without a new event."""
_CHECK_SECONDS = 1.0
_LOG_TAIL = 2000
_BATCH_SECONDS = 0.2
"""Events that come within this time are recorded together."""
_FULL_BATCH = 500
_METRICS_BYTES = 200
_UNARCHIVED_BYTES = 4 << 20
"""Of metrics and logs that stay in Redis, about."""
_MOST_UNARCHIVED_BYTES = 64 << 20
"""While the blob store is down, no more metrics and logs than this are taken from the nodes: all jobs share Redis."""


@dataclass(frozen=True, kw_only=True)
class TrainingJobParts:
    """What runs need of the rest of the service."""

    namespace: str
    jobs: TrainingJobs
    store: TrainingFiles
    pool: TrainPool
    compiler: TrainingGraphCompiler
    tokens: Tokens
    keyring: Keyring
    settings: ServiceSettings


def token_name(job: str) -> str:
    """The name of the tokens of a job's ranks. Only an administrator could give it to another token."""
    return f"train job {job}"


class TrainingJobRun(JobRun):
    """One job under one lease."""

    def __init__(self, parts: TrainingJobParts, loaded: TrainingJobRecord, owner: str) -> None:
        super().__init__(parts.jobs, loaded.job.id, owner, loaded.turn)
        self.loaded = loaded
        self.cancelled = asyncio.Event()
        self._parts = parts
        self._node_job = node_job_id(parts.namespace, loaded.job.id)
        self._spec = loaded.job.spec
        self._progress: TrainingJobProgress = loaded.progress
        self._state: TrainState = loaded.job.state
        self._detail = loaded.job.detail
        self._cancelled_by = ""
        self._last_number = loaded.last_number
        self._writes = loaded.writes
        self._events = loaded.events
        self._timed_out = False
        self._ending = asyncio.Event()
        """The job was cancelled, or its timeout is over."""
        self._driver_lost = False
        self._unarchived = ARCHIVE_ENTRIES
        self._unarchived_bytes = 0
        self._end_number = 0
        """Number of the event that ends the job."""
        self._order: TrainOrder | None = None
        self._order_lock = asyncio.Lock()
        self._issued: list[IssuedToken] = []
        """Tokens of its ranks that this run has issued."""
        self._notes: list[TrainEvent] = []
        """Events for the next record."""
        self._elastic_capture: asyncio.Task[None] | None = None
        if loaded.progress.begun != loaded.resumes:
            loaded.progress.reset_ranks()

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
            last_number=self._last_number,
            writes=self._writes,
            events=max(self._events, 1),
            turn=self.loaded.turn,
            resumes=self.loaded.resumes,
            cancelled_by=self._cancelled_by,
        )

    async def run(self) -> None:
        try:
            if not self._progress.prepared and not self._progress.started:
                await _run_unless(self.cancelled, self._precompilation().before(), 0.0, _Cancelled())
            ended = await self._run_ranks()
        except _Cancelled:
            ended = self._changed_to("cancelled", self._cancelled_by)
        except JobLost:
            raise
        except RelayError as error:
            ended = self._changed_to("failed", error.message)
        await self._end(ended)

    # --- before ranks are placed ---------------------------------------------------------------------------

    def _precompilation(self) -> Precompilation:
        parts = self._parts
        return Precompilation(
            spec=self._spec,
            progress=self._progress,
            pool=parts.pool,
            compiler=parts.compiler,
            make_order=self._train_order,
            source=self.loaded.source,
            seconds=parts.settings.train_capture_seconds,
            record=self._record,
            add_note=self._notes.append,
        )

    # --- ranks ---------------------------------------------------------------------------------------------

    async def _run_ranks(self) -> StateChanged:
        """Have the nodes run the job, and record their events. Returns the event that ends the job, unrecorded."""
        stopper = asyncio.create_task(self._stop_on_request(), name=f"stop train {self.id}")
        try:
            return await self._follow_ranks(stopper)
        finally:
            await end(stopper, *([self._elastic_capture] if self._elastic_capture else []))

    async def _follow_ranks(self, stopper: asyncio.Task[None]) -> StateChanged:
        pool, progress, resumes = self._parts.pool, self._progress, self.loaded.resumes
        lost, pause = 0, RETRY_SECONDS
        while True:
            if stopper.done() and not stopper.cancelled():
                return self._stop_result()
            try:
                if progress.begun != resumes or self._driver_lost:
                    if self.cancelled.is_set():
                        raise _Cancelled
                    await self._start_ranks()
                if self._unarchived_bytes > _MOST_UNARCHIVED_BYTES and not self._ending.is_set():
                    await self._archive([])
                    if self._unarchived_bytes:
                        raise Unavailable("the blob store takes no metrics and logs")
                news = await self._answered(
                    pool.train_news(self._node_job, self._last_number, seconds=_POLL_SECONDS)
                )
            except WorkerLost as error:
                lost += 1
                if self.cancelled.is_set():
                    return self._stop_result()
                if lost >= _MOST_DRIVER_LOSSES:
                    return self._changed_to(
                        "failed", f"the job's driver was lost again and again: {error.message}"
                    )
                self._driver_lost = True
                log.warning("train_driver_lost", job=self.id, error=error.message)
            except (Unavailable, Overloaded) as error:
                log.warning("train_news_wait", job=self.id, error=error.message)
            else:
                pause = RETRY_SECONDS
                if news:
                    lost = 0
                    if (last := await self._record_news(news)) is not None:
                        return last
                    if len(news) < _FULL_BATCH:
                        await asyncio.sleep(_BATCH_SECONDS)
                continue
            await self._pause(pause)
            pause = min(2 * pause, RETRY_MOST_SECONDS)

    async def _pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until the job is to end."""
        if self._ending.is_set():
            await asyncio.sleep(RETRY_SECONDS)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()

    async def _answered(self, request: Coroutine[Any, Any, T]) -> T:
        """The nodes' answer. Raises Unavailable if it takes long once the job is to end."""
        late = Unavailable("the job is to end, and its nodes do not answer")
        return await _run_unless(self._ending, request, _HANG_SECONDS, late)

    async def _start_ranks(self) -> None:
        """Have the nodes start the job. Raises Unavailable, NotFound."""
        progress, resumes = self._progress, self.loaded.resumes
        progress.ranks = 0
        if progress.begun == resumes:
            await self._record([], state="recovering", detail="its driver was lost and starts again")
        else:
            await self._record([], state="starting", detail="ranks are being placed")
        await self._answered(self._send_order(anew=resumes > 0 and progress.begun != resumes))
        self._order, self._driver_lost = None, False
        if progress.begun != resumes:
            progress.begun = resumes
            await self._record([])

    async def _send_order(self, *, anew: bool) -> None:
        if anew:
            await self._parts.pool.train_forget(self._node_job)
        await self._parts.pool.train_begin(await self._train_order())

    async def _record_news(self, news: Sequence[NumberedEvent]) -> StateChanged | None:
        """Record new events. The StateChanged that ends the job is returned for `_end`; a gateway that takes the job
        over before gets it again from the nodes."""
        events: list[TrainEvent] = []
        state, detail, last, number = self._state, self._detail, None, self._last_number
        for each in news:
            if each.number <= number:
                continue
            if isinstance(each.event, StateChanged) and each.event.state in TRAIN_ENDED:
                last, self._end_number = each.event, each.number
                break
            number = each.number
            self._progress.apply(each.event)
            events.append(each.event)
            if isinstance(each.event, StateChanged):
                state, detail = each.event.state, each.event.detail
        self._last_number = number
        if events:
            events += self._take_notes()
            await self._record(events, state=state, detail=detail, quiet=True)
            await self._archive(events)
        if self._state == "running" and self._elastic_capture is None:
            self._elastic_capture = asyncio.create_task(
                self._precompilation().compile_elastic(), name=f"capture {self.id}"
            )
        return last

    async def _stop_on_request(self) -> None:
        """Once the job is cancelled or its timeout is over, have its ranks end; return when they should have ended."""
        while not self.cancelled.is_set() and not self._check_timeout():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_SECONDS):
                    await self.cancelled.wait()
        self._ending.set()
        began, answered = time.monotonic(), False
        while time.monotonic() < began + (_CANCEL_SECONDS if answered else _UNREACHABLE_SECONDS):
            try:  # more than once: a driver may be starting
                async with asyncio.timeout(_HANG_SECONDS):
                    await self._parts.pool.train_cancel(self._node_job)
                answered = True
            except TimeoutError:
                log.warning("train_not_cancelled", job=self.id, error="its driver does not answer")
            except RelayError as error:
                log.warning("train_not_cancelled", job=self.id, error=error.message)
            await asyncio.sleep(_CHECK_SECONDS)

    def _check_timeout(self) -> bool:
        limit, since = self._spec.timeout_seconds, self._progress.since
        self._timed_out = bool(limit and since and time.time() - since > limit)
        return self._timed_out

    def _stop_result(self) -> StateChanged:
        if self._timed_out and not self.cancelled.is_set():
            return self._changed_to("failed", _timeout_text(self._spec.timeout_seconds))
        return self._changed_to("cancelled", self._cancelled_by)

    # --- the end -------------------------------------------------------------------------------------------

    async def _end(self, ended: StateChanged) -> None:
        """Revoke the tokens of the job's ranks, end its driver, and end the job. Raises JobLost."""
        if self._timed_out and ended.state == "cancelled" and not self.cancelled.is_set():
            ended = self._changed_to("failed", _timeout_text(self._spec.timeout_seconds))
        self._progress.apply(ended)
        await self._record(self._take_notes())
        await retry_while_down(self._revoke)
        for _ in range(3):
            try:
                await self._parts.pool.train_forget(self._node_job)
                break
            except RelayError as error:
                log.warning("train_not_forgotten", job=self.id, error=error.message)
                await asyncio.sleep(RETRY_SECONDS)
        with contextlib.suppress(Unavailable, RedisError):  # Redis has them then
            await self._parts.jobs.archive(self.id, self.owner, everything=True)
        detail = (self._cancelled_by if ended.state == "cancelled" else "") or ended.detail
        ended = msgspec.structs.replace(ended, detail=detail[:_LOG_TAIL])
        last_number = max(self._last_number, self._end_number)
        await retry_while_down(
            lambda: self._parts.jobs.end(self.id, self.owner, ended, last_number=last_number)
        )
        log.info("train_ended", job=self.id, state=ended.state)

    async def _revoke(self) -> None:
        tokens, by = self._parts.tokens, self._creator_grant()
        for record in await tokens.records(by=by):
            if record.name == token_name(self.id) and record.revoked is None:
                await tokens.revoke(record.id, by=by)

    # --- recording -----------------------------------------------------------------------------------------

    async def _record(
        self,
        events: Sequence[TrainEvent],
        *,
        state: TrainState | None = None,
        detail: str | None = None,
        quiet: bool = False,
    ) -> None:
        """Record events and how far the job is. A new state adds an event, unless `quiet`. Raises JobLost."""
        if state is not None and state != self._state and not quiet:
            events = [StateChanged(state=state, at=time.time(), detail=detail or ""), *events]
        if detail is not None and not self.cancelled.is_set():
            self._detail = detail[:_LOG_TAIL]
        self._state = state or self._state
        jobs = self._parts.jobs
        while True:
            recorded = await retry_while_down(lambda: jobs.record_events(self.snapshot(), self.owner, events))
            if recorded:
                break
            # the lease had expired while Redis was down, or Redis had lost the job
            if await retry_while_down(self.renew) != "held":
                raise JobLost
            loaded = await retry_while_down(lambda: jobs.load(self.id))
            if loaded.writes != self._writes:
                raise JobLost
        self._writes += 1
        self._events += len(events)

    async def _archive(self, events: Sequence[TrainEvent]) -> None:
        """Move metrics and logs from Redis to the blob store once there are many. events: those just recorded."""
        self._unarchived += len(events)
        self._unarchived_bytes += sum(
            sum(map(len, each.lines)) if isinstance(each, LogLines) else _METRICS_BYTES for each in events
        )
        large = self._unarchived_bytes > _UNARCHIVED_BYTES
        if not large and self._unarchived < ARCHIVE_ENTRIES:
            return
        try:
            await self._parts.jobs.archive(self.id, self.owner, everything=large)
            self._unarchived = self._unarchived_bytes = 0
        except (Unavailable, RedisError) as error:
            # they are still in Redis; the next call tries again
            log.warning("train_not_shelved", job=self.id, error=str(error))

    def _take_notes(self) -> list[TrainEvent]:
        events = self._notes.copy()
        self._notes.clear()
        return events

    def _changed_to(self, state: TrainState, detail: str) -> StateChanged:
        return StateChanged(state=state, at=time.time(), detail=detail, restarts=self._progress.restarts)

    # --- the order for the nodes ---------------------------------------------------------------------------

    async def _train_order(self) -> TrainOrder:
        """The order for the nodes, made once: they import PyTorch early, with the environment that ranks get later.
        Raises Unavailable; NotFound where the package is gone."""
        async with self._order_lock:
            if self._order is None:
                self._order = await self._make_order()
            return self._order

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
                by=self._creator_grant(),
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

    def _creator_grant(self) -> Grant:
        return Grant(self.loaded.job.by, frozenset(), "", self._parts.namespace)


class _Cancelled(Exception):
    """The job was cancelled before it had ranks."""


async def _run_unless(
    event: asyncio.Event, work: Coroutine[Any, Any, T], seconds: float, error: Exception
) -> T:
    """The result of `work`. Raises `error` if `work` goes on for `seconds` after `event` was set."""
    task, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
        raise error
    finally:
        await end(task, waiting)


def _timeout_text(seconds: float) -> str:
    return f"it ran for longer than its timeout of {seconds:g} s"
