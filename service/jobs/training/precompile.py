"""Captures the graphs of a training job's script on one worker, and compiles them before the job has ranks.

Graphs depend on the number of ranks: those of `workers` ranks are compiled, and of `min_workers` of an elastic job.
Graphs of other numbers compile when ranks reach them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

from ....compiler.api import compiles
from ....compiler.api.training.events import JobNote, TrainEvent
from ....compiler.api.training.jobs import TrainSpec
from ....compiler.api.training.node_messages import CapturedGraphs, TrainOrder
from ....compiler.errors import CompileTimeout, Overloaded, OverQuota, RelayError, Unavailable
from ....workers.pool import WorkerLost, WorkerPool
from ...admission.admit import Admission
from ...admission.saved_requests import SavedRequests
from ...base.async_tasks import end, run_together
from ...storage.redis.retry import retry_while_down
from ..compiles import MOST_PAUSE_SECONDS, JobCompiles
from .progress import TrainingJobProgress

log = structlog.get_logger(__name__)

RETRY_SECONDS = 0.5
RETRY_MOST_SECONDS = 15.0
_LOG_TAIL = 2000
_CONCURRENT = 16
"""Graphs of one job that are queued, or compile, at one time."""

OnCompiled = Callable[[bool, str], Awaitable[None]]
"""Called for each graph: whether it was compiled now, and the error if it failed, or ''."""


@dataclass(frozen=True)
class TrainingGraphCompiler:
    namespace: str
    compiles: JobCompiles
    admission: Admission
    saved_requests: SavedRequests
    seconds: float
    """How long a graph may wait for a worker."""

    async def compile(self, bodies: Sequence[bytes], *, source: bool, on_compiled: OnCompiled) -> None:
        """Compile the graphs that the cache lacks. Raises what `on_compiled` raises."""
        free = asyncio.Semaphore(_CONCURRENT)
        reporting = asyncio.Lock()

        async def compile_and_report(body: bytes) -> None:
            async with free:
                try:
                    fresh, why = await self._compile_graph(body, source=source), ""
                except RelayError as error:
                    fresh, why = False, error.message
            async with reporting:
                await on_compiled(fresh, why)

        try:
            await run_together(*map(compile_and_report, bodies))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _compile_graph(self, body: bytes, *, source: bool) -> bool:
        """Whether the graph was compiled now. Raises the compile's error."""
        request = await self.admission.parse(body, namespace=self.namespace)
        loop = asyncio.get_running_loop()

        async def refused(error: Overloaded | OverQuota) -> None:
            if isinstance(error, OverQuota) and (error.retry_after or 0) > MOST_PAUSE_SECONDS:
                raise error  # it may take hours; ranks compile it themselves
            limit.reschedule(loop.time() + self.seconds + MOST_PAUSE_SECONDS)

        async def told(progress: compiles.CompileProgress) -> None:
            if progress.stage != "queued":
                limit.reschedule(None)

        try:
            async with asyncio.timeout(self.seconds) as limit:
                _, fresh = await self.compiles.compiled(
                    request, body, source=source, on_refused=refused, on_progress=told
                )
        except TimeoutError:
            raise CompileTimeout(f"no worker was free within {self.seconds:g} s") from None
        if fresh:
            await self.saved_requests.note(request.key, body)
        return fresh


@dataclass(frozen=True, kw_only=True)
class Precompilation:
    """Precompiles the graphs of one job.

    source: whether its graphs may hold source. seconds: the time limit of a capture run. record: records events, a
    state and a detail.
    """

    spec: TrainSpec
    progress: TrainingJobProgress
    pool: WorkerPool
    compiler: TrainingGraphCompiler
    make_order: Callable[[], Awaitable[TrainOrder]]
    source: bool
    seconds: float
    record: Callable[..., Awaitable[None]]

    async def run(self) -> None:
        """Compile what ranks will request first. A failure here does not fail the job: its ranks compile then."""
        spec = self.spec
        if spec.capture and spec.compile != "off" and spec.kind == "train":
            await self.record([], state="waiting", detail="for a worker that has room for its capture")
            try:
                train_order = await self.make_order()
            except RelayError as error:
                await self.record([_warning(f"nothing is captured, ranks start cold: {error.message}")])
            else:
                warming = asyncio.create_task(self._warm(train_order), name="warm nodes")
                try:
                    await self._capture_and_compile(train_order)
                finally:
                    await end(warming)
        self.progress.prepared = True

    async def _capture_and_compile(self, train_order: TrainOrder) -> None:
        spec, progress = self.spec, self.progress
        bodies: dict[bytes, None] = {}
        notes: list[TrainEvent] = []
        for world in (spec.workers, spec.min_workers) if self._elastic else (spec.workers,):
            try:
                captured = await self._capture(train_order, world)
            except RelayError as error:
                notes.append(
                    _warning(f"the capture{self._rank_text(world)} failed, ranks start cold: {error.message}")
                )
                continue
            bodies |= dict.fromkeys(captured.bodies)
            notes += self._notes_of(world, captured)
        progress.captured, progress.compiled = len(bodies), 0
        if not bodies:
            await self.record(notes)
            return
        await self.record(notes, state="compiling", detail=f"{len(bodies)} graphs")
        done = 0

        async def on_compiled(fresh: bool, failed: str) -> None:
            nonlocal done
            done += 1
            progress.compiled += fresh
            if failed:
                progress.skip(failed)
            await self.record([], detail=f"{done} of {len(bodies)} graphs")

        await self.compiler.compile(list(bodies), source=self.source, on_compiled=on_compiled)

    async def _warm(self, train_order: TrainOrder) -> None:
        """Have the nodes import PyTorch meanwhile."""
        try:
            await self.pool.training.warm(train_order)
        except RelayError as error:
            log.warning("train_starts_cold", error=error.message)

    async def _capture(self, train_order: TrainOrder, world: int) -> CapturedGraphs:
        """The graphs of rank 0 of `world`, captured when a worker has room. Raises RelayError."""

        async def started() -> None:
            detail = f"one worker runs the first step{self._rank_text(world)}"
            await self.record([], state="capturing", detail=detail)

        async def once() -> CapturedGraphs:
            return await retry_while_down(
                lambda: self.pool.training.capture(
                    train_order, world=world, seconds=self.seconds, placed=started
                ),
                seconds=self.seconds,
                longest_pause=RETRY_MOST_SECONDS,
                errors=(Unavailable,),
            )

        try:
            return await once()
        except WorkerLost as error:
            log.warning("train_capture_lost", job=train_order.job, error=error.message)
            return await once()

    def _notes_of(self, world: int, captured: CapturedGraphs) -> list[TrainEvent]:
        for why in captured.skipped:
            if why not in self.progress.skipped:
                self.progress.skip(why)
        if captured.ended.startswith("failed"):
            tail = f"\n{captured.log[-_LOG_TAIL:]}" if captured.log else ""
            return [_warning(f"the capture{self._rank_text(world)} {captured.ended[:_LOG_TAIL]}{tail}")]
        if not captured.bodies:
            return [_warning("the capture found no graph: does the script use torch.compile?")]
        return []

    @property
    def _elastic(self) -> bool:
        return 0 < self.spec.min_workers < self.spec.workers

    def _rank_text(self, world: int) -> str:
        return f" of {world} rank{'s' * (world > 1)}" if self._elastic else ""


def _warning(text: str) -> JobNote:
    return JobNote(level="warning", text=text)
