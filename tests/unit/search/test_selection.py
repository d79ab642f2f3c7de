"""compiler/search/compare_candidates.py, compiler/graph/toolchain.py: who wins among equals, what
counts as wrong, and where this is."""

from types import SimpleNamespace

import pytest
import torch
from torchrelay.compiler.graph import toolchain
from torchrelay.compiler.search import benchmark, compare_candidates
from torchrelay.compiler.torch_internals.algorithm_selection import operator_candidates
from torchrelay.compiler.tuning.records import Operand, Problem


def selection(dtype="float32", aten=(1,)):
    candidates = ["triton_mm BLOCK_K=64", "aten mm", "triton_mm BLOCK_K=32", "aten mm_plus"]
    problem = Problem("mm", (), Operand(dtype, (2, 2), (2, 1)))
    return SimpleNamespace(candidates=candidates, aten=list(aten), problem=problem)


def test_among_equals_pytorchs_own_kernel_wins_and_then_the_first_by_text():
    assert compare_candidates.preferred(selection(aten=[1, 3])) == [1, 3, 2, 0]
    assert compare_candidates.preferred(selection(aten=[])) == [1, 3, 2, 0]


@pytest.mark.parametrize(
    "dtype, own, error, wrong",
    [
        ("float32", 1e-6, 4e-6, False),  # another order of summation
        ("float32", 1e-6, 6e-6, True),
        ("float32", 0.0, 4e-7, False),  # PyTorch's own happened to be exact: units in the last place are left
        ("float32", 0.0, 1e-6, True),
        ("float32", 3e-4, 1e-3, False),  # both with TF32
        ("bfloat16", 2e-3, 3e-2, False),
        ("bfloat16", 2e-3, 5e-2, True),
        ("float32", 1e-6, float("inf"), True),
        ("float32", float("inf"), float("inf"), False),  # PyTorch's own is no measure
        ("int32", 0.0, 0.0, False),
        ("int32", 0.0, 1e-9, True),
    ],
)
def test_a_candidate_is_wrong_when_it_is_much_further_off_than_pytorchs_own(dtype, own, error, wrong):
    found = compare_candidates.inaccurate_candidates(selection(dtype), {1: own, 2: error})
    assert set(found) == ({2} if wrong else set())


def test_without_a_reference_only_pytorchs_own_kernels_can_win():
    found = compare_candidates.inaccurate_candidates(selection(), {0: None, 1: None, 2: None, 3: None})
    assert set(found) == {0, 2} and "no reference" in found[0]


def test_without_a_kernel_of_pytorchs_the_dtypes_tolerance_decides():
    found = compare_candidates.inaccurate_candidates(selection(aten=[]), {0: 0.5, 2: 1e-3})
    assert set(found) == {0}


def test_candidates_without_any_reference_must_agree_with_most():
    results = [torch.ones(4), torch.full((4,), 2.0), torch.full((4,), 2.001), torch.full((4,), float("nan"))]
    agreement = benchmark.CandidateAgreement(5e-3)
    for candidate, result in enumerate(results):
        agreement.add(candidate, result)
    assert agreement.disagreeing() == [0, 3]


def drawn(dtype, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def test_products_of_integers_are_exact_in_float64():
    a, b = (
        torch.arange(-128, 128, dtype=torch.int32).repeat(8).view(32, 64).to(torch.int8) for _ in range(2)
    )
    own = torch._int_mm(a, b.t().contiguous())
    assert own.abs().max() > 2**15
    assert torch.equal(operator_candidates.float64_product("int_mm", [a, b.t()]), own.double())


@pytest.mark.parametrize("scales", [((), ()), ((32, 1), (1, 16))], ids=["tensor", "rows and columns"])
def test_scaled_products_have_a_reference(scales):
    a, b = drawn(torch.float8_e4m3fn, 32, 64), drawn(torch.float8_e4m3fn, 16, 64).t()
    scale_a, scale_b = (drawn(torch.float32, *shape).abs() + 0.5 for shape in scales)
    found = operator_candidates.float64_product("scaled_mm", [a, b, scale_a, scale_b])
    own = (a.float() @ b.float()) * scale_a * scale_b
    assert torch.allclose(found.float(), own, rtol=1e-5, atol=1e-4)
    assert (
        operator_candidates.float64_product("scaled_mm", [a, b, torch.ones(32, 2), torch.ones(2, 16)]) is None
    )


@pytest.mark.parametrize(
    "a, b, offsets",
    [
        ((32, 16), (4, 16, 16), [8, 8, 24, 32]),
        ((4, 16, 32), (32, 32), [8, 8, 24, 32]),
        ((16, 32), (32, 16), [8, 8, 24, 32]),
        ((4, 16, 32), (4, 32, 16), None),
    ],
)
def test_grouped_products_have_a_reference(a, b, offsets):
    a, b = drawn(torch.bfloat16, *a), drawn(torch.bfloat16, *b)
    ends = [] if offsets is None else [torch.tensor(offsets, dtype=torch.int32)]
    own = torch.nn.functional.grouped_mm(a, b, offs=ends[0] if ends else None)
    found = operator_candidates.float64_product("grouped_mm", [a, b, *ends])
    assert torch.allclose(found.float(), own.float(), rtol=2e-2, atol=0.1)


def test_scaled_grouped_products_have_a_reference():
    a, b = drawn(torch.float8_e4m3fn, 32, 16), drawn(torch.float8_e4m3fn, 2, 8, 16).transpose(1, 2)
    scale_a, scale_b = drawn(torch.float32, 32).abs(), drawn(torch.float32, 2, 8).abs()
    ends = torch.tensor([12, 32], dtype=torch.int32)
    found = operator_candidates.float64_product("scaled_grouped_mm", [a, b, scale_a, scale_b, ends])
    wide = [(a[:12].double() @ b[0].double()) * scale_b[0], (a[12:].double() @ b[1].double()) * scale_b[1]]
    assert torch.allclose(found, torch.cat(wide) * scale_a[:, None])


def test_the_processors_model_is_linuxs_own_name_for_it(tmp_path):
    listed = tmp_path / "cpuinfo"
    listed.write_text(
        "processor\t: 0\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R) Platinum 8488C\nflags\t: fpu\n"
    )
    assert toolchain.cpuinfo("model name", listed) == "Intel(R) Xeon(R) Platinum 8488C"
    assert toolchain.cpuinfo("flags", listed) == "fpu"
    listed.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert toolchain.cpuinfo("model name", listed) == ""
    assert toolchain.cpuinfo("model name", tmp_path / "none") == ""


@pytest.mark.parametrize(
    "text, version",
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\nGCC 12", "580.95.05"),
        ("NVRM version: something else\n", ""),
    ],
)  # fmt: skip
def test_the_drivers_version_is_the_kernel_modules(tmp_path, text, version):
    (tmp_path / "version").write_text(text)
    assert toolchain.gpu_driver(tmp_path / "version") == version
    assert toolchain.gpu_driver(tmp_path / "none") == ""
