"""Stage 8, where a searcher works: a task in; its candidates, built, and what their contest found, out.

One device, and the processes that build for it. On a GPU, where candidates run in this process, one that hangs or
breaks the device ends the process.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch

from ..torch_internals.algorithm_selection import operator_candidates
from ..tuning import records
from ..tuning.candidates import CandidateBuilds, Candidates
from ..tuning.queries import TuningTask
from ..tuning.records import DeviceEnvironment
from ..tuning.tile_config import TileConfig
from . import benchmark, compare_candidates, lower_problem, ranking

log = logging.getLogger(__name__)

BROKEN = 76
"""Exit status of a process whose candidate hung or broke the device."""
ROUNDS = {"default": 0, "exhaustive": 4}
"""How often, in a space, a GPU's best configurations are looked around in. Never in the default one: two searches
differ twice as often where what is tried follows from what was measured (benchmarks/search_agreement.py)."""
BUILD_SECONDS = 900.0
"""Compilers of which none has built anything for so long hang."""
MOST_BUILT = 1000
_LEAST_BUILT = 32
_BUILD_SECONDS = 3.0
"""Of one processor, for one candidate."""
_LOOK_SECONDS = 1.0
_WARM = records.parse_problem("mm(f16[256,256], f16[256,256]) -> f16[256,256]")


def most_built(task: TuningTask) -> int:
    """How many candidates, beside PyTorch's own, a task's budget is enough for. An exhaustive space has thousands."""
    in_time = int(task.seconds * len(os.sched_getaffinity(0)) / _BUILD_SECONDS)
    return min(MOST_BUILT, max(in_time, _LEAST_BUILT)) if task.seconds else MOST_BUILT


class TaskExecutor:
    """place: where it measures. threads: of a CPU's kernels. beside: see compare_candidates.compare_candidates."""

    def __init__(
        self,
        device: str,
        place: DeviceEnvironment,
        *,
        threads: int,
        beside: Callable[[], Path | None],
        settings: ranking.RankingSettings,
    ) -> None:
        self.place = place
        self.ties = settings.ties
        self._device = device
        self._threads = threads
        self._beside = beside
        self._settings = settings
        self._watched = _watchdog if device == "cuda" else benchmark.no_watchdog
        self._rested = 0.0
        """Seconds, since one more candidate was built."""

    def warm_up(self) -> None:
        """Have the GPU's context, its libraries and Inductor's templates ready: there may be no work yet."""
        if self._device != "cuda":
            return
        task = TuningTask(id="warm", problem=_WARM, exact=False)
        try:
            ones = torch.ones(256, 256, dtype=torch.float16, device="cuda")
            with lower_problem.in_force(task):
                lower_problem.lower_problem(task, self._device).close()
                torch.mm(ones, ones)
            torch.cuda.synchronize()
        except Exception:
            log.exception("the searcher begins cold")

    def rounds(self, task: TuningTask) -> int:
        """How often the best of its configurations are looked around in."""
        return ROUNDS[task.space] if self._device == "cuda" else 0

    def candidates(self, task: TuningTask, around: Sequence[TileConfig] = ()) -> Candidates:
        """A task's candidates; or PyTorch's own and these configurations alone. Raises UnsupportedProblem."""
        with lower_problem.in_force(task):
            return lower_problem.lower_problem(
                task, self._device, lower_problem.NeighbourGuide(around) if around else None
            )

    def build(self, task: TuningTask, selection: Candidates) -> CandidateBuilds:
        """Have them built, as many as the task's budget is enough for."""
        with lower_problem.in_force(task):
            if isinstance(selection, operator_candidates.OperatorCandidates):
                selection.thin(most_built(task))
            return selection.begin_building()

    def rest(self, buildings: Sequence[CandidateBuilds], seconds: float) -> None:
        """Until one more candidate of these is built, for so long at most."""
        left = [future for building in buildings for future in building.futures if not future.done()]
        begun = time.monotonic()
        with self._watched(BUILD_SECONDS - self._rested):
            while left and not any(future.done() for future in left):
                more = begun + seconds - time.monotonic()
                if more <= 0:
                    self._rested += seconds
                    return
                # of one that is cancelled who waits does not hear
                concurrent.futures.wait(left, min(_LOOK_SECONDS, more), concurrent.futures.FIRST_COMPLETED)
        self._rested = 0.0

    def contest(
        self,
        task: TuningTask,
        selection: Candidates,
        building: CandidateBuilds,
        *,
        begun: float,
        first: Collection[str],
        before: Callable[[str], None],
    ) -> compare_candidates.SearchOutcome:
        """Measure what is built. before: called with each candidate before its first run; the rest as
        compare_candidates.compare_candidates has it, which says what is raised."""
        try:
            with self._watched(BUILD_SECONDS):
                doomed = dict(building.wait())
            for candidate, text in enumerate(selection.candidates):
                if text in task.avoid:
                    doomed[candidate] = "ended the process that ran it"
            with lower_problem.in_force(task):
                return compare_candidates.compare_candidates(
                    selection,
                    place=self.place,
                    settings=self._limited(task),
                    threads=self._threads,
                    beside=self._beside(),
                    doomed=doomed,
                    begun=begun,
                    first=first,
                    before=lambda candidate: before(selection.candidates[candidate]),
                    failed=lambda: self.check(task),
                    watched=self._watched,
                )
        finally:
            self._let_go()

    def check(self, task: TuningTask) -> None:
        """End the process if the GPU can be used no more: whatever ran last, for this task, broke it."""
        if self._device != "cuda":
            return
        try:
            held = torch.ones(1024, device="cuda")
            works = int(held.mul_(2).sum().item()) == 2048
        except Exception:
            works = False
        if not works:
            _end(f"the GPU cannot be used any more, after a candidate for {task.problem.text()}")

    def _limited(self, task: TuningTask) -> ranking.RankingSettings:
        most = task.samples or self._settings.most
        return ranking.RankingSettings(
            band=self._settings.band,
            rounds=min(self._settings.rounds, most),
            most=most,
            seconds=task.seconds or self._settings.seconds,
        )

    def _let_go(self) -> None:
        """Of the GPU's memory: compiles on it need some too."""
        if self._device == "cuda":
            with contextlib.suppress(Exception):  # what broke the GPU was told already
                torch.cuda.empty_cache()


@contextlib.contextmanager
def _watchdog(seconds: float) -> Iterator[None]:
    """End the process if the block takes longer: a kernel that hangs cannot be stopped otherwise."""
    timer = threading.Timer(seconds, _end, [f"a candidate did not come back for {seconds:.0f} s"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(why: str) -> None:
    print(why, file=sys.stderr, flush=True)
    os._exit(BROKEN)
