"""Stage 8, where max-autotune chooses: an operator and its candidates in; the one that implements it out.

A winner that the request's lock file or the team's database knows for this problem, on this device and with these
versions, is taken as it is. What nobody knows is measured once in a compile, however often the graph has it, and told.
Only a candidate that agrees with a reference in higher precision can win.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from . import contest, measure, tuning, wire
from .errors import TuningUnknown, Unavailable
from .place import place_of
from .torch_internals import Selection
from .tuning import Entry, Place, Problem, Timing

log = logging.getLogger(__name__)


class Search:
    """What one compile chooses. searched, recalled: problems that it measured, and that were known.

    ask: the team's database. unable: why candidates cannot be run here; '' if they can. beside: a folder that the
    compiles on this machine share. during(problem): around the work on one problem.
    """

    def __init__(
        self,
        request: wire.GraphRequest,
        *,
        ask: tuning.Ask | None,
        settings: measure.Settings,
        unable: str,
        beside: Path | None,
        during: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.searched = 0
        self.recalled = 0
        self._request = request
        self._ask = ask
        self._settings = settings
        self._unable = unable
        self._beside = beside
        self._during = during
        self._places: dict[str, Place] = {}
        self._entries: dict[Problem, Entry] = {}
        self._only_aten = False

    def measurements(self) -> list[wire.Measurement]:
        """What was taken for each problem that was measured or known."""
        taken = [
            (problem, entry, (entry.aten if self._only_aten else None) or entry.winner)
            for problem, entry in self._entries.items()
        ]
        return [
            wire.Measurement(
                problem=problem.text(),
                winner=timing.candidate,
                milliseconds=timing.milliseconds,
                candidates=entry.candidates,
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

    def choose(self, selection: Selection, settle: Callable[[], None]) -> int:
        """The candidate to take, by position. settle: waits until this process builds nothing.

        Raises TuningUnknown where a strict lock has no winner; CompileFailed if no candidate works.
        """
        problem = selection.problem
        if self._only_aten and selection.aten:
            return selection.aten[0]
        entry = self._entries.get(problem)
        if entry is None or entry.winner.candidate not in selection.candidates:
            with self._during(problem.text()):
                entry = self._known(selection)
                if entry is not None:
                    self.recalled += problem not in self._entries
                elif self._unable:
                    log.warning("%s is not measured: %s", problem.text(), self._unable)
                    return contest.preferred(selection)[0]
                else:
                    entry = self._measured(selection, settle)
                    self.searched += problem not in self._entries
            self._entries[problem] = entry
        return selection.candidates.index(entry.winner.candidate)

    # --- known winners ---------------------------------------------------------------------------------

    def _known(self, selection: Selection) -> Entry | None:
        """The entry that the lock or the database has, if its winner is a candidate."""
        problem, place = selection.problem, self.place(selection.device)
        lock = self._request.tuning_lock
        pinned = [entry for entry in lock.entries if _fits(entry, problem, place)] if lock is not None else []
        for entry in pinned:
            if entry.winner.candidate in selection.candidates:
                return entry
        if lock is not None and lock.strict:
            raise TuningUnknown(
                f"the tuning lock's winner for {problem.text()}, {pinned[0].winner.candidate}, is no candidate here"
                if pinned
                else f"the tuning lock has no winner for {problem.text()} on {place.device}"
            )
        return self._standing(tuning.Lookup(place, [problem]), selection)

    def _standing(self, question: tuning.Question, selection: Selection) -> Entry | None:
        """What the database answers, if it is about this problem and its winner is a candidate."""
        if self._ask is None:
            return None
        try:
            entries = tuning.entries_of(self._ask(question))
        except Unavailable as error:
            log.warning("%s: without the tuning database: %s", selection.problem.text(), error)
            return None
        place = self.place(selection.device)
        return next(
            (
                entry
                for entry in entries
                if _fits(entry, selection.problem, place) and entry.winner.candidate in selection.candidates
            ),
            None,
        )

    def place(self, device: str) -> Place:
        """Where this compile measures what runs on `device`."""
        if device not in self._places:
            request = self._request
            self._places[device] = place_of(
                request.toolchain, request.target, device, request.ambient.threads
            )
        return self._places[device]

    # --- measured winners ------------------------------------------------------------------------------

    def _measured(self, selection: Selection, settle: Callable[[], None]) -> Entry:
        """Measure the candidates and tell what was found; what stands for everyone now, unless it failed here."""
        begun = time.monotonic()
        doomed = selection.begin_building()()
        settle()
        found = contest.hold(
            selection,
            place=self.place(selection.device),
            settings=self._settings,
            threads=self._request.ambient.threads,
            beside=self._beside if selection.device == "cpu" else contest.gpu_folder(),
            doomed=doomed,
            begun=begun,
        )
        told = tuning.Found(
            found.entry, timings=found.timings[:MOST_TOLD], failures=found.failures[:MOST_TOLD]
        )
        standing = self._standing(told, selection)
        if standing is None or selection.candidates.index(standing.winner.candidate) in found.failed:
            return found.entry
        return standing


MOST_TOLD = 400
"""Timings, and failures, that a report has room for (tuning.QUESTION_LIMIT)."""


def _text(timing: Timing | None) -> str:
    return "" if timing is None else timing.candidate


def _fits(entry: Entry, problem: Problem, place: Place) -> bool:
    return entry.problem == problem and entry.place == place
