"""Ranks candidates by timed samples, which a given function takes. Pure; imports no torch.

Samples are interleaved: each round takes one sample of every candidate, in another order, so whatever slows the machine
slows all of them, and candidates are compared round by round. Rounds are taken a few at a time, so that the operands
can be moved between them. Medians and their intervals come from order statistics: times are skewed, and no distribution
is assumed. Candidates that are certainly slower than the best are dropped, and the rest is measured twice as often.
Among candidates as good as the best, the first one in a fixed order wins, so that two searches agree
(docs/decisions/0017-how-kernels-are-measured.md).
"""

from __future__ import annotations

import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from fractions import Fraction

from msgspec import Struct

TakeSamples = Callable[[Sequence[int]], Sequence[float | None]]
"""One timed sample, in milliseconds, for each element of a list of candidates, which may repeat; None once a candidate
has failed."""


class RankingSettings(Struct, frozen=True, kw_only=True):
    band: float = 0.02
    """The tie band: two searches' winners should differ by no more than this share."""
    rounds: int = 10
    """Samples of each candidate that is not hopeless before any is dropped."""
    at_once: int = 5
    """Rounds in one call of `take`."""
    most: int = 4096
    """Limit of samples of one candidate."""
    seconds: float = 10.0
    """After this time, only the first `rounds` are completed."""

    @property
    def ties(self) -> float:
        """A candidate slower than the best by no more than this share is as good. Half of the band, because a candidate
        at the edge is as good in one search and not in the next."""
        return self.band / 2


DEFAULTS = RankingSettings()


class SampleSummary(Struct, frozen=True):
    """A median and its 95% confidence interval."""

    median: float
    low: float
    high: float
    samples: int


class Ranking(Struct, frozen=True):
    """winner: None if every candidate failed. timed: milliseconds, by candidate that did not fail."""

    winner: int | None
    timed: dict[int, SampleSummary]
    failed: frozenset[int]


def rank(
    take: TakeSamples,
    preferred: Sequence[int],
    *,
    name: str,
    settings: RankingSettings = DEFAULTS,
    clock: Callable[[], float] = time.monotonic,
) -> Ranking:
    """Measure candidates.

    preferred: all of them; the first one that is as good as the best wins. name: the problem's; it alone determines the
    order of samples.
    """
    begun = clock()
    samples: dict[int, list[float]] = {candidate: [] for candidate in preferred}
    alive, failed = set(preferred), set[int]()
    batch = _orders(name, alive, 0, 1)
    _sort_in({candidate: [] for candidate in alive}, batch, take(batch), failed)  # warm-up, not counted
    alive -= failed
    done, wanted, limit = 0, settings.rounds, 1 + settings.ties
    while alive:
        while alive and done < wanted and (done < settings.rounds or clock() - begun < settings.seconds):
            rounds = min(settings.at_once, wanted - done)
            batch = _orders(name, alive, done + 1, rounds)
            _sort_in(samples, batch, take(batch), failed)
            alive -= failed
            done += rounds
            if done < settings.rounds:
                best = _best(samples, alive)
                alive = {c for c in alive if not _hopeless(samples[c], samples[best])}
        if not alive:
            break
        best = _best(samples, alive)
        ratios = {c: _ratio(samples[c], samples[best]) for c in alive}
        alive = {c for c in alive if ratios[c].low <= limit}
        over = done < wanted or done >= settings.most or clock() - begun >= settings.seconds
        leader = next(c for c in preferred if c in alive)
        if over or all(_ratio(samples[leader], samples[c]).high <= limit for c in alive):
            if over:
                leader = next(c for c in preferred if c in alive and ratios[c].median <= limit)
            return Ranking(leader, _summaries(samples, failed), frozenset(failed))
        wanted = min(2 * wanted, settings.most)
    rest = _summaries(samples, failed)  # dropped candidates, if all better ones failed
    shortest = min((summary.median for summary in rest.values()), default=0.0)
    winner = next((c for c in preferred if c in rest and rest[c].median <= limit * shortest), None)
    return Ranking(winner, rest, frozenset(failed))


def _best(samples: dict[int, list[float]], alive: set[int]) -> int:
    """0 if there is none."""
    return min(alive, key=lambda c: (statistics.median(samples[c]), c), default=0)


HOPELESS = 1.25
"""A candidate slower than this multiple of the best in each of the first rounds is dropped: otherwise candidates that
take twice as long would use half of a search's time."""


def _hopeless(times: Sequence[float], others: Sequence[float]) -> bool:
    return all(its > HOPELESS * other for its, other in zip(times, others, strict=True))


REPORTED = 0.025
CERTAIN = 0.002
"""Chance that the true median is beyond one end of an interval: of reported intervals, and of those that decide, which
are looked at up to six times in a search."""


def summary(samples: Sequence[float], beyond: float = REPORTED) -> SampleSummary:
    """The median with its interval; the whole range if there are too few samples for `beyond`.

    The number of samples below the true median is binomial for any distribution: David and Nagaraja, Order Statistics
    (2003), section 7.1.
    """
    ordered = sorted(samples)
    rank = _lower_rank(len(ordered), beyond)
    return SampleSummary(statistics.median(ordered), ordered[rank], ordered[-1 - rank], len(ordered))


@functools.cache
def _lower_rank(count: int, beyond: float) -> int:
    """The largest r such that `count` coin tosses give at most r heads with a chance of at most `beyond`; or 0."""
    total, rank, limit = 0, -1, int(Fraction(beyond) * 2**count)
    while (total := total + math.comb(count, rank + 1)) <= limit:
        rank += 1
    return max(rank, 0)


def _orders(name: str, candidates: set[int], first: int, rounds: int) -> list[int]:
    """The candidates in another order for each round; their relative order does not depend on which others are left."""
    orders = []
    for number in range(first, first + rounds):
        draws = {c: random.Random(f"{name} {number} {c}").random() for c in candidates}
        orders += sorted(candidates, key=lambda c: (draws[c], c))
    return orders


def _sort_in(
    samples: dict[int, list[float]],
    candidates: Sequence[int],
    times: Sequence[float | None],
    failed: set[int],
) -> None:
    for candidate, milliseconds in zip(candidates, times, strict=True):
        if milliseconds is None:
            failed.add(candidate)
        else:
            samples[candidate].append(milliseconds)


def _ratio(times: Sequence[float], others: Sequence[float]) -> SampleSummary:
    """A candidate's time as a multiple of another's, round by round."""
    return summary([its / other for its, other in zip(times, others, strict=True)], CERTAIN)


def _summaries(samples: dict[int, list[float]], failed: set[int]) -> dict[int, SampleSummary]:
    return {c: summary(taken) for c, taken in samples.items() if taken and c not in failed}
