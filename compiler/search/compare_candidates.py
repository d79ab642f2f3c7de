"""Stage 8: one operator's candidates, built, in; the winner, and what was measured and why the rest failed, out.

Only a candidate that agrees with a reference in higher precision can win."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from msgspec import Struct

from ..errors import CompileFailed
from ..torch_internals.algorithm_selection.padding_candidates import PADDING_PREFIX
from ..tuning import records
from ..tuning.candidates import Candidates
from ..tuning.records import CandidateFailure, DeviceEnvironment, Timing, TuningEntry
from ..tuning.tile_config import TileConfig, neighbours, parse_tile_config
from . import benchmark
from . import ranking as search_ranking
from .device_lock import exclusive, gpu_clock

log = logging.getLogger(__name__)


_TIMES_ATEN = 4.0


_ULPS = 4.0
"""A candidate may be as far off the reference as this many times PyTorch's own kernel, and as many units in the last
place of its dtype: another order of summation is not an error."""


PADDING_TIES = 0.1
"""So much faster must padding be, as a share: in a graph it costs memory too (torch/_inductor/fx_passes/pad_mm.py)."""


class SearchOutcome(Struct, frozen=True):
    """timings: of all candidates that ran, fastest first. failed: positions of those that did not."""

    entry: TuningEntry
    timings: list[Timing]
    failures: list[CandidateFailure]
    failed: frozenset[int]


def compare_candidates(
    selection: Candidates,
    *,
    place: DeviceEnvironment,
    settings: search_ranking.RankingSettings,
    threads: int,
    beside: Path | None,
    doomed: Mapping[int, str],
    begun: float,
    first: Collection[str] = (),
    before: Callable[[int], None] = lambda candidate: None,
    failed: Callable[[], None] = lambda: None,
    watched: benchmark.Watchdog = benchmark.no_watchdog,
) -> SearchOutcome:
    """Run and measure the candidates but those that are `doomed`.

    threads: of a CPU's kernels. beside: see `alone`. begun: when the search began (time.monotonic). first: candidates
    that win among equals. before: called with each candidate before its first run; failed: after one that failed.
    watched: around whatever may hang. Raises CompileFailed if none works.
    """
    name = records.problem_digest(selection.problem)
    if selection.problem.op.startswith(PADDING_PREFIX):
        settings = msgspec.structs.replace(settings, band=max(settings.band, 2 * PADDING_TIES))
    why = dict(doomed)
    errors: dict[int, float | None] = {}
    try:
        with exclusive(beside):
            with watched(benchmark.FIRST_SECONDS):
                selection.prepare(seed=int(name[:8], 16))
                running = benchmark.candidate_runner(selection, threads)
            with running:
                for candidate in preferred(selection, first):
                    if candidate not in why:
                        before(candidate)
                        try:
                            with watched(benchmark.FIRST_SECONDS):
                                errors[candidate] = running.start(candidate)
                        except benchmark.CandidateFailed as error:
                            why[candidate] = str(error)
                            failed()
                why |= inaccurate_candidates(selection, errors)
                ranking = search_ranking.rank(
                    lambda order: _taken(running, order, watched),
                    [candidate for candidate in preferred(selection, first) if candidate not in why],
                    name=name,
                    settings=settings,
                )
    finally:
        selection.close()
    why |= dict.fromkeys(ranking.failed, "failed while it was measured")
    for candidate, text in why.items():
        log.warning("%s: %s %s", selection.problem.text(), selection.candidates[candidate], text)
    if ranking.winner is None:
        raise CompileFailed(f"no candidate for {selection.problem.text()} works: {_listed(selection, why)}")
    timings = {
        candidate: _timing(selection.candidates[candidate], told) for candidate, told in ranking.timed.items()
    }
    off = errors[ranking.winner]
    own = [candidate for candidate in selection.aten if candidate in timings]
    entry = TuningEntry(
        problem=selection.problem,
        place=place,
        winner=timings[ranking.winner],
        runner_up=_fastest([timings[c] for c in timings if c != ranking.winner]),
        aten=_fastest([timings[c] for c in own]),
        default=timings[own[0]] if own and own[0] == selection.aten[0] else None,
        candidates=len(selection.candidates),
        failed=len(why),
        error=None if off is None or not math.isfinite(off) else records.rounded(off),
        clock=gpu_clock() if selection.device == "cuda" else "",
        seconds=round(time.monotonic() - begun, 3),
    )
    return SearchOutcome(
        entry,
        sorted(timings.values(), key=lambda timing: (timing.milliseconds, timing.candidate)),
        [
            CandidateFailure(selection.candidates[candidate], text[:1000])
            for candidate, text in sorted(why.items())
        ],
        frozenset(why),
    )


def merge_outcomes(earlier: SearchOutcome, later: SearchOutcome, ties: float) -> SearchOutcome:
    """Of two contests for one problem, of which the later had what was best in the earlier, and PyTorch's own kernels:
    the later one's winner, unless what it did not have was better."""
    again = {timing.candidate for timing in later.timings}
    timings = [*later.timings, *(timing for timing in earlier.timings if timing.candidate not in again)]
    why = {failure.candidate: failure for failure in (*earlier.failures, *later.failures)}
    ran = {timing.candidate for timing in timings}
    failures = [failure for failure in why.values() if failure.candidate not in ran]
    first, second = earlier.entry, later.entry
    keeps = first.winner.candidate not in again and (
        first.winner.milliseconds <= second.winner.milliseconds * (1 + ties)
    )
    entry = msgspec.structs.replace(
        first if keeps else second,
        candidates=len(timings) + len(failures),
        failed=len(failures),
        seconds=max(first.seconds, second.seconds),
    )
    timings.sort(key=lambda timing: (timing.milliseconds, timing.candidate))
    return SearchOutcome(entry, timings, failures, later.failed)


