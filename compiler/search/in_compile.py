"""Stage 8, where max-autotune chooses: an operator and its candidates in; the one that implements it out.

A winner that the request's lock file or the team's database knows for this problem, on this device and with these
versions, is taken as it is. What nobody knows is measured once in a compile, however often the graph has it, and told.
Only a candidate that agrees with a reference in higher precision can win.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from .. import decoding
from ..api import compiles
from ..artifact import manifest
from ..errors import TuningUnknown, Unavailable
from ..graph.device_environment import device_environment
from ..request import schema
from ..torch_internals.algorithm_selection.padding_candidates import PADDING_PREFIX
from ..torch_internals.algorithm_selection.selector_cache import ATEN
from ..torch_internals.inductor.dry_run import DryRunFinished
from ..tuning import queries
from ..tuning.candidates import Candidates
from ..tuning.records import DeviceEnvironment, Problem, Timing, TuningEntry
from ..tuning.tile_config import TileConfig
from . import compare_candidates, device_lock, ranking

log = logging.getLogger(__name__)


class StageClock(Protocol):
    """Is told what a compile does, and counts the seconds of each stage."""

    def enter(self, stage: compiles.Stage, detail: str) -> None: ...
    def during(self, stage: compiles.Stage, detail: str) -> AbstractContextManager[None]:
        """A stage inside the present one, which goes on afterwards."""


class _NoClock:
    """The clock of a copy, whose seconds nobody counts."""

    def enter(self, stage: compiles.Stage, detail: str) -> None:
        pass

    def during(self, stage: compiles.Stage, detail: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class _Chosen(Struct, frozen=True):
    """Of a copy's lowering: how often each problem was met, and what is known of them."""

    uses: Counter[Problem]
    entries: dict[Problem, TuningEntry]
    looked_up: dict[Problem, list[TuningEntry]]


