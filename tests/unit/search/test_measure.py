"""compiler/search/ranking.py: rankings of candidates whose true times are known, by clocks that are noisy."""

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrelay.compiler.search import ranking as search_ranking
from torchrelay.compiler.search.ranking import RankingSettings


class Machine:
    """Candidates with true times in milliseconds, timed with noise: multiplicative, skewed, with a drift that all of
    them share. `time`: seconds that its samples took."""

    def __init__(self, times, seed, noise=0.05, fails=()):
        self.times, self.noise, self.fails = times, noise, set(fails)
        self.random = random.Random(seed)
        self.taken = [0] * len(times)
        self.orders = []
        self.time = 0.0

    def take(self, order):
        self.orders.append(list(order))
        return [self.sample(candidate) for candidate in order]

    def sample(self, candidate):
        if candidate in self.fails:
            return None
        self.taken[candidate] += 1
        drift = 1 + 0.3 * math.sin(self.time / 2)
        spike = 3.0 if self.random.random() < 0.02 else 1.0
        took = self.times[candidate] * drift * spike * math.exp(self.random.gauss(0, self.noise))
        self.time += took / 1e3
        return took

    def rank(self, preferred=None, **limits):
        return search_ranking.rank(
            self.take,
            range(len(self.times)) if preferred is None else preferred,
            name="mm",
            settings=RankingSettings(**limits),
            clock=lambda: self.time,
        )


def test_the_fastest_wins_and_all_are_told():
    machine = Machine([2.0, 1.0, 3.0], seed=1)
    ranking = machine.rank()
    assert ranking.winner == 1
    assert ranking.failed == frozenset()
    for candidate, true in enumerate(machine.times):
        told = ranking.timed[candidate]
        assert told.low <= told.median <= told.high
        assert told.median == pytest.approx(true, rel=0.4)
        assert told.samples == machine.taken[candidate] - 1  # the first warms up


def fields(count):
    """Problems as they are: from two candidates to two dozen, some nearly as good as the best, most far from it."""
    draw = random.Random(7)
    for _ in range(count):
        yield [draw.uniform(0.5, 2.0) * (1 + abs(draw.gauss(0, 0.35))) for _ in range(draw.randint(2, 24))]


def test_two_searches_agree_and_what_differs_is_in_the_tie_band():
    equal = searches = 0
    for number, times in enumerate(fields(100)):
        winners = [Machine(times, seed=(number << 8) + s).rank().winner for s in range(2)]
        equal += winners[0] == winners[1]
        searches += 1
        for winner in winners:
            assert times[winner] <= min(times) * 1.03, (times[winner] / min(times), times)
    assert equal >= 0.95 * searches, f"{equal} of {searches} searches found the same winner again"


def test_where_two_searches_differ_their_winners_are_in_the_tie_band():
    """Each finds candidates a little faster or slower than the other does, as tensors that lie elsewhere make them."""
    draw = random.Random(11)
    differ = 0
    for number in range(60):
        true = 1.002 + 0.0005 * number
        winners = []
        for search in range(2):
            off = [math.exp(draw.gauss(0, 0.0015)) for _ in range(2)]
            times = [true * off[0], off[1]]
            winners.append(Machine(times, (number << 8) + search, noise=0.01).rank().winner)
        if winners[0] != winners[1]:
            differ += 1
            assert true <= 1 + search_ranking.DEFAULTS.band, "who was at the edge for one was out of the band"
    assert differ, "no candidate was at the edge"


def test_of_those_as_good_as_the_best_the_preferred_one_wins_however_often_it_is_measured():
    times = [1.0, 1.004, 1.002, 1.5]
    assert {Machine(times, seed).rank(preferred=[2, 1, 0, 3]).winner for seed in range(30)} == {2}
    assert {Machine(times, seed).rank(preferred=[3, 1, 0, 2]).winner for seed in range(30)} == {1}


def test_hopeless_candidates_are_measured_no_more_than_they_must_be():
    machine = Machine([1.0, 1.01] + [5.0] * 20, seed=3)
    machine.rank(preferred=[1, 0, *range(2, 22)])
    assert set(machine.taken[2:]) == {6}


def test_who_may_still_win_is_not_hopeless():
    """Spikes make single samples three times as long; 20% slower is slow, and not hopeless."""
    machine = Machine([1.0, 1.2, 1.01, 1.6], seed=3, noise=0.08)
    machine.rank(preferred=[2, 0, 1, 3])
    assert machine.taken[1] >= 11 and machine.taken[2] >= 11
    assert machine.taken[3] == 6


def test_a_clear_field_is_measured_once():
    machine = Machine([1.0, 4.0], seed=3)
    machine.rank()
    assert machine.taken == [11, 6]


