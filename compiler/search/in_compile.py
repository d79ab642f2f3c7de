"""Stage 8: chooses an operator's candidate, where Inductor's max-autotune would choose.

A winner from the request's lock or the namespace's database is used as it is. An unknown problem is searched once in a
compile, by a search worker if there is one, otherwise here.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from ..api import compiles
from ..artifact import manifest
from ..errors import Unavailable
from ..request import schema
from ..torch_internals.algorithm_selection.padding_candidates import PADDING_PREFIX
from ..torch_internals.algorithm_selection.selector_cache import ATEN
from ..tuning import queries
from ..tuning.candidates import Candidates
from ..tuning.records import DeviceEnvironment, Problem, TuningEntry
from . import compare_candidates, ranking
from .device_turn import DeviceTurn
from .known_winners import KnownWinners, measurement

log = logging.getLogger(__name__)

MAX_DRY_RUNS = 4
"""With other winners than a dry run assumed, the graph may have other problems."""
NO_PROGRESS_SECONDS = 300.0
"""If others finish none of a compile's problems for this long, it measures them itself."""
REPORT_SECONDS = 0.3
"""Least time between two reports of a dry run."""
DISTURBED_DEVICES = frozenset({"cpu"})
"""Kinds of device on which a compile's own work disturbs measurements."""
HOLD_SECONDS = 4.0
"""How long the service may hold back a reply that has nothing new."""
_POLL_SECONDS = (0.1, 0.5)
"""Shortest and longest time from one query to the next without progress: not every service holds replies back."""
_MAX_PROBLEMS = 256
"""Limit for one SearchRequest."""


class StageClock:
    """Reports progress and adds up each stage's seconds."""

    def __init__(self, progress: Callable[[compiles.Stage, str], None]) -> None:
        self._progress = progress
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._stage: compiles.Stage | None = None
        self._detail = ""
        self._since = 0.0

    def enter(self, stage: compiles.Stage, detail: str) -> None:
        self._leave()
        self._stage, self._detail, self._since = stage, detail, time.perf_counter()
        self._progress(stage, detail)

    @contextlib.contextmanager
    def during(self, stage: compiles.Stage, detail: str) -> Iterator[None]:
        """Inside the block another stage runs; the current one continues afterwards."""
        around = self._stage, self._detail
        self.enter(stage, detail)
        try:
            yield
        finally:
            if around[0] is not None:
                self.enter(around[0], around[1])

    def move(self, seconds: float, source: compiles.Stage, target: compiles.Stage) -> None:
        """Count seconds of one stage as another's."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def seconds(self) -> list[tuple[str, float]]:
        """Without the waits for the device, which are `queued`."""
        self._leave()
        return [(stage, round(seconds, 6)) for stage, seconds in self._seconds.items() if stage != "queued"]

    def turns(self, folder: Path | None) -> dict[str, DeviceTurn]:
        """This process's turns by kind of device; a wait for one counts as `queued`. folder: see DeviceTurn."""

        def waiting() -> AbstractContextManager[None]:
            return self.during("queued", "others measure on its device")

        return {
            "cpu": DeviceTurn("cpu", folder, waiting=waiting),
            "cuda": DeviceTurn("cuda", waiting=waiting),
        }

    def _leave(self) -> None:
        if self._stage:
            self._seconds[self._stage] += time.perf_counter() - self._since
            self._stage = None


