"""Runs one training job: compiles its graphs, starts its ranks on the nodes, and records their events.

Ranks do not need a dispatcher. If this one dies, another takes the lease and requests the events that are not recorded
yet. The nodes store events while Redis is down.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import structlog
from redis.exceptions import RedisError

from ....compiler.api.training.events import NumberedEvent, StateChanged, TrainEvent
from ....compiler.api.training.jobs import TRAIN_ENDED, TrainSpec, TrainState
from ....compiler.api.training.node_messages import TrainOrder, node_job_id
from ....compiler.artifact.signing import key_text
from ....compiler.errors import NotFound, Overloaded, RelayError, Unavailable
from ....workers.pool import WorkerLost, WorkerPool
from ...access.tokens import Grant, IssuedToken, Tokens, rank_token_name
from ...base.async_tasks import end, is_set_within
from ...base.settings import ServiceSettings
from ...signing.trusted_keys import TrustedKeys
from ...storage.redis.retry import redis_errors_logged, retry_while_down
from ..run import JobRun
from .bounds import about_bytes, bounded
from .files import TrainingFiles
from .precompile import (
    RETRY_MOST_SECONDS,
    RETRY_SECONDS,
    Precompilation,
    TrainingGraphCompiler,
)
from .records import ARCHIVE_ENTRIES, TrainingJobRecord, TrainingJobs, job_event

log = structlog.get_logger(__name__)

T = TypeVar("T")

_POLL_SECONDS = 2.0
CANCEL_SECONDS = 20.0
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
_TOKEN_SECONDS = 2 * 86400
"""How long the ranks' token lives on after a dispatcher last ran the job."""
EXTEND_SECONDS = 3600.0
_BATCH_SECONDS = 0.2
"""Events that come within this time are recorded together."""
_FULL_BATCH = 500
_BYTES_A_SECOND = 16 << 20
"""The rate at which one job's events are taken; more wait at its nodes."""
_UNARCHIVED_BYTES = 4 << 20
"""About how many bytes of metrics and logs stay in Redis."""
_MOST_UNARCHIVED_BYTES = 64 << 20
"""While the blob store is down, no more metrics and logs than this are taken from the nodes: all jobs share Redis."""


@dataclass(frozen=True, kw_only=True)
class TrainingJobParts:
    """What runs need of the rest of the service."""

    namespace: str
    jobs: TrainingJobs
    store: TrainingFiles
    pool: WorkerPool
    compiler: TrainingGraphCompiler
    tokens: Tokens
    keyring: TrustedKeys
    settings: ServiceSettings


