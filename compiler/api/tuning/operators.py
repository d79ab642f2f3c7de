"""The operators that a tuning job may name, and the result of each on given operands and settings. No torch.

A problem has the operands that the operator is called with (`addmm` with the bias as the user has it). The search
worker completes what Inductor adds. Client and gateway both check every problem against this table.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from math import prod

from msgspec import Struct

from ...request import schema
from ...tuning.records import Operand, Problem, contiguous

FLOATS = ("bfloat16", "float16", "float32", "float64")
FP8 = ("float8_e4m3fn", "float8_e5m2")
PRECISIONS = ("highest", "high", "medium")
MASKS = r"none|causal|window:[1-9][0-9]{0,8}|prefix:[1-9][0-9]{0,8}"
"""Masks of flex attention: causal; `window:256`: also no key more than 256 before its query; `prefix:128`: also the
first 128 keys."""

_CAPABILITY = {"bfloat16": (8, 0), "float8_e4m3fn": (8, 9), "float8_e5m2": (8, 9)}
"""The least CUDA compute capability for a dtype's matrix products."""
_SPATIAL = (1, 2, 3)
_WHOLE = 1 << 40
"""Elements of a tensor, at most."""

Result = Callable[[Sequence[Operand], Mapping[str, str]], Operand]
"""result(operands, settings): what an operator makes of them. Raises ValueError."""


class TunableOperator(Struct, frozen=True):
    """How an operator's result follows from its operands.

    settings: which may be given, as patterns. constants: which of its operands may be a graph's constants.
    """

    result: Result
    operands: tuple[int, ...]
    """How many it takes."""
    dtypes: tuple[str, ...] = FLOATS
    """What the first operand may have."""
    settings: dict[str, str] = {}
    constants: tuple[int, ...] = ()


def check(problem: Problem) -> None:
    """Raises ValueError, which says what is wrong, for a problem that no operator has."""
    settings = dict(problem.settings)
    expected = result_of(problem.op, problem.operands, settings, problem.result.dtype)
    if problem.result.size != expected.size:
        raise ValueError(f"{problem.op} gives {expected.text()}, not {problem.result.text()}")


def result_of(op: str, operands: Sequence[Operand], settings: Mapping[str, str], dtype: str = "") -> Operand:
    """What `op` makes of `operands`, with the dtype `dtype` if it is not the operands' own. Raises ValueError."""
    operator = OPERATORS.get(op)
    if operator is None:
        raise ValueError(
            f"{op[:40]!r} is not an operator that can be tuned; there are {', '.join(sorted(OPERATORS))}"
        )
    if len(operands) not in operator.operands:
        raise ValueError(
            f"{op} takes {' or '.join(map(str, operator.operands))} operands, not {len(operands)}"
        )
    for operand in operands:
        _check_operand(operand)
    if operands[0].dtype not in operator.dtypes:
        raise ValueError(f"{op} of {operands[0].dtype}: it takes {', '.join(operator.dtypes)}")
    for name, value in settings.items():
        pattern = _PRECISION if name == "precision" else operator.settings.get(name)
        if name == "constants":
            _check_constants(op, operator, value)
        elif pattern is None:
            raise ValueError(f"{op} has no setting {name[:40]!r}")
        elif not re.fullmatch(pattern, value):
            raise ValueError(f"{name} = {value[:40]!r} is not possible")
    if "precision" in settings and operands[0].dtype != "float32":
        raise ValueError(f"precision is a setting of float32, not of {operands[0].dtype}")
    found = operator.result(operands, settings)
    if op == "scaled_mm" and dtype:
        if dtype not in ("bfloat16", "float16", "float32", *FP8):
            raise ValueError(f"scaled_mm gives no {dtype}")
        return Operand(dtype, found.size, found.stride)
    if dtype and dtype != found.dtype:
        raise ValueError(f"{op} of {operands[0].dtype} gives {found.dtype}, not {dtype}")
    return found


def check_device(problem: Problem, target: schema.Target) -> None:
    """Raises ValueError where the device lacks a dtype or an operator."""
    dtypes = {operand.dtype for operand in (*problem.operands, problem.result)}
    if target.kind == "cpu":
        lacking = sorted(dtypes & set(FP8))
        if lacking:
            raise ValueError(f"a CPU has no matrix product of {lacking[0]}")
        if problem.op == "flex_attention":
            raise ValueError("Inductor has no candidates for flex_attention on a CPU")
        return
    have = tuple(int(part) for part in re.findall(r"\d+", target.capability)[:2])
    for dtype in sorted(dtypes):
        need = _CAPABILITY.get(dtype, (0, 0))
        if have < need:
            raise ValueError(
                f"{target.name} has compute capability {target.capability}, and {dtype} needs {need[0]}.{need[1]}"
            )
    if constants := dict(problem.settings).get("constants"):
        raise ValueError(f"constant operands ({constants}) change nothing on a GPU")


