"""Configurations of matrix templates: read from candidates' texts, and the order in which they are compiled."""

from __future__ import annotations

import pytest
from torchrelay.compiler.tuning.tile_config import TileConfig, parse_tile_config, slowest_first

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


def test_large_tiles_of_few_warps_are_compiled_first_and_all_are() -> None:
    tiles = [(64, 4), (128, 4), (128, 8), (16, 8)]
    texts = [
        TEXT.replace("BLOCK_K=32", f"BLOCK_K={k}").replace("num_warps=4", f"num_warps={warps}")
        for k, warps in tiles
    ]
    assert slowest_first(["aten mm", *texts, "decompose_k_mm_64_split"]) == [2, 1, 3, 4, 0, 5]
