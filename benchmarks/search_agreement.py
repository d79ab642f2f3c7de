"""How often two searches of one problem end with different winners, with operands in one place of memory and in many.

    python benchmarks/search_agreement.py
    python benchmarks/search_agreement.py --problems 600 --places 64

The ranking is the search's own (compiler/search/ranking.py); kernels are simulated. A problem is a landscape over
Triton's configurations with an optimum of its own, more or less flat, with PyTorch's own kernel near it. A sample has
noise, spikes and a timer's ticks; and each candidate is faster or slower by a share of its own in each place of memory,
drawn anew for each search. So the figures are no GPU's; the difference of two rows is what moving the operands does.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Sequence

from torchrelay.compiler.search import ranking as search_ranking
from torchrelay.compiler.tuning.tile_config import TileConfig, parse_tile_config
from torchrelay.examples.harness.table import print_table

OFFERED = (
    *((32, 32, 16, 1, 2), (32, 32, 128, 2, 4), (32, 64, 32, 5, 8), (64, 32, 32, 5, 8), (64, 32, 128, 5, 4)),
    *((64, 64, 16, 2, 4), (64, 64, 32, 2, 4), (64, 64, 64, 3, 8), (64, 64, 128, 5, 4), (64, 128, 32, 3, 4)),
    *((64, 128, 32, 4, 8), (64, 128, 64, 3, 4), (64, 128, 128, 4, 4), (128, 64, 32, 3, 4)),
    *((128, 64, 32, 4, 8), (128, 128, 32, 2, 8), (128, 128, 32, 3, 4), (128, 128, 64, 3, 4)),
    (128, 128, 64, 5, 8),
)
"""Tiles, stages and warps that Inductor has for every product."""
OWN = "aten mm"
NOISE = 0.03
PLACEMENT = 0.006
"""Standard deviations, as shares: of a sample; of a candidate's time over placements. As on an H200 (decision 17)."""
TICK = 3.2e-5
"""Of CUDA's events, in milliseconds."""
SAMPLE_SECONDS = 2.5e-4


def text_of(c: TileConfig) -> str:
    return (
        f"triton_mm BLOCK_K={c.block_k}, BLOCK_M={c.block_m}, BLOCK_N={c.block_n}, GROUP_M={c.group_m}, "
        f"num_stages={c.stages}, num_warps={c.warps}"
    )


class Landscape:
    """What each candidate of a problem truly takes, in milliseconds."""

    def __init__(self, number: int) -> None:
        draw = random.Random(number)
        self.name = f"problem {number}"
        self._least = math.exp(draw.uniform(math.log(0.006), math.log(0.3)))
        self._flat = draw.choice([0.05, 0.15, 0.4])
        ranges = ((5, 7), (5, 7), (5, 6.5), (2, 4.5), (1.8, 3))
        self._best = [draw.uniform(*each) for each in ranges]
        self._own = math.exp(draw.gauss(0.03, 0.08))

    def milliseconds(self, candidate: str) -> float:
        c = parse_tile_config(candidate)
        if c is None:
            return self._least * self._own
        draw = random.Random(f"{self.name} {candidate}")
        where = (*map(math.log2, (c.block_m, c.block_n, c.block_k)), c.stages, math.log2(c.warps))
        steep = (0.12, 0.12, 0.1, 0.015, 0.06)
        away = sum(s * (a - b) ** 2 for s, a, b in zip(steep, where, self._best, strict=True))
        grouped = 1.0 if c.group_m == 8 else 1.0 + abs(draw.gauss(0, 0.004))
        return self._least * math.exp(self._flat * away + draw.gauss(0, 0.012)) * grouped


class Search:
    """One search from nothing. places: copies of the operands in memory, used in turn."""

    def __init__(self, landscape: Landscape, seed: int, places: int) -> None:
        self.seconds = 0.0
        self._landscape = landscape
        self._random = random.Random(seed)
        self._places = places
        self._shares: dict[tuple[str, int], float] = {}

    def winner(self) -> str:
        candidates = [OWN, *(text_of(TileConfig("mm", *each)) for each in OFFERED)]
        true = [self._landscape.milliseconds(candidate) for candidate in candidates]
        turn = 0

        def take(order: Sequence[int]) -> list[float | None]:
            nonlocal turn
            place, turn = turn % self._places, turn + 1
            taken = [true[i] * self._share(candidates[i], place) * self._noise() for i in order]
            self.seconds += sum(taken) / 1e3 + SAMPLE_SECONDS * len(taken)
            return [max(round(each / TICK), 1) * TICK for each in taken]

        # as compare_candidates.preferred
        preferred = sorted(range(len(candidates)), key=lambda i: (candidates[i] != OWN, candidates[i]))
        ranking = search_ranking.rank(take, preferred, name=self._landscape.name, clock=lambda: self.seconds)
        assert ranking.winner is not None
        return candidates[ranking.winner]

    def _share(self, candidate: str, place: int) -> float:
        key = candidate, place
        if key not in self._shares:
            self._shares[key] = math.exp(self._random.gauss(0, PLACEMENT))
        return self._shares[key]

    def _noise(self) -> float:
        spike = 1.5 if self._random.random() < 0.02 else 1.0
        return spike * math.exp(self._random.gauss(0, NOISE))


def row(problems: int, places: int) -> list[str]:
    different = apart = contested = 0
    seconds, speeds = [], []
    for number in range(problems):
        landscape = Landscape(number)
        searches = [Search(landscape, 2 * number + i, places) for i in range(2)]
        winners = [search.winner() for search in searches]
        seconds += [search.seconds for search in searches]
        times = [landscape.milliseconds(winner) for winner in winners]
        speeds.append(statistics.geometric_mean(times) / landscape.milliseconds(OWN))
        contested += OWN not in winners
        different += winners[0] != winners[1]
        apart += max(times) > min(times) * (1 + search_ranking.DEFAULTS.band)
    mean = statistics.geometric_mean(speeds)
    return [
        *map(str, (places, different, apart, contested)),
        f"{mean:.4f}",
        f"{statistics.mean(seconds):.1f}",
    ]


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--problems", type=int, default=150)
    parser.add_argument("--places", type=numbers, default=[1, 16, 64])
    args = parser.parse_args()
    print_table(
        f"{args.problems} problems, each searched twice from nothing",
        [
            "places",
            "differ",
            "by over 2%",
            "Triton wins both",
            "of PyTorch's own",
            "measured, s each",
        ],
        [row(args.problems, places) for places in args.places],
    )


if __name__ == "__main__":
    main()