def neighbours_to_try(found: SearchOutcome, tried: Collection[str], ties: float) -> list[TileConfig]:
    """What is worth a look after a contest: the best of Triton's configurations, and what differs by one step from the
    winner; if that is another kernel, from the best of those near it. Empty: none is near, or nothing is left to try.
    tried: candidates by text.

    Around the winner, because who wins is certain and who is second is not: two searches are to look around alike."""
    told = [(timing, parse_tile_config(timing.candidate)) for timing in found.timings]
    known = [(timing, configuration) for timing, configuration in told if configuration is not None]
    if not known or known[0][0].milliseconds > _NEAR * found.timings[0].milliseconds:
        return []
    limit = known[0][0].milliseconds * (1 + ties)
    known.sort(key=lambda pair: (max(pair[0].milliseconds, limit), pair[0].candidate))  # among equals by text
    best = [configuration for _, configuration in known[:_BEST_KEPT]]
    winner = parse_tile_config(found.entry.winner.candidate)
    if winner is not None:
        best = [winner, *(configuration for configuration in best if configuration != winner)]
    seen = [configuration for text in tried if (configuration := parse_tile_config(text)) is not None]
    others = neighbours(best[:1], seen)
    return [*best, *others] if others else []


_NEAR = 1.05
"""A step seldom gains more."""


_BEST_KEPT = 3


def _taken(
    running: benchmark.CandidateRunner, order: Sequence[int], watched: benchmark.Watchdog
) -> list[float | None]:
    with watched(benchmark.SAMPLE_SECONDS + 0.1 * len(order)):
        return running.take(order)


def _timing(candidate: str, told: search_ranking.SampleSummary) -> Timing:
    median, low, high = map(records.rounded, (told.median, told.low, told.high))
    return Timing(candidate, median, low, high, told.samples)


def _fastest(timings: list[Timing]) -> Timing | None:
    return min(timings, key=lambda timing: timing.milliseconds, default=None)


def preferred(selection: Candidates, first: Collection[str] = ()) -> list[int]:
    """Who wins among equals: PyTorch's own kernel, which needs no compiler and keeps the code small; then what was
    there `first`; then by text."""

    def rank(candidate: int) -> tuple[bool, bool, str]:
        text = selection.candidates[candidate]
        return candidate not in selection.aten, text not in first, text

    return sorted(range(len(selection.candidates)), key=rank)


def inaccurate_candidates(selection: Candidates, errors: Mapping[int, float | None]) -> dict[int, str]:
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


def _listed(selection: Candidates, failed: Mapping[int, str]) -> str:
    return "; ".join(f"{selection.candidates[candidate]} {why}" for candidate, why in sorted(failed.items()))