class TrainingJobRun(JobRun[TrainingJobRecord]):
    def __init__(self, parts: TrainingJobParts, loaded: TrainingJobRecord, lease: str) -> None:
        super().__init__(parts.jobs, loaded, lease)
        self.cancelled = asyncio.Event()
        self._parts = parts
        self._node_job = node_job_id(parts.namespace, loaded.job.id)
        self._spec = loaded.job.spec
        self._ending = asyncio.Event()
        """The job was cancelled, or its timeout is over."""
        self._unarchived = ARCHIVE_ENTRIES
        self._unarchived_bytes = 0
        self._end_number = 0
        """Number of the event that ends the job."""
        self._train_order: TrainOrder | None = None
        self._extended = -math.inf
        self._issued: list[IssuedToken] = []
        """Tokens of its ranks that this run has issued."""
        if loaded.progress.begun != loaded.resumes:
            loaded.progress.reset_ranks()
        if loaded.cancelled_by:
            self.cancel(loaded.cancelled_by)

    def promised(self) -> list[TrainSpec]:
        """The job's, unless its ranks have their room."""
        return [] if self._state == "running" else [self._spec]

    async def restore(self) -> None:
        for issued in self._issued:
            await self._parts.tokens.restore(issued, lifetime_seconds=_TOKEN_SECONDS)

    def cancel(self, by: str) -> None:
        if not self.cancelled.is_set():
            self._cancelled_by = self._detail = by
            self.cancelled.set()

    async def run(self) -> None:
        try:
            if not self._progress.prepared and not self._progress.started:
                await _run_unless(self.cancelled, self._precompilation().run(), 0.0, _Cancelled())
            ended = await self._run_ranks()
        except _Cancelled:
            ended = self._changed_to("cancelled", self._cancelled_by)
        except RelayError as error:
            ended = self._changed_to("failed", error.message)
        await self._end(ended)

    def _precompilation(self) -> Precompilation:
        parts = self._parts
        return Precompilation(
            spec=self._spec,
            progress=self._progress,
            pool=parts.pool,
            compiler=parts.compiler,
            make_order=self._get_order,
            source=self.loaded.source,
            seconds=parts.settings.train_capture_seconds,
            record=self._record,
        )

    # --- ranks ---------------------------------------------------------------------------------------------

    async def _run_ranks(self) -> StateChanged:
        """Have the nodes run the job, and record their events. Returns the event that ends the job, unrecorded."""
        stopper = asyncio.create_task(self._stop_on_request(), name=f"stop train {self.id}")
        try:
            return await self._follow_ranks(stopper)
        finally:
            await end(stopper)

    async def _follow_ranks(self, stopper: asyncio.Task[None]) -> StateChanged:
        start = self._progress.begun != self.loaded.resumes
        losses, pause = 0, RETRY_SECONDS
        while not stopper.done():
            try:
                if start:
                    if self.cancelled.is_set():
                        raise _Cancelled
                    await self._start_ranks()
                    start = False
                await self._extend_token()
                await self._wait_for_blob_store()
                events = await self._answered(
                    self._parts.pool.training.events(
                        self._node_job, self._progress.last_number, _POLL_SECONDS
                    )
                )
            except WorkerLost as error:
                losses += 1
                if self.cancelled.is_set():
                    break
                if losses >= _MOST_DRIVER_LOSSES:
                    return self._changed_to(
                        "failed", f"the job's driver was lost again and again: {error.message}"
                    )
                start = True
                log.warning("train_driver_lost", job=self.id, error=error.message)
            except (Unavailable, Overloaded) as error:
                log.warning("train_news_wait", job=self.id, error=error.message)
            else:
                pause = RETRY_SECONDS
                if events:
                    losses = 0
                    if (last := await self._record_events(events)) is not None:
                        return last
                    await self._wait_for_more(events)
                continue
            if self._ending.is_set():
                await asyncio.sleep(RETRY_SECONDS)
            else:
                await is_set_within(self._ending, pause)
            pause = min(2 * pause, RETRY_MOST_SECONDS)
        return self._stop_result()

    @staticmethod
    async def _wait_for_more(recorded: Sequence[NumberedEvent]) -> None:
        seconds = sum(about_bytes(each.event) for each in recorded) / _BYTES_A_SECOND
        if len(recorded) < _FULL_BATCH:
            seconds = max(seconds, _BATCH_SECONDS)
        await asyncio.sleep(seconds)

    async def _extend_token(self) -> None:
        """The ranks' token, also one that another dispatcher issued, lives on with the job."""
        if time.monotonic() - self._extended < EXTEND_SECONDS:
            return
        self._extended = time.monotonic()
        with redis_errors_logged("token_not_extended", job=self.id):
            await self._parts.tokens.extend(
                rank_token_name(self.id), namespace=self._parts.namespace, lifetime_seconds=_TOKEN_SECONDS
            )

    async def _wait_for_blob_store(self) -> None:
        """Raises Unavailable while too many metrics and logs wait in Redis for the blob store."""
        if self._unarchived_bytes > _MOST_UNARCHIVED_BYTES and not self._ending.is_set():
            await self._archive([])
            if self._unarchived_bytes:
                raise Unavailable("the blob store takes no metrics and logs")

    async def _answered(self, request: Coroutine[Any, Any, T]) -> T:
        """The nodes' answer. Raises Unavailable if it takes long once the job is to end."""
        late = Unavailable("the job is to end, and its nodes do not answer")
        return await _run_unless(self._ending, request, _HANG_SECONDS, late)

    async def _start_ranks(self) -> None:
        """Have the nodes start the job. Raises Unavailable, NotFound."""
        progress, resumes = self._progress, self.loaded.resumes
        again = progress.begun == resumes
        progress.ranks = 0
        if again:
            await self._record([], state="recovering", detail="its driver was lost and starts again")
        else:
            await self._record([], state="starting", detail="ranks are being placed")
        await self._answered(self._send_order(forget=resumes > 0 and not again))
        self._train_order = None
        if not again or progress.cluster != self._parts.pool.cluster:
            progress.begun, progress.cluster = resumes, self._parts.pool.cluster
            await self._record([])

    async def give_up(self, why: str) -> None:
        with contextlib.suppress(RelayError):
            await self._parts.pool.training.forget(self._node_job)
        await super().give_up(why)

    async def _send_order(self, *, forget: bool) -> None:
        """forget: the nodes still know the job from before it was resumed."""
        if forget:
            await self._parts.pool.training.forget(self._node_job)
        await self._parts.pool.training.begin(await self._get_order())

    async def _record_events(self, received: Sequence[NumberedEvent]) -> StateChanged | None:
        """Record new events of the nodes. The event that ends the job is returned for `_end`; until that has recorded
        it, a dispatcher that takes the job over gets it again from the nodes."""
        events: list[TrainEvent] = []
        last: StateChanged | None = None
        for number, told in ((each.number, each.event) for each in received):
            if number <= self._progress.last_number:
                continue
            event = bounded(told, self._spec.workers)
            if isinstance(event, StateChanged) and event.state in TRAIN_ENDED:
                last, self._end_number = event, number
                break
            self._progress.last_number = number
            self._progress.apply(event)
            events.append(event)
            if isinstance(event, StateChanged):
                self._state = event.state
                self._set_detail(event.detail)
        if events:
            await self._record(events)
            await self._archive(events)
        return last

    async def _stop_on_request(self) -> None:
        """Wait until the job is cancelled or its timeout is over. Then have its ranks end, and return when they should
        have ended."""
        while not await is_set_within(self.cancelled, _CHECK_SECONDS):
            limit, since = self._spec.timeout_seconds, self._progress.since
            if limit and since and time.time() - since > limit:
                break
        self._ending.set()
        began, answered = time.monotonic(), False
        while time.monotonic() < began + (CANCEL_SECONDS if answered else _UNREACHABLE_SECONDS):
            try:  # more than once: a driver may be starting
                async with asyncio.timeout(_HANG_SECONDS):
                    await self._parts.pool.training.cancel(self._node_job)
                answered = True
            except TimeoutError:
                log.warning("train_not_cancelled", job=self.id, error="its driver does not answer")
            except RelayError as error:
                log.warning("train_not_cancelled", job=self.id, error=error.message)
            await asyncio.sleep(_CHECK_SECONDS)

    def _stop_result(self) -> StateChanged:
        if self.cancelled.is_set():
            return self._changed_to("cancelled", self._cancelled_by)
        return self._changed_to(
            "failed", f"it ran for longer than its timeout of {self._spec.timeout_seconds:g} s"
        )

    # --- the end -------------------------------------------------------------------------------------------

    async def _end(self, ended: StateChanged) -> None:
        """Revoke the tokens of the job's ranks, end its driver, and end the job. Raises JobLost."""
        self._progress.apply(ended)
        if ended.state == "cancelled" and (self.cancelled.is_set() or self._ending.is_set()):
            ended = self._stop_result()
        await self._record([])
        name, creator = rank_token_name(self.id), self._creator_grant()
        await retry_while_down(lambda: self._parts.tokens.revoke_named(name, by=creator))
        for _ in range(3):
            try:
                await self._parts.pool.training.forget(self._node_job)
                break
            except RelayError as error:
                log.warning("train_not_forgotten", job=self.id, error=error.message)
                await asyncio.sleep(RETRY_SECONDS)
        with contextlib.suppress(Unavailable, RedisError):  # Redis has them then
            await self._parts.jobs.archive(self.id, self.lease, everything=True)
        ended = msgspec.structs.replace(ended, detail=ended.detail[:_LOG_TAIL])
        last_number = max(self._progress.last_number, self._end_number)
        progress = msgspec.structs.replace(self._progress, last_number=last_number)
        await retry_while_down(lambda: self._jobs.end(self.id, self.lease, ended, progress))
        log.info("train_ended", job=self.id, state=ended.state)

    # --- recording -----------------------------------------------------------------------------------------

    async def _record(
        self,
        events: Sequence[TrainEvent],
        *,
        state: TrainState | None = None,
        detail: str | None = None,
    ) -> None:
        """Record events and how far the job is. A new state adds an event. Raises JobLost."""
        if detail is not None:
            self._set_detail(detail)
        await self._record_job([job_event(event) for event in events], state=state)

    def _set_detail(self, detail: str) -> None:
        if not self.cancelled.is_set():
            self._detail = detail[:_LOG_TAIL]

    async def _archive(self, events: Sequence[TrainEvent]) -> None:
        """Move metrics and logs from Redis to the blob store once there are many. events: those just recorded."""
        self._unarchived += len(events)
        self._unarchived_bytes += sum(map(about_bytes, events))
        large = self._unarchived_bytes > _UNARCHIVED_BYTES
        if not large and self._unarchived < ARCHIVE_ENTRIES:
            return
        try:
            await self._parts.jobs.archive(self.id, self.lease, everything=large)
            self._unarchived = self._unarchived_bytes = 0
        except (Unavailable, RedisError) as error:
            # they are still in Redis; the next call tries again
            log.warning("train_not_shelved", job=self.id, error=str(error))

    def _changed_to(self, state: TrainState, detail: str) -> StateChanged:
        return StateChanged(state=state, at=time.time(), detail=detail, restarts=self._progress.restarts)

    # --- the order for the nodes ---------------------------------------------------------------------------

    async def _get_order(self) -> TrainOrder:
        """The order for the nodes, the same for the capture, the prefork process and the ranks. Raises Unavailable;
        NotFound if the package is gone."""
        if self._train_order is None:
            self._train_order = await self._make_order()
        return self._train_order

    async def _make_order(self) -> TrainOrder:
        parts, package = self._parts, b""
        if self._spec.package:
            stored = await retry_while_down(
                lambda: parts.store.package(self._spec.package),
                seconds=_PACKAGE_SECONDS,
                longest_pause=RETRY_MOST_SECONDS,
                errors=(Unavailable,),
            )
            if stored is None:
                raise NotFound("the job's packed working directory is gone", hint="Begin the job again")
            package = stored
        issued = await retry_while_down(
            lambda: parts.tokens.issue(
                rank_token_name(self.id),
                frozenset({"compile"}),
                by=self._creator_grant(),
                namespace=parts.namespace,
                lifetime_seconds=_TOKEN_SECONDS,
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
