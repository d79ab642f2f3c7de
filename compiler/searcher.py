"""Stage 8, apart from any compile: problems in, one after the other; what a search of each found out.

A searcher is a long-lived job at one device. It asks the service for tasks, rebuilds each one's operator from the
problem alone, builds the candidates of the next while it measures the present one, and tells what it found. On a GPU,
where candidates run in its own process, one that hangs or breaks the device ends that process: who gave the task out
was told which candidate was about to run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from msgspec import Struct

from . import contest, inductor, measure, rebuild, torch_internals, trials, triton_store, tuning, wire
from . import target as targets
from .candidates import Candidates
from .errors import CompileFailed, Unavailable
from .kernel_store import Exchange
from .place import place_of
from .search import MOST_TOLD
from .search_order import SearchOrder
from .tuning import Place, Task

log = logging.getLogger(__name__)

AHEAD = 3
"""Tasks at hand: one that is measured, others whose candidates are being built."""
MOST_QUESTIONS = 100_000
"""After so many it ends, when it holds nothing: a service starts another one, with nothing left behind."""
PATIENCE_SECONDS = 300.0
"""Of a service that does not answer."""
_RETRY_SECONDS = 2.0
BROKEN = 76
"""Exit status of a process whose candidate hung or broke the device."""


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
    """Search what `ask` hands out until it says that it is over.

    workdir: a folder of this job alone. kernels: where what was built is found and laid. beside: a folder that the
    searches on this machine share, so that only one measures on its CPU at a time; None: that of `kernels`. Raises
    Unavailable if the service does not answer for long. The process ends where a candidate hangs or breaks the device.
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
        _Searcher(
            ask,
            device=device,
            place=place_of(order.toolchain, order.target, device, order.threads),
            threads=order.threads,
            # What is built while something is measured on the same processors would be measured too.
            ahead=AHEAD if device == "cuda" or threads > order.threads else 1,
            beside=(lambda: shared) if device == "cpu" else contest.gpu_folder,
            settings=settings,
            progress=progress,
        ).run()


ROUNDS = {"default": 2, "exhaustive": 4}
"""How often, in a space, a GPU's best configurations are looked around in."""


BUILD_SECONDS = 900.0
"""A compiler that takes longer for a problem's candidates hangs."""
MOST_BUILT = 1000
_BUILD_SECONDS = 3.0
"""Of one processor, for one candidate."""


def _most_built(task: Task) -> int:
    """How many candidates, beside PyTorch's own, a task's budget is enough for. An exhaustive space has thousands."""
    in_time = int(task.seconds * len(os.sched_getaffinity(0)) / _BUILD_SECONDS)
    return min(MOST_BUILT, max(in_time, _LEAST_BUILT)) if task.seconds else MOST_BUILT


_LEAST_BUILT = 32
_WARM = tuning.problem_of("mm(f16[256,256], f16[256,256]) -> f16[256,256]")


class _Prepared(Struct):
    """A task whose candidates are being built. wait: for that; says which failed, and why.

    found: in earlier rounds; tried: then. rounds: so many more at most.
    """

    task: Task
    selection: Candidates
    wait: Callable[[], Mapping[int, str]]
    begun: float
    rounds: int
    found: contest.Outcome | None = None
    tried: frozenset[str] = frozenset()


