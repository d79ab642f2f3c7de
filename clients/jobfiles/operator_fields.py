"""How each operator is written in a tuning job's file: its fields, the operands and settings that they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from ...compiler.api.tuning.operators import FP8, MASKS, channels_last
from ...compiler.tuning.records import WRITTEN, Operand, contiguous

_DTYPES = "|".join(sorted({*WRITTEN, *WRITTEN.values()}))

Size = Annotated[int, Meta(ge=1, le=1 << 40)]
DType = Annotated[str, Meta(pattern=f"^({_DTYPES})$", description=_DTYPES.replace("|", ", "))]
Layout = Literal["row", "column"]
Bias = Literal["vector", "matrix"]
Lengths = Annotated[
    str, Meta(pattern="^[1-9][0-9]{0,5}(x[1-9][0-9]{0,5}){0,2}$", description="a size like 56 or 56x56")
]
Paddings = Annotated[
    str, Meta(pattern="^[0-9]{1,6}(x[0-9]{1,6}){0,2}$", description="a size like 0, 56 or 56x56")
]


class OperatorFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of an entry. The methods raise ValueError if fields do not go together."""

    def operands(self) -> list[Operand]:
        return []

    def settings(self, dims: int) -> dict[str, str]:
        """dims: of a convolution."""
        return {}

    def result(self) -> str:
        """The result's dtype; '': that of the operands."""
        return ""


class IntegerProduct(OperatorFields, frozen=True, kw_only=True):
    m: Size
    n: Size
    k: Size
    a: Layout = "row"
    b: Layout = "row"

    def operands(self) -> list[Operand]:
        return self.matrices("int8")

    def matrices(self, dtype: str, *batch: int) -> list[Operand]:
        left = _matrix(dtype, self.a, *batch, self.m, self.k)
        return [left, _matrix(dtype, self.b, *batch, self.k, self.n)]


class Product(IntegerProduct, frozen=True, kw_only=True):
    dtype: DType

    def operands(self) -> list[Operand]:
        return self.matrices(self.dtype)


class BatchedProduct(Product, frozen=True, kw_only=True):
    batch: Size

    def operands(self) -> list[Operand]:
        return self.matrices(self.dtype, self.batch)


class ProductWithBias(Product, frozen=True, kw_only=True):
    bias: Bias = "vector"

    def operands(self) -> list[Operand]:
        size = (self.n,) if self.bias == "vector" else (self.m, self.n)
        return [_tensor(self.dtype, *size), *super().operands()]


class BatchedProductWithBias(BatchedProduct, frozen=True, kw_only=True):
    bias: Bias = "matrix"

    def operands(self) -> list[Operand]:
        size = (self.n,) if self.bias == "vector" else (self.batch, self.m, self.n)
        return [_tensor(self.dtype, *size), *super().operands()]


class ScaledProductSettings(OperatorFields, frozen=True, kw_only=True):
    out: DType = "bfloat16"
    fast_accum: bool = False

    def settings(self, dims: int) -> dict[str, str]:
        return {"arg.use_fast_accum": str(self.fast_accum)}

    def result(self) -> str:
        return WRITTEN.get(self.out, self.out)


class ScaledProduct(ScaledProductSettings, frozen=True, kw_only=True):
    m: Size
    n: Size
    k: Size
    dtype: DType = FP8[0]
    scales: Literal["tensor", "row"] = "tensor"
    bias: bool = False

    def operands(self) -> list[Operand]:
        scales = [(self.m, 1), (1, self.n)] if self.scales == "row" else [(), ()]
        return [
            _matrix(self.dtype, "row", self.m, self.k),
            _matrix(self.dtype, "column", self.k, self.n),
            *(_tensor("float32", *size) for size in scales),
            *([_tensor("bfloat16", self.n)] if self.bias else []),
        ]


class GroupedProduct(OperatorFields, frozen=True, kw_only=True):
    """m: rows of all groups together."""

    groups: Size
    m: Size
    n: Size
    k: Size
    dtype: DType
    b: Layout = "row"

    def operands(self) -> list[Operand]:
        return [
            _matrix(self.dtype, "row", self.m, self.k),
            _matrix(self.dtype, self.b, self.groups, self.k, self.n),
            _tensor("int32", self.groups),
        ]


