"""Stage 8: measures an operator's built candidates; returns the winner, all timings and all failures.

Only a candidate that agrees with a reference in float64 can win, or PyTorch's own kernel. On a GPU, attention has
neither: its candidates must agree with most of each other.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from ..errors import CompileFailed
from ..torch_internals.algorithm_selection.padding_candidates import PADDING_PREFIX
from ..tuning import records
from ..tuning.candidates import Candidates
from ..tuning.queries import SearchResult
from ..tuning.records import CandidateFailure, DeviceEnvironment, Problem, Timing, TuningEntry
from . import benchmark, numerics
from . import ranking as search_ranking
from .device_turn import DeviceTurn

log = logging.getLogger(__name__)

MAX_REPORTED = 400
"""Timings, and failures, that fit into one message (queries.QUESTION_LIMIT)."""

PADDING_TIES = 0.1
"""Padding must be faster by this share: in a graph it also costs memory (torch/_inductor/fx_passes/pad_mm.py)."""

_TIMES_ATEN = 4.0
_ULPS = 4.0
"""A candidate's error may be this many times that of PyTorch's own kernel, plus this many units in the last place:
another order of summation is not an error."""


def compare_candidates(
    selection: Candidates,
    *,
    environment: DeviceEnvironment,
    settings: search_ranking.RankingSettings,
    threads: int,
    turn: DeviceTurn,
    failures: Mapping[int, str],
    started: float,
    before_first_run: Callable[[int], None] = lambda candidate: None,
    after_failure: Callable[[], None] = lambda: None,
    watchdog: benchmark.Watchdog = contextlib.nullcontext,
) -> SearchResult:
    """Run and measure all candidates except those in `failures`, which did not build.

    threads: for kernels on a CPU. turn: taken while candidates run. started: time.monotonic at the search's start; the
    wait for the turn does not count. watchdog: limits the time of everything that may hang. Raises CompileFailed if no
    candidate works.
    """
    name = records.problem_digest(selection.problem)
    if selection.problem.op.startswith(PADDING_PREFIX):
        settings = msgspec.structs.replace(settings, band=max(settings.band, 2 * PADDING_TIES))
    failed = dict(failures)
    errors: dict[int, float | None] = {}
    waited = turn.waited
    with turn:
        started += turn.waited - waited
        try:
            with watchdog(benchmark.FIRST_SECONDS):
                selection.prepare(seed=int(name[:8], 16))
                runner, agreement = benchmark.candidate_runner(selection, threads)
            with runner:
                for candidate in preferred(selection):
                    if candidate in failed:
                        continue
                    before_first_run(candidate)
                    try:
                        with watchdog(benchmark.FIRST_SECONDS):
                            errors[candidate] = runner.start(candidate)
                    except benchmark.CandidateFailed as error:
                        failed[candidate] = str(error)
                        after_failure()
                if agreement is None:
                    failed |= inaccurate_candidates(selection, errors)
                else:
                    failed |= dict.fromkeys(
                        agreement.disagreeing(), "differs from what most candidates compute"
                    )

                def take(candidates: Sequence[int]) -> list[float | None]:
                    with watchdog(benchmark.SAMPLE_SECONDS + 0.1 * len(candidates)):
                        return runner.take(candidates)

                ranking = search_ranking.rank(
                    take,
                    [candidate for candidate in preferred(selection) if candidate not in failed],
                    name=name,
                    settings=settings,
                )
        finally:
            selection.close()
    failed |= dict.fromkeys(ranking.failed, FAILED_LATER)
    for candidate, why in failed.items():
        log.warning("%s: %s %s", selection.problem.text(), selection.candidates[candidate], why)
    if ranking.winner is None:
        reasons = "; ".join(f"{selection.candidates[i]} {why}" for i, why in sorted(failed.items()))
        raise CompileFailed(f"no candidate for {selection.problem.text()} works: {reasons}")
    result = search_result(
        selection.problem,
        environment,
        selection.candidates,
        ranking,
        failed,
        aten=selection.aten,
        error=errors[ranking.winner],
        clock=benchmark.gpu_clock() if selection.device == "cuda" else "",
        started=started,
    )
    return msgspec.structs.replace(
        result, timings=result.timings[:MAX_REPORTED], failures=result.failures[:MAX_REPORTED]
    )


FAILED_LATER = "failed while it was measured"


def search_result(
    problem: Problem,
    environment: DeviceEnvironment,
    candidates: Sequence[str],
    ranking: search_ranking.Ranking,
    failed: Mapping[int, str],
    *,
    aten: Sequence[int] = (),
    error: float | None = None,
    clock: str,
    started: float,
) -> SearchResult:
    """A ranking that has a winner, as it is reported and stored. failed: why each failed candidate failed."""
    timings = {i: _timing(candidates[i], summary) for i, summary in ranking.timed.items()}
    fastest = sorted(timings.values(), key=lambda timing: (timing.milliseconds, timing.candidate))
    own = [timings[i] for i in aten if i in timings]
    assert ranking.winner is not None
    winner = timings[ranking.winner]
    entry = TuningEntry(
        problem=problem,
        place=environment,
        winner=winner,
        runner_up=next((timing for timing in fastest if timing is not winner), None),
        aten=min(own, key=lambda timing: timing.milliseconds, default=None),
        default=timings.get(aten[0]) if aten else None,
        candidates=len(candidates),
        failed=len(failed),
        error=None if error is None or not math.isfinite(error) else records.rounded(error),
        clock=clock,
        seconds=round(time.monotonic() - started, 3),
    )
    failures = [CandidateFailure(candidates[i], why[:1000]) for i, why in sorted(failed.items())]
    return SearchResult(entry, timings=fastest, failures=failures)


def _timing(candidate: str, summary: search_ranking.SampleSummary) -> Timing:
    median, low, high = map(records.rounded, (summary.median, summary.low, summary.high))
    return Timing(candidate, median, low, high, summary.samples)


def preferred(selection: Candidates) -> list[int]:
    """The order in which equally fast candidates win: PyTorch's own kernels, which need no compiler, then by text."""
    texts = selection.candidates
    return sorted(range(len(texts)), key=lambda i: (i not in selection.aten, texts[i]))


def inaccurate_candidates(selection: Candidates, errors: Mapping[int, float | None]) -> dict[int, str]:
    """Candidates that cannot win, and why: those whose error is larger than the error of PyTorch's own kernel allows,
    and those that nothing can be compared with, unless they are PyTorch's own."""
    own = [error for candidate, error in errors.items() if candidate in selection.aten and error is not None]
    dtype = getattr(torch, selection.problem.result.dtype)
    ulp = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    allowed = _TIMES_ATEN * min(own) + _ULPS * ulp if own else numerics.TOLERANCE.get(dtype, 0.0)
    wrong: dict[int, str] = {}
    for candidate, error in errors.items():
        if error is None:
            if not selection.candidates[candidate].startswith("aten "):
                wrong[candidate] = "has no reference in float64 that it could be compared with"
        elif not error <= allowed:
            wrong[candidate] = f"is off by {error:.2g} of the largest value, where {allowed:.2g} is rounding"
    return wrong