def _check_operand(operand: Operand) -> None:
    if len(operand.size) != len(operand.stride):
        raise ValueError(f"{operand.text()} has {len(operand.size)} sizes and {len(operand.stride)} strides")
    if 0 in operand.size:
        raise ValueError(f"{operand.text()} has no elements")
    if prod(operand.size) > _WHOLE:
        raise ValueError(f"{operand.text()} has more than {_WHOLE} elements")
    reach = sum((length - 1) * step for length, step in zip(operand.size, operand.stride, strict=True)) + 1
    if reach > _WHOLE:
        raise ValueError(f"{operand.text()} reaches over more than {_WHOLE} elements")


def _check_constants(op: str, operator: TunableOperator, value: str) -> None:
    for position in value.split(" "):
        if not position.isdecimal() or int(position) not in operator.constants:
            raise ValueError(f"operand {position[:10]} of {op} is never a constant that matters")


# --- matrix products ---------------------------------------------------------------------------------------


def _dense(dtype: str, *size: int) -> Operand:
    return Operand(dtype, size, contiguous(size))


def _same_dtype(operands: Sequence[Operand]) -> str:
    dtypes = sorted({operand.dtype for operand in operands})
    if len(dtypes) > 1:
        raise ValueError(f"operands of {' and '.join(dtypes)}: they have one dtype")
    return dtypes[0]


def _product(a: Operand, b: Operand, rank: int) -> tuple[int, ...]:
    for operand in (a, b):
        if len(operand.size) != rank:
            raise ValueError(f"{operand.text()} has {len(operand.size)} dimensions, not {rank}")
    if a.size[:-2] != b.size[:-2]:
        raise ValueError(f"{a.text()} and {b.text()} do not match: {a.size[0]} matrices and {b.size[0]}")
    if a.size[-1] != b.size[-2]:
        raise ValueError(
            f"{a.text()} and {b.text()} do not match: {a.size[-1]} columns and {b.size[-2]} rows"
        )
    return (*a.size[:-1], b.size[-1])


def _matrix_product(rank: int, result_dtype: str = "") -> Result:
    """The product of two operands, or of three: a bias comes first. result_dtype: '': the operands'."""

    def result(operands: Sequence[Operand], settings: Mapping[str, str]) -> Operand:
        dtype = _same_dtype(operands)
        *biases, a, b = operands
        size = _product(a, b, rank)
        for bias in biases:
            tail = size[len(size) - len(bias.size) :]
            if len(bias.size) > len(size) or any(
                have not in (1, want) for have, want in zip(bias.size, tail, strict=True)
            ):
                raise ValueError(
                    f"{bias.text()} cannot be added to the product, {_dense(dtype, *size).text()}"
                )
        return _dense(result_dtype or dtype, *size)

    return result


def _scaled_mm(operands: Sequence[Operand], settings: Mapping[str, str]) -> Operand:
    a, b, scale_a, scale_b, *bias = operands
    if b.dtype not in FP8:
        raise ValueError(f"scaled_mm of {b.dtype}: it takes {', '.join(FP8)}")
    if a.dtype == b.dtype == "float8_e5m2":
        raise ValueError("scaled_mm has no product of two float8_e5m2")
    m, n = _product(a, b, 2)
    if a.size[1] % 16 or n % 16:
        raise ValueError(f"scaled_mm wants k and n to be multiples of 16, not {a.size[1]} and {n}")
    by_tensor = all(scale.size in ((), (1,), (1, 1)) for scale in (scale_a, scale_b))
    by_row = (scale_a.size, scale_b.size) == ((m, 1), (1, n))
    if {scale_a.dtype, scale_b.dtype} != {"float32"} or not (by_tensor or by_row):
        raise ValueError(
            f"scales {scale_a.text()} and {scale_b.text()}: one f32 for each tensor, or f32[{m},1] and f32[1,{n}]"
        )
    if bias and bias[0].size != (n,):
        raise ValueError(f"the bias is {bias[0].text()}, and the product has {n} columns")
    return _dense("bfloat16", m, n)


def _grouped_mm(operands: Sequence[Operand], settings: Mapping[str, str]) -> Operand:
    a, b, offsets = operands
    if (len(a.size), len(b.size)) != (2, 3):
        raise ValueError(
            f"grouped_mm takes rows of all groups and a matrix for each, not {a.text()} and {b.text()}"
        )
    if a.size[1] != b.size[1]:
        raise ValueError(f"{a.text()} and {b.text()} do not match: {a.size[1]} columns and {b.size[1]} rows")
    if offsets.dtype != "int32" or offsets.size != b.size[:1]:
        raise ValueError(f"the groups' ends are i32[{b.size[0]}], not {offsets.text()}")
    return _dense(_same_dtype([a, b]), a.size[0], b.size[2])


# --- convolution, attention, copy --------------------------------------------------------------------------


