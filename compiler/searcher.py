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

from . import contest, inductor, measure, rebuild, torch_internals, triton_store, tuning, wire
from . import target as targets
from .candidates import Building, Candidates
from .configurations import Configuration
from .errors import CompileFailed, Unavailable
from .kernel_store import Exchange
from .place import place_of
from .search import MOST_TOLD
from .search_order import SearchOrder
from .tuning import Place, Task
from .workbench import Workbench

log = logging.getLogger(__name__)

AHEAD = 6
"""Tasks at hand: one that is measured, others whose candidates are being built. With fewer a GPU waits for compilers,
with more the last ones are not where there is time for them (benchmarks/farm_scaling.py)."""
MOST_QUESTIONS = 100_000
"""After so many it ends, when it holds nothing: a service starts another one, with nothing left behind."""
AGAIN_SECONDS = 0.2
"""Between two questions for more while what is in hand is being built: a compile tells one problem after the other."""
PATIENCE_SECONDS = 300.0
"""Of a service that does not answer."""
_RETRY_SECONDS = 2.0


def serve(
    order: SearchOrder,
    ask: tuning.Ask,
    *,
    workdir: Path,
    progress: Callable[[wire.Stage, str], None],
    kernels: Exchange | None = None,
    beside: Path | None = None,
    settings: measure.Settings = measure.DEFAULTS,
) -> None:
    """Search what `ask` hands out until it says that it is over; for the rest see `workbench_for`.

    Raises Unavailable if the service does not answer for long. The process ends where a candidate hangs or breaks the
    device.
    """
    with workbench_for(order, workdir=workdir, kernels=kernels, beside=beside, settings=settings) as bench:
        # What is built while something is measured on the same processors would be measured too.
        spare = len(os.sched_getaffinity(0)) > order.threads
        ahead = AHEAD if order.target.kind == "cuda" or spare else 1
        Searcher(ask, bench, ahead=ahead, progress=progress).run()


@contextlib.contextmanager
def workbench_for(
    order: SearchOrder,
    *,
    workdir: Path,
    kernels: Exchange | None = None,
    beside: Path | None = None,
    settings: measure.Settings = measure.DEFAULTS,
) -> Iterator[Workbench]:
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
        stack.enter_context(torch_internals.environment(**caches))
        stack.enter_context(triton_store.sharing_binaries(kernels))
        if device == "cuda" and threads > 1:
            torch_internals.start_kernel_processes(threads)
            stack.callback(torch_internals.stop_kernel_processes)
        stack.enter_context(torch_internals.sharing_libraries(kernels))
        stack.enter_context(
            torch_internals.cpu_target(
                targets.vector_sets(cpu), targets.compiler_flags(cpu), "avx512_bf16" in cpu
            )
        )
        options = inductor.search_options(order.toolchain.torch, order.threads, threads)
        stack.enter_context(torch_internals.options_in_force(options))
        if order.threads and torch.get_num_threads() != order.threads:
            torch.set_num_threads(order.threads)
        shared = beside if beside is not None or kernels is None else kernels.store
        yield Workbench(
            device,
            place_of(order.toolchain, order.target, device, order.threads),
            threads=order.threads,
            beside=(lambda: shared) if device == "cpu" else contest.gpu_folder,
            settings=settings,
        )


class _Held(Struct):
    """A task, and the candidates that are being built for its next round.

    rounds: so many more may follow. spent: seconds. found: in earlier rounds; tried: then.
    """

    task: Task
    selection: Candidates
    building: Building
    rounds: int
    spent: float
    found: contest.Outcome | None = None
    tried: frozenset[str] = frozenset()


class _TakenOver(Exception):
    """Somebody else has the task by now."""


class Bench(Protocol):
    """What a searcher needs of workbench.Workbench."""

    place: Place
    ties: float

    def warm_up(self) -> None: ...
    def rounds(self, task: Task) -> int: ...
    def candidates(self, task: Task, around: Sequence[Configuration] = ()) -> Candidates: ...
    def build(self, task: Task, selection: Candidates) -> Building: ...
    def rest(self, buildings: Sequence[Building], seconds: float) -> None: ...
    def contest(
        self,
        task: Task,
        selection: Candidates,
        building: Building,
        *,
        begun: float,
        first: Collection[str],
        before: Callable[[str], None],
    ) -> contest.Outcome: ...
    def check(self, task: Task) -> None: ...