class CompileSearch:
    """What one compile chooses; the Guide of its lowering. searched, recalled: problems that were measured for it, here
    or elsewhere, and that were known.

    ask: the team's database, and whoever searches for it. unable: why candidates cannot be run here; '' if they can.
    beside: a folder that the compiles on this machine share.

    The first problem that nobody knows makes a scout of the compile: from there on it takes PyTorch's own kernels,
    generates no code, and gathers what else nobody knows (`scouting`). Then it has all of these searched at once
    (`hand_over`), and compiles from the beginning; where it comes to one that is still being searched it waits.
    """

    def __init__(
        self,
        request: schema.GraphRequest,
        *,
        ask: queries.SendQuery | None,
        settings: ranking.RankingSettings,
        unable: str,
        beside: Path | None,
        clock: StageClock,
    ) -> None:
        self._request = request
        self._ask = ask
        self._settings = settings
        self._unable = unable
        self._beside = beside
        self._clock = clock
        self._places: dict[str, DeviceEnvironment] = {}
        self._entries: dict[Problem, TuningEntry] = {}
        self._looked_up: dict[Problem, list[TuningEntry]] = {}
        self._looking = threading.Lock()
        self._look_up = self._ask_for
        self._only_aten = False
        self._uses: Counter[Problem] = Counter()
        self._announced: Problem | None = None
        self._scouts_left = 0 if ask is None else SCOUTS
        self._wanted: dict[Problem, str] = {}
        """Of the scout that is under way: what nobody knows, and on which device."""
        self._told = 0
        self._told_at = -math.inf
        self._open: dict[Problem, str] = {}
        """What scouts before found out and others still search."""
        self._handed_over = 0
        self._fetched: set[Problem] = set()
        """Measured for this compile, here or elsewhere."""
        self._own: set[Problem] = set()
        """Problems that nobody else will search."""
        self._inside_copy = False
        self._uses_before: Counter[Problem] = Counter()

    @property
    def searched(self) -> int:
        return len(self._entries.keys() & self._fetched)

    @property
    def recalled(self) -> int:
        return len(self._entries.keys() - self._fetched)

    def measurements(self) -> list[manifest.Measurement]:
        """What was taken for each problem that was measured or known."""
        taken = [
            (problem, entry, (entry.aten if self._only_aten else None) or entry.winner)
            for problem, entry in self._entries.items()
            if self._uses[problem]  # a scout may have met others
        ]
        return [
            manifest.Measurement(
                problem=problem.text(),
                winner=timing.candidate,
                milliseconds=timing.milliseconds,
                candidates=entry.candidates,
                uses=self._uses[problem],
            )
            for problem, entry, timing in taken
        ]

    def do_without_templates(self) -> bool:
        """From now on take PyTorch's own kernels; false if they were taken already, or a strict lock says which.

        A template's code is generated with what Inductor fuses into it, and Inductor now and then cannot: what ran well
        alone does not compile inside this graph.
        """
        lock = self._request.tuning_lock
        templates = any(entry.winner.candidate != _text(entry.aten) for entry in self._entries.values())
        if self._only_aten or not templates or (lock is not None and lock.strict):
            return False
        self._only_aten = True
        return True

    def begin(self) -> None:
        """The graph is lowered from its beginning."""
        self._uses.clear()
        self._announced = None

    def expects(self, problem: Problem, device: str) -> str | None:
        """The candidate that will be taken, as far as that can be told without making candidates. Raises TuningUnknown
        where a strict lock has no winner."""
        self._uses[problem] += 1
        self._announced = problem
        if self._only_aten:
            return ATEN
        self._await(problem)
        entry = self._entries.get(problem)
        if entry is None:
            with self._clock.during("autotune", problem.text()):
                entry = next(iter(self._pinned(problem, device) or self._database(problem, device)), None)
            if entry is None:
                return ATEN if self._scouts(problem, device) else None
            self._entries[problem] = entry
        return entry.winner.candidate

    def more(self, problem: Problem) -> Sequence[TileConfig]:
        """A compile offers what Inductor does; who searches apart from it may look around."""
        return ()

    @property
    def only_more(self) -> bool:
        return False

    def choose(self, selection: Candidates, settle: Callable[[], None]) -> int:
        """The candidate to take, by position. settle: waits until this process builds nothing.

        Raises TuningUnknown where a strict lock has no winner; CompileFailed if no candidate works.
        """
        problem = selection.problem
        self._uses[problem] += problem != self._announced
        self._announced = None
        if self._only_aten and selection.aten:
            return selection.aten[0]
        self._await(problem)
        entry = self._entries.get(problem)
        if entry is None or entry.winner.candidate not in selection.candidates:
            with self._clock.during("autotune", problem.text()):
                entry = self._known(selection)
                if entry is None:
                    if self._scouts(problem, selection.device):
                        return self._guess(selection)
                    if self._unable:
                        log.warning("%s is not measured: %s", problem.text(), self._unable)
                        return compare_candidates.preferred(selection)[0]
                    entry = self._measured(selection, settle)
                    self._fetched.add(problem)
            self._entries[problem] = entry
        return selection.candidates.index(entry.winner.candidate)

    def _guess(self, selection: Candidates) -> int:
        """What a scout takes: PyTorch's own kernel, as that depends least on the rest; of padding, which Inductor asks
        about where a product is large and its sizes are odd, that it pays."""
        if selection.problem.op.startswith(PADDING_PREFIX):
            return len(selection.candidates) - 1
        return compare_candidates.preferred(selection)[0]

    # --- in a copy of this process -----------------------------------------------------------------------

    @property
    def may_be_copied(self) -> bool:
        """Whether what nobody knows would be others' to measure."""
        return self._ask is not None and bool(self._scouts_left) and not self._own and not self._open

    def answer(self, question: bytes) -> bytes:
        """Of a copy: what the database has for a problem. Each is looked up once, whoever comes to it first."""
        problem, device = decoding.from_msgpack(question, type=tuple[Problem, str])
        return msgspec.msgpack.encode(self._database(problem, device))

    def leave(self, ask: Callable[[bytes], bytes]) -> None:
        """This is the copy. What nobody knows ends it."""

        def through(problem: Problem, device: str) -> list[TuningEntry]:
            answer = ask(msgspec.msgpack.encode((problem, device)))
            return decoding.from_msgpack(answer, type=list[TuningEntry])

        self._inside_copy, self._look_up, self._looking = True, through, threading.Lock()
        self._clock = _NoClock()
        self._uses_before = self._uses.copy()

    def taken_along(self) -> _Chosen:
        return _Chosen(self._uses - self._uses_before, self._entries, self._looked_up)

    def take_over(self, found: _Chosen) -> None:
        self._uses += found.uses
        self._entries |= found.entries
        self._looked_up |= found.looked_up

    # --- known winners ---------------------------------------------------------------------------------

    def _known(self, selection: Candidates) -> TuningEntry | None:
        """The entry that the lock or the database has, if its winner is a candidate."""
        problem, device = selection.problem, selection.device
        for entry in (*self._pinned(problem, device), *self._database(problem, device)):
            if entry.winner.candidate in selection.candidates:
                return entry
        lock = self._request.tuning_lock
        if lock is not None and lock.strict:
            winner = self._pinned(problem, device)[0].winner.candidate
            raise TuningUnknown(
                f"the tuning lock's winner for {problem.text()}, {winner}, is no candidate here"
            )
        return None

    def _pinned(self, problem: Problem, device: str) -> list[TuningEntry]:
        """What the lock has for the problem. Raises TuningUnknown: nothing, and it is strict."""
        lock, place = self._request.tuning_lock, self.place(device)
        pinned = [entry for entry in lock.entries if _fits(entry, problem, place)] if lock is not None else []
        if lock is not None and lock.strict and not pinned:
            raise TuningUnknown(f"the tuning lock has no winner for {problem.text()} on {place.device}")
        return pinned

    def _database(self, problem: Problem, device: str) -> list[TuningEntry]:
        """What the database has for the problem; asked once. Nothing under a strict lock."""
        lock = self._request.tuning_lock
        if lock is not None and lock.strict:
            return []
        with self._looking:
            if problem not in self._looked_up:
                self._looked_up[problem] = self._look_up(problem, device)
            return self._looked_up[problem]

    def _ask_for(self, problem: Problem, device: str) -> list[TuningEntry]:
        place = self.place(device)
        return self._standing(queries.EntryLookup(place, [problem]), problem, place)

    def _standing(
        self, question: queries.TuningQuery, problem: Problem, place: DeviceEnvironment
    ) -> list[TuningEntry]:
        """What the database answers about this problem."""
        if self._ask is None:
            return []
        try:
            entries = queries.entries_of(self._ask(question))
        except Unavailable as error:
            log.warning("%s: without the tuning database: %s", problem.text(), error)
            self._scouts_left = 0
            return []
        return [entry for entry in entries if _fits(entry, problem, place)]

    # --- winners that others search ----------------------------------------------------------------------

    @property
    def scouting(self) -> bool:
        """Whether this compile only finds out what must be searched."""
        return bool(self._wanted)

    def _scouts(self, problem: Problem, device: str) -> bool:
        """Whether others are to search the problem, which nobody knows."""
        if self._inside_copy:
            raise DryRunFinished  # whoever is copied comes to it too
        if problem in self._own or not (self._scouts_left or self.scouting):
            return False
        self._wanted[problem] = device
        if time.monotonic() - self._told_at > TELL_SECONDS:
            self.tell()
        return True

    def tell(self) -> None:
        """Have what was found out so far searched, while the scout goes on."""
        if len(self._wanted) > self._told:
            self._told, self._told_at = len(self._wanted), time.monotonic()
            with contextlib.suppress(Unavailable):
                self._asked(list(self._wanted))

    def hand_over(self) -> None:
        """The scout is done: others search what it found out, while the compile begins again. On a CPU it waits until
        nothing is searched: what it did meanwhile would be measured too."""
        self.tell()
        self._open |= self._wanted
        self._handed_over = len(self._open)
        self._wanted, self._told = {}, 0
        self._scouts_left -= 1
        if not DISTURBED.isdisjoint(self._open.values()):
            self._await(None)

    def _await(self, problem: Problem | None) -> None:
        """Until this problem, or None: all that others search, is known, or nobody searches it. What is not known then
        is measured here. A scout waits for nothing."""
        if self.scouting or not self._open or (problem is not None and problem not in self._open):
            return
        with self._clock.during("search", self._how_far()):
            pause, news = _PAUSES[0], time.monotonic()
            while self._open if problem is None else problem in self._open:
                asked = time.monotonic()
                try:
                    found, given_up, searching = self._asked(list(self._open), self._open, PATIENCE_SECONDS)
                except Unavailable as error:
                    log.warning("what is not known yet is measured here: %s", error)
                    self._scouts_left = 0
                    self._search_here(list(self._open))
                    return
                for known, entry in found.items():
                    self._looked_up[known] = [entry]
                    self._fetched.add(known)
                    del self._open[known]
                self._search_here(given_up.intersection(self._open))
                if not searching:
                    self._search_here(list(self._open))
                elif found or given_up:
                    pause, news = _PAUSES[0], time.monotonic()
                    self._clock.enter("search", self._how_far())
                elif time.monotonic() - news > NEWS_SECONDS:
                    log.warning("no problem was searched elsewhere for %.0f s", NEWS_SECONDS)
                    self._search_here(list(self._open))
                else:
                    time.sleep(max(0.0, pause - (time.monotonic() - asked)))
                    pause = min(pause * 1.5, _PAUSES[1])

    def _how_far(self) -> str:
        return f"{self._handed_over - len(self._open)} of {self._handed_over} problems searched"

    def _search_here(self, problems: Collection[Problem]) -> None:
        for problem in problems:
            del self._open[problem]
        self._own.update(problems)

    def give_up_scouting(self) -> None:
        """Measure here what the scout was to find out: it failed."""
        self._own.update(self._wanted)
        self._wanted, self._told, self._scouts_left = {}, 0, 0

    def _asked(
        self,
        problems: Sequence[Problem],
        devices: Mapping[Problem, str] | None = None,
        patience: float = 0.0,
    ) -> tuple[dict[Problem, TuningEntry], set[Problem], bool]:
        """Of these problems: what is known, what nobody will search, and whether anything is still being searched.
        Raises Unavailable."""
        devices = self._wanted if devices is None else devices
        found: dict[Problem, TuningEntry] = {}
        given_up: set[Problem] = set()
        searching = False
        assert self._ask is not None
        kinds = sorted({devices[problem] for problem in problems})
        if len(kinds) > 1 or len(problems) > _MOST_WANTED:  # what is new may be in another answer
            patience = 0.0
        for device in kinds:
            place = self.place(device)
            here = [problem for problem in problems if devices[problem] == device]
            for begin in range(0, len(here), _MOST_WANTED):
                part = here[begin : begin + _MOST_WANTED]
                answer = self._ask(queries.SearchRequest(place, part, patience))
                if isinstance(answer, queries.KnownEntries):
                    found |= {e.problem: e for e in answer.entries if e.place == place and e.problem in part}
                    given_up.update(answer.given_up)
                    searching = searching or answer.open > 0
        return found, given_up, searching

    def place(self, device: str) -> DeviceEnvironment:
        """Where this compile measures what runs on `device`."""
        if device not in self._places:
            request = self._request
            self._places[device] = device_environment(
                request.toolchain, request.target, device, request.ambient.threads
            )
        return self._places[device]

    # --- measured winners ------------------------------------------------------------------------------

    def _measured(self, selection: Candidates, settle: Callable[[], None]) -> TuningEntry:
        """Measure the candidates and tell what was found; what stands for everyone now, unless it failed here."""
        begun = time.monotonic()
        doomed = selection.begin_building().wait()
        settle()
        found = compare_candidates.compare_candidates(
            selection,
            place=self.place(selection.device),
            settings=self._settings,
            threads=self._request.ambient.threads,
            beside=self._beside if selection.device == "cpu" else device_lock.gpu_lock_folder(),
            doomed=doomed,
            begun=begun,
        )
        told = queries.SearchResult(
            found.entry, timings=found.timings[:MOST_TOLD], failures=found.failures[:MOST_TOLD]
        )
        for standing in self._standing(told, selection.problem, self.place(selection.device)):
            winner = standing.winner.candidate
            if winner in selection.candidates and selection.candidates.index(winner) not in found.failed:
                return standing
        return found.entry


SCOUTS = 4
"""With other winners than a scout has taken the graph may have other problems."""
NEWS_SECONDS = 300.0
"""A compile waits so long for one more of its problems to be searched."""
TELL_SECONDS = 0.3
"""A scout tells no more often what it has found out."""
DISTURBED = frozenset({"cpu"})
"""Kinds of device on which what a compile does shows in what is measured beside it."""
PATIENCE_SECONDS = 4.0
"""For so long at most is the service to hold an answer back in which nothing is new."""
_PAUSES = (0.1, 0.5)
"""From one question to the next without news, at least: not every service waits."""
_MOST_WANTED = 256
MOST_TOLD = 400
"""Timings, and failures, that a report has room for (queries.QUESTION_LIMIT)."""


def _text(timing: Timing | None) -> str:
    return "" if timing is None else timing.candidate


def _fits(entry: TuningEntry, problem: Problem, place: DeviceEnvironment) -> bool:
    return entry.problem == problem and entry.place == place