class CompileSearch:
    """Chooses candidates for one compile. searched, recalled: problems measured for it, here or elsewhere, and known
    before.

    ask: sends queries to the service. cannot_run: why candidates cannot run on this host; '' if they can. turns: by
    kind of device, taken while candidates run.

    The first unknown problem turns the lowering into a dry run: from there on it takes PyTorch's own kernels, generates
    no code and collects the other unknown problems. `finish_dry_run` has them searched by others. Then the compile
    starts again, and waits where it reaches a problem that is still being searched.
    """

    def __init__(
        self,
        request: schema.GraphRequest,
        *,
        ask: queries.SendQuery | None,
        settings: ranking.RankingSettings,
        cannot_run: str,
        turns: Mapping[str, DeviceTurn],
        clock: StageClock,
    ) -> None:
        self._known = KnownWinners(request, ask)
        self._threads = request.ambient.threads
        self._ask = ask
        self._settings = settings
        self._cannot_run = cannot_run
        self._turns = turns
        self._clock = clock
        self._entries: dict[Problem, TuningEntry] = {}
        self._uses: Counter[Problem] = Counter()
        self._announced: Problem | None = None
        """Counted by `expected_candidate`, so that `choose` does not count it again."""
        self._only_aten = False
        self._dry_runs_left = MAX_DRY_RUNS
        self._unknown: dict[Problem, str] = {}
        """Found by the present dry run, with each problem's device."""
        self._reported = 0
        self._reported_at = -math.inf
        self._pending: dict[Problem, str] = {}
        """Found by earlier dry runs and still being searched by others."""
        self._submitted = 0
        self._measured_for_this: set[Problem] = set()
        self._left_to_this: set[Problem] = set()
        """Problems that others do not search."""

    @property
    def searched(self) -> int:
        return len(self._entries.keys() & self._measured_for_this)

    @property
    def recalled(self) -> int:
        return len(self._entries.keys() - self._measured_for_this)

    def measurements(self) -> list[manifest.Measurement]:
        """Each problem of the graph with its winner, for the manifest."""
        measurements = []
        for problem, entry in self._entries.items():
            if not self._uses[problem]:  # only a dry run met it
                continue
            taken = (entry.aten if self._only_aten else None) or entry.winner
            measurements.append(measurement(entry, taken, self._uses[problem]))
        return measurements

    def begin(self) -> None:
        """The graph is lowered from its beginning."""
        self._uses.clear()
        self._announced = None

    def avoid_templates(self) -> bool:
        """Take PyTorch's own kernels from now on; False if that changes nothing, or a strict lock forbids it.

        Inductor sometimes cannot generate a template together with what it fuses into it.
        """
        templates = any(
            entry.aten is None or entry.winner.candidate != entry.aten.candidate
            for entry in self._entries.values()
        )
        if self._only_aten or not templates or self._known.strict:
            return False
        self._only_aten = True
        return True

    def expected_candidate(self, problem: Problem, device: str) -> str | None:
        """See selector_cache.ExpectedCandidate: called before candidates are made. Raises TuningUnknown where a strict
        lock has no winner."""
        self._uses[problem] += 1
        self._announced = problem
        if self._only_aten:
            return ATEN
        self._wait_for(problem)
        entry = self._entries.get(problem)
        if entry is None:
            with self._autotune_stage(problem):
                entry = self._known.first(problem, device)
            if entry is None:
                return ATEN if self._leave_to_others(problem, device) else None
            self._entries[problem] = entry
        return entry.winner.candidate

    def choose(self, selection: Candidates, wait_for_builds: Callable[[], None]) -> int:
        """The position of the candidate to take. wait_for_builds: returns when this process builds nothing.

        Raises TuningUnknown where a strict lock has no winner; CompileFailed if no candidate works.
        """
        problem = selection.problem
        self._uses[problem] += problem != self._announced
        self._announced = None
        if self._only_aten and selection.aten:
            return selection.aten[0]
        self._wait_for(problem)
        entry = self._entries.get(problem)
        if entry is None or entry.winner.candidate not in selection.candidates:
            with self._autotune_stage(problem):
                entry = self._known.among(problem, selection.device, selection.candidates)
                if entry is None:
                    if self._leave_to_others(problem, selection.device):
                        return _assumed_winner(selection)
                    if self._cannot_run:
                        log.warning("%s is not measured: %s", problem.text(), self._cannot_run)
                        return compare_candidates.preferred(selection)[0]
                    entry = self._measure(selection, wait_for_builds)
                    self._measured_for_this.add(problem)
            self._entries[problem] = entry
        return selection.candidates.index(entry.winner.candidate)

    def environment(self, device: str) -> DeviceEnvironment:
        return self._known.environment(device)

    def _autotune_stage(self, problem: Problem) -> AbstractContextManager[None]:
        return self._clock.during("autotune", problem.text())

    def _measure(self, selection: Candidates, wait_for_builds: Callable[[], None]) -> TuningEntry:
        started = time.monotonic()
        failures = selection.begin_building().wait()
        wait_for_builds()
        result = compare_candidates.compare_candidates(
            selection,
            environment=self.environment(selection.device),
            settings=self._settings,
            threads=self._threads,
            turn=self._turns[selection.device],
            failures=failures,
            started=started,
        )
        return self._known.report(result, selection.device, selection.candidates)

    # --- problems that others search -----------------------------------------------------------------------

    @property
    def in_dry_run(self) -> bool:
        return bool(self._unknown)

    @property
    def _may_dry_run(self) -> bool:
        return self._known.reachable and self._dry_runs_left > 0

    def _leave_to_others(self, problem: Problem, device: str) -> bool:
        """Whether others are to search this unknown problem; it then belongs to a dry run."""
        if problem in self._left_to_this or not (self._may_dry_run or self.in_dry_run):
            return False
        self._unknown[problem] = device
        if time.monotonic() - self._reported_at > REPORT_SECONDS:
            self.report_problems()
        return True

    def report_problems(self) -> None:
        """Have the problems found so far searched while the dry run continues."""
        if len(self._unknown) > self._reported:
            self._reported, self._reported_at = len(self._unknown), time.monotonic()
            with contextlib.suppress(Unavailable):
                self._request_searches(self._unknown)

    def finish_dry_run(self) -> None:
        """Leave the dry run's problems to others. On a CPU wait for all of them: this compile's work would disturb the
        measurements."""
        self.report_problems()
        self._pending |= self._unknown
        self._submitted = len(self._pending)
        self._unknown, self._reported = {}, 0
        self._dry_runs_left -= 1
        if not DISTURBED_DEVICES.isdisjoint(self._pending.values()):
            self._wait_for(None)

    def abandon_dry_run(self) -> None:
        """The dry run failed: measure its problems here."""
        self._left_to_this.update(self._unknown)
        self._unknown, self._reported, self._dry_runs_left = {}, 0, 0

    def _wait_for(self, problem: Problem | None) -> None:
        """Wait until `problem` is known or left to this compile (None: until all pending problems are). A dry run does
        not wait."""

        def pending() -> bool:
            return bool(self._pending) if problem is None else problem in self._pending

        if self.in_dry_run or not pending():
            return
        with self._clock.during("search", self._progress()):
            pause, last_progress = _POLL_SECONDS[0], time.monotonic()
            while pending():
                asked = time.monotonic()
                try:
                    found, given_up, searching = self._request_searches(self._pending, HOLD_SECONDS)
                except Unavailable as error:
                    log.warning("unknown problems are measured here: %s", error)
                    self._dry_runs_left = 0
                    self._search_here(list(self._pending))
                    return
                for known, entry in found.items():
                    self._known.add(entry)
                    self._measured_for_this.add(known)
                    del self._pending[known]
                self._search_here(given_up.intersection(self._pending))
                if not searching:
                    self._search_here(list(self._pending))
                elif found or given_up:
                    pause, last_progress = _POLL_SECONDS[0], time.monotonic()
                    self._clock.enter("search", self._progress())
                elif time.monotonic() - last_progress > NO_PROGRESS_SECONDS:
                    log.warning("no problem was searched elsewhere for %.0f s", NO_PROGRESS_SECONDS)
                    self._search_here(list(self._pending))
                else:
                    time.sleep(max(0.0, pause - (time.monotonic() - asked)))
                    pause = min(pause * 1.5, _POLL_SECONDS[1])

    def _progress(self) -> str:
        return f"{self._submitted - len(self._pending)} of {self._submitted} problems searched"

    def _search_here(self, problems: Collection[Problem]) -> None:
        for problem in problems:
            del self._pending[problem]
        self._left_to_this.update(problems)

    def _request_searches(
        self, problems: Mapping[Problem, str], hold_seconds: float = 0.0
    ) -> tuple[dict[Problem, TuningEntry], set[Problem], bool]:
        """Have problems searched. Returns the known winners, the problems that others will not search, and whether any
        is being searched. Raises Unavailable."""
        assert self._ask is not None
        requests: list[queries.SearchRequest] = []
        for device in sorted(set(problems.values())):
            same = [problem for problem in problems if problems[problem] == device]
            for begin in range(0, len(same), _MAX_PROBLEMS):
                part = same[begin : begin + _MAX_PROBLEMS]
                requests.append(queries.SearchRequest(self.environment(device), part, hold_seconds))
        if len(requests) > 1:  # a reply that is held back would delay the others
            requests = [msgspec.structs.replace(request, wait_seconds=0.0) for request in requests]
        found: dict[Problem, TuningEntry] = {}
        given_up: set[Problem] = set()
        searching = False
        for request in requests:
            reply = self._ask(request)
            if isinstance(reply, queries.KnownEntries):
                found |= {
                    entry.problem: entry
                    for entry in reply.entries
                    if entry.place == request.place and entry.problem in request.problems
                }
                given_up.update(reply.given_up)
                searching = searching or reply.open > 0
        return found, given_up, searching


def _assumed_winner(selection: Candidates) -> int:
    """A dry run takes PyTorch's own kernel, which influences other problems least, and assumes that padding pays:
    Inductor asks only if a product is large and its sizes are odd."""
    if selection.problem.op.startswith(PADDING_PREFIX):
        return len(selection.candidates) - 1
    return compare_candidates.preferred(selection)[0]
