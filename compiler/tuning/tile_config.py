"""Reads tile sizes from the texts of candidates of Inductor's Triton matrix templates."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

_NAMES = {
    "BLOCK_M": "block_m",
    "BLOCK_N": "block_n",
    "BLOCK_K": "block_k",
    "GROUP_M": "group_m",
    "num_stages": "stages",
    "num_warps": "warps",
}
_BLOCKS = (16, 32, 64, 128, 256)
_WARPS = (2, 4, 8)
_STAGES = range(1, 8)
_GROUPS = (1, 4, 8, 16)


class TileConfig(Struct, frozen=True):
    """A configuration of a template (`mm`, `bmm`, `mm_persistent_tma` ...). Tile sizes in elements."""

    template: str
    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    group_m: int = 8

    def usable(self) -> bool:
        """Whether it is within the bounds of what may be built."""
        blocks = (self.block_m, self.block_n, self.block_k)
        return (
            all(block in _BLOCKS for block in blocks)
            and self.warps in _WARPS
            and self.stages in _STAGES
            and self.group_m in _GROUPS
            and self.warps * 256 <= self.block_m * self.block_n <= 256 * 128 * 2
        )


def parse_tile_config(candidate: str) -> TileConfig | None:
    """From a text like `triton_mm ACC_TYPE='tl.float32', BLOCK_K=32, ...`; None: another kind, or out of bounds."""
    found = re.match(r"triton_([a-z0-9_]{1,40}) ", candidate)
    given = dict(re.findall(r"\b([A-Za-z_]+)=([0-9]{1,4})(?![0-9])", candidate))
    if found is None or not _NAMES.keys() - {"GROUP_M"} <= given.keys():
        return None
    fields = {field: int(given[name]) for name, field in _NAMES.items() if name in given}
    configuration = TileConfig(found[1], **fields)
    return configuration if configuration.usable() else None


def slowest_first(candidates: Sequence[str]) -> list[int]:
    """Positions, in the order in which to compile them: a few take ten times as long as the others.

    A compiler unrolls a tile's product over a warp's threads. Build times of 15 products for an H200 correlate with
    this order, with rank coefficients of 0.74 to 0.95 (benchmarks/recorded/gpt2_search.json)."""

    def effort(position: int) -> float:
        tile = parse_tile_config(candidates[position])
        return 0.0 if tile is None else tile.block_m * tile.block_n * tile.block_k / tile.warps

    return sorted(range(len(candidates)), key=effort, reverse=True)
