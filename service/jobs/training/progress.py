"""How far a training job is, from its events, and what people see of it."""

from __future__ import annotations

import time

import msgspec
from msgspec import Struct

from ....compiler.api.training.events import (
    CheckpointEvent,
    FirstStep,
    RankCompiles,
    RankStarted,
    StateChanged,
    StepMetrics,
    TrainEvent,
)
from ....compiler.api.training.jobs import TRAIN_ENDED, CompileCounts, TrainJob, TrainState

_SKIPPED = 100
_WHY = 300


class TrainingJobProgress(Struct, kw_only=True, omit_defaults=True):
    """What changes of a job while it runs. Stored as JSON. Times as in TrainJob.

    prepared: its graphs are compiled, or the job starts without them. begun: the `resumes` for which a driver was last
    started, -1: none. last_number: of the driver's last event that is recorded. since: when its ranks first ran since
    it began or was resumed. attempt, world: of the ranks that run now. there, stepped: when each rank started and took
    its first step. counts: hits, misses and fallbacks by rank.
    """

    prepared: bool = False
    begun: int = -1
    last_number: int = 0
    cluster: str = ""
    since: float = 0.0
    started: float = 0.0
    first_step_seconds: float = 0.0
    ranks: int = 0
    restarts: int = 0
    step: int = 0
    checkpoint: str = ""
    checkpoint_step: int = 0
    captured: int = 0
    compiled: int = 0
    skipped: list[str] = []
    attempt: int = 0
    world: int = 0
    there: dict[int, float] = {}
    stepped: dict[int, float] = {}
    counts: dict[int, tuple[int, int, int]] = {}

    def reset_ranks(self) -> None:
        """The job was resumed: its time begins again, and its earlier ranks are forgotten."""
        self.since, self.ranks, self.attempt, self.world = 0.0, 0, -1, 0
        self.there, self.stepped, self.counts = {}, {}, {}

    def apply(self, event: TrainEvent) -> None:
        match event:
            case RankStarted():
                if event.attempt > self.attempt:
                    self.attempt = event.attempt
                    self.there, self.stepped, self.counts = {}, {}, {}
                if event.attempt == self.attempt:
                    self.world = event.world_size
                    self.there[event.rank] = event.at
                    self._update_start()
            case FirstStep():
                self.stepped[event.rank] = event.at
                self._update_start()
            case RankCompiles():
                if event.attempt >= self.attempt:
                    self.counts[event.rank] = (event.hits, event.misses, event.fallbacks)
            case StepMetrics():
                if event.rank == 0:
                    self.step = event.step
            case CheckpointEvent():
                if event.kept:
                    self.checkpoint, self.checkpoint_step = event.name, event.step
            case StateChanged():
                self.restarts = max(self.restarts, event.restarts)
                self.ranks = event.ranks
                if event.state == "running" and not self.since:
                    now = time.time()  # training code can tell any time; no job outlasts its timeout by that
                    self.since = min(now, event.at) or now
            case _:
                pass

    def _update_start(self) -> None:
        """Note when all ranks have started, and when all have taken their first step."""
        if self.world == 0 or len(self.there) < self.world:
            return
        all_there = max(self.there.values())
        self.ranks = self.world
        self.started = self.started or all_there
        if len(self.stepped) >= self.world and not self.first_step_seconds:
            self.first_step_seconds = round(max(max(self.stepped.values()) - all_there, 0.0), 3)

    def skip(self, why: str) -> None:
        """Note a graph that could not be sent."""
        if len(self.skipped) < _SKIPPED:
            self.skipped = [*self.skipped, why[:_WHY]]

    def compiles(self) -> CompileCounts:
        hits, misses, fallbacks = (sum(count[n] for count in self.counts.values()) for n in range(3))
        return CompileCounts(self.captured, self.compiled, hits, misses, fallbacks)

    def shown(self, job: TrainJob, state: TrainState, ended: float, detail: str) -> TrainJob:
        return msgspec.structs.replace(
            job,
            state=state,
            started=self.started,
            first_step_seconds=self.first_step_seconds,
            ended=ended,
            ranks=0 if state in TRAIN_ENDED else self.ranks,
            restarts=self.restarts,
            step=self.step,
            checkpoint=self.checkpoint,
            checkpoint_step=self.checkpoint_step,
            compiles=self.compiles(),
            detail=detail,
            skipped=self.skipped,
        )
