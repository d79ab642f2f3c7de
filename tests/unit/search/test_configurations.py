"""Configurations of matrix templates: read from candidates' texts, and stepped away from."""

from __future__ import annotations

import pytest
from torchrelay.compiler.tuning.tile_config import TileConfig, neighbours, parse_tile_config, slowest_first

TEXT = (
    "triton_mm ACC_TYPE='tl.float32', ALLOW_TF32=False, BLOCK_K=32, BLOCK_M=64, BLOCK_N=128, EVEN_K=True, "
    "GROUP_M=8, USE_FAST_ACCUM=False, num_stages=3, num_warps=4"
)


def test_a_candidates_text_tells_its_configuration() -> None:
    assert parse_tile_config(TEXT) == TileConfig("mm", 64, 128, 32, 3, 4, 8)


@pytest.mark.parametrize(
    "text",
    [
        "aten mm",
        "cpp_bmm",
        "decompose_k_mm_64_split",
        TEXT.replace("num_warps=4", ""),
        TEXT.replace("num_warps=4", "num_warps=5"),
        TEXT.replace("BLOCK_M=64", "BLOCK_M=4096"),
        TEXT.replace("BLOCK_M=64", "BLOCK_M=64000"),
        TEXT.replace("num_stages=3", "num_stages=300"),
        TEXT.replace("triton_mm", "triton_mm; import os"),
    ],
)
def test_what_is_no_configuration_is_none(text: str) -> None:
    assert parse_tile_config(text) is None


def test_neighbours_differ_by_one_step_and_are_new() -> None:
    middle = TileConfig("mm", 64, 128, 32, 3, 4, 8)
    found = neighbours([middle], [middle, TileConfig("mm", 64, 128, 64, 3, 4, 8)])
    assert len(found) == len(set(found)) == 11
    for other in found:
        different = [
            name for name in other.__struct_fields__ if getattr(other, name) != getattr(middle, name)
        ]
        assert len(different) == 1
        assert other.usable()


def test_neighbours_of_the_best_come_first() -> None:
    first, second = TileConfig("mm", 64, 128, 32, 3, 4, 8), TileConfig("mm", 128, 128, 32, 3, 4, 8)
    found = neighbours([first, second], [first, second])
    own = neighbours([first], [first, second])
    assert found[: len(own)] == own
    assert len(found) > len(own)


def test_large_tiles_of_few_warps_are_compiled_first_and_all_are() -> None:
    tiles = [(64, 4), (128, 4), (128, 8), (16, 8)]
    texts = [
        TEXT.replace("BLOCK_K=32", f"BLOCK_K={k}").replace("num_warps=4", f"num_warps={warps}")
        for k, warps in tiles
    ]
    assert slowest_first(["aten mm", *texts, "decompose_k_mm_64_split"]) == [2, 1, 3, 4, 0, 5]


def test_no_step_leaves_the_bounds() -> None:
    corner = TileConfig("mm", 256, 256, 16, 7, 8, 16)
    for other in neighbours([corner], []):
        assert max(other.block_m, other.block_n, other.block_k) <= 256
        assert other.stages <= 7 and other.group_m <= 16
