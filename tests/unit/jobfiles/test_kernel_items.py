"""Kernel items of a tuning job, looked up in real modules: candidates, and what cannot be sent, with its line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import kernel_parts
import pytest

pytest.importorskip("triton", reason="needs Triton, not a GPU")

from torchrelay.clients.jobfiles import kernel_entries
from torchrelay.clients.jobfiles.imported_kernels import resolve_kernel
from torchrelay.compiler.api.tuning import kernels
from torchrelay.compiler.api.tuning.kernels import KernelSpec
from torchrelay.compiler.errors import BadTuneJob
from torchrelay.compiler.request import triton_source

MODULE = """\
import triton
import triton.language as tl

@triton.jit
def scale(x_ptr, out_ptr, n, factor, BLOCK: tl.constexpr, MODE: tl.constexpr = "a"):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, x * factor, mask=offsets < n)

CONFIGS = [triton.Config({"BLOCK": b}, num_warps=w) for b, w in ((128, 4), (256, 4), (512, 8))]
tuned = triton.autotune(configs=CONFIGS, key=["n"])(scale)
resets = triton.autotune(configs=CONFIGS, key=["n"], reset_to_zero=["out_ptr"], restore_value=["x_ptr"])(scale)
pruned = triton.autotune(
    configs=CONFIGS,
    key=["n"],
    prune_configs_by={"early_config_prune": lambda configs, named, **kwargs: [
        config for config in configs if config.kwargs["BLOCK"] * 2 <= named["n"] and named["x_ptr"].shape == (1000,)
    ]},
)(scale)
badly = triton.autotune(
    configs=CONFIGS, key=["n"], prune_configs_by={"early_config_prune": lambda configs, named: configs[:named["m"]]}
)(scale)
hooked = triton.autotune(configs=CONFIGS, key=["n"], pre_hook=lambda *args, **kwargs: None)(scale)
config_hook = triton.autotune(
    configs=[triton.Config({"BLOCK": 128}, pre_hook=lambda args: None), *CONFIGS], key=["n"]
)(scale)

@triton.autotune(configs=CONFIGS, key=["n"])
@triton.heuristics({"EVEN": lambda given: given["n"] % given["BLOCK"] == 0})
@triton.jit
def even(x_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)

@triton.heuristics({"EVEN": lambda given: given["m"] % 2})
@triton.jit
def wrong(x_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)

TABLE = {"a": 1}

@triton.jit
def open_ended(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr, TABLE["a"])

def plain(x):
    return x