class ConvolutionSettings(OperatorFields, frozen=True, kw_only=True):
    stride: Lengths = "1"
    padding: Paddings = "0"
    dilation: Lengths = "1"
    output_padding: Paddings = "0"
    transposed: bool = False
    groups: Size = 1

    def settings(self, dims: int) -> dict[str, str]:
        lengths = ("stride", "padding", "dilation", "output_padding")
        return {
            **{f"arg.{name}": str(_lengths(getattr(self, name), dims)) for name in lengths},
            "arg.transposed": str(self.transposed),
            "arg.groups": str(self.groups),
        }


class Convolution(ConvolutionSettings, frozen=True, kw_only=True):
    """dims: of the image; 0: as many as a field like `56x56` has, else 2."""

    batch: Size
    inputs: Size = msgspec.field(name="in")
    outputs: Size = msgspec.field(name="out")
    size: Lengths
    kernel: Lengths
    dtype: DType
    dims: Annotated[int, Meta(ge=0, le=3)] = 0
    bias: bool = False
    layout: Literal["channels_first", "channels_last"] = "channels_first"

    def operands(self) -> list[Operand]:
        if self.inputs % self.groups or self.outputs % self.groups:
            raise ValueError(
                f"{self.inputs} and {self.outputs} channels are not divided by {self.groups} groups"
            )
        written = (self.size, self.kernel, self.stride, self.padding, self.dilation)
        longest = max(text.count("x") + 1 for text in written)
        dims = self.dims or (longest if longest > 1 else 2)
        channels = (self.outputs, self.inputs // self.groups)
        if self.transposed:
            channels = (self.inputs, self.outputs // self.groups)
        image = (self.batch, self.inputs, *_lengths(self.size, dims))
        kernel = (*channels, *_lengths(self.kernel, dims))
        strides = channels_last if self.layout == "channels_last" else contiguous
        dtype = WRITTEN.get(self.dtype, self.dtype)
        return [
            Operand(dtype, image, strides(image)),
            Operand(dtype, kernel, strides(kernel)),
            *([_tensor(dtype, self.outputs)] if self.bias else []),
        ]


class AttentionSettings(OperatorFields, frozen=True, kw_only=True):
    mask: Annotated[str, Meta(pattern=f"^({MASKS})$", description="none, causal, window:256, prefix:128")] = (
        "none"
    )

    def settings(self, dims: int) -> dict[str, str]:
        return {"mask": self.mask}


class Attention(AttentionSettings, frozen=True, kw_only=True):
    batch: Size
    heads: Size
    kv_heads: Size | None = None
    queries: Size
    keys: Size | None = None
    width: Size
    value_width: Size | None = None
    dtype: DType

    def operands(self) -> list[Operand]:
        heads, keys = self.kv_heads or self.heads, self.keys or self.queries
        return [
            _tensor(self.dtype, self.batch, self.heads, self.queries, self.width),
            _tensor(self.dtype, self.batch, heads, keys, self.width),
            _tensor(self.dtype, self.batch, heads, keys, self.value_width or self.width),
        ]


FIELDS: dict[str, type[OperatorFields]] = {
    "mm": Product,
    "addmm": ProductWithBias,
    "bmm": BatchedProduct,
    "baddbmm": BatchedProductWithBias,
    "int_mm": IntegerProduct,
    "scaled_mm": ScaledProduct,
    "grouped_mm": GroupedProduct,
    "convolution": Convolution,
    "flex_attention": Attention,
}
SETTINGS: dict[str, type[OperatorFields]] = {
    "scaled_mm": ScaledProductSettings,
    "convolution": ConvolutionSettings,
    "flex_attention": AttentionSettings,
}
"""The fields of an entry that also has `operands`; the other operators have none."""


def _tensor(dtype: str, *size: int) -> Operand:
    return Operand(WRITTEN.get(dtype, dtype), size, contiguous(size))


def _matrix(dtype: str, layout: Layout, *size: int) -> Operand:
    """layout: of the last two dimensions, row after row or column after column."""
    if layout == "row":
        return _tensor(dtype, *size)
    *steps, _, _ = contiguous(size)
    return Operand(WRITTEN.get(dtype, dtype), size, (*steps, 1, size[-2]))


def _lengths(text: str, dims: int) -> Sequence[int]:
    """The lengths in `56x40`, or in `56` for every dimension. Raises ValueError."""
    lengths = tuple(map(int, text.split("x")))
    if len(lengths) not in (1, dims):
        raise ValueError(f"{text} is not of {dims} dimensions")
    return lengths * dims if len(lengths) == 1 else lengths
