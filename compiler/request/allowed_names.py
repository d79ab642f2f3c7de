"""Stage 2: small closed sets of names that a request may hold besides operators; torch-free data.

Values of torch's own enumerations change with its versions; a name that a version lacks fails when the worker
decodes it, as an Unsupported request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping


def words(text: str) -> list[str]:
    return text.split()


DTYPE_BYTES: Mapping[str, int] = {
    name: size
    for size, names in (
        (1, "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"),
        (2, "uint16 int16 float16 bfloat16"),
        (4, "uint32 int32 float32 complex32"),
        (8, "uint64 int64 float64 complex64"),
        (16, "complex128"),
    )
    for name in words(names)
}
"""dtype name (torch.<name>) -> bytes of an element."""

DIFFERENTIABLE = frozenset(
    name
    for name in DTYPE_BYTES
    if name.startswith(("float", "bfloat", "complex")) and name != "float8_e8m0fnu"
)
"""dtypes whose tensors may require gradients."""

DEVICES = frozenset({"cpu", "cuda", "meta"})
MEMORY_FORMATS = frozenset({"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"})
LAYOUTS = frozenset({"strided"})

ATTRIBUTES = frozenset(
    words(
        "H T data device dtype grad imag is_cpu is_cuda is_leaf is_sparse itemsize layout mH mT nbytes "
        "ndim real requires_grad shape"
    )
)
"""What `builtins.getattr` in a graph may read of a node's value: no dunder, no method."""

SDPA_BACKENDS = frozenset(
    words("CUDNN_ATTENTION EFFICIENT_ATTENTION ERROR FLASH_ATTENTION MATH OVERRIDEABLE")
)

NUMPY_ATTRIBUTES = frozenset(words("T flat imag real shape size strides"))
"""What a graph may read of an array of NumPy code."""

TEXT_ARGUMENTS: Mapping[str, tuple[int, frozenset[str]]] = {
    "builtins.getattr": (1, ATTRIBUTES),
    "torch._dynamo.utils.numpy_attr_wrapper": (1, NUMPY_ATTRIBUTES),
    "torch.nn.attention._backend_from_string": (0, SDPA_BACKENDS),
}
"""Functions that look up a name: the argument's position (it is the last) and the names allowed."""

DTENSOR_CALLS = frozenset({"torchrelay.from_local", "torchrelay.redistribute", "torchrelay.to_local"})
"""Methods of DTensor that a graph with meshes may call; compiler/request/meshes.py has their arguments."""

PLACEMENT = re.compile(r"R|S-?[0-9]{1,2}|P(sum|avg|product|max|min)", re.ASCII)
"""How a tensor lies in one dimension of a mesh: replicated, sharded along a dimension, or partial (to be reduced)."""

TRITON_CALL = "torch.ops.higher_order.triton_kernel_wrapper_mutation"
"""A call of a user-written Triton kernel: in no table, for its callers need a permission of their own."""

TRITON_DTYPES = frozenset(
    words(
        "bfloat16 float16 float32 float64 float8e4b15 float8e4b8 float8e4nv float8e5 float8e5b16 int1 int16 int32 "
        "int64 int8 uint16 uint32 uint64 uint8 void"
    )
)
"""Names of triton.language that are dtypes."""

MATMUL_PRECISIONS = frozenset({"highest", "high", "medium"})

AMBIENT_FLAGS = frozenset(
    words(
        "cuda.matmul.allow_bf16_reduced_precision_reduction cuda.matmul.allow_fp16_reduced_precision_reduction "
        "cudnn.allow_tf32 cudnn.benchmark cudnn.deterministic cudnn.enabled mkldnn.enabled "
        "sdp.cudnn sdp.flash sdp.math sdp.math_reduced_precision sdp.mem_efficient"
    )
)
"""Names of `Ambient.flags` whose values are bools."""

FP32_PRECISION = re.compile(
    r"fp32_precision\.(generic\.all|cuda\.(all|matmul|conv|rnn)|mkldnn\.(all|matmul|conv|rnn))", re.ASCII
)
"""Names of `Ambient.flags` whose values are in FP32_PRECISIONS."""

FP32_PRECISIONS = frozenset({"ieee", "tf32", "bf16"})

AUTOCAST_DTYPE = "autocast_dtype."
"""Names of `Ambient.flags` whose values are dtypes begin with it, and end with a device's type."""

TEXT_FLAGS: Mapping[str, re.Pattern[str]] = {
    "opt_einsum.strategy": re.compile("auto|greedy|optimal"),
    "sdp.priority": re.compile("[0-4]( [0-4]){4}"),
}
"""Names of `Ambient.flags` whose values are other texts."""

MAX_TEXT = 1024
"""Characters of one string argument."""

TEXT = re.compile(r'[^"\\\x00-\x1f\x7f]*')
"""What a string argument may hold: Inductor writes assertion messages into C++ between quotes, unescaped."""

OPTION_TEXT = re.compile(r"[A-Za-z0-9_.' -]{0,64}", re.ASCII)
"""What a higher-order operator's string may hold: flex_attention's kernel options become kernel code."""

IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)
INSTRUCTION_SET = re.compile(r"[a-z0-9_.]{1,40}", re.ASCII)

UNBACKED_PATH = re.compile(
    r"(\[[0-9]{1,4}\]){0,8}(\.(size|stride|storage_offset)\(\)(\[[0-9]{1,2}\])?)?", re.ASCII
)
"""Where a size is in a node's value."""
DEVICE_TEXT = re.compile(r"(cpu|cuda|meta):([0-9]{1,4})", re.ASCII)
"""A device with an index, as text: never on the wire, where a device is a DeviceArg without an index."""