"""
LINES: dict[tuple[str | int, ...], int] = {
    (): 4,
    ("kernel",): 4,
    ("arguments",): 6,
    ("arguments", "m"): 7,
    ("grid",): 9,
    ("tune",): 10,
}
SCALE: dict[str, Any] = {
    "kernel": "some_kernels:scale",
    "arguments": {"factor": 2.0, "x_ptr": "f32[1000]", "out_ptr": "f32[1000]", "n": 1000},
    "grid": "cdiv(n, BLOCK)",
}
TRIED = {"tune": {"BLOCK": [64, 128]}, "num_warps": 4, "num_stages": 1}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "some_kernels.py").write_text(MODULE)
    (tmp_path / "broken_kernels.py").write_text("import no_such_module_of_a_test\n")
    for name in ("some_kernels", "broken_kernels"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def resolved(folder: Path, **changes: Any) -> KernelSpec:
    entry = kernel_parts.written({**SCALE, **changes})
    (item,) = kernel_entries.parse(kernel_parts.reader(LINES), (), entry)
    return resolve_kernel(item, folder)


def refused(folder: Path, **changes: Any) -> str:
    with pytest.raises(BadTuneJob) as error:
        resolved(folder, **changes)
    return error.value.message


def test_a_kernel_is_sent_with_its_candidates_grids_and_arguments(folder: Path) -> None:
    before = list(sys.path)
    kernel = resolved(folder, **TRIED)
    assert sys.path == before
    triton_source.check(kernel.source)
    assert [kernels.config_text(config) for config in kernel.source.configs] == [
        "BLOCK=64 num_warps=4 num_stages=1",
        "BLOCK=128 num_warps=4 num_stages=1",
    ]
    assert kernel.grids == [(16, 1, 1), (8, 1, 1)]
    assert [name for name, _ in kernel.tensors] == ["x_ptr", "out_ptr"]  # as the function has them
    assert kernel.constants == [("n", 1000), ("factor", 2.0)]


@pytest.mark.parametrize("name", ["tuned", "resets"])
def test_what_autotune_says_is_tried(name: str, folder: Path) -> None:
    kernel = resolved(folder, kernel=f"some_kernels:{name}")
    assert [kernels.config_text(config) for config in kernel.source.configs] == [
        "BLOCK=128 num_warps=4 num_stages=3",
        "BLOCK=256 num_warps=4 num_stages=3",
        "BLOCK=512 num_warps=8 num_stages=3",
    ]
    assert kernel.grids == [(8, 1, 1), (4, 1, 1), (2, 1, 1)]


def test_pruning_sees_the_arguments(folder: Path) -> None:
    kernel = resolved(folder, kernel="some_kernels:pruned")
    assert [dict(config.kwargs)["BLOCK"] for config in kernel.source.configs] == [128, 256]


def test_heuristics_are_computed_for_each_candidate(folder: Path) -> None:
    kernel = resolved(
        folder, kernel="some_kernels:even", arguments={"x_ptr": "f32[768]", "n": 768}, grid="cdiv(n, BLOCK)"
    )
    assert [dict(config.kwargs) for config in kernel.source.configs] == [
        {"BLOCK": 128, "EVEN": True},
        {"BLOCK": 256, "EVEN": True},
        {"BLOCK": 512, "EVEN": False},
    ]


ARGUMENTS = SCALE["arguments"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": "no_such_module_here:scale"}, "line 4: module no_such_module_here cannot be imported"),
        (
            {"kernel": "broken_kernels:scale"},
            "line 4: module broken_kernels cannot be imported: ModuleNotFoundError",
        ),
        ({"kernel": "some_kernels:scales"}, "line 4: module some_kernels has no kernel scales"),
        ({"kernel": "some_kernels:plain"}, "line 4: plain is a function, no kernel of triton.jit"),
        ({"kernel": "some_kernels:TABLE"}, "line 4: TABLE is a dict, no kernel"),
        ({"kernel": "some_kernels:hooked"}, "line 4: pre_hook of triton.autotune"),
        ({"kernel": "some_kernels:config_hook"}, "line 4: pre_hook of triton.Config cannot be sent"),
        (
            {"kernel": "some_kernels:badly"},
            "line 4: its early_config_prune fails on these arguments: TypeError",
        ),
        (
            {
                "kernel": "some_kernels:wrong",
                "arguments": {"x_ptr": "f32[8]", "n": 8},
                "tune": {"BLOCK": [8, 16]},
            },
            "line 4: its heuristic for EVEN fails on these arguments: KeyError",
        ),
        (
            {"kernel": "some_kernels:open_ended", "arguments": {"x_ptr": "f32[8]"}, "grid": 1, **TRIED},
            "line 4: user-written Triton kernel open_ended: open_ended uses TABLE, a dict, which cannot be sent",
        ),
        (
            {"arguments": {**ARGUMENTS, "m": 3}, **TRIED},
            "line 7: scale has no parameter m, but x_ptr, out_ptr",
        ),
        ({"arguments": {"x_ptr": "f32[8]", "n": 8}, **TRIED}, "line 6: scale is given no out_ptr"),
        ({"tune": {}}, "line 6: scale is given no BLOCK (or values under `tune`)"),
        (
            {"arguments": {**ARGUMENTS, "MODE": "f32[8]"}, **TRIED},
            "line 6: MODE is a tl.constexpr, and no tensor",
        ),
        ({"arguments": {**ARGUMENTS, "n": "'x'"}, **TRIED}, "line 6: n is no tl.constexpr"),
        ({"tune": {"WIDTH": [1, 2]}}, "line 10: scale has no tl.constexpr WIDTH to try values of"),
        ({"tune": {"n": [1, 2]}, "arguments": {"x_ptr": "f32[8]"}}, "line 10: scale has no tl.constexpr n"),
        (
            {"kernel": "some_kernels:tuned", "arguments": {**ARGUMENTS, "BLOCK": 64}},
            "line 6: BLOCK is an argument, and set by configuration BLOCK=128 num_warps=4",
        ),
        ({**TRIED, "tune": {"BLOCK": [64]}}, "line 4: the kernel has one candidate"),
        (
            {**TRIED, "grid": "cdiv(n, WIDTH)"},
            "line 9: expression 'CeilDiv(n, WIDTH)' uses unknown symbol 'WIDTH'",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused_with_its_line(
    changes: dict[str, Any], message: str, folder: Path
) -> None:
    assert message in refused(folder, **changes)


def test_without_triton_the_line_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert refused(folder, **TRIED).startswith("job.yaml, line 4: Triton is not installed here")
