"""A back end of one's own, in NumPy: it asks torchrelay for a graph in prims, and interprets these.

    python examples/numpy_prims.py

PrimTorch's prims have no type promotion and no implicit broadcasting, so most are one NumPy function. What PyTorch does
not decompose (matrix products, convolutions, gathers) is at the end. For inference on float32, integers and booleans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torchrelay
from numpy.lib.stride_tricks import sliding_window_view

Array = Any
"""numpy.ndarray, or a Python number."""


def numpy_prims(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """`torch.compile(model, backend=numpy_prims)`. Raises NotImplementedError for an operator that is not in
    OPERATORS."""
    lowered = torchrelay.lower_graph(gm, example_inputs, level="prims")
    prims = lowered.graph_module("prims")
    unknown = {str(node.target) for node in prims.graph.nodes if node.op == "call_function"}
    if unknown := sorted(name for name in unknown - OPERATORS.keys() if "getitem" not in name):
        raise NotImplementedError(f"no NumPy for {', '.join(unknown)}")

    def run(*inputs: Any) -> tuple[Any, ...]:
        values = [value.detach().numpy() if isinstance(value, torch.Tensor) else value for value in inputs]
        results = [as_tensor(value) for value in Interpreter(prims).run(*values)]
        for position, value in zip(lowered.mutated, results, strict=False):
            inputs[position].copy_(value)
        return tuple(results[len(lowered.mutated) :][: lowered.outputs])

    return run


class Interpreter(torch.fx.Interpreter):
    """Runs a graph of prims on arrays."""

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().get_attr(target, args, kwargs).detach().numpy()

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        operator = OPERATORS.get(str(target))
        with np.errstate(all="ignore"):
            return target(*args, **kwargs) if operator is None else operator(*args, **kwargs)


def as_tensor(value: Any) -> Any:
    return (
        torch.from_numpy(np.array(value, order="C")) if isinstance(value, np.ndarray | np.generic) else value
    )


def dtype_of(dtype: torch.dtype) -> Any:
    return torch.empty(0, dtype=dtype).numpy().dtype


# --- prims ---------------------------------------------------------------------------------------------------------


def typed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A prim returns the type of its arrays; a number beside them has no type of its own."""

    def call(*args: Any, **kwargs: Any) -> Any:
        kind = next(value.dtype for value in args if hasattr(value, "dtype"))
        numbers = (np.asarray(value, kind) if isinstance(value, int | float) else value for value in args)
        return np.asarray(function(*numbers, **kwargs)).astype(kind, copy=False)

    return call


def div(a: Array, b: Array) -> Array:
    kind = np.result_type(a)
    return np.trunc(np.true_divide(a, b)).astype(kind) if kind.kind in "iu" else np.divide(a, b)


def broadcast_in_dim(a: Array, shape: Sequence[int], dimensions: Sequence[int]) -> Array:
    wide = [1] * len(shape)
    for position, dimension in enumerate(dimensions):
        wide[dimension] = np.shape(a)[position]
    return np.broadcast_to(np.reshape(a, wide), shape)


def var(a: Array, dims: Sequence[int], correction: float = 1) -> Array:
    count = math.prod(a.shape[dim] for dim in dims)
    return np.asarray(a.var(axis=tuple(dims)) * count / max(count - correction, 0))