class Searcher:
    """The loop. All of it in one thread, but the building.

    What is built is measured. Who has more rounds before him comes first: were tasks finished one by one, nothing would
    be built in the end beside the last one's rounds.
    """

    def __init__(
        self, ask: tuning.Ask, bench: Bench, *, ahead: int, progress: Callable[[wire.Stage, str], None]
    ) -> None:
        self._ask = ask
        self._bench = bench
        self._ahead = ahead
        self._progress = progress
        self._asked = 0
        self._over = False
        self._again_at = -math.inf
        """Nothing more was to be had: until when it is not asked for again beside what is in hand."""
        self._held: list[_Held] = []

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

    def _next(self) -> tuning.Work:
        """What the service gives, however long it takes to answer at all. Raises Unavailable after PATIENCE_SECONDS."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                answer = self._told(tuning.Next(self._bench.place, len(self._held)))
                return answer if isinstance(answer, tuning.Work) else tuning.Work([])
            except Unavailable:
                if self._held:  # these can be searched meanwhile
                    return tuning.Work([])
                if time.monotonic() > until:
                    raise
                time.sleep(_RETRY_SECONDS)

    def _told(self, question: tuning.Question) -> tuning.Answer:
        self._asked += 1
        return self._ask(question)

    def _prepare(self, task: Task) -> None:
        """Rebuild a task's operator and have its candidates built."""
        since = time.monotonic()
        try:
            selection = self._bench.candidates(task)
            if not task.exact and self._is_known(task, selection):
                return
            building = self._bench.build(task, selection)
        except rebuild.Unsuited as error:
            self._unfit(task, str(error))
            return
        except Exception as error:
            log.exception("%s", task.problem.text())
            self._bench.check(task)
            self._unfit(task, f"{type(error).__name__}: {error}")
            return
        spent = time.monotonic() - since
        self._held.append(_Held(task, selection, building, self._bench.rounds(task), spent))

    def _is_known(self, task: Task, selection: Candidates) -> bool:
        """Whether somebody has searched this very problem here; if so that is what was found."""
        try:
            entries = tuning.entries_of(self._told(tuning.Lookup(self._bench.place, [selection.problem])))
        except Unavailable:
            return False
        for entry in entries:
            here = (entry.problem, entry.place) == (selection.problem, self._bench.place)
            if here and entry.winner.candidate in selection.candidates:
                self._say(tuning.Found(entry, task=task.id))
                return True
        return False

    def _search(self, held: _Held) -> None:
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
        except _TakenOver:
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

    def _all(self, held: _Held, found: contest.Outcome) -> contest.Outcome:
        """What was found in this round and in those before."""
        before = held.found
        return found if before is None else contest.together(before, found, self._bench.ties)

    def _look_around(self, held: _Held, found: contest.Outcome) -> bool:
        """Have configurations near the best ones built, to be measured in their turn; False if there is no need."""
        task, ties = held.task, self._bench.ties
        best = min(timing.milliseconds for timing in found.timings)
        before = held.found
        worse = before is not None and best * (1 + ties) > before.timings[0].milliseconds
        if not held.rounds or worse or (task.seconds and held.spent > task.seconds):
            return False
        found = self._all(held, found)
        tried = held.tried | set(held.selection.candidates) | set(task.avoid)
        configurations = contest.around(found, tried, ties)
        if not configurations:
            return False
        self._say(tuning.Trying(task.id, ""))
        since = time.monotonic()
        try:
            selection = self._bench.candidates(task, configurations)
            building = self._bench.build(task, selection)
        except Exception:
            log.exception("%s is not looked around in", task.problem.text())
            return False
        spent = held.spent + time.monotonic() - since
        self._held.append(_Held(task, selection, building, held.rounds - 1, spent, found, frozenset(tried)))
        return True

    def _failed(self, held: _Held, why: str) -> None:
        """A round failed: what the earlier ones found counts."""
        if held.found is None:
            self._unfit(held.task, why)
        else:
            self._report(held.task, held.found)

    def _report(self, task: Task, found: contest.Outcome) -> None:
        self._say(
            tuning.Found(
                found.entry,
                task=task.id,
                timings=found.timings[:MOST_TOLD],
                failures=found.failures[:MOST_TOLD],
            )
        )

    def _trying(self, task: Task, candidate: str) -> None:
        """Raises _TakenOver."""
        if isinstance(self._say(tuning.Trying(task.id, candidate)), tuning.TakenOver):
            raise _TakenOver

    def _unfit(self, task: Task, why: str) -> None:
        log.warning("%s is not searched: %s", task.problem.text(), why)
        self._say(tuning.Unfit(task.id, " ".join(why.split())[:1000]))

    def _say(self, question: tuning.Question) -> tuning.Answer | None:
        """Tell the service; it gives the task out again if it does not hear."""
        try:
            return self._told(question)
        except Unavailable as error:
            log.warning("the service was not told: %s", error)
            return None
