"""Kernels in a tuning job's file: what an entry expands to, what is refused and with which line, what is sent."""

from __future__ import annotations

import re
from typing import Any

import kernel_parts
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrelay.clients.jobfiles import kernel_entries
from torchrelay.clients.jobfiles.kernel_entries import number_of
from torchrelay.compiler.api.tuning import kernels
from torchrelay.compiler.api.tuning.kernels import KernelSpec
from torchrelay.compiler.errors import BadExpression, BadTuneJob
from torchrelay.compiler.request import codec, schema, triton_source
from torchrelay.compiler.request.validate import check_request
from torchrelay.compiler.tuning.records import Operand, contiguous

TOOLCHAIN = schema.Toolchain("cp312", "2.11.0+cu128", "3.6.0", "12.8", "linux-x86_64")
GPU = schema.Target(kind="cuda", name="NVIDIA H200", capability="9.0", units=132, cpu=[])
ENTRY: dict[str, Any] = {
    "kernel": "kernels.softmax:softmax_kernel",
    "sizes": {"rows": 4096, "columns": [500, 1024]},
    "arguments": {
        "out_ptr": "f32[rows, columns]",
        "x_ptr": {"dtype": "float32", "shape": ["rows", "columns"], "stride": [1, "rows"]},
        "columns": "columns",
        "scale": 0.5,
        "BLOCK": "next_power_of_2(columns)",
        "MODE": "'tanh'",
        "KIND": "tl.float32",
        "bias_ptr": None,
    },
    "grid": ["cdiv(rows, ROWS)"],
    "tune": {"ROWS": [1, 2, 4]},
    "num_warps": [2, 4],
}
LINES = {(): 10, ("sizes",): 12, ("arguments",): 14, ("arguments", "x_ptr"): 16, ("grid",): 24, ("tune",): 25}


def parse(value: Any, lines: Any) -> list[kernel_entries.KernelEntry]:
    return kernel_entries.parse(kernel_parts.reader(lines), (), kernel_parts.written(value))


def entry(**changes: Any) -> dict[str, Any]:
    return {**ENTRY, **changes}


def config(warps: int = 4, stages: int = 3, **kwargs: schema.KernelConstant) -> schema.KernelConfig:
    return schema.KernelConfig(sorted(kwargs.items()), warps, stages, 1, None)


def test_an_entry_has_an_item_for_each_combination_of_its_sizes() -> None:
    items = parse(entry(sizes={"rows": [8, 16], "columns": [500, 1024]}), LINES)
    assert [(item.numbers["rows"], item.numbers["columns"]) for item in items] == [
        (8, 500),
        (8, 1024),
        (16, 500),
        (16, 1024),
    ]
    first = items[0]
    assert dict(first.arguments) == {
        "out_ptr": Operand("float32", (8, 500), (500, 1)),
        "x_ptr": Operand("float32", (8, 500), (1, 8)),
        "columns": 500,
        "scale": 0.5,
        "BLOCK": 512,
        "MODE": "tanh",
        "KIND": schema.TritonDType("float32"),
        "bias_ptr": None,
    }
    assert first.line == 10
    assert first.text == (
        "kernels.softmax:softmax_kernel(out_ptr=f32[8,500], x_ptr=f32[8,500]:1,8, columns=500, scale=0.5, BLOCK=512, "
        "MODE='tanh', KIND=tl.float32, bias_ptr=None)"
    )


