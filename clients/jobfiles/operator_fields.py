"""How each operator is written in a batch job's file: its fields in; its operands and settings out. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from ...compiler.api.tuning.operators import FP8, MASKS, channels_last
from ...compiler.tuning.records import WRITTEN, Operand, contiguous

REQUIRED = object()


class OperatorField(Struct, frozen=True):
    """A field of an entry. `read` raises ValueError. setting: it is also given beside written operands."""

    name: str
    read: Callable[[Any], Any]
    default: Any = REQUIRED
    setting: bool = False


class OperatorForm(Struct, frozen=True):
    """Fields in, operands out; and the settings, by the fields that are settings."""

    fields: list[OperatorField]
    operands: Callable[[Mapping[str, Any]], list[Operand]]
    settings: Callable[[Mapping[str, Any], int], dict[str, str]] = lambda given, dims: {}
    result: Callable[[Mapping[str, Any]], str] = lambda given: ""


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 40:
        raise ValueError(f"{str(value)[:40]!r} is no size")
    return value


def _sizes(least: int) -> Callable[[Any], tuple[int, ...]]:
    """3, which counts for each dimension, or like 56x56."""

    def read(value: Any) -> tuple[int, ...]:
        if not re.fullmatch(r"[0-9]{1,6}(x[0-9]{1,6}){0,2}", str(value)) or isinstance(value, bool):
            raise ValueError(f"{str(value)[:40]!r} is no size like 56 or 56x56")
        found = tuple(map(int, str(value).split("x")))
        if min(found) < least:
            raise ValueError(f"{value} is less than {least}")
        return found

    return read


def _dims(value: Any) -> int:
    if isinstance(value, bool) or value not in (1, 2, 3):
        raise ValueError(f"{str(value)[:40]} is not 1, 2 or 3")
    return int(value)


def _dtype(value: Any) -> str:
    name = WRITTEN.get(str(value), str(value))
    if name not in WRITTEN.values():
        raise ValueError(f"{str(value)[:40]!r} is no dtype; there are {', '.join(sorted(WRITTEN))}")
    return name


def _one_of(*allowed: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"{str(value)[:40]!r}; allowed: {', '.join(allowed)}")
        return str(value)

    return read


def _yes_no(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{str(value)[:40]!r} is not true or false")
    return value


def _mask(value: Any) -> str:
    if not re.fullmatch(MASKS, str(value)):
        raise ValueError(f"{str(value)[:40]!r}; allowed: none, causal, window:256, prefix:128")
    return str(value)


def _matrix(dtype: str, layout: str, *size: int) -> Operand:
    """`layout` of the last two dimensions: row or column after column."""
    if layout == "row":
        return Operand(dtype, size, contiguous(size))
    *outer, rows, columns = size
    *steps, _, _ = contiguous(size)
    return Operand(dtype, (*outer, rows, columns), (*steps, 1, rows))


_M, _N, _K = (OperatorField(name, _size) for name in "mnk")
_DTYPE = OperatorField("dtype", _dtype)
_LAYOUT = _one_of("row", "column")
_A, _B = OperatorField("a", _LAYOUT, "row"), OperatorField("b", _LAYOUT, "row")
_BATCH = OperatorField("batch", _size)


def _product_operands(given: Mapping[str, Any]) -> list[Operand]:
    outer = [given["batch"]] if "batch" in given else []
    m, n, k, dtype = given["m"], given["n"], given["k"], given.get("dtype", "int8")
    operands = [_matrix(dtype, given["a"], *outer, m, k), _matrix(dtype, given["b"], *outer, k, n)]
    if given.get("bias") == "matrix":
        return [_matrix(dtype, "row", *outer, m, n), *operands]
    return [Operand(dtype, (n,), (1,)), *operands] if "bias" in given else operands


def _scaled_operands(given: Mapping[str, Any]) -> list[Operand]:
    m, n, k, dtype = given["m"], given["n"], given["k"], given["dtype"]
    scales = [(m, 1), (1, n)] if given["scales"] == "row" else [(), ()]
    operands = [_matrix(dtype, "row", m, k), _matrix(dtype, "column", k, n)]
    operands += [Operand("float32", size, contiguous(size)) for size in scales]
    return [*operands, Operand("bfloat16", (n,), (1,))] if given["bias"] else operands


def _grouped_operands(given: Mapping[str, Any]) -> list[Operand]:
    m, n, k, groups, dtype = given["m"], given["n"], given["k"], given["groups"], given["dtype"]
    return [
        _matrix(dtype, "row", m, k),
        _matrix(dtype, given["b"], groups, k, n),
        Operand("int32", (groups,), (1,)),
    ]


def _convolution_operands(given: Mapping[str, Any]) -> list[Operand]:
    dims = max(len(given[name]) for name in ("size", "kernel", "stride", "padding", "dilation"))
    dims = given["dims"] or (dims if dims > 1 else 2)
    groups, dtype = given["groups"], given["dtype"]
    inner, outer = given["in"], given["out"]
    if inner % groups or outer % groups:
        raise ValueError(f"{inner} and {outer} channels are not divided by {groups} groups")
    image = (given["batch"], inner, *_spread(given["size"], dims))
    window = _spread(given["kernel"], dims)
    kernel = (inner, outer // groups, *window) if given["transposed"] else (outer, inner // groups, *window)
    strides = channels_last if given["layout"] == "channels_last" else contiguous
    found = [Operand(dtype, image, strides(image)), Operand(dtype, kernel, strides(kernel))]
    return [*found, Operand(dtype, (outer,), (1,))] if given["bias"] else found


def _convolution_settings(given: Mapping[str, Any], dims: int) -> dict[str, str]:
    lists = {name: given[name] for name in ("stride", "padding", "dilation", "output_padding")}
    return {
        **{f"arg.{name}": repr(_spread(value, dims)) for name, value in lists.items()},
        "arg.transposed": str(given["transposed"]),
        "arg.groups": str(given["groups"]),
    }


def _spread(value: tuple[int, ...], dims: int) -> tuple[int, ...]:
    if len(value) not in (1, dims):
        raise ValueError(f"{'x'.join(map(str, value))} is not of {dims} dimensions")
    return value * dims if len(value) == 1 else value


def _attention_operands(given: Mapping[str, Any]) -> list[Operand]:
    dtype, batch, heads = given["dtype"], given["batch"], given["heads"]
    inner, length = given["kv_heads"] or heads, given["keys"] or given["queries"]
    sizes = [
        (batch, heads, given["queries"], given["width"]),
        (batch, inner, length, given["width"]),
        (batch, inner, length, given["value_width"] or given["width"]),
    ]
    return [Operand(dtype, size, contiguous(size)) for size in sizes]


OPERATOR_FORMS: dict[str, OperatorForm] = {
    "mm": OperatorForm([_M, _N, _K, _DTYPE, _A, _B], _product_operands),
    "addmm": OperatorForm(
        [_M, _N, _K, _DTYPE, _A, _B, OperatorField("bias", _one_of("vector", "matrix"), "vector")],
        _product_operands,
    ),
    "bmm": OperatorForm([_BATCH, _M, _N, _K, _DTYPE, _A, _B], _product_operands),
    "baddbmm": OperatorForm(
        [_BATCH, _M, _N, _K, _DTYPE, _A, _B, OperatorField("bias", _one_of("vector", "matrix"), "matrix")],
        _product_operands,
    ),
    "int_mm": OperatorForm([_M, _N, _K, _A, _B], _product_operands),
    "scaled_mm": OperatorForm(
        [
            _M,
            _N,
            _K,
            OperatorField("dtype", _dtype, FP8[0]),
            OperatorField("scales", _one_of("tensor", "row"), "tensor"),
            OperatorField("bias", _yes_no, False),
            OperatorField("out", _dtype, "bfloat16", setting=True),
            OperatorField("fast_accum", _yes_no, False, setting=True),
        ],
        _scaled_operands,
        lambda given, dims: {"arg.use_fast_accum": str(given["fast_accum"])},
        lambda given: str(given["out"]),
    ),
    "grouped_mm": OperatorForm([OperatorField("groups", _size), _M, _N, _K, _DTYPE, _B], _grouped_operands),
    "convolution": OperatorForm(
        [
            _BATCH,
            OperatorField("in", _size),
            OperatorField("out", _size),
            OperatorField("size", _sizes(1)),
            OperatorField("kernel", _sizes(1)),
            _DTYPE,
            OperatorField("dims", _dims, 0),
            OperatorField("bias", _yes_no, False),
            OperatorField("layout", _one_of("channels_first", "channels_last"), "channels_first"),
            OperatorField("stride", _sizes(1), (1,), setting=True),
            OperatorField("padding", _sizes(0), (0,), setting=True),
            OperatorField("dilation", _sizes(1), (1,), setting=True),
            OperatorField("output_padding", _sizes(0), (0,), setting=True),
            OperatorField("transposed", _yes_no, False, setting=True),
            OperatorField("groups", _size, 1, setting=True),
        ],
        _convolution_operands,
        _convolution_settings,
    ),
    "flex_attention": OperatorForm(
        [
            _BATCH,
            OperatorField("heads", _size),
            OperatorField("kv_heads", _size, 0),
            OperatorField("queries", _size),
            OperatorField("keys", _size, 0),
            OperatorField("width", _size),
            OperatorField("value_width", _size, 0),
            _DTYPE,
            OperatorField("mask", _mask, "none", setting=True),
        ],
        _attention_operands,
        lambda given, dims: {"mask": given["mask"]},
    ),
}