class _Searcher:
    """The loop. All of it in one thread, but the building."""

    def __init__(
        self,
        ask: tuning.Ask,
        *,
        device: str,
        place: Place,
        threads: int,
        ahead: int,
        beside: Callable[[], Path | None],
        settings: measure.Settings,
        progress: Callable[[wire.Stage, str], None],
    ) -> None:
        self._ask = ask
        self._device = device
        self._place = place
        self._threads = threads
        self._ahead = ahead
        self._beside = beside
        self._settings = settings
        self._progress = progress
        self._asked = 0
        self._held: deque[_Prepared] = deque()

    def run(self) -> None:
        if self._device == "cuda":
            self._warm_up()
        over = False
        while True:
            while not over and len(self._held) < self._ahead:
                work = self._next()
                over = work.over or self._asked >= MOST_QUESTIONS
                for task in work.tasks:
                    self._prepare(task)
                if not work.tasks:
                    break
            if self._held:
                self._search(self._held.popleft())
            elif over:
                return

    def _warm_up(self) -> None:
        """Have the GPU's context, its libraries and Inductor's templates ready: there may be no work yet."""
        task = Task(id="warm", problem=_WARM, exact=False)
        try:
            ones = torch.ones(256, 256, dtype=torch.float16, device="cuda")
            with rebuild.in_force(task):
                rebuild.rebuild(task, self._device).close()
                torch.mm(ones, ones)
            torch.cuda.synchronize()
        except Exception:
            log.exception("the searcher begins cold")

    def _next(self) -> tuning.Work:
        """What the service gives, however long it takes to answer at all. Raises Unavailable after PATIENCE_SECONDS."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                answer = self._told(tuning.Next(self._place, len(self._held)))
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
        begun = time.monotonic()
        try:
            with rebuild.in_force(task):
                selection = rebuild.rebuild(task, self._device)
                if not task.exact and self._is_known(task, selection):
                    return
                if isinstance(selection, torch_internals.Selection):
                    selection.thin(_most_built(task))
                wait = selection.begin_building()
        except rebuild.Unsuited as error:
            self._unfit(task, str(error))
            return
        except Exception as error:
            log.exception("%s", task.problem.text())
            self._check_device(task)
            self._unfit(task, f"{type(error).__name__}: {error}")
            return
        rounds = ROUNDS[task.space] if self._device == "cuda" else 0
        self._held.append(_Prepared(task, selection, wait, begun, rounds))

    def _is_known(self, task: Task, selection: Candidates) -> bool:
        """Whether somebody has searched this very problem here; if so that is what was found."""
        try:
            entries = tuning.entries_of(self._told(tuning.Lookup(self._place, [selection.problem])))
        except Unavailable:
            return False
        for entry in entries:
            here = (entry.problem, entry.place) == (selection.problem, self._place)
            if here and entry.winner.candidate in selection.candidates:
                self._say(tuning.Found(entry, task=task.id))
                return True
        return False

    def _search(self, prepared: _Prepared) -> None:
        task, selection = prepared.task, prepared.selection
        watched = self._watched if self._device == "cuda" else trials.unwatched
        self._progress("autotune", selection.problem.text()[:500])
        try:
            with watched(BUILD_SECONDS):
                doomed = dict(prepared.wait())
            for candidate, text in enumerate(selection.candidates):
                if text in task.avoid:
                    doomed[candidate] = "ended the process that ran it"
            with rebuild.in_force(task):
                found = contest.hold(
                    selection,
                    place=self._place,
                    settings=self._limited(task),
                    threads=self._threads,
                    beside=self._beside(),
                    doomed=doomed,
                    begun=prepared.begun,
                    first=prepared.tried,
                    before=lambda candidate: self._trying(task, selection.candidates[candidate]),
                    failed=lambda: self._check_device(task),
                    watched=watched,
                )
        except CompileFailed as error:
            self._failed(prepared, error.message)
            return
        except Exception as error:
            log.exception("%s", task.problem.text())
            self._check_device(task)
            self._failed(prepared, f"{type(error).__name__}: {error}")
            return
        finally:
            self._let_go()
        if not self._look_around(prepared, found):
            self._report(task, self._all(prepared, found))

    def _all(self, prepared: _Prepared, found: contest.Outcome) -> contest.Outcome:
        """What was found in this round and in those before."""
        before = prepared.found
        return found if before is None else contest.together(before, found, self._settings.band)

    def _look_around(self, prepared: _Prepared, found: contest.Outcome) -> bool:
        """Have configurations near the best ones built, to be measured in their turn; False if there is no need."""
        task, band = prepared.task, self._settings.band
        best = min(timing.milliseconds for timing in found.timings)
        before = prepared.found
        worse = before is not None and best * (1 + band) > before.timings[0].milliseconds
        spent = task.seconds and time.monotonic() - prepared.begun > task.seconds
        if not prepared.rounds or worse or spent:
            return False
        found = self._all(prepared, found)
        tried = prepared.tried | set(prepared.selection.candidates) | set(task.avoid)
        configurations = contest.around(found, tried, band)
        if not configurations:
            return False
        try:
            with rebuild.in_force(task):
                selection = rebuild.rebuild(task, self._device, rebuild.Around(configurations))
                wait = selection.begin_building()
        except Exception:
            log.exception("%s is not looked around in", task.problem.text())
            return False
        self._held.append(
            _Prepared(task, selection, wait, prepared.begun, prepared.rounds - 1, found, frozenset(tried))
        )
        return True

    def _failed(self, prepared: _Prepared, why: str) -> None:
        """A round failed: what the earlier ones found counts."""
        if prepared.found is None:
            self._unfit(prepared.task, why)
        else:
            self._report(prepared.task, prepared.found)

    def _report(self, task: Task, found: contest.Outcome) -> None:
        self._say(
            tuning.Found(
                found.entry,
                task=task.id,
                timings=found.timings[:MOST_TOLD],
                failures=found.failures[:MOST_TOLD],
            )
        )

    def _limited(self, task: Task) -> measure.Settings:
        most = task.samples or self._settings.most
        return measure.Settings(
            band=self._settings.band,
            rounds=min(self._settings.rounds, most),
            most=most,
            seconds=task.seconds or self._settings.seconds,
        )

    def _trying(self, task: Task, candidate: str) -> None:
        self._say(tuning.Trying(task.id, candidate))

    def _unfit(self, task: Task, why: str) -> None:
        log.warning("%s is not searched: %s", task.problem.text(), why)
        self._say(tuning.Unfit(task.id, " ".join(why.split())[:1000]))

    def _say(self, question: tuning.Question) -> None:
        """Tell the service; it gives the task out again if it does not hear."""
        try:
            self._told(question)
        except Unavailable as error:
            log.warning("the service was not told: %s", error)

    def _let_go(self) -> None:
        """Of the GPU's memory: compiles on it need some too."""
        if self._device == "cuda":
            with contextlib.suppress(Exception):  # what broke the GPU was told already
                torch.cuda.empty_cache()

    # --- the device -----------------------------------------------------------------------------------------

    def _check_device(self, task: Task) -> None:
        """End the process if the GPU can be used no more: whatever ran last broke it."""
        if self._device != "cuda":
            return
        try:
            held = torch.ones(1024, device="cuda")
            works = int(held.mul_(2).sum().item()) == 2048
        except Exception:
            works = False
        if not works:
            _end(f"the GPU cannot be used any more, after a candidate for {task.problem.text()}")

    @contextlib.contextmanager
    def _watched(self, seconds: float) -> Iterator[None]:
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
