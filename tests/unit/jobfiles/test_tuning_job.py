"""A batch job's file: what expands to what, and how what is wrong is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torchrelay.clients.jobfiles import tune_file
from torchrelay.compiler.api.tuning import operators
from torchrelay.compiler.api.tuning.jobs import TUNE_ITEMS, TuneBudget
from torchrelay.compiler.errors import BadTuneJob
from torchrelay.compiler.request import schema
from torchrelay.compiler.tuning.records import parse_problem

H200 = schema.Target(kind="cuda", name="NVIDIA H200", capability="9.0", units=132, cpu=[])
A100 = schema.Target(kind="cuda", name="NVIDIA A100", capability="8.0", units=108, cpu=[])
V100 = schema.Target(kind="cuda", name="NVIDIA V100", capability="7.0", units=80, cpu=[])
CPU = schema.Target(kind="cpu", name="", capability="", units=0, cpu=["avx2"])
FLEX = "f32[1,2,16,16]"


def read(text: str) -> tune_file.TuneFile:
    return tune_file.read(text.encode(), "job.yaml")


def texts(text: str) -> list[str]:
    return [item.problem.text() for item in read(text).operators]


def refused(text: str) -> str:
    with pytest.raises(BadTuneJob) as caught:
        read(text)
    return caught.value.message


def test_lists_and_ranges_expand_to_all_combinations_each_with_its_line() -> None:
    spec = read(
        """\
name: sweep
operators:
  - op: mm
    m: [16, 32]
    n: {from: 64, to: 256, times: 2}
    k: {from: 8, to: 24, step: 8}
    dtype: bf16
  - op: mm
    m: 1
    n: 2
    k: 3
    dtype: f32