def test_a_candidate_at_the_edge_is_measured_as_often_as_allowed():
    machine = Machine([1.01, 1.0], seed=3)
    machine.rank(most=100)
    assert machine.taken == [101, 101]


def test_who_fails_is_out_whenever_it_fails():
    machine = Machine([1.0, 2.0, 3.0], seed=3, fails={0})
    ranking = machine.rank()
    assert (ranking.winner, ranking.failed) == (1, frozenset({0}))
    assert 0 not in ranking.timed

    late = Machine([1.0, 1.01, 3.0], seed=4)
    take = late.take

    def fail_later(order):
        late.fails = {0} if late.taken[0] > 12 else set()
        return take(order)

    ranking = search_ranking.rank(fail_later, [1, 0, 2], name="mm", clock=lambda: 0.0)
    assert (ranking.winner, ranking.failed) == (1, frozenset({0}))
    assert Machine([1.0, 2.0], 3, fails={0, 1}).rank() == search_ranking.Ranking(None, {}, frozenset({0, 1}))


def test_time_is_bounded_and_the_first_rounds_are_finished_all_the_same():
    slow = Machine([20_000.0, 20_100.0], seed=3)
    assert slow.rank(seconds=1.0).winner in (0, 1)
    assert slow.taken == [11, 11]
    close = Machine([10.0, 9.8], seed=3)
    close.rank(seconds=1.0, most=10_000)
    assert close.time < 1.5


def test_the_order_of_samples_changes_by_round_and_follows_from_the_name_alone():
    first, second = Machine([1.0, 1.0, 1.0, 1.0], seed=1), Machine([1.0, 1.0, 1.0, 1.0], seed=2)
    first.rank(), second.rank()
    shared = min(len(first.orders), len(second.orders))
    assert first.orders[:shared] == second.orders[:shared]
    every = [candidate for order in first.orders[1:] for candidate in order]
    rounds = [tuple(every[i : i + 4]) for i in range(0, 40, 4)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in rounds)
    assert len(set(rounds)) > 4


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8), st.integers(0, 1000))
def test_the_same_samples_give_the_same_ranking(times, seed):
    assert Machine(times, seed).rank(most=32) == Machine(times, seed).rank(most=32)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=8), st.integers(0, 1000))
def test_a_clock_without_noise_finds_the_preferred_of_those_as_good(times, seed):
    good = [c for c, t in enumerate(times) if t <= min(times) * 1.01]

    def take(order):
        return [times[c] for c in order]

    preferred = random.Random(seed).sample(range(len(times)), len(times))
    found = search_ranking.rank(take, preferred, name="mm", clock=lambda: 0.0)
    assert found.winner == next(c for c in preferred if c in good)


@pytest.mark.parametrize("count", [6, 8, 13, 40, 100])
def test_an_interval_holds_the_median_as_often_as_it_says(count):
    draw = random.Random(count)
    inside = 0
    for _ in range(2000):
        found = search_ranking.summary([draw.expovariate(1.0) for _ in range(count)])  # far from normal
        inside += found.low <= math.log(2) <= found.high
    assert inside / 2000 >= 0.935
    assert found.samples == count


def test_ranks_of_the_interval_are_those_of_the_tables():
    """Conover, Practical Nonparametric Statistics, and any table of the sign test: n -> how many to leave out."""
    for count, left_out in ((6, 0), (8, 0), (9, 1), (12, 2), (20, 5), (25, 7), (40, 13)):
        found = search_ranking.summary([float(i) for i in range(count)])
        assert (found.low, found.high) == (left_out, count - 1 - left_out), count
        assert found.median == statistics.median(range(count))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_samples_give_their_whole_range(count):
    found = search_ranking.summary([float(i) for i in range(count)])
    assert (found.low, found.high) == (0.0, count - 1)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.floats(0.5, 2.0), st.integers(0, 80) | st.none()), min_size=1, max_size=8),
    st.integers(0, 1000),
)
def test_whenever_candidates_fail_one_that_works_wins(candidates, seed):
    machine = Machine([time for time, _ in candidates], seed)
    dies = [after for _, after in candidates]

    def take(order):
        times = []
        for candidate in order:
            if dies[candidate] is not None and machine.taken[candidate] >= dies[candidate]:
                machine.fails.add(candidate)
            times.append(machine.sample(candidate))
        return times

    found = search_ranking.rank(
        take, range(len(candidates)), name="mm", settings=RankingSettings(most=64), clock=lambda: 0
    )
    assert found.failed == machine.fails
    assert found.timed.keys() >= {c for c in range(len(candidates)) if c not in machine.fails}
    if found.winner is None:
        assert machine.fails == set(range(len(candidates)))
    else:
        assert found.winner not in machine.fails