def _convolution(operands: Sequence[Operand], settings: Mapping[str, str]) -> Operand:
    x, weight, *bias = operands
    dims = len(x.size) - 2
    if dims not in _SPATIAL or len(weight.size) != len(x.size):
        raise ValueError(f"{x.text()} and {weight.text()} are not an image and a kernel of 1 to 3 dimensions")
    given = {
        name: _numbers(settings.get(f"arg.{name}", repr((default,) * dims)), dims, name)
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0))
    }
    if 0 in given["stride"] or 0 in given["dilation"]:
        raise ValueError("a convolution's stride and dilation are at least 1")
    transposed = settings.get("arg.transposed") == "True"
    _check_output_padding(given, transposed=transposed)
    groups = int(settings.get("arg.groups", "1"))
    channels, outputs = weight.size[1] * groups, weight.size[0]
    if transposed:
        channels, outputs = weight.size[0], weight.size[1] * groups
    if x.size[1] != channels or outputs % groups:
        raise ValueError(
            f"{x.text()} and {weight.text()} do not match: {x.size[1]} channels and {channels} in {groups} groups"
        )
    sizes = []
    for i in range(dims):
        reach = given["dilation"][i] * (weight.size[2 + i] - 1) + 1
        pad, step, length = given["padding"][i], given["stride"][i], x.size[2 + i]
        if transposed:
            out = (length - 1) * step - 2 * pad + reach + given["output_padding"][i]
        else:
            out = (length + 2 * pad - reach) // step + 1
        if out < 1:
            raise ValueError(f"a kernel of {reach} does not fit on {length} with padding {pad}")
        sizes.append(out)
    if bias and bias[0].size != (outputs,):
        raise ValueError(f"the bias is {bias[0].text()}, and there are {outputs} channels")
    size = (x.size[0], outputs, *sizes)
    dtype = _same_dtype(operands)
    last = channels_last(x.size) in (x.stride, weight.stride) and x.stride != contiguous(x.size)
    return Operand(dtype, size, channels_last(size) if last else contiguous(size))


def _check_output_padding(lengths: Mapping[str, Sequence[int]], *, transposed: bool) -> None:
    if not transposed and any(lengths["output_padding"]):
        raise ValueError("only a transposed convolution has output_padding")
    for more, step, spread in zip(
        lengths["output_padding"], lengths["stride"], lengths["dilation"], strict=True
    ):
        if more >= max(step, spread):
            raise ValueError(f"output_padding {more} is not less than stride {step} or dilation {spread}")


def _numbers(text: str, dims: int, name: str) -> tuple[int, ...]:
    numbers = ast.literal_eval(text)  # of a text that the setting's pattern allows
    if len(numbers) != dims:
        raise ValueError(f"{name} {text} is not of {dims} dimensions")
    return tuple(numbers)


def channels_last(size: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor whose channels lie together."""
    inner = contiguous((size[0], *size[2:], size[1]))
    return (inner[0], inner[-1], *inner[1:-1])


def _flex_attention(operands: Sequence[Operand], settings: Mapping[str, str]) -> Operand:
    query, key, value = operands
    for operand in operands:
        if len(operand.size) != 4:
            raise ValueError(f"{operand.text()} is not batch, heads, length, width")
    if key.size[:3] != value.size[:3]:
        raise ValueError(f"keys {key.text()} and values {value.text()} do not match")
    if query.size[0] != key.size[0] or query.size[3] != key.size[3]:
        raise ValueError(f"queries {query.text()} and keys {key.text()} do not match")
    if query.size[1] % key.size[1]:
        raise ValueError(
            f"{query.size[1]} heads of queries are not a multiple of {key.size[1]} heads of keys"
        )
    return _dense(_same_dtype(operands), *query.size[:3], value.size[3])


def _copy(operands: Sequence[Operand], settings: Mapping[str, str]) -> Operand:
    return operands[0]


_TUPLE = r"\((?:[0-9]{1,6}, ){0,2}[0-9]{1,6},?\)"
_PRECISION = "|".join(PRECISIONS)

OPERATORS: dict[str, TunableOperator] = {
    "mm": TunableOperator(_matrix_product(2), (2,), constants=(1,)),
    "addmm": TunableOperator(_matrix_product(2), (3,), constants=(2,)),
    "bmm": TunableOperator(_matrix_product(3), (2,), constants=(1,)),
    "baddbmm": TunableOperator(_matrix_product(3), (3,), constants=(2,)),
    "int_mm": TunableOperator(_matrix_product(2, "int32"), (2,), dtypes=("int8",)),
    "scaled_mm": TunableOperator(
        _scaled_mm, (4, 5), dtypes=FP8, settings={"arg.use_fast_accum": "True|False"}
    ),
    "grouped_mm": TunableOperator(_grouped_mm, (3,), dtypes=("bfloat16", "float16", "float32")),
    "convolution": TunableOperator(
        _convolution,
        (2, 3),
        settings={
            "arg.stride": _TUPLE,
            "arg.padding": _TUPLE,
            "arg.dilation": _TUPLE,
            "arg.output_padding": _TUPLE,
            "arg.transposed": "True|False",
            "arg.groups": "[1-9][0-9]{0,5}",
        },
        constants=(1,),
    ),
    "flex_attention": TunableOperator(
        _flex_attention, (3,), dtypes=("bfloat16", "float16", "float32"), settings={"mask": MASKS}
    ),
    "copy": TunableOperator(_copy, (1,), dtypes=(*FLOATS, "uint8")),
}
"""By the names that tuning.Problem has for them."""
