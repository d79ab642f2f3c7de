"""Stage 8, outside of any compile: searches one problem after the other, and reports each result.

A search worker is a long-lived process on one device. It requests tasks from the service, rebuilds each task's
operator from the problem alone, builds the next tasks' candidates while it measures one, and reports results. On a GPU
candidates run in this process, and one that hangs or breaks the device ends it. The service knows which candidate that
was: each is reported before its first run.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from msgspec import Struct

from ..api import compiles
from ..api.tuning.jobs import SearchJobSpec
from ..errors import CompileFailed, Unavailable
from ..graph import configuration
from ..graph.toolchain import device_environment
from ..kernel_store import triton_cache
from ..kernel_store.libraries import KernelExchange
from ..torch_internals import cpp, patching
from ..torch_internals.algorithm_selection import operator_candidates
from ..torch_internals.inductor import config
from ..torch_internals.triton import compile_workers
from ..tuning import queries, records
from ..tuning.candidates import CandidateBuilds, Candidates
from ..tuning.queries import SearchResult, TuningTask
from ..tuning.records import DeviceEnvironment
from . import benchmark, compare_candidates, lower_problem, ranking
from .device_turn import DeviceTurn

log = logging.getLogger(__name__)

TASKS_HELD = 6
"""Tasks held at a time: one is measured while the others' candidates are built. With fewer a GPU waits for compilers;
with more the last tasks are not where there is time for them (benchmarks/search_scaling.py)."""
MAX_QUERIES = 100_000
"""After this many queries the process ends once it holds no task; the service starts a fresh one."""
REQUEST_SECONDS = 0.2
"""Between two requests for more tasks during builds: a compile reports its problems one by one."""
UNAVAILABLE_SECONDS = 300.0
"""How long the service may be unreachable."""
_RETRY_SECONDS = 2.0
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


def serve(
    spec: SearchJobSpec,
    ask: queries.SendQuery,
    *,
    workdir: Path,
    progress: Callable[[compiles.Stage, str], None],
    kernels: KernelExchange | None = None,
    settings: ranking.RankingSettings = ranking.DEFAULTS,
) -> None:
    """Search the tasks that `ask` returns until the service ends it; for other arguments see `open_task_executor`.

    Raises Unavailable if the service does not answer for long. The process ends if a candidate hangs or breaks the
    device.
    """
    with open_task_executor(spec, workdir=workdir, kernels=kernels, settings=settings) as executor:
        # On a CPU with no processor to spare, builds would disturb measurements.
        spare = len(os.sched_getaffinity(0)) > spec.threads
        max_held = TASKS_HELD if spec.target.kind == "cuda" or spare else 1
        SearchWorker(ask, executor, max_held=max_held, progress=progress).run()


@contextlib.contextmanager
def open_task_executor(
    spec: SearchJobSpec,
    *,
    workdir: Path,
    kernels: KernelExchange | None = None,
    settings: ranking.RankingSettings = ranking.DEFAULTS,
) -> Iterator[TaskExecutor]:
    """Prepare this process to search problems for the order's target, inside the block.

    workdir: a folder of this job alone. kernels: the store of built kernels; searches on one CPU that share it take
    turns.
    """
    device = spec.target.kind
    processors = len(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        stack.enter_context(patching.cache_folders(workdir))
        stack.enter_context(triton_cache.sharing_binaries(kernels))
        stack.enter_context(compile_workers.compile_workers(device, processors))
        stack.enter_context(cpp.sharing_cpp_libraries(kernels))
        stack.enter_context(cpp.cpu_target(spec.target))
        options = configuration.search_options(spec.toolchain.torch, spec.threads, processors)
        stack.enter_context(config.inductor_config(options))
        if spec.threads and torch.get_num_threads() != spec.threads:
            torch.set_num_threads(spec.threads)
        shared = None if kernels is None else kernels.store
        yield TaskExecutor(
            device,
            device_environment(spec.toolchain, spec.target, device, spec.threads),
            threads=spec.threads,
            turn=DeviceTurn(device, shared),
            settings=settings,
        )


class _PreparedTask(Struct):
    """A task whose candidates are being built. seconds: spent on it so far."""

    task: TuningTask
    selection: Candidates
    builds: CandidateBuilds
    seconds: float


class _TaskReassigned(Exception):
    """The service gave the task to another search worker."""


class SearchWorker:
    """The loop that requests, measures and reports tasks, in the order in which their candidates are built."""

    def __init__(
        self,
        ask: queries.SendQuery,
        executor: TaskExecutor,
        *,
        max_held: int,
        progress: Callable[[compiles.Stage, str], None],
    ) -> None:
        self._ask = ask
        self._executor = executor
        self._max_held = max_held
        self._progress = progress
        self._queries = 0
        self._over = False
        self._next_request = -math.inf
        """After an empty answer, no more tasks are requested before this time, as long as any is held."""
        self._prepared: list[_PreparedTask] = []

    def run(self) -> None:
        self._executor.warm_up()
        while not self._over or self._prepared:
            self._take_tasks()
            if not self._prepared:
                continue
            built = next((held for held in self._prepared if not held.builds.left()), None)
            if built is not None:
                self._prepared.remove(built)
                self._measure(built)
                self._next_request = -math.inf
            else:
                since = time.monotonic()
                self._executor.wait_for_build([held.builds for held in self._prepared], REQUEST_SECONDS)
                self._prepared[0].seconds += time.monotonic() - since

    def _take_tasks(self) -> None:
        while not self._over and len(self._prepared) < self._max_held:
            if self._prepared and time.monotonic() < self._next_request:
                return
            batch = self._request_tasks()
            self._over = batch.over or self._queries >= MAX_QUERIES
            if not batch.tasks:
                self._next_request = time.monotonic() + REQUEST_SECONDS
            for task in batch.tasks:
                self._prepare(task)

    def _request_tasks(self) -> queries.TaskBatch:
        """Retries while the service is unreachable. Raises Unavailable after UNAVAILABLE_SECONDS."""
        until = time.monotonic() + UNAVAILABLE_SECONDS
        while True:
            try:
                reply = self._send(queries.TaskRequest(self._executor.environment, len(self._prepared)))
                return reply if isinstance(reply, queries.TaskBatch) else queries.TaskBatch([])
            except Unavailable:
                if self._prepared:  # these can be searched meanwhile
                    return queries.TaskBatch([])
                if time.monotonic() > until:
                    raise
                time.sleep(_RETRY_SECONDS)

    def _send(self, query: queries.TuningQuery) -> queries.TuningReply:
        self._queries += 1
        return self._ask(query)

    def _prepare(self, task: TuningTask) -> None:
        """Rebuild a task's operator and start to build its candidates."""
        since = time.monotonic()
        try:
            selection = self._executor.candidates(task)
            if not task.exact and self._is_known(task, selection):
                return
            builds = self._executor.build(task, selection)
        except lower_problem.UnsupportedProblem as error:
            self._report_unsupported(task, str(error))
        except Exception as error:
            self._report_error(task, error)
        else:
            self._prepared.append(_PreparedTask(task, selection, builds, time.monotonic() - since))

    def _is_known(self, task: TuningTask, selection: Candidates) -> bool:
        """Whether the completed problem has a winner already; if so, report it as the result."""
        environment = self._executor.environment
        try:
            entries = queries.entries_of(self._send(queries.EntryLookup(environment, [selection.problem])))
        except Unavailable:
            return False
        for entry in entries:
            same = (entry.problem, entry.place) == (selection.problem, environment)
            if same and entry.winner.candidate in selection.candidates:
                self._report(queries.SearchResult(entry, task=task.id))
                return True
        return False

    def _measure(self, prepared: _PreparedTask) -> None:
        task = prepared.task
        self._progress("autotune", prepared.selection.problem.text()[:500])

        def before_first_run(candidate: str) -> None:
            reply = self._report(queries.CandidateAttempt(task.id, candidate))
            if isinstance(reply, queries.TaskReassigned):
                raise _TaskReassigned

        try:
            result = self._executor.measure(
                task,
                prepared.selection,
                prepared.builds,
                started=time.monotonic() - prepared.seconds,
                before_first_run=before_first_run,
            )
        except _TaskReassigned:
            pass
        except CompileFailed as error:
            self._report_unsupported(task, error.message)
        except Exception as error:
            self._report_error(task, error)
        else:
            self._report(msgspec.structs.replace(result, task=task.id))

    def _report_error(self, task: TuningTask, error: Exception) -> None:
        log.error("%s", task.problem.text(), exc_info=error)
        self._executor.check_device(task)
        self._report_unsupported(task, f"{type(error).__name__}: {error}")

    def _report_unsupported(self, task: TuningTask, why: str) -> None:
        log.warning("%s is not searched: %s", task.problem.text(), why)
        self._report(queries.UnsupportedTask(task.id, " ".join(why.split())[:1000]))

    def _report(self, query: queries.TuningQuery) -> queries.TuningReply | None:
        """Send it; if the service cannot be reached, it will give the task out again."""
        try:
            return self._send(query)
        except Unavailable as error:
            log.warning("a report did not reach the service: %s", error)
            return None


# --- one task ------------------------------------------------------------------------------------------------


def max_built(task: TuningTask) -> int:
    """How many candidates, besides PyTorch's own, a task's budget allows. An exhaustive space has thousands."""
    in_time = int(task.seconds * len(os.sched_getaffinity(0)) / _SECONDS_PER_BUILD)
    return min(MAX_BUILT, max(in_time, _MIN_BUILT)) if task.seconds else MAX_BUILT


class TaskExecutor:
    """Builds a task's candidates and measures them. threads: for kernels on a CPU. turn: taken while they run."""

    def __init__(
        self,
        device: str,
        environment: DeviceEnvironment,
        *,
        threads: int,
        turn: DeviceTurn,
        settings: ranking.RankingSettings,
    ) -> None:
        self.environment = environment
        self._device = device
        self._threads = threads
        self._turn = turn
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
                turn=self._turn,
                failures=failures,
                started=started,
                before_first_run=lambda candidate: before_first_run(selection.candidates[candidate]),
                after_failure=lambda: self.check_device(task),
                watchdog=self._watchdog,
            )

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
