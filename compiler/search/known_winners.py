"""Stage 8: looks a problem's winner up in the request's tuning lock and in the namespace's database."""

from __future__ import annotations

import logging
from collections.abc import Collection

from ..artifact import manifest
from ..errors import TuningUnknown, Unavailable
from ..graph.toolchain import device_environment
from ..request import schema
from ..tuning import queries
from ..tuning.records import DeviceEnvironment, Problem, Timing, TuningEntry

log = logging.getLogger(__name__)


class KnownWinners:
    """The winners for one request. Those of its lock come first; a strict lock is the only source.

    ask: sends a query to the namespace's database; None: there is none. reachable: False once the database did not
    answer.
    """

    def __init__(self, request: schema.GraphRequest, ask: queries.SendQuery | None) -> None:
        self.reachable = ask is not None
        self._request = request
        self._ask = ask
        self._lock = request.tuning_lock
        self._environments: dict[str, DeviceEnvironment] = {}
        self._stored: dict[Problem, list[TuningEntry]] = {}

    @property
    def strict(self) -> bool:
        return self._lock is not None and self._lock.strict

    def environment(self, device: str) -> DeviceEnvironment:
        """Where this compile's kernels for `device` (`cpu` or `cuda`) are measured."""
        if device not in self._environments:
            request = self._request
            self._environments[device] = device_environment(
                request.toolchain, request.target, device, request.ambient.threads
            )
        return self._environments[device]

    def first(self, problem: Problem, device: str) -> TuningEntry | None:
        """The first entry, before candidates are made. Raises TuningUnknown if a strict lock has none."""
        pinned = self._pinned(problem, device)
        return next(iter(pinned or self.stored(problem, device)), None)

    def among(self, problem: Problem, device: str, candidates: Collection[str]) -> TuningEntry | None:
        """The first entry whose winner is one of the candidates. Raises TuningUnknown if a strict lock has none."""
        pinned = self._pinned(problem, device)
        for entry in (*pinned, *self.stored(problem, device)):
            if entry.winner.candidate in candidates:
                return entry
        if self.strict:
            winner = pinned[0].winner.candidate
            raise TuningUnknown(
                f"the tuning lock's winner for {problem.text()}, {winner}, is no candidate here"
            )
        return None

    def _pinned(self, problem: Problem, device: str) -> list[TuningEntry]:
        if self._lock is None:
            return []
        pinned = self._valid(self._lock.entries, problem, device)
        if not pinned and self.strict:
            name = self.environment(device).device
            raise TuningUnknown(f"the tuning lock has no winner for {problem.text()} on {name}")
        return pinned

    def stored(self, problem: Problem, device: str) -> list[TuningEntry]:
        """The database's entries; looked up once. None under a strict lock."""
        if self.strict:
            return []
        if problem not in self._stored:
            lookup = queries.EntryLookup(self.environment(device), [problem])
            self._stored[problem] = self._send(lookup, problem, device)
        return self._stored[problem]

    def add(self, entry: TuningEntry) -> None:
        """An entry that came in another reply."""
        self._stored[entry.problem] = [entry]

    def report(self, result: queries.SearchResult, device: str, candidates: Collection[str]) -> TuningEntry:
        """Send what was measured; returns the entry to use: the database's, unless its winner failed here."""
        problem = result.entry.problem
        failed = {failure.candidate for failure in result.failures}
        for entry in self._send(result, problem, device):
            if entry.winner.candidate in candidates and entry.winner.candidate not in failed:
                return entry
        return result.entry

    def _send(self, query: queries.TuningQuery, problem: Problem, device: str) -> list[TuningEntry]:
        if self._ask is None:
            return []
        try:
            entries = queries.entries_of(self._ask(query))
        except Unavailable as error:
            log.warning("%s: without the tuning database: %s", problem.text(), error)
            self.reachable = False
            return []
        return self._valid(entries, problem, device)

    def _valid(self, entries: Collection[TuningEntry], problem: Problem, device: str) -> list[TuningEntry]:
        environment = self.environment(device)
        return [entry for entry in entries if (entry.problem, entry.place) == (problem, environment)]


def measurement(entry: TuningEntry, taken: Timing, uses: int) -> manifest.Measurement:
    """A problem in an artifact's manifest. taken: the candidate that was used."""
    return manifest.Measurement(
        problem=entry.problem.text(),
        winner=taken.candidate,
        milliseconds=taken.milliseconds,
        candidates=entry.candidates,
        uses=uses,
    )
