"""Stage 6: a dispatcher has a missing graph compiled by a worker, signed, and published.

There is one flight for each lease that this dispatcher holds. A flight runs two tasks: one renews the lease, the other
compiles, signs and publishes. The first to end ends the other. Clients never wait for a flight: they wait for its
events in Redis, which any gateway can serve.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

import msgspec
import structlog
from opentelemetry.trace import Span, StatusCode
from redis.exceptions import RedisError

from ...compiler.api import compiles
from ...compiler.errors import (
    ArtifactError,
    BadOption,
    CompileFailed,
    CompileKilled,
    CompileTimeout,
    DataDependent,
    ForbiddenTarget,
    NoWorker,
    Overloaded,
    RelayError,
    SchemaMismatch,
    ServiceError,
    Unavailable,
    Unsupported,
    VerifyFailed,
)
from ...compiler.request.schema import REVISION
from ...compiler.tuning.queries import TuningQuery
from ...compiler.tuning.records import TuningEntry
from ...workers.pool import WorkerPool, WorkersBusy
from ..admission.admit import Admission
from ..admission.compile_request import CompileRequest
from ..base.async_tasks import end
from ..base.metrics import GatewayMetrics
from ..base.settings import ServiceSettings
from ..base.tracing import Stages, Tracer, current_trace
from ..cache.artifact_cache import ArtifactCache, Offer, make_offer
from ..signing.remote import SignerDown
from ..signing.trusted_keys import TrustedKeys
from ..storage.outages import BlobStoreDown
from ..storage.redis.retry import REDIS_OUTAGES, redis_errors_logged, retry_while_down, write_refusal
from .search.compile_queries import CompileQueries, OnQuery
from .search.database import TuningDatabase
from .search.queue import SearchQueue
from .search.task import SearchTarget
from .single_flight import CompileNeeds, Lease, Leases

log = structlog.get_logger(__name__)

_MOST_HOLDERS = 3
"""A compile is not taken over from more dispatchers that died: its artifact may be what kills them."""
ATTEMPTS = 2
"""A compile whose worker dies (its node went away, for example) is queued once more."""
REPEATABLE = (CompileFailed, VerifyFailed, Unsupported, ForbiddenTarget, BadOption)
"""Errors that the same request would meet again. They are remembered for a while."""
POISON = (CompileKilled, CompileTimeout)
"""Errors that the same request may meet again, at the cost of a worker. They are remembered for longer each time."""
POOL_GRACE_SECONDS = 30.0
"""The pool enforces the deadline; past this much more, the flight stops waiting for it."""
_MOST_STEPS = 64
"""Steps of a compile that wait to be written to Redis."""
_MOST_DETAIL = 500
"""Characters of a step's text."""
_LONGEST_PAUSE_SECONDS = 8.0
"""Between two tries to publish."""


class Flight:
    """One compile under one lease. `lease` changes when it is taken again under a new fence."""

    def __init__(self, lease: Lease, *, nowhere: bool = False) -> None:
        """nowhere: no dispatcher has workers for it, so that it fails here."""
        self.lease = lease
        self.nowhere = nowhere
        self.began = time.monotonic()
        self.placed = False
        """It has a worker."""
        self.working: float | None = None
        """Since when that compiles it."""
        self.worked = 0.0
        """Seconds that a worker spent on it."""
        self.deadly = False
        """Dispatchers have died of it."""
        self.over = False
        """Its lease is given up: nobody may renew it any more."""
        self.compiled = False
        """The artifact is there and only has to be published, even if no client waits."""

    @property
    def waits(self) -> bool:
        """Whether it has no worker yet."""
        return not (self.placed or self.over)


class _GiveBack(Exception):
    """The compile goes back to the queue: there is no worker for it here now. killed: its worker has died of it."""

    def __init__(self, *, killed: bool) -> None:
        self.killed = killed