def reduced(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(a: Array, dims: Sequence[int], *, output_dtype: torch.dtype | None = None) -> Array:
        kind = a.dtype if output_dtype is None else dtype_of(output_dtype)
        return np.asarray(function(a, axis=tuple(dims))).astype(kind, copy=False)

    return call


def split_dim(a: Array, dim: int, outer: int) -> Array:
    return a.reshape(*a.shape[:dim], outer, a.shape[dim] // outer, *a.shape[dim + 1 :])


def collapse_view(a: Array, start: int, end: int) -> Array:
    return a.reshape(*a.shape[:start], math.prod(a.shape[start : end + 1]), *a.shape[end + 1 :])


def iota(length: int, *, start: int, step: int, dtype: torch.dtype, **_: Any) -> Array:
    return start + step * np.arange(length, dtype=dtype_of(dtype))


def copy_to(target: Array, source: Array) -> Array:
    target[...] = source
    return target


def filled(shape: Sequence[int], value: Any, *, dtype: torch.dtype, **_: Any) -> Array:
    return np.full(shape, value, dtype_of(dtype))


# --- what PyTorch does not decompose ---------------------------------------------------------------------------------


def as_strided(a: Array, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Array:
    """PyTorch reshapes by it, and then `a` is contiguous."""
    flat = np.ascontiguousarray(a).reshape(-1)[offset or 0 :]
    steps = [step * flat.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(flat, size, steps)


def index(a: Array, indices: Sequence[Array | None]) -> Array:
    return a[tuple(slice(None) if each is None else each for each in indices)]


def sliced(a: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    return a[(*[slice(None)] * (dim % a.ndim), slice(start, end, step))]


def maximum(a: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    return a.max(axis=dim, keepdims=keepdim), a.argmax(axis=dim, keepdims=keepdim)


def windows(a: Array, size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Array:
    """[batch, channel, *positions, *size]: each place that a kernel of `size` sees."""
    dims = range(2, a.ndim)
    reach = [1 + spread * (length - 1) for length, spread in zip(size, dilation, strict=True)]
    seen = sliding_window_view(a, reach, axis=tuple(dims))
    steps = [slice(None, None, step) for step in stride]
    return seen[(slice(None), slice(None), *steps, *(slice(None, None, spread) for spread in dilation))]


def convolution(
    a: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    rank = a.ndim - 2
    stride, padding, dilation, extra = (
        [*each] * (rank // len(each)) for each in (stride, padding, dilation, output_padding)
    )
    if transposed:  # the gradient of a convolution: spread the input, turn the kernel around
        spread = np.zeros(
            (
                *a.shape[:2],
                *(1 + step * (length - 1) for step, length in zip(stride, a.shape[2:], strict=True)),
            ),
            a.dtype,
        )
        spread[(slice(None), slice(None), *(slice(None, None, step) for step in stride))] = a
        reach = [step * (length - 1) for step, length in zip(dilation, weight.shape[2:], strict=True)]
        edges = [(far - pad, far - pad + more) for far, pad, more in zip(reach, padding, extra, strict=True)]
        a, stride = np.pad(spread, [(0, 0), (0, 0), *edges]), [1] * rank
        weight = np.flip(weight, tuple(range(2, weight.ndim)))
        split = np.split(weight, groups)
        weight = np.concatenate([np.swapaxes(each, 0, 1) for each in split])
    else:
        a = np.pad(a, [(0, 0), (0, 0), *((pad, pad) for pad in padding)])
    outputs = []
    for part, kernel in zip(np.split(a, groups, 1), np.split(weight, groups), strict=True):
        seen = windows(part, kernel.shape[2:], stride, dilation)
        inside = [1, *range(2 + rank, 2 + 2 * rank)]
        outputs.append(np.moveaxis(np.tensordot(seen, kernel, (inside, list(range(1, 2 + rank)))), -1, 1))
    result = np.concatenate(outputs, 1)
    return result if bias is None else result + bias.reshape(-1, *[1] * rank)


def avg_pool2d(a: Array, size: Sequence[int], stride: Sequence[int] = (), *_: Any) -> Array:
    """Without padding."""
    return windows(a, size, list(stride) or size, [1] * len(size)).mean(axis=(-2, -1), dtype=a.dtype)


# --- the table -----------------------------------------------------------------------------------------------------

_PRIMS: dict[str, Callable[..., Any]] = {
    **{
        name: typed(getattr(np, name))
        for name in ("ceil", "cos", "exp", "expm1", "floor", "log", "log1p", "sin")
    },
    **{
        name: typed(getattr(np, name)) for name in ("fmod", "maximum", "minimum", "remainder", "sqrt", "tanh")
    },
    "abs": typed(np.abs),
    "add": typed(np.add),
    "div": typed(div),
    "erf": typed(np.vectorize(math.erf, otypes=[np.float64])),
    "mul": typed(np.multiply),
    "neg": typed(np.negative),
    "pow": typed(np.power),
    "reciprocal": typed(lambda a: 1 / a),
    "rsqrt": typed(lambda a: 1 / np.sqrt(a)),
    "sub": typed(np.subtract),
    **{name: getattr(np, name) for name in ("bitwise_and", "bitwise_not", "bitwise_or", "signbit", "where")},
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "ne": np.not_equal,
    "amax": reduced(np.max),
    "amin": reduced(np.min),
    "sum": reduced(np.sum),
    "var": typed(var),
    "broadcast_in_dim": broadcast_in_dim,
    "cat": np.concatenate,
    "clone": lambda a, **_: np.array(a),
    "collapse_view": collapse_view,
    "convert_element_type": lambda a, dtype: np.asarray(a).astype(dtype_of(dtype)),
    "copy_to": copy_to,
    "empty_strided": lambda shape, strides, *, dtype, **_: np.empty(shape, dtype_of(dtype)),
    "iota": iota,
    "scalar_tensor": lambda value, *, dtype, **_: np.asarray(value, dtype_of(dtype)),
    "split_dim": split_dim,
    "squeeze": lambda a, dims: np.squeeze(a, tuple(dims)),
    "transpose": np.transpose,
    "view_of": lambda a: a,
}
_ATEN: dict[str, Callable[..., Any]] = {
    "as_strided.default": as_strided,
    "avg_pool2d.default": avg_pool2d,
    "bmm.default": np.matmul,
    "convolution.default": convolution,
    "empty.memory_format": lambda shape, *, dtype=torch.float32, **_: np.empty(shape, dtype_of(dtype)),
    "full_like.default": lambda a, value, **_: np.full_like(a, value),
    "gather.default": lambda a, dim, indices: np.take_along_axis(a, indices, dim),
    "index.Tensor": index,
    "max.dim": maximum,
    "mm.default": np.matmul,
    "scalar_tensor.default": lambda value, *, dtype=torch.float32, **_: np.asarray(value, dtype_of(dtype)),
    "slice.Tensor": sliced,
    "select.int": lambda a, dim, position: np.take(a, position, dim),
}
OPERATORS = {
    **{f"prims.{name}.default": function for name, function in _PRIMS.items()},
    **{f"aten.{name}": function for name, function in _ATEN.items()},
}
"""Operator -> NumPy."""


if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 2)
    )
    rows = torch.randn(4, 8)
    with torch.no_grad():
        expected, computed = model(rows), torch.compile(model, backend=numpy_prims)(rows)
    print(f"eager and NumPy differ by {(expected - computed).abs().max():.1e} at most")
