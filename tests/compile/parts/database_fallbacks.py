"""The cases of PyTorch's databases that may fall back to local compilation, each with its reason.

A case that falls back and is not here is a failure, and so is one that is here and no longer falls back.
"""

from __future__ import annotations

from collections.abc import Mapping

UNCHECKED_INDICES = "its compiled code trusts its indices: it could read and write any memory of a worker"
NOT_PYTORCHS = (
    "an operator that a program registers: a worker does not have it, and never runs a program's code"
)
ASSEMBLY = "its argument is GPU assembly, which nothing checks"
JOINT_GRAPH = (
    "graphs made by AOTAutograd whose nodes say which pass they belong to; users call flex_attention"
)

TORCH_NN = "an operator of PyTorch's library torch_nn, written in Python, which is not in the table"

ALLOWED: Mapping[str, str] = {
    "operators/_unsafe_masked_index": UNCHECKED_INDICES,
    "operators/_unsafe_masked_index_put_accumulate": UNCHECKED_INDICES,
    "operators/nn.functional.linear_cross_entropy.chunked": TORCH_NN,
    "operators/nn.functional.linear_cross_entropy.chunked_none": TORCH_NN,
    **{
        f"dtypes/nn.functional.linear_cross_entropy.chunked {dtype}": TORCH_NN
        for dtype in ("float64", "bfloat16", "float16")
    },
    "higher-order/auto_functionalize.simple": NOT_PYTORCHS,
    "higher-order/flex_attention_backward.simple": JOINT_GRAPH,
    "higher-order/flex_attention_backward.explicit_buffers": JOINT_GRAPH,
    "higher-order/inline_asm_elementwise.simple": ASSEMBLY,
    "custom/NumpyCubeCustomOp": NOT_PYTORCHS,
    "custom/NumpyMulCustomOp": NOT_PYTORCHS,
    "custom/NumpyMulScalarCustomOp": NOT_PYTORCHS,
    "custom/NumpySortCustomOp": NOT_PYTORCHS,
    "custom/NumpyTakeCustomOp": NOT_PYTORCHS,
    "custom/NumpyViewCopyCustomOp": NOT_PYTORCHS,
    "custom/NumpyCatCustomOp": NOT_PYTORCHS,
    "custom/NumpySplitCopyCustomOp": NOT_PYTORCHS,
    "custom/NumpySplitCopyWithIntCustomOp": NOT_PYTORCHS,
}