class Flights:
    def __init__(
        self,
        settings: ServiceSettings,
        namespace: str,
        leases: Leases,
        cache: ArtifactCache,
        tunings: TuningDatabase,
        searches: SearchQueue,
        admission: Admission,
        pool: WorkerPool,
        keyring: TrustedKeys,
        metrics: GatewayMetrics,
        tracer: Tracer,
    ) -> None:
        self._settings = settings
        self._namespace = namespace
        self._leases = leases
        self._cache = cache
        self._tunings = tunings
        self._searches = searches
        self._admission = admission
        self._pool = pool
        self._keyring = keyring
        self._metrics = metrics
        self._tracer = tracer
        self._flights: dict[asyncio.Task[None], Flight] = {}
        self._listeners: dict[str, OnQuery] = {}

    @contextmanager
    def listening(self, key: str, on_query: OnQuery) -> Iterator[None]:
        """Inside, calls `on_query` with each tuning query of a compile of `key` here. Of several listeners to a key,
        only the last is called."""
        self._listeners[key] = on_query
        try:
            yield
        finally:
            if self._listeners.get(key) is on_query:
                del self._listeners[key]

    def _pass_on(self, key: str, query: TuningQuery, entries: Sequence[TuningEntry]) -> None:
        if (on_query := self._listeners.get(key)) is not None:
            on_query(query, entries)

    async def take(self, key: str, needs: CompileNeeds, *, nowhere: bool = False) -> Flight | None:
        """Begins a compile that is queued, or continues one whose holder died. None if that lives, or if the compile is
        over or not known. nowhere: see Flight. Raises RedisError."""
        if self._flights_of(key):
            return None  # the task that renews its lease takes it again
        lease = await self._leases.take(key, needs)
        if lease is None:
            return None
        if lease.taken > 1:
            log.warning("compile_taken_over", key=key)
            self._metrics.takeovers.inc()
        flight = Flight(lease, nowhere=nowhere)
        self._launch(flight)
        return flight

    def _flights_of(self, key: str) -> list[Flight]:
        flights = self._flights.values()
        return [flight for flight in flights if flight.lease.key == key and not flight.over]

    async def close(self) -> None:
        """Stop all flights and give their leases back."""
        await end(*self._flights)

    def _launch(self, flight: Flight) -> None:
        key = flight.lease.key
        task = asyncio.create_task(self._traced(flight), name=f"compile {key[:12]}")
        self._flights[task] = flight
        self._metrics.compiles_here.inc()

        def landed(done: asyncio.Task[None]) -> None:
            self._metrics.compiles_here.dec()
            del self._flights[done]
            if not done.cancelled() and (error := done.exception()) is not None:
                log.error("flight_broke", key=key, exc_info=error)

        task.add_done_callback(landed)

    async def _traced(self, flight: Flight) -> None:
        lease = flight.lease
        queued = time.time() - lease.waited
        with self._tracer.begin("compile", lease.trace, began=queued) as span:
            span.set_attributes(
                {
                    "torchrelay.key": lease.key,
                    "torchrelay.namespace": self._namespace,
                    "torchrelay.leases": lease.taken,
                }
            )
            await self._fly(flight, span, queued)

    async def _fly(self, flight: Flight, span: Span, queued: float) -> None:
        """queued: when the compile was, in seconds since the epoch."""
        key = flight.lease.key
        renewer = asyncio.create_task(self._renew_lease(flight))
        worker = asyncio.create_task(self._compile(flight, queued))
        try:
            await asyncio.wait({renewer, worker}, return_when=asyncio.FIRST_COMPLETED)
            if not worker.done():
                await end(worker)
                verdict = renewer.result()
                log.info("compile_stopped", key=key, verdict=verdict)
                flight.over = True
                if verdict == "abandoned":
                    await self._leases.fail(flight.lease, _abandoned(), remember_seconds=0)
                return
            await end(renewer)
            flight.over = True
            if isinstance(back := worker.exception(), _GiveBack):
                await self._leases.release(flight.lease, killed=back.killed)
            else:
                await self._report_failure(flight, worker, span)
        except asyncio.CancelledError:
            await end(worker)
            await end(renewer)
            with redis_errors_logged("lease_not_released", key=key):  # it expires by itself
                await self._leases.release(flight.lease)
            raise
        finally:
            flight.over = True
            await self._charge(flight)

    async def _charge(self, flight: Flight) -> None:
        """Counts what a worker spent, whatever the result."""
        if flight.worked:
            with redis_errors_logged("spending_not_counted", seconds=round(flight.worked, 3)):
                await self._leases.charge(flight.worked)

    async def _renew_lease(self, flight: Flight) -> Literal["lost", "published", "abandoned"]:
        """Renews until another holder has the lease, or no client waits for the compile. Waits while Redis is down."""
        while True:
            await asyncio.sleep(self._settings.lease_seconds / 3)
            try:
                renewal, flight.lease = await self._leases.renew(flight.lease)
            except RedisError as error:
                log.warning("lease_not_renewed", key=flight.lease.key, error=str(error))
                continue
            match renewal:
                case "abandoned" if flight.compiled:
                    continue
                case "lost" | "published" | "abandoned":
                    return renewal
                case "retaken":
                    log.warning("lease_retaken", key=flight.lease.key)

    async def _compile(self, flight: Flight, queued: float) -> None:
        if not flight.lease.wanted:
            raise _abandoned()
        limit = self._settings.compile_deadline_seconds
        if flight.lease.waited >= limit:
            raise CompileTimeout(
                f"no worker was free within the deadline of {limit:g} s",
                hint="Add workers, or raise the compile deadline in the service's settings",
            )
        if flight.lease.taken > _MOST_HOLDERS:
            flight.deadly = True
            raise CompileKilled(
                f"{flight.lease.taken - 1} dispatchers that had this compile have died",
                hint="Compile this graph locally",
            )
        if (theirs := flight.lease.needs.revision) != REVISION:
            raise SchemaMismatch(
                f"the gateway's requests are of revision {theirs}, and all dispatchers' of others ({REVISION} here)",
                hint="Upgrade dispatchers and workers too",
            )
        request = await self._admission.request_of(flight.lease.body, namespace=self._namespace)
        stages = Stages(self._tracer, "wait", began=queued)
        try:
            data = await self._run(flight, request, stages)
        finally:
            stages.end()
        await self._report_progress(flight, "publish", "")
        flight.compiled = True
        with self._tracer.span("sign"):
            signed = await self._sign(flight, request.key, data)
        offer = await make_offer(request.key, signed, request.components)
        offer = msgspec.structs.replace(offer, unkeyed=flight.lease.needs.unkeyed)
        with self._tracer.span("publish"):
            published = await self._publish(flight, offer)
        if published:
            took = time.monotonic() - flight.began
            self._metrics.compile_seconds.observe(took)
            log.info("published", key=offer.key, bytes=len(signed), seconds=round(took, 3))
            await self._trim()

    async def _trim(self) -> None:
        try:
            await self._cache.trim()
        except (RedisError, Unavailable) as error:
            log.warning("cache_not_trimmed", error=str(error))  # the next publish tries again

    async def _run(self, flight: Flight, request: CompileRequest, stages: Stages) -> bytes:
        """The artifact from a worker; its progress goes to the compile's events on the way."""
        steps: asyncio.Queue[tuple[compiles.Stage, str] | None] = asyncio.Queue(_MOST_STEPS)

        def on_progress(stage: compiles.Stage, detail: str) -> None:
            if flight.working is None and stage != "queued":
                flight.working = time.monotonic()
            stages.enter("wait" if stage == "queued" else stage)
            with suppress(asyncio.QueueFull):  # Redis is slower than the worker
                steps.put_nowait((stage, detail[:_MOST_DETAIL]))

        reporter = asyncio.create_task(self._report(flight, steps))
        until = flight.began + self._settings.compile_deadline_seconds - flight.lease.waited
        try:
            return await self._compile_on_worker(flight, request, until, on_progress)
        except WorkersBusy:
            raise _GiveBack(killed=False) from None
        except CompileKilled as error:
            if flight.lease.killed + 1 >= ATTEMPTS:
                raise
            log.warning("compile_retried", key=request.key, error=error.message)
            on_progress("queued", f"trying again: {error.message}")
            raise _GiveBack(killed=True) from None
        except NoWorker:
            if flight.nowhere or self._pool.room(request.toolchain, request.target) is not None:
                raise
            raise _GiveBack(killed=False) from None
        finally:
            if flight.working is not None:
                flight.worked = time.monotonic() - flight.working
            await steps.put(None)
            await asyncio.wait({reporter})

    async def _compile_on_worker(
        self,
        flight: Flight,
        request: CompileRequest,
        until: float,
        on_progress: Callable[[compiles.Stage, str], None],
    ) -> bytes:
        """until: the deadline, on the monotonic clock."""
        left = max(0.0, until - time.monotonic())
        if request.threads is not None:
            self._searches.expect(SearchTarget(request.toolchain, request.target, request.threads))
        on_query = functools.partial(self._pass_on, request.key)
        queries = CompileQueries(
            self._tunings, self._searches, request, on_query, flight.lease.needs.priority
        )
        try:
            async with asyncio.timeout(left + POOL_GRACE_SECONDS):
                flight.placed = True  # the pool gives it an idle worker at once, or refuses
                return await self._pool.compile(
                    request.canonical,
                    key=request.key,
                    namespace=self._namespace,
                    toolchain=request.toolchain,
                    target=request.target,
                    holds_source=bool(request.kernels),
                    trace_id="" if (trace := current_trace()) is None else trace.trace_id,
                    deadline_seconds=left,
                    on_progress=on_progress,
                    on_query=queries.answer,
                )
        except TimeoutError:
            limit = self._settings.compile_deadline_seconds
            raise CompileTimeout(f"the compile took longer than {limit:g} s") from None

    async def _report(self, flight: Flight, steps: asyncio.Queue[tuple[compiles.Stage, str] | None]) -> None:
        while (step := await steps.get()) is not None:
            await self._report_progress(flight, *step)

    async def _report_progress(self, flight: Flight, stage: compiles.Stage, detail: str) -> None:
        """Progress is for people: whatever prevents it is logged, and the compile goes on."""
        try:
            with redis_errors_logged("progress_lost", key=flight.lease.key, stage=stage):
                await self._leases.progress(flight.lease, stage, detail)
        except Exception:
            log.exception("progress_not_reported", key=flight.lease.key)

    async def _sign(self, flight: Flight, key: str, data: bytes) -> bytes:
        """Signed, however long the signer is away, up to `publish_retry_seconds`; the lease is renewed meanwhile."""

        async def sign() -> bytes:
            try:
                return await self._keyring.in_thread(
                    self._keyring.sign, data, key=key, namespace=self._namespace
                )
            except SignerDown as error:
                await self._report_progress(flight, "publish", error.message)
                raise

        return await retry_while_down(
            sign,
            seconds=self._settings.publish_retry_seconds,
            longest_pause=_LONGEST_PAUSE_SECONDS,
            errors=(SignerDown, Overloaded),
        )

    async def _publish(self, flight: Flight, offer: Offer) -> bool:
        """Publishes, and tries again while Redis or the blob store is down; the lease is renewed meanwhile. False:
        another artifact or lease stands.

        Raises the error of the last try after `publish_retry_seconds`; clients then get a failed event.
        """
        until = time.monotonic() + self._settings.publish_retry_seconds

        async def publish() -> bool:
            try:
                return await self._publish_once(flight, offer)
            except BlobStoreDown as error:
                left = max(0.0, until - time.monotonic())
                await self._report_progress(flight, "publish", f"for {left:.0f} s more: {error.message}")
                raise

        return await retry_while_down(
            publish,
            seconds=self._settings.publish_retry_seconds,
            longest_pause=_LONGEST_PAUSE_SECONDS,
            errors=(*REDIS_OUTAGES, BlobStoreDown),
        )

    async def _publish_once(self, flight: Flight, offer: Offer) -> bool:
        while not await self._cache.publish(flight.lease.token, offer):
            renewal, flight.lease = await self._leases.renew(flight.lease)
            if renewal in ("lost", "published"):
                log.warning("late_publish_refused", key=offer.key, verdict=renewal)
                return False
        return True

    async def _report_failure(self, flight: Flight, worker: asyncio.Task[None], span: Span) -> None:
        """Sends the failed event of a failed compile; a published one needs nothing more."""
        failure = worker.exception()
        if failure is None:
            return
        key = flight.lease.key
        error = _as_relay_error(failure)
        span.set_status(StatusCode.ERROR, error.code)
        log.error("compile_failed", key=key, code=error.code, error=error.message, exc_info=failure)
        self._metrics.compile_errors.labels(error.code).inc()
        poison = isinstance(error, POISON) and (flight.working is not None or flight.deadly)
        remember = poison or isinstance(error, REPEATABLE)
        await retry_while_down(
            lambda: self._leases.fail(
                flight.lease,
                error,
                remember_seconds=self._settings.negative_ttl_seconds if remember else 0.0,
                growing=poison or isinstance(error, DataDependent),
            ),
            seconds=self._settings.publish_retry_seconds,
        )


def _abandoned() -> CompileKilled:
    return CompileKilled("no client waits for this compile any more", hint="Ask again")


def _as_relay_error(failure: BaseException) -> RelayError:
    """The error for clients. They see only the texts of our own errors; the rest is in the log."""
    if isinstance(failure, ArtifactError):
        return ServiceError(f"the worker returned an artifact that cannot be signed: {failure.message}")
    if isinstance(failure, RelayError):
        return failure
    if isinstance(failure, REDIS_OUTAGES):
        return Unavailable("Redis could not be reached while the compile was published")
    if refusal := write_refusal(failure):
        return Unavailable(f"Redis took no writes while the compile was published: {refusal}")
    if isinstance(failure, RedisError):
        return Unavailable(f"Redis refused the compile's result ({type(failure).__name__})")
    return ServiceError(f"the service failed with {type(failure).__name__}; its log says more")
