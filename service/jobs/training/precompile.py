"""Captures the graphs of a training job's script on one worker, and compiles them before the job has ranks.

Graphs depend on the number of ranks. Those of `workers` ranks, and of `min_workers` of an elastic job, are compiled
before ranks start. Those of the numbers between are captured and compiled while ranks run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import structlog

from ....compiler.api.training.events import JobNote, TrainEvent
from ....compiler.api.training.jobs import TrainSpec, TrainState
from ....compiler.api.training.node_messages import CapturedGraphs, TrainOrder
from ....compiler.errors import RelayError, Unavailable
from ....workers.pool import WorkerLost
from ...base.async_tasks import end
from ...base.worker_pools import TrainPool
from .graphs import TrainingGraphCompiler
from .progress import TrainingJobProgress

log = structlog.get_logger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 0.5
RETRY_MOST_SECONDS = 15.0
_LOG_TAIL = 2000
_MOST_SIZES = 16
"""Numbers of ranks between an elastic job's two, the largest first, whose graphs are captured."""


class RecordEvents(Protocol):
    """Records events and how far the job is."""

    async def __call__(
        self, events: list[TrainEvent], *, state: TrainState | None = None, detail: str | None = None
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Precompilation:
    """Precompiles the graphs of one job.

    source: whether its graphs may hold source. seconds: the time that a script has for its first step. add_note: adds
    an event to the next record.
    """

    spec: TrainSpec
    progress: TrainingJobProgress
    pool: TrainPool
    compiler: TrainingGraphCompiler
    make_order: Callable[[], Awaitable[TrainOrder]]
    source: bool
    seconds: float
    record: RecordEvents
    add_note: Callable[[TrainEvent], None]

    @property
    def _elastic(self) -> bool:
        return 0 < self.spec.min_workers < self.spec.workers

    async def before(self) -> None:
        """Compile what ranks will request first. A failure here costs compiles later, and never the job."""
        spec, progress = self.spec, self.progress
        if not spec.capture or spec.compile == "off" or spec.kind != "train":
            progress.prepared = True
            return
        warming = asyncio.create_task(self._warm(), name="warm nodes")
        try:
            await self._compile_ahead()
        finally:
            await end(warming)
        progress.prepared = True

    async def _compile_ahead(self) -> None:
        spec, progress = self.spec, self.progress
        await self.record([], state="waiting", detail="for a worker that has room for its capture")
        bodies: dict[bytes, None] = {}
        notes: list[TrainEvent] = []
        for world in (spec.workers, spec.min_workers) if self._elastic else (spec.workers,):
            try:
                captured = await self._captured(world, self._capture_started)
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

    async def _warm(self) -> None:
        """Have the nodes import PyTorch meanwhile."""
        try:
            await self.pool.train_warm(await self.make_order())
        except RelayError as error:
            log.warning("train_starts_cold", error=error.message)

    async def compile_elastic(self) -> None:
        """Compile, while ranks run, what other numbers of ranks will request. Records nothing itself."""
        spec, progress = self.spec, self.progress
        if not self._elastic or not progress.captured:  # no graph was found for the more important numbers
            return

        async def on_compiled(fresh: bool, failed: str) -> None:
            if failed:
                log.info("train_graph_not_compiled", error=failed)

        between = range(spec.workers - 1, spec.min_workers, -1)
        for world in between[:_MOST_SIZES]:
            if world in progress.sizes:
                continue
            try:
                captured = await self._captured(world, _nothing)
                for note in self._notes_of(world, captured):
                    self.add_note(note)
                await self.compiler.compile(captured.bodies, source=self.source, on_compiled=on_compiled)
            except RelayError as error:
                self.add_note(_warning(f"the capture{self._rank_text(world)} failed: {error.message}"))
            progress.sizes = [*progress.sizes, world]

    async def _captured(self, world: int, on_start: Callable[[int], Awaitable[None]]) -> CapturedGraphs:
        """The graphs of rank 0 of `world`, captured once a worker has room. Raises RelayError."""
        order = await self.make_order()

        async def placed() -> None:
            await on_start(world)

        async def once() -> CapturedGraphs:
            return await retry_until_available(
                lambda: self.pool.train_capture(order, world=world, seconds=self.seconds, placed=placed),
                self.seconds,
            )

        try:
            return await once()
        except WorkerLost as error:
            log.warning("train_capture_lost", job=order.job, error=error.message)
            return await once()

    async def _capture_started(self, world: int) -> None:
        await self.record(
            [], state="capturing", detail=f"one worker runs the first step{self._rank_text(world)}"
        )

    def _notes_of(self, world: int, captured: CapturedGraphs) -> list[TrainEvent]:
        for why in captured.skipped:
            if why not in self.progress.skipped:
                self.progress.skip(why)
        if captured.ended.startswith("failed"):
            tail = f"\n{captured.log[-_LOG_TAIL:]}" if captured.log else ""
            return [_warning(f"the capture{self._rank_text(world)} {captured.ended}{tail}")]
        if not captured.bodies:
            return [_warning("the capture found no graph: does the script use torch.compile?")]
        return []

    def _rank_text(self, world: int) -> str:
        return f" of {world} rank{'s' * (world > 1)}" if self._elastic else ""


async def retry_until_available(call: Callable[[], Awaitable[T]], seconds: float) -> T:
    """What `call` returns, once there are workers. Raises what it raises; Unavailable after `seconds`."""
    until, pause = time.monotonic() + seconds, RETRY_SECONDS
    while True:
        try:
            return await call()
        except Unavailable:
            if time.monotonic() + pause > until:
                raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, RETRY_MOST_SECONDS)


async def _nothing(world: int) -> None:
    """A capture for ranks that may come later is not recorded when it starts."""


def _warning(text: str) -> JobNote:
    return JobNote(level="warning", text=text)
