"""Stage 8, where max-autotune chooses: an operator and its candidates in; the one that implements it out.

A winner that the request's lock file or the team's database knows for this problem, on this device and with these
versions, is taken as it is. What nobody knows is measured once in a compile, however often the graph has it, and told.
Only a candidate that agrees with a reference in higher precision can win.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from . import measure, target, trials, tuning, wire
from .errors import CompileFailed, TuningUnknown, Unavailable
from .torch_internals import Selection
from .tuning import Entry, Place, Problem, Timing

log = logging.getLogger(__name__)

_TIMES_ATEN = 4.0
_ULPS = 4.0
"""A candidate may be as far off the reference as this many times PyTorch's own kernel, and as many units in the last
place of its dtype: another order of summation is not an error."""


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
                    return _preferred(selection)[0]
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
            made, aim = self._request.toolchain, self._request.target
            versions = made.torch, made.triton, made.cuda
            self._places[device] = (
                Place(aim.name, aim.capability, _gpu_driver(), *versions)
                if device == "cuda"
                else Place(
                    _cpu_model(), target.capability(aim.cpu), "", *versions, self._request.ambient.threads
                )
            )
        return self._places[device]

    # --- measured winners ------------------------------------------------------------------------------

    def _measured(self, selection: Selection, settle: Callable[[], None]) -> Entry:
        """Measure the candidates and tell what was found; what stands for everyone now, unless it failed here."""
        begun = time.monotonic()
        name = tuning.name_of(selection.problem)
        failed = dict.fromkeys(selection.build(), "does not build")
        settle()
        selection.prepare(seed=int(name[:8], 16))
        errors: dict[int, float | None] = {}
        try:
            with (
                alone(self._beside if selection.device == "cpu" else None),
                trials.trials(selection, self._request.ambient.threads) as running,
            ):
                for candidate in _preferred(selection):
                    if candidate not in failed:
                        try:
                            errors[candidate] = running.start(candidate)
                        except trials.Failed as error:
                            failed[candidate] = str(error)
                failed |= _wrong(selection, errors)
                ranking = measure.rank(
                    running.take,
                    [candidate for candidate in _preferred(selection) if candidate not in failed],
                    name=name,
                    settings=self._settings,
                )
        finally:
            selection.close()
        failed |= dict.fromkeys(ranking.failed, "failed while it was measured")
        for candidate, why in failed.items():
            log.warning("%s: %s %s", selection.problem.text(), selection.candidates[candidate], why)
        if ranking.winner is None:
            raise CompileFailed(
                f"no candidate for {selection.problem.text()} works: {_listed(selection, failed)}"
            )
        entry = self._entry(selection, ranking, len(failed), errors, time.monotonic() - begun)
        standing = self._standing(tuning.Found(entry), selection)
        if standing is None or selection.candidates.index(standing.winner.candidate) in failed:
            return entry
        return standing

    def _entry(
        self,
        selection: Selection,
        ranking: measure.Ranking,
        failed: int,
        errors: dict[int, float | None],
        seconds: float,
    ) -> Entry:
        assert ranking.winner is not None
        timings = {
            candidate: _timing(selection.candidates[candidate], told)
            for candidate, told in ranking.timed.items()
        }
        error = errors[ranking.winner]

        def fastest(candidates: list[int]) -> Timing | None:
            return min((timings[c] for c in candidates), key=lambda t: t.milliseconds, default=None)

        return Entry(
            problem=selection.problem,
            place=self.place(selection.device),
            winner=timings[ranking.winner],
            runner_up=fastest([c for c in timings if c != ranking.winner]),
            aten=fastest([c for c in selection.aten if c in timings]),
            candidates=len(selection.candidates),
            failed=failed,
            error=None if error is None or not math.isfinite(error) else tuning.rounded(error),
            clock=_clock() if selection.device == "cuda" else "",
            seconds=round(seconds, 3),
        )


def _timing(candidate: str, told: measure.Summary) -> Timing:
    median, low, high = map(tuning.rounded, (told.median, told.low, told.high))
    return Timing(candidate, median, low, high, told.samples)


ALONE_SECONDS = 30.0


@contextlib.contextmanager
def alone(folder: Path | None, seconds: float = ALONE_SECONDS) -> Iterator[None]:
    """Inside the block, no other process is inside such a block with `folder`.

    A wish and no promise: after `seconds` it is entered all the same. Who holds it may have stopped, and to measure is
    then better than to wait. Nothing is written: a job may only read what it shares with others.
    """
    if folder is None:
        yield
        return
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield
        return
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:  # somebody is; or this file system has no locks
                time.sleep(0.02)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_UN)  # copies of this process hold the file open too
        os.close(held)


def _text(timing: Timing | None) -> str:
    return "" if timing is None else timing.candidate


def _fits(entry: Entry, problem: Problem, place: Place) -> bool:
    return entry.problem == problem and entry.place == place


def _preferred(selection: Selection) -> list[int]:
    """Who wins among equals: PyTorch's own kernel, which needs no compiler and keeps the code small; then by text."""
    return sorted(
        range(len(selection.candidates)), key=lambda c: (c not in selection.aten, selection.candidates[c])
    )


def _wrong(selection: Selection, errors: dict[int, float | None]) -> dict[int, str]:
    """Candidates further off the reference than PyTorch's own kernel allows, and why."""
    own = [error for candidate, error in errors.items() if candidate in selection.aten and error is not None]
    if not own:
        return {}
    dtype = getattr(torch, selection.problem.result.dtype)
    ulp = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    allowed = _TIMES_ATEN * min(own) + _ULPS * ulp
    return {
        candidate: f"is off by {error:.2g} of the largest value, where {allowed:.2g} is rounding"
        for candidate, error in errors.items()
        if error is not None and not error <= allowed
    }


def _listed(selection: Selection, failed: dict[int, str]) -> str:
    return "; ".join(f"{selection.candidates[candidate]} {why}" for candidate, why in sorted(failed.items()))


def _cpu_model(path: Path = Path("/proc/cpuinfo")) -> str:
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def _gpu_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The driver's version; '' if the system does not tell."""
    with contextlib.suppress(OSError):
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", path.read_text())
        return found[0] if found else ""
    return ""


def _clock() -> str:
    """Of the GPU's multiprocessors, now; '' where NVML is not to be had."""
    try:
        return f"{torch.cuda.clock_rate()} MHz"
    except Exception:
        return ""
