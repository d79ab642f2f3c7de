"""What a problem must do at least follows from its shapes; what a device can do, from what was measured on it."""

from __future__ import annotations

import msgspec
import pytest
from torchrelay.clients.reports.tuning import roofline
from torchrelay.compiler.tuning.records import DeviceEnvironment, Problem, Timing, TuningEntry, parse_problem

PLACE = DeviceEnvironment("GPU", "9.0", "1", "2.13", "3.7", "13.0")


def took(problem: Problem, milliseconds: float) -> TuningEntry:
    timing = Timing("aten", milliseconds, milliseconds, milliseconds, 1)
    return TuningEntry(problem=problem, place=PLACE, winner=timing, candidates=1)


@pytest.mark.parametrize(
    ("shape", "settings", "flops", "moved"),
    [
        ("mm(bf16[128,64], bf16[64,32]) -> bf16[128,32]", {}, 2 * 128 * 64 * 32, 2 * (8192 + 2048 + 4096)),
        # a bias that is expanded to the result's shape is read once
        ("addmm(f16[8,4]:0,1, f16[8,2], f16[2,4]) -> f16[8,4]", {}, 2 * 8 * 2 * 4, 2 * (4 + 16 + 8 + 32)),
        ("bmm(f32[5,8,4], f32[5,4,2]) -> f32[5,8,2]", {}, 2 * 5 * 8 * 4 * 2, 4 * (160 + 40 + 80)),
        (
            "scaled_mm(f8e4m3[16,32], f8e4m3[32,8]:1,32, f32[], f32[]) -> bf16[16,8]",
            {},
            2 * 16 * 32 * 8,
            512 + 256 + 8 + 2 * 128,
        ),
        ("grouped_mm(bf16[64,16], bf16[4,16,8], i32[4]) -> bf16[64,8]", {}, 2 * 64 * 16 * 8, None),
        ("grouped_mm(bf16[8,64], bf16[64,16], i32[4]) -> bf16[4,8,16]", {}, 2 * 8 * 64 * 16, None),
        (
            "convolution(f16[2,8,10,10], f16[4,8,3,3]) -> f16[2,4,8,8]",
            {"arg.transposed": "False"},
            2 * 2 * 4 * 64 * 8 * 9,
            2 * (1600 + 288 + 512),
        ),
        # a group's filters see their share of the channels
        ("convolution(f16[2,8,10,10], f16[8,1,3,3]) -> f16[2,8,8,8]", {}, 2 * 2 * 8 * 64 * 9, None),
        # the gradient's direction: each input element goes to all of a filter
        (
            "convolution(f16[2,8,10,10], f16[8,4,3,3]) -> f16[2,4,12,12]",
            {"arg.transposed": "True"},
            2 * 2 * 8 * 100 * 4 * 9,
            None,
        ),
        ("copy(f32[1024]) -> f32[1024]", {}, 0, 8192),
        ("flex_attention(f16[1,2,64,16], f16[1,2,64,16], f16[1,2,64,16]) -> f16[1,2,64,16]", {}, None, 16384),
        # a user's kernel is given its results too
        ("triton.softmax(f32[64,32], f32[64,32]) -> f32[64,32]", {}, None, 2 * 8192),
    ],
)
def test_what_a_problem_must_do(
    shape: str, settings: dict[str, str], flops: int | None, moved: int | None
) -> None:
    done = roofline.kernel_work(took(parse_problem(shape, tuple(settings.items())), 1.0))
    assert done.flops == flops
    if moved is not None:
        assert done.bytes == moved


def test_float32_in_limited_precision_is_another_unit() -> None:
    shape = "mm(f32[8,4], f32[4,2]) -> f32[8,2]"
    entries = [took(parse_problem(shape, (("precision", p),)), 1.0) for p in ("highest", "high", "medium")]
    assert [roofline.kind(entry) for entry in entries] == ["float32", "tf32", "tf32"]
    on_cpu = msgspec.structs.replace(entries[2], place=msgspec.structs.replace(PLACE, threads=8))
    assert roofline.kind(on_cpu) == "float32, medium"


def test_a_product_that_is_faster_than_the_large_one_raises_the_ceiling_that_there_is() -> None:
    large, fast, other = (
        took(parse_problem(f"mm({d}[1000,1000], {d}[1000,1000]) -> {d}[1000,1000]"), milliseconds)
        for d, milliseconds in (("bf16", 4.0), ("bf16", 1.0), ("f16", 1.0))
    )
    assert roofline.ceilings([large], [fast, other]).flops == {"bfloat16": pytest.approx(2e12)}


def test_a_share_is_of_the_ceiling_that_binds() -> None:
    device = roofline.ceilings(
        [
            took(parse_problem("copy(f32[1000000]) -> f32[1000000]"), 1.0),  # 8 GB/s
            took(parse_problem("copy(f32[1000000]) -> f32[1000000]"), 2.0),
            took(parse_problem("mm(bf16[1000,1000], bf16[1000,1000]) -> bf16[1000,1000]"), 1.0),  # 2 TFLOP/s
        ]
    )
    assert device.bytes == pytest.approx(8e9)
    assert device.flops == {"bfloat16": pytest.approx(2e12)}
    wide = parse_problem("mm(bf16[1000,1000], bf16[1000,1000]) -> bf16[1000,1000]")
    told = roofline.share(took(wide, 2.0), device)
    assert told is not None and (told.share, told.bound) == (pytest.approx(0.5), "compute")
    skinny = parse_problem("mm(bf16[1,4000], bf16[4000,4000]) -> bf16[1,4000]")
    told = roofline.share(took(skinny, 8.0), device)
    assert told is not None and told.bound == "memory"
    assert told.share == pytest.approx(2 * (16e6 + 8e3) / 8e9 / 8e-3)


def test_without_the_ceiling_of_its_unit_a_product_has_no_share() -> None:
    device = roofline.ceilings([took(parse_problem("copy(f32[1000000]) -> f32[1000000]"), 1.0)])
    assert roofline.share(took(parse_problem("mm(f16[8,4], f16[4,2]) -> f16[8,2]"), 1.0), device) is None
    assert (
        roofline.share(took(parse_problem("copy(f32[8]) -> f32[8]"), 1.0), roofline.DeviceCeilings()) is None
    )
    # how much an attention multiplies is its mask's business
    assert roofline.share(took(parse_problem("flex_attention(f16[8]) -> f16[8]"), 1.0), device) is None
    told = roofline.share(took(parse_problem("triton.softmax(f16[8], f16[8]) -> f16[8]"), 1.0), device)
    assert told is not None and told.bound == "memory"