"""
    )
    assert spec.name == "sweep"
    assert len(spec.operators) == 2 * 3 * 3 + 1
    assert spec.operators[0].problem.text() == "mm(bf16[16,8], bf16[8,64]) -> bf16[16,64]"
    assert spec.operators[-2].problem.text() == "mm(bf16[32,24], bf16[24,256]) -> bf16[32,256]"
    assert spec.operators[-1].problem.text() == "mm(f32[1,3], f32[3,2]) -> f32[1,2] {precision=highest}"
    assert [item.line for item in spec.operators[-2:]] == [3, 8]


SCALED = (
    "scaled_mm(f8e4m3[32,64], f8e4m3[64,16]:1,64, f32[], f32[]) -> bf16[32,16] {arg.use_fast_accum=False}"
)


def test_the_same_problem_twice_is_searched_once() -> None:
    assert texts("operators:\n- {op: mm, m: [4, 4], n: 4, k: 4, dtype: [f16, float16, fp16]}") == [
        "mm(f16[4,4], f16[4,4]) -> f16[4,4]"
    ]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("op: mm, m: 8, n: 4, k: 2, dtype: f16, b: column", "mm(f16[8,2], f16[2,4]:1,2) -> f16[8,4]"),
        (
            "op: mm, m: 8, n: 4, k: 2, dtype: f32, constant: true, precision: high",
            "mm(f32[8,2], f32[2,4]) -> f32[8,4] {constants=1, precision=high}",
        ),
        ("op: mm, m: 8, n: 4, k: 2, dtype: fp32", "mm(f32[8,2], f32[2,4]) -> f32[8,4] {precision=highest}"),
        ('op: mm, operands: ["fp64[8,2]", "f64[2,4]"]', "mm(f64[8,2], f64[2,4]) -> f64[8,4]"),
        ("op: scaled_mm, m: 32, n: 16, k: 64, dtype: fp8, out: fp16", SCALED.replace("bf16", "f16")),
        ("op: addmm, m: 8, n: 4, k: 2, dtype: f16", "addmm(f16[4], f16[8,2], f16[2,4]) -> f16[8,4]"),
        ("op: bmm, batch: 3, m: 8, n: 4, k: 2, dtype: f16", "bmm(f16[3,8,2], f16[3,2,4]) -> f16[3,8,4]"),
        (
            "op: baddbmm, batch: 3, m: 8, n: 4, k: 2, dtype: f16",
            "baddbmm(f16[3,8,4], f16[3,8,2], f16[3,2,4]) -> f16[3,8,4]",
        ),
        ("op: int_mm, m: 32, n: 16, k: 8", "int_mm(i8[32,8], i8[8,16]) -> i32[32,16]"),
        ("op: scaled_mm, m: 32, n: 16, k: 64", SCALED),
        (
            "op: scaled_mm, m: 32, n: 16, k: 64, scales: row, out: f32, fast_accum: true",
            "scaled_mm(f8e4m3[32,64], f8e4m3[64,16]:1,64, f32[32,1], f32[1,16]) -> f32[32,16] "
            "{arg.use_fast_accum=True}",
        ),
        (
            "op: grouped_mm, groups: 4, m: 64, n: 16, k: 8, dtype: bf16, b: column",
            "grouped_mm(bf16[64,8], bf16[4,8,16]:128,1,8, i32[4]) -> bf16[64,16]",
        ),
        (
            "op: conv, batch: 2, in: 3, out: 8, size: 32x16, kernel: 3, padding: 1, stride: 2, dtype: bf16",
            "convolution(bf16[2,3,32,16], bf16[8,3,3,3]) -> bf16[2,8,16,8] {arg.dilation=(1, 1), arg.groups=1, "
            "arg.output_padding=(0, 0), arg.padding=(1, 1), arg.stride=(2, 2), arg.transposed=False}",
        ),
        (
            "op: conv, batch: 2, in: 4, out: 8, size: 9, kernel: 3, dims: 1, dtype: f16, transposed: true, stride: 2",
            "convolution(f16[2,4,9], f16[4,8,3]) -> f16[2,8,19] {arg.dilation=(1,), arg.groups=1, "
            "arg.output_padding=(0,), arg.padding=(0,), arg.stride=(2,), arg.transposed=True}",
        ),
        (
            "op: flex_attention, batch: 2, heads: 8, kv_heads: 2, queries: 128, width: 64, dtype: bf16, mask: causal",
            "flex_attention(bf16[2,8,128,64], bf16[2,2,128,64], bf16[2,2,128,64]) -> bf16[2,8,128,64] {mask=causal}",
        ),
        (
            'op: mm, operands: ["bf16[8,2]", "bf16[2,4]:1,2"]',
            "mm(bf16[8,2], bf16[2,4]:1,2) -> bf16[8,4]",
        ),
    ],
)
def test_each_operator_becomes_a_problem_that_the_gateway_takes(entry: str, expected: str) -> None:
    assert texts(f"operators: [{{{entry}}}]") == [expected]
    (item,) = read(f"operators: [{{{entry}}}]").operators
    operators.check(item.problem)


def test_channels_last_lays_the_channels_together() -> None:
    entry = "op: conv, batch: 2, in: 3, out: 8, size: 4, kernel: 1, layout: channels_last, dtype: f16"
    (text,) = texts(f"operators: [{{{entry}}}]")
    assert text.startswith(
        "convolution(f16[2,3,4,4]:48,1,12,3, f16[8,3,1,1]:3,1,3,3) -> f16[2,8,4,4]:128,1,32,8 "
    )


def test_convolutions_agree_with_pytorch() -> None:
    torch = pytest.importorskip("torch")
    cases = [
        {"stride": 2, "padding": 1, "dilation": 2, "groups": 2},
        {"stride": 3, "padding": 2, "transposed": True, "output_padding": 1, "groups": 2},
    ]
    for case in cases:
        written = ", ".join(f"{k}: {str(v).lower()}" for k, v in case.items())
        entry = (
            f"op: conv, batch: 2, in: 4, out: 6, size: 17x13, kernel: 3x2, dtype: f32, bias: true, {written}"
        )
        (item,) = read(f"operators: [{{{entry}}}]").operators
        x, weight, bias = (torch.empty(operand.size) for operand in item.problem.operands)
        result = torch.convolution(
            x,
            weight,
            bias,
            [case["stride"]] * 2,
            [case["padding"]] * 2,
            [case.get("dilation", 1)] * 2,
            case.get("transposed", False),
            [case.get("output_padding", 0)] * 2,
            case["groups"],
        )
        assert tuple(result.shape) == item.problem.result.size


def test_budget_space_precision_graphs_and_device_are_read() -> None:
    spec = read(
        """\
device: NVIDIA H200
torch: 2.13.0+cu130
threads: 4
budget: {seconds: 10m, trials: 500, samples: 40}
space: exhaustive
precision: [highest, high]
operators:
  - {op: mm, m: 8, n: 8, k: 8, dtype: [f32, bf16]}
  - {op: mm, m: 8, n: 8, k: 8, dtype: bf16, space: default}
graphs:
  - file: graphs/train.graphs
    mode: max-autotune
  - key: "%s"
