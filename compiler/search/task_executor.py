"""Stage 8, in a search worker: builds a task's candidates and measures them.

It has one device, and processes that build for it. On a GPU, where candidates run in this process, a candidate that
hangs or breaks the device ends the process.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from ..torch_internals.algorithm_selection import operator_candidates
from ..tuning import records
from ..tuning.candidates import CandidateBuilds, Candidates
from ..tuning.queries import SearchResult, TuningTask
from ..tuning.records import DeviceEnvironment
from . import benchmark, compare_candidates, lower_problem, ranking

log = logging.getLogger(__name__)

BROKEN_DEVICE_EXIT = 76
"""Exit code of a process whose candidate hung or broke the device."""
BUILD_SECONDS = 900.0
"""If compilers build nothing for this long, they hang."""
MAX_BUILT = 1000
_MIN_BUILT = 32
_SECONDS_PER_BUILD = 3.0
"""Seconds of one processor, for one candidate."""
_POLL_SECONDS = 1.0
_WARM_UP_PROBLEM = records.parse_problem("mm(f16[256,256], f16[256,256]) -> f16[256,256]")


def max_built(task: TuningTask) -> int:
    """How many candidates, besides PyTorch's own, a task's budget allows. An exhaustive space has thousands."""
    in_time = int(task.seconds * len(os.sched_getaffinity(0)) / _SECONDS_PER_BUILD)
    return min(MAX_BUILT, max(in_time, _MIN_BUILT)) if task.seconds else MAX_BUILT


class TaskExecutor:
    """threads: for kernels on a CPU. lock_folder: see device_lock.exclusive."""

    def __init__(
        self,
        device: str,
        environment: DeviceEnvironment,
        *,
        threads: int,
        lock_folder: Callable[[], Path | None],
        settings: ranking.RankingSettings,
    ) -> None:
        self.environment = environment
        self._device = device
        self._threads = threads
        self._lock_folder = lock_folder
        self._settings = settings
        self._watchdog: benchmark.Watchdog = _exit_after if device == "cuda" else contextlib.nullcontext
        self._seconds_without_build = 0.0

    def warm_up(self) -> None:
        """Load the GPU's context and libraries and Inductor's templates before there is a task."""
        if self._device != "cuda":
            return
        task = TuningTask(id="warm", problem=_WARM_UP_PROBLEM, exact=False)
        try:
            ones = torch.ones(256, 256, dtype=torch.float16, device="cuda")
            with lower_problem.in_force(task):
                lower_problem.lower_problem(task, self._device).close()
                torch.mm(ones, ones)
            torch.cuda.synchronize()
        except Exception:
            log.exception("the search worker's warm-up failed")

    def candidates(self, task: TuningTask) -> Candidates:
        """Raises UnsupportedProblem."""
        with lower_problem.in_force(task):
            return lower_problem.lower_problem(task, self._device)

    def build(self, task: TuningTask, selection: Candidates) -> CandidateBuilds:
        """Start to build as many candidates as the task's budget allows."""
        with lower_problem.in_force(task):
            if isinstance(selection, operator_candidates.OperatorCandidates):
                selection.thin(max_built(task))
            return selection.begin_building()

    def wait_for_build(self, builds: Sequence[CandidateBuilds], seconds: float) -> None:
        """Return when one more candidate is built, or after `seconds`."""
        left = [future for each in builds for future in each.futures if not future.done()]
        started = time.monotonic()
        with self._watchdog(BUILD_SECONDS - self._seconds_without_build):
            while left and not any(future.done() for future in left):
                remaining = started + seconds - time.monotonic()
                if remaining <= 0:
                    self._seconds_without_build += seconds
                    return
                # wait() does not notice a cancelled future, so its waits are short
                timeout = min(_POLL_SECONDS, remaining)
                concurrent.futures.wait(left, timeout, concurrent.futures.FIRST_COMPLETED)
        self._seconds_without_build = 0.0

    def measure(
        self,
        task: TuningTask,
        selection: Candidates,
        builds: CandidateBuilds,
        *,
        started: float,
        before_first_run: Callable[[str], None],
    ) -> SearchResult:
        """Measure what is built; arguments and exceptions are those of compare_candidates.compare_candidates."""
        try:
            with self._watchdog(BUILD_SECONDS):
                failures = dict(builds.wait())
            avoided = [n for n, text in enumerate(selection.candidates) if text in task.avoid]
            if len(avoided) < len(selection.candidates):  # else the last ones are tried again
                failures |= dict.fromkeys(avoided, "ended the process that ran it")
            with lower_problem.in_force(task):
                return compare_candidates.compare_candidates(
                    selection,
                    environment=self.environment,
                    settings=self._within_budget(task),
                    threads=self._threads,
                    lock_folder=self._lock_folder(),
                    failures=failures,
                    started=started,
                    before_first_run=lambda candidate: before_first_run(selection.candidates[candidate]),
                    after_failure=lambda: self.check_device(task),
                    watchdog=self._watchdog,
                )
        finally:
            if self._device == "cuda":
                with contextlib.suppress(Exception):  # a broken GPU is reported by check_device
                    torch.cuda.empty_cache()  # compiles need memory on this GPU too

    def check_device(self, task: TuningTask) -> None:
        """End the process if the GPU is unusable: the last candidate, of this task, broke it."""
        if self._device == "cuda" and not benchmark.gpu_works():
            _exit(f"the GPU cannot be used any more, after a candidate for {task.problem.text()}")

    def _within_budget(self, task: TuningTask) -> ranking.RankingSettings:
        most = task.samples or self._settings.most
        return ranking.RankingSettings(
            band=self._settings.band,
            rounds=min(self._settings.rounds, most),
            most=most,
            seconds=task.seconds or self._settings.seconds,
        )


@contextlib.contextmanager
def _exit_after(seconds: float) -> Iterator[None]:
    """End the process if the block takes longer: a kernel that hangs cannot be stopped otherwise."""
    timer = threading.Timer(seconds, _exit, [f"a candidate did not come back for {seconds:.0f} s"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _exit(why: str) -> None:
    print(why, file=sys.stderr, flush=True)
    os._exit(BROKEN_DEVICE_EXIT)
