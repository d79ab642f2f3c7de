"""Which of several candidates is fastest: something that takes timed samples in, a ranking out. Pure; knows no torch.

Samples are interleaved: each round takes one of every candidate, in another order, so whatever slows the machine for a
while slows all of them, and candidates are compared round by round. A few rounds are taken at a time, so that who
takes them can have the operands elsewhere for the next: where they lie makes a kernel faster or slower by a per cent.
Medians, and intervals of medians from order statistics alone: times are skewed, and no shape is assumed. The field is
halved and halved again, or faster: who is slower than the best for certain is measured no more, and the rest twice as
often. Among those that are as good as the best the winner is who stands first in an order that does not depend on the
samples, so that two searches agree; where they do not, their winners are to lie within the tie band of each other.
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
"""One timed sample, in milliseconds, of each candidate of a list, in its order (it may name one many times); None for
a candidate that failed, then and from there on."""


class RankingSettings(Struct, frozen=True, kw_only=True):
    band: float = 0.02
    """The tie band: two searches' winners are to differ by no more than this, as a share."""
    rounds: int = 10
    """Samples of each candidate before any is dropped that is not hopeless."""
    at_once: int = 5
    """Rounds of one call of `take`."""
    most: int = 4096
    """Samples of one candidate."""
    seconds: float = 10.0
    """After this long the first `rounds` are finished, and nothing more is begun."""

    @property
    def ties(self) -> float:
        """A candidate this much slower than the best, as a share, is as good. Half of the band: who is at the edge is
        as good for one search and not for the next, and each is off by a little."""
        return self.band / 2


DEFAULTS = RankingSettings()


class SampleSummary(Struct, frozen=True):
    """A median, and a 95% confidence interval of it."""

    median: float
    low: float
    high: float
    samples: int


class Ranking(Struct, frozen=True):
    """winner: None if every candidate failed. timed: by candidate, in milliseconds; of those that did not fail."""

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
    """Measure the candidates 0 to n - 1.

    preferred: all of them; of those that are as good as the best, the first one wins. name: of what is measured; the
    order of the samples is a function of it alone.
    """
    begun = clock()
    samples: dict[int, list[float]] = {candidate: [] for candidate in preferred}
    alive, failed = set(preferred), set[int]()
    batch = _orders(name, alive, 0, 1)
    _sort_in({candidate: [] for candidate in alive}, batch, take(batch), failed)  # warms up; kept out
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
    rest = _summaries(samples, failed)  # whoever was dropped before all that were better failed
    shortest = min((told.median for told in rest.values()), default=0.0)
    winner = next((c for c in preferred if c in rest and rest[c].median <= limit * shortest), None)
    return Ranking(winner, rest, frozenset(failed))


def _best(samples: dict[int, list[float]], alive: set[int]) -> int:
    """0 if there is none."""
    return min(alive, key=lambda c: (statistics.median(samples[c]), c), default=0)


HOPELESS = 1.25
"""Who is slower than this, as a multiple of the best, in each round of the first few is measured no more: half of a
search's time would go to candidates that take twice the best one's or more."""


def _hopeless(times: Sequence[float], others: Sequence[float]) -> bool:
    return all(its > HOPELESS * other for its, other in zip(times, others, strict=True))


REPORTED = 0.025
CERTAIN = 0.002
"""How often the median may lie beyond one end of an interval: of those reported, and of those that decide. Those are
looked at up to six times in a search, and may not be wrong once."""


def summary(samples: Sequence[float], beyond: float = REPORTED) -> SampleSummary:
    """The median, and between which of the sorted samples it lies.

    The number of samples below the true median is binomial whatever their distribution: David and Nagaraja, Order
    Statistics (2003), section 7.1. Where the samples are too few for `beyond`: all of their range.
    """
    ordered = sorted(samples)
    rank = _lower_rank(len(ordered), beyond)
    return SampleSummary(statistics.median(ordered), ordered[rank], ordered[-1 - rank], len(ordered))


@functools.cache
def _lower_rank(count: int, beyond: float) -> int:
    """The largest r for which `count` tosses of a coin give at most r heads with a chance of at most `beyond`; or 0."""
    total, rank, limit = 0, -1, int(Fraction(beyond) * 2**count)
    while (total := total + math.comb(count, rank + 1)) <= limit:
        rank += 1
    return max(rank, 0)


def _orders(name: str, candidates: set[int], first: int, rounds: int) -> list[int]:
    """The candidates, shuffled anew for each round; where one stands does not depend on which others are left."""
    orders = []
    for number in range(first, first + rounds):
        draws = {c: random.Random(f"{name} {number} {c}").random() for c in candidates}
        orders += sorted(candidates, key=lambda c: (draws[c], c))
    return orders


def _sort_in(
    samples: dict[int, list[float]], order: Sequence[int], times: Sequence[float | None], failed: set[int]
) -> None:
    for candidate, milliseconds in zip(order, times, strict=True):
        if milliseconds is None:
            failed.add(candidate)
        else:
            samples[candidate].append(milliseconds)


def _ratio(times: Sequence[float], others: Sequence[float]) -> SampleSummary:
    """A candidate's time as a multiple of another's in the same round."""
    return summary([its / other for its, other in zip(times, others, strict=True)], CERTAIN)


def _summaries(samples: dict[int, list[float]], failed: set[int]) -> dict[int, SampleSummary]:
    return {c: summary(taken) for c, taken in samples.items() if taken and c not in failed}