@pytest.mark.parametrize(
    ("changes", "line", "message"),
    [
        ({"kernel": "softmax_kernel"}, 10, "kernel is 'softmax_kernel'; allowed: module:function"),
        ({"kernel": "a:b:c"}, 10, "kernel is 'a:b:c'; allowed: module:function"),
        ({"kernels": 3}, 10, "'kernels' is not a field here; the fields are arguments, grid"),
        ({"space": "large"}, 10, "space is 'large'; allowed: default, exhaustive"),
        ({"sizes": {"rows": 2.5, "columns": 3}}, 12, "sizes: Expected `int`"),
        ({"sizes": {"rows": [], "columns": 3}}, 12, "sizes: Expected `list` of length >= 1"),
        ({"sizes": {"rows": True, "columns": 3}}, 12, "sizes: Expected `int`"),
        (
            {"sizes": {"rows": list(range(40)), "columns": list(range(40))}},
            12,
            "1600 combinations, 1000 allowed",
        ),
        ({"sizes": {"not a name": 3}}, 12, "sizes: Expected `str` matching"),
        ({"arguments": {"x_ptr": "f32[depth]"}}, 16, "unknown symbol 'depth'"),
        ({"arguments": {"x_ptr": "f33[rows]"}}, 16, "'f33' is not a dtype"),
        ({"arguments": {"x_ptr": "f32[rows - 5000]"}}, 16, "length rows - 5000 is -904"),
        ({"arguments": {"x_ptr": "f32[rows / 3]"}}, 16, "no whole number"),
        ({"arguments": {"x_ptr": "f32[rows]:1,2"}}, 16, "1 dimensions has 2 strides"),
        ({"arguments": {"x_ptr": {"dtype": "f32", "shape": 3}}}, 16, "shape: Expected `list`"),
        (
            {"arguments": {"x_ptr": {"dtype": "f32", "shape": [3], "device": "cpu"}}},
            16,
            "unknown field `device`",
        ),
        ({"arguments": {"x_ptr": "__import__('os')"}}, 16, "characters outside the grammar"),
        ({"arguments": {"x_ptr": "os.system"}}, 16, "not in the grammar"),
        ({"arguments": {"x_ptr": [1]}}, 16, "a list is neither a tensor"),
        ({"arguments": {"x_ptr": 1 << 70}}, 16, "past 64 bits"),
        ({"arguments": {"x_ptr": "'say \"'"}}, 16, "characters that could end it"),
        ({"arguments": {"n": 3}}, 14, "no argument is a tensor"),
        ({"arguments": {"x_ptr": "f32[rows]", "rows": 3}}, 14, "another number among the sizes"),
        ({"arguments": []}, 14, "arguments: Expected `mapping`"),
        ({"arguments": [1]}, 14, "arguments: Expected `mapping`"),
        ({"grid": []}, 24, "grid: Expected `list` of length >= 1"),
        ({"grid": [[1]]}, 24, "grid, item 1: Expected `str`"),
        ({"tune": {"ROWS": 4}}, 25, "tune: Expected `list`"),
        ({"tune": {"num_warps": [4]}}, 25, "a field next to `tune`"),
        ({"tune": {"BLOCK": [4]}}, 25, "both an argument and tuned"),
        ({"num_warps": [3]}, 10, "powers of two"),
        ({"num_stages": [0]}, 10, "num_stages, item 1: Expected `int` >= 1"),
    ],
)
def test_what_cannot_be_is_refused_with_its_line(changes: dict[str, Any], line: int, message: str) -> None:
    with pytest.raises(BadTuneJob) as refused:
        parse(entry(**changes), LINES)
    assert refused.value.message.startswith(f"job.yaml, line {line}: ")
    assert message in refused.value.message


@pytest.mark.parametrize("missing", ["kernel", "arguments", "grid"])
def test_an_entry_names_kernel_arguments_and_grid(missing: str) -> None:
    short = {name: value for name, value in ENTRY.items() if name != missing}
    with pytest.raises(BadTuneJob, match=f"line 10: Object missing required field `{missing}`"):
        parse(short, LINES)


def test_an_entry_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(BadTuneJob, match="line 10: fields are expected here"):
        parse(["softmax"], LINES)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("n", 1000),
        ("cdiv(n, 256)", 4),
        ("min(n, 64) * 2", 128),
        ("max(n, 64, 2048)", 2048),
        ("next_power_of_2(n)", 1024),
        ("next_power_of_2(cdiv(n, 3))", 512),
        ("next_power_of_2(n + 24)", 1024),
        ("next_power_of_2(0)", 1),
        ("n // 3 % 7", 4),
        ("n / 8", 125.0),
    ],
)
def test_numbers_are_spelled_as_in_triton(text: str, value: float) -> None:
    assert number_of(text, {"n": 1000}) == value


@pytest.mark.parametrize(
    "text", ["n / 0", "next_power_of_2(n / 3)", "n == 3", "m", "", "n.real", "2 ** 100", "n" * 5000]
)
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(BadExpression):
        number_of(text, {"n": 1000})


