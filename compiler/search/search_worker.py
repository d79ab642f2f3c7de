"""Stage 8, apart from any compile: problems in, one after the other; what a search of each found out.

A searcher is a long-lived job at one device. It asks the service for tasks, rebuilds each one's operator from the
problem alone, builds the candidates of the next while it measures the present one, and tells what it found. On a GPU,
where candidates run in its own process, one that hangs or breaks the device ends that process: who gave the task out
was told which candidate was about to run.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from msgspec import Struct

from ..api import compiles
from ..api.tuning.search_order import SearchJobSpec
from ..errors import CompileFailed, Unavailable
from ..graph import inductor_options
from ..graph.device_environment import device_environment
from ..kernel_store import triton_cache
from ..kernel_store.libraries import KernelExchange
from ..request import cpu_isa as targets
from ..torch_internals import patching
from ..torch_internals.cpp import instruction_set, kernel_libraries
from ..torch_internals.inductor import config
from ..torch_internals.triton import compile_workers
from ..tuning import queries
from ..tuning.candidates import CandidateBuilds, Candidates
from ..tuning.queries import TuningTask
from ..tuning.records import DeviceEnvironment
from ..tuning.tile_config import TileConfig
from . import compare_candidates, device_lock, lower_problem, ranking
from .in_compile import MOST_TOLD
from .task_executor import TaskExecutor

log = logging.getLogger(__name__)

TASKS_AT_HAND = 6
"""Tasks at hand: one that is measured, others whose candidates are being built. With fewer a GPU waits for compilers,
with more the last ones are not where there is time for them (benchmarks/search_scaling.py)."""
MOST_QUESTIONS = 100_000
"""After so many it ends, when it holds nothing: a service starts another one, with nothing left behind."""
AGAIN_SECONDS = 0.2
"""Between two questions for more while what is in hand is being built: a compile tells one problem after the other."""
PATIENCE_SECONDS = 300.0
"""Of a service that does not answer."""
_RETRY_SECONDS = 2.0


def serve(
    order: SearchJobSpec,
    ask: queries.SendQuery,
    *,
    workdir: Path,
    progress: Callable[[compiles.Stage, str], None],
    kernels: KernelExchange | None = None,
    beside: Path | None = None,
    settings: ranking.RankingSettings = ranking.DEFAULTS,
) -> None:
    """Search what `ask` hands out until it says that it is over; for the rest see `workbench_for`.

    Raises Unavailable if the service does not answer for long. The process ends where a candidate hangs or breaks the
    device.
    """
    with open_task_executor(
        order, workdir=workdir, kernels=kernels, beside=beside, settings=settings
    ) as bench:
        # What is built while something is measured on the same processors would be measured too.
        spare = len(os.sched_getaffinity(0)) > order.threads
        ahead = TASKS_AT_HAND if order.target.kind == "cuda" or spare else 1
        SearchWorker(ask, bench, ahead=ahead, progress=progress).run()


@contextlib.contextmanager
def open_task_executor(
    order: SearchJobSpec,
    *,
    workdir: Path,
    kernels: KernelExchange | None = None,
    beside: Path | None = None,
    settings: ranking.RankingSettings = ranking.DEFAULTS,
) -> Iterator[TaskExecutor]:
    """Where problems of an order are searched, until the block ends.

    workdir: a folder of this job alone. kernels: where what was built is found and laid. beside: a folder that the
    searches on this machine share, so that only one measures on its CPU at a time; None: that of `kernels`.
    """
    device = order.target.kind
    threads = len(os.sched_getaffinity(0))
    cpu = order.target.cpu
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(workdir / "inductor"),
        "TRITON_CACHE_DIR": str(workdir / "triton"),
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(patching.patched_environment(**caches))
        stack.enter_context(triton_cache.sharing_binaries(kernels))
        if device == "cuda" and threads > 1:
            compile_workers.start_compile_workers(threads)
            stack.callback(compile_workers.stop_compile_workers)
        stack.enter_context(kernel_libraries.sharing_cpp_libraries(kernels))
        stack.enter_context(
            instruction_set.cpu_target(
                targets.vector_sets(cpu), targets.compiler_flags(cpu), "avx512_bf16" in cpu
            )
        )
        options = inductor_options.search_options(order.toolchain.torch, order.threads, threads)
        stack.enter_context(config.inductor_config(options))
        if order.threads and torch.get_num_threads() != order.threads:
            torch.set_num_threads(order.threads)
        shared = beside if beside is not None or kernels is None else kernels.store
        yield TaskExecutor(
            device,
            device_environment(order.toolchain, order.target, device, order.threads),
            threads=order.threads,
            beside=(lambda: shared) if device == "cpu" else device_lock.gpu_lock_folder,
            settings=settings,
        )


class _PreparedTask(Struct):
    """A task, and the candidates that are being built for its next round.

    rounds: so many more may follow. spent: seconds. found: in earlier rounds; tried: then.
    """

    task: TuningTask
    selection: Candidates
    building: CandidateBuilds
    rounds: int
    spent: float
    found: compare_candidates.SearchOutcome | None = None
    tried: frozenset[str] = frozenset()


class _TaskReassigned(Exception):
    """Somebody else has the task by now."""


class ExecutesTasks(Protocol):
    """What a searcher needs of task_executor.TaskExecutor."""

    place: DeviceEnvironment
    ties: float

    def warm_up(self) -> None: ...
    def rounds(self, task: TuningTask) -> int: ...
    def candidates(self, task: TuningTask, around: Sequence[TileConfig] = ()) -> Candidates: ...
    def build(self, task: TuningTask, selection: Candidates) -> CandidateBuilds: ...
    def rest(self, buildings: Sequence[CandidateBuilds], seconds: float) -> None: ...
    def contest(
        self,
        task: TuningTask,
        selection: Candidates,
        building: CandidateBuilds,
        *,
        begun: float,
        first: Collection[str],
        before: Callable[[str], None],
    ) -> compare_candidates.SearchOutcome: ...
    def check(self, task: TuningTask) -> None: ...


class SearchWorker:
    """The loop. All of it in one thread, but the building.

    What is built is measured. Who has more rounds before him comes first: were tasks finished one by one, nothing would
    be built in the end beside the last one's rounds.
    """

    def __init__(
        self,
        ask: queries.SendQuery,
        bench: ExecutesTasks,
        *,
        ahead: int,
        progress: Callable[[compiles.Stage, str], None],
    ) -> None:
        self._ask = ask
        self._bench = bench
        self._ahead = ahead
        self._progress = progress
        self._asked = 0
        self._over = False
        self._again_at = -math.inf
        """Nothing more was to be had: until when it is not asked for again beside what is in hand."""
        self._held: list[_PreparedTask] = []

    def run(self) -> None:
        self._bench.warm_up()
        while not self._over or self._held:
            self._take()
            if not self._held:
                continue
            in_turn = sorted(self._held, key=lambda held: -held.rounds)
            built = next((held for held in in_turn if not held.building.left()), None)
            if built is not None:
                self._held.remove(built)
                self._search(built)
                self._again_at = -math.inf
            else:
                since = time.monotonic()
                self._bench.rest([held.building for held in in_turn], AGAIN_SECONDS)
                in_turn[0].spent += time.monotonic() - since

    def _take(self) -> None:
        while not self._over and len(self._held) < self._ahead and not self._waits():
            work = self._next()
            self._over = work.over or self._asked >= MOST_QUESTIONS
            if not work.tasks:
                self._again_at = time.monotonic() + AGAIN_SECONDS
            for task in work.tasks:
                self._prepare(task)

    def _waits(self) -> bool:
        return bool(self._held) and time.monotonic() < self._again_at

    def _next(self) -> queries.TaskBatch:
        """What the service gives, however long it takes to answer at all. Raises Unavailable after PATIENCE_SECONDS."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                answer = self._told(queries.TaskRequest(self._bench.place, len(self._held)))
                return answer if isinstance(answer, queries.TaskBatch) else queries.TaskBatch([])
            except Unavailable:
                if self._held:  # these can be searched meanwhile
                    return queries.TaskBatch([])
                if time.monotonic() > until:
                    raise
                time.sleep(_RETRY_SECONDS)

    def _told(self, question: queries.TuningQuery) -> queries.TuningReply:
        self._asked += 1
        return self._ask(question)

    def _prepare(self, task: TuningTask) -> None:
        """Rebuild a task's operator and have its candidates built."""
        since = time.monotonic()
        try:
            selection = self._bench.candidates(task)
            if not task.exact and self._is_known(task, selection):
                return
            building = self._bench.build(task, selection)
        except lower_problem.UnsupportedProblem as error:
            self._unfit(task, str(error))
            return
        except Exception as error:
            log.exception("%s", task.problem.text())
            self._bench.check(task)
            self._unfit(task, f"{type(error).__name__}: {error}")
            return
        spent = time.monotonic() - since
        self._held.append(_PreparedTask(task, selection, building, self._bench.rounds(task), spent))

    def _is_known(self, task: TuningTask, selection: Candidates) -> bool:
        """Whether somebody has searched this very problem here; if so that is what was found."""
        try:
            entries = queries.entries_of(
                self._told(queries.EntryLookup(self._bench.place, [selection.problem]))
            )
        except Unavailable:
            return False
        for entry in entries:
            here = (entry.problem, entry.place) == (selection.problem, self._bench.place)
            if here and entry.winner.candidate in selection.candidates:
                self._say(queries.SearchResult(entry, task=task.id))
                return True
        return False

    def _search(self, held: _PreparedTask) -> None:
        task, begun = held.task, time.monotonic() - held.spent
        self._progress("autotune", held.selection.problem.text()[:500])
        try:
            found = self._bench.contest(
                task,
                held.selection,
                held.building,
                begun=begun,
                first=held.tried,
                before=lambda candidate: self._trying(task, candidate),
            )
        except _TaskReassigned:
            return
        except CompileFailed as error:
            self._failed(held, error.message)
            return
        except Exception as error:
            log.exception("%s", task.problem.text())
            self._bench.check(task)
            self._failed(held, f"{type(error).__name__}: {error}")
            return
        held.spent = time.monotonic() - begun
        if not self._look_around(held, found):
            self._report(task, self._all(held, found))

    def _all(
        self, held: _PreparedTask, found: compare_candidates.SearchOutcome
    ) -> compare_candidates.SearchOutcome:
        """What was found in this round and in those before."""
        before = held.found
        return found if before is None else compare_candidates.merge_outcomes(before, found, self._bench.ties)

    def _look_around(self, held: _PreparedTask, found: compare_candidates.SearchOutcome) -> bool:
        """Have configurations near the best ones built, to be measured in their turn; False if there is no need."""
        task, ties = held.task, self._bench.ties
        best = min(timing.milliseconds for timing in found.timings)
        before = held.found
        worse = before is not None and best * (1 + ties) > before.timings[0].milliseconds
        if not held.rounds or worse or (task.seconds and held.spent > task.seconds):
            return False
        found = self._all(held, found)
        tried = held.tried | set(held.selection.candidates) | set(task.avoid)
        configurations = compare_candidates.neighbours_to_try(found, tried, ties)
        if not configurations:
            return False
        self._say(queries.CandidateAttempt(task.id, ""))
        since = time.monotonic()
        try:
            selection = self._bench.candidates(task, configurations)
            building = self._bench.build(task, selection)
        except Exception:
            log.exception("%s is not looked around in", task.problem.text())
            return False
        spent = held.spent + time.monotonic() - since
        self._held.append(
            _PreparedTask(task, selection, building, held.rounds - 1, spent, found, frozenset(tried))
        )
        return True

    def _failed(self, held: _PreparedTask, why: str) -> None:
        """A round failed: what the earlier ones found counts."""
        if held.found is None:
            self._unfit(held.task, why)
        else:
            self._report(held.task, held.found)

    def _report(self, task: TuningTask, found: compare_candidates.SearchOutcome) -> None:
        self._say(
            queries.SearchResult(
                found.entry,
                task=task.id,
                timings=found.timings[:MOST_TOLD],
                failures=found.failures[:MOST_TOLD],
            )
        )

    def _trying(self, task: TuningTask, candidate: str) -> None:
        """Raises _TaskReassigned."""
        if isinstance(self._say(queries.CandidateAttempt(task.id, candidate)), queries.TaskReassigned):
            raise _TaskReassigned

    def _unfit(self, task: TuningTask, why: str) -> None:
        log.warning("%s is not searched: %s", task.problem.text(), why)
        self._say(queries.UnsupportedTask(task.id, " ".join(why.split())[:1000]))

    def _say(self, question: queries.TuningQuery) -> queries.TuningReply | None:
        """Tell the service; it gives the task out again if it does not hear."""
        try:
            return self._told(question)
        except Unavailable as error:
            log.warning("the service was not told: %s", error)
            return None