"""
        % ("ab" * 32)
    )
    assert (spec.device, spec.torch, spec.threads) == ("NVIDIA H200", "2.13.0+cu130", 4)
    assert spec.lines == {"device": 1, "torch": 2, "threads": 3}
    assert spec.budget == TuneBudget(600.0, 500, 40)
    assert [(item.space, dict(item.problem.settings).get("precision")) for item in spec.operators] == [
        ("exhaustive", "highest"),
        ("exhaustive", "high"),
        ("exhaustive", None),
        ("default", None),
    ]
    assert spec.files == [tune_file.GraphFilePath(11, "graphs/train.graphs", "max-autotune")]
    assert [(item.line, item.key) for item in spec.graphs] == [(13, "ab" * 32)]


CONV = "op: conv, batch: 1, in: 3, out: 4, size: 8, kernel: 3, dtype: f16"
OPERATOR = "operators:\n- op: mm\n  m: 4\n  n: 4\n  dtype: f16\n  k: 4\n"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('operators:\n- op: mm\n  operands: ["bf16[8,3]", "bf16[2,4]"]', 3, "3 columns and 2 rows"),
        ('operators:\n- op: mm\n  operands: ["bf16[8,2]", x]', 3, "no tensor"),
        ('operators:\n- op: mm\n  operands: ["bf16[8,2]", "f16[2,4]"]', 3, "one dtype"),
        ('operators:\n- op: addmm\n  operands: ["f16[3]", "f16[8,2]", "f16[2,4]"]', 3, "cannot be added"),
        (
            "operators:\n- op: matmul",
            2,
            "'matmul' is not an operator; there are addmm, baddbmm, bmm, conv, flex_",
        ),
        (OPERATOR + "  l: 4\n", 7, "'l' is not a field here"),
        (OPERATOR.replace("k: 4", "k: 0"), 6, "k: Expected `int` >= 1"),
        (OPERATOR.replace("  k: 4\n", ""), 2, "missing required field `k`"),
        (OPERATOR.replace("f16", "f12"), 5, "dtype is 'f12'; allowed: b8, bf16"),
        (OPERATOR.replace("m: 4", "m: {from: 8, to: 4, step: 1}"), 3, "ends before"),
        (OPERATOR.replace("m: 4", "m: {from: 8, to: 9}"), 3, "a range is"),
        (OPERATOR.replace("m: 4", "m: []"), 3, "empty list"),
        (
            OPERATOR.replace("m: 4", "m: {from: 1, to: 9999999, step: 1}"),
            3,
            "more problems than a job may have",
        ),
        (
            OPERATOR.replace("m: 4", f"m: {list(range(1, TUNE_ITEMS + 2))}"),
            2,
            "more problems than a job may have",
        ),
        (OPERATOR + "  m: 8\n", 7, "given twice"),
        (OPERATOR + "space: all\n", 7, "space is 'all'"),
        (OPERATOR + "budget:\n  seconds: soon\n", 8, "seconds is 'soon'; allowed: a number"),
        (OPERATOR + "threads: many\n", 7, "threads: Expected `int`"),
        (OPERATOR + "graphs:\n- key: abc\n", 8, "key is 'abc'; allowed: 64 hexadecimal digits"),
        (OPERATOR + "graphs:\n- mode: max-autotune\n", 8, "has a file"),
        ("operators:\n- {op: int_mm, m: 4, n: 4, k: 4, constant: true}", 2, "may be constant"),
        (
            "operators:\n- op: conv\n  batch: 1\n  in: 3\n  out: 4\n  size: 2\n  kernel: 3\n  dtype: f16",
            2,
            "does not fit",
        ),
        (
            "operators:\n- {op: conv, batch: 1, in: 3, out: 4, size: 8, kernel: 3, groups: 2, dtype: f16}",
            2,
            "divided",
        ),
        (f"operators:\n- {{{CONV}, dims: 4}}", 2, "dims: Expected `int` <= 3"),
        (
            f"operators:\n- {{{CONV}, output_padding: 1}}",
            2,
            "only a transposed convolution has output_padding",
        ),
        (
            f"operators:\n- {{{CONV}, transposed: true, stride: 2, output_padding: 2}}",
            2,
            "output_padding 2 is not less than stride 2 or dilation 1",
        ),
        ('operators:\n- op: mm\n  operands: ["f32[4,5]:1000000000000,1", "f32[5,4]"]', 3, "reaches over"),
        ("operators:\n- {op: scaled_mm, m: 8, n: 8, k: 8}", 2, "multiples of 16"),
        ("operators:\n- &a {op: mm}", 2, "anchors"),
        ("operators:\n- !!python/object:os.system {}", 2, "tags"),
        ("operators: [", 1, "not YAML"),
        ("operators:\n\t- x", 2, "not YAML"),
        ("a: 1\nname: x", 1, "'a' is not a field here"),
    ],
)
def test_what_is_wrong_is_named_by_file_and_line(text: str, line: int, words: str) -> None:
    message = refused(text)
    assert message.startswith(f"job.yaml, line {line}: "), message
    assert words in message


def test_an_empty_job_and_garbage_are_refused() -> None:
    assert "names no operators" in refused("")
    assert "too deep" in refused("name: " + "[" * 500_000)
    with pytest.raises(BadTuneJob, match="line 2: this is not UTF-8"):
        tune_file.read(b"name: x\n\xff", "job.yaml")
    with pytest.raises(BadTuneJob, match="cannot be read"):
        tune_file.load(Path("/nowhere/job.yaml"))


@pytest.mark.parametrize(
    ("text", "target", "words"),
    [
        ("scaled_mm(f8e4m3[32,64], f8e4m3[64,16], f32[], f32[]) -> bf16[32,16]", A100, "needs 8.9"),
        ("scaled_mm(f8e4m3[32,64], f8e4m3[64,16], f32[], f32[]) -> bf16[32,16]", CPU, "a CPU has no"),
        ("mm(bf16[8,8], bf16[8,8]) -> bf16[8,8]", V100, "bfloat16 needs 8.0"),
        ("scaled_mm(f8e4m3[32,64], f8e4m3[64,16], f32[], f32[]) -> bf16[32,16]", H200, ""),
        ("mm(bf16[8,8], bf16[8,8]) -> bf16[8,8]", A100, ""),
        ("mm(f16[8,8], f16[8,8]) -> f16[8,8]", V100, ""),
        ("mm(bf16[8,8], bf16[8,8]) -> bf16[8,8]", CPU, ""),
        (f"flex_attention({FLEX}, {FLEX}, {FLEX}) -> {FLEX}", CPU, "no candidates for flex_attention"),
        (f"flex_attention({FLEX}, {FLEX}, {FLEX}) -> {FLEX}", H200, ""),
    ],
)
def test_what_the_device_lacks_is_refused(text: str, target: schema.Target, words: str) -> None:
    problem = parse_problem(text)
    operators.check(problem)
    if words:
        with pytest.raises(ValueError, match=words):
            operators.check_device(problem, target)
    else:
        operators.check_device(problem, target)


@pytest.mark.parametrize(
    "text",
    [
        "mm(f16[8,4], f16[4,8]) -> f16[8,9]",
        "mm(f16[8,4], f16[4,8]) -> f32[8,8]",
        "mm(f16[8,0], f16[0,8]) -> f16[8,8]",
        "mm(f16[8,4], f16[4,8]:1) -> f16[8,8]",
        "mm(f16[8,4]) -> f16[8,8]",
        "sort(f16[8]) -> f16[8]",
        "mm(f16[1099511627776,2], f16[2,8]) -> f16[1099511627776,8]",
    ],
)
def test_the_gateway_takes_no_problem_that_no_operator_has(text: str) -> None:
    with pytest.raises(ValueError):
        operators.check(parse_problem(text))


@pytest.mark.parametrize(
    "settings",
    [
        (("arg.stride", "__import__('os')"),),
        (("arg.groups", "0"),),
        (("constants", "0"),),
        (("constants", "x"),),
        (("precision", "exact"),),
        (("space", "all"),),
    ],
)
def test_the_gateway_takes_no_setting_that_the_operator_lacks(settings: tuple[tuple[str, str], ...]) -> None:
    shape = "convolution(f32[1,3,8,8], f32[4,3,3,3]) -> f32[1,4,6,6]"
    operators.check(parse_problem(shape))
    with pytest.raises(ValueError):
        operators.check(parse_problem(shape, settings))


EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "tune").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_can_be_run(path: Path) -> None:
    spec = tune_file.load(path)
    target = CPU if spec.device == "cpu" else H200
    for item in spec.operators:
        operators.check(item.problem)
        operators.check_device(item.problem, target)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


def test_reading_a_file_imports_no_torch() -> None:
    code = (
        "import sys; from torchrelay.clients.jobfiles import tune_file;"
        f"tune_file.read({OPERATOR.encode()!r}, 'x'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