@given(st.text(max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_number_or_refused(text: str) -> None:
    try:
        value = number_of(text, {"n": 7})
    except BadExpression:
        return
    assert type(value) in (int, float)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS, lambda below: st.lists(below, max_size=3) | st.dictionaries(SCALARS, below, max_size=3)
)


@given(
    st.dictionaries(st.sampled_from(sorted(ENTRY)), VALUES),
    st.lists(st.sampled_from(sorted(ENTRY)), max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_a_damaged_entry_is_refused_or_read(changes: dict[str, Any], gone: list[str]) -> None:
    damaged = {name: value for name, value in entry(**changes).items() if name not in gone}
    try:
        parse(damaged, LINES)
    except BadTuneJob as error:
        assert re.match("job.yaml, line [12][0-9]: ", error.message)


def item(**changes: Any) -> kernel_entries.KernelEntry:
    return parse(entry(sizes={"rows": 4096, "columns": 500}, **changes), LINES)[0]


def test_a_kernel_without_configurations_is_tried_in_every_combination() -> None:
    tried = kernel_entries.candidates(item(num_stages=[3]), [])
    assert tried == [config(warps, 3, ROWS=rows) for rows in (1, 2, 4) for warps in (2, 4)]
    assert [kernel_entries.grid_of(item(), each) for each in tried] == [
        (4096, 1, 1),
        (4096, 1, 1),
        (2048, 1, 1),
        (2048, 1, 1),
        (1024, 1, 1),
        (1024, 1, 1),
    ]


def test_a_kernels_own_configurations_are_the_default_space() -> None:
    own = [config(2, 2, ROWS=1), config(8, 4, ROWS=8)]
    plain = {"tune": {}, "num_warps": []}
    assert kernel_entries.candidates(item(**plain), own) == own
    wide = kernel_entries.candidates(item(**plain, space="exhaustive"), own)
    assert wide[:2] == own
    assert len(wide) == 2 * 5 * 5  # both are among the combinations
    assert {dict(each.kwargs)["ROWS"] for each in wide} == {1, 8}


def test_what_the_file_names_is_tried_beside_the_kernels_own() -> None:
    own = [config(2, 2, ROWS=1)]
    tried = kernel_entries.candidates(item(tune={"ROWS": [1, 2]}, num_warps=[2], num_stages=[2]), own)
    assert tried == [config(2, 2, ROWS=1), config(2, 2, ROWS=2)]


def test_too_many_candidates_are_refused_before_they_are_made() -> None:
    huge = item(tune={name: list(range(100)) for name in "ABCDEFGH"})
    with pytest.raises(BadTuneJob, match=r"line 25: the kernel has \d{16,} candidates, 1024 allowed"):
        kernel_entries.candidates(huge, [])


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("cdiv(rows, NONE)", "unknown symbol 'NONE'"),
        ("rows // (ROWS - 1)", "has no value"),
        ("lambda meta: 3", "characters outside the grammar"),
        ("open(3)", "calls 'open'"),
        ("rows / 3", "no size of a grid"),
        ("rows - 4096", "'rows - 4096' is 0 in ROWS=1 num_warps=4 num_stages=3"),
        ("rows * 1000000", "no size of a grid"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(grid: str, message: str) -> None:
    with pytest.raises(BadTuneJob, match="line 24") as refused:
        kernel_entries.grid_of(item(grid=grid), config(ROWS=1))
    assert message in refused.value.message


# --- what is sent -----------------------------------------------------------------------------------------


def source(factor: int = 2, *configs: schema.KernelConfig) -> schema.KernelSource:
    text = f"def scale(x_ptr, out_ptr, n, BLOCK: tl.constexpr):\n    tl.store(out_ptr, {factor} * BLOCK)\n"
    return schema.KernelSource("scale", triton_source.module_text([], [], {"scale": text}), list(configs))


def kernel(
    factor: int = 2, size: int = 1000, n: int = 1000, blocks: tuple[int, ...] = (64, 128)
) -> KernelSpec:
    operand = Operand("float32", (size,), contiguous((size,)))
    return KernelSpec(
        source=source(factor, *(config(BLOCK=block) for block in blocks)),
        grids=[(-(-size // block), 1, 1) for block in blocks],
        tensors=[("x_ptr", operand), ("out_ptr", operand)],
        constants=[("n", n)],
    )


def test_a_kernels_request_passes_the_gate() -> None:
    request = kernels.request(kernel(), TOOLCHAIN, GPU)
    check_request(request, codec.Limits())
    assert codec.unpack_request(codec.pack_request(request)) == request
    assert request.mode == "max-autotune-no-cudagraphs"


def test_a_kernel_survives_its_encoding() -> None:
    for encode, decode in ((msgspec.json, msgspec.json), (msgspec.msgpack, msgspec.msgpack)):
        assert decode.decode(encode.encode(kernel()), type=KernelSpec) == kernel()


def test_a_problem_names_source_arguments_and_candidates() -> None:
    problem = kernels.problem(kernel())
    assert problem.shape() == "triton.scale(f32[1000], f32[1000]) -> f32[1000]"
    told = dict(problem.settings)
    assert told["arg.n"] == "1000"
    assert told["tensors"] == "x_ptr out_ptr"
    assert told["source"] == kernels.source_digest(kernel().source)
    assert problem == kernels.problem(kernel(blocks=(128, 64)))  # their order means nothing
    others = [
        kernel(factor=3),
        kernel(size=1001),
        kernel(n=999),
        kernel(blocks=(64, 256)),
        msgspec.structs.replace(kernel(), grids=[(1, 1, 1), (2, 1, 1)]),
    ]
    assert len({problem.text(), *(kernels.problem(other).text() for other in others)}) == 6
