"""Runs of eager in which the results of operators are off by rounding, up or down at random (Monte Carlo arithmetic).

Compiled code rounds in other places than eager does: a fused kernel keeps in float32 what eager stores in bfloat16. By
how much a value may change for that cannot be seen from one run: of numbers that have their errors in common, one may
be ten times as exact as another.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...torch_internals.dynamo.operators import called_graph, packets, tensors_in, watching_calls
from ...torch_internals.dynamo.tensors.stand_ins import parts


def rounding_at_random(run: int) -> AbstractContextManager[object]:
    """Inside the block, results of operators that round are off by about as much as rounding is. run: its number; each
    has other errors."""
    draws: dict[torch.device, torch.Generator] = {}

    def on_call(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if called := called_graph(operator, args):
            with watching_calls(on_call):
                return called[0](*called[1])
        results = operator(*args, **kwargs)
        packet = getattr(operator, "overloadpacket", None)
        if operator.namespace == "higher_order" or packet in _rounding_operators():
            for value in tensors_in(results):
                for part in parts(value)[0]:
                    if part.dtype.is_floating_point and part.dtype.itemsize > 1:
                        draw = draws.get(part.device)
                        if draw is None:
                            draw = draws[part.device] = torch.Generator(part.device).manual_seed(run)
                        _round(part, draw)
        return results

    return watching_calls(on_call)


def _round(value: torch.Tensor, draw: torch.Generator) -> None:
    # In half precision it is rounded again: then a fifth of the values is off by a unit.
    units = 0.8 if value.dtype.itemsize == 2 else 8.0
    limits = torch.finfo(value.dtype)
    error = torch.rand(value.shape, generator=draw, device=value.device, dtype=value.dtype).sub_(0.5)
    rounded = torch.addcmul(value, value, error, value=units * limits.eps)
    value.copy_(
        rounded.where(value.abs() < limits.max / 2, value)
    )  # the least number is a mask, as infinity is


@functools.cache
def _rounding_operators() -> frozenset[Any]:
    return frozenset(packets(_ROUNDING))


_NORMS = (
    "native_layer_norm native_group_norm _fused_rms_norm native_batch_norm cudnn_batch_norm miopen_batch_norm"
)
_ATTENTION = (
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu"
)
_ACTIVATIONS = (
    "tanh sigmoid gelu silu elu softplus mish hardswish hardsigmoid log_sigmoid _softmax _log_softmax"
)
_POOLS = "avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d upsample_bilinear2d"
_WITH_BACKWARD = f"{_NORMS} {_ATTENTION} {_ACTIVATIONS} {_POOLS} convolution linear"
_ROUNDING = (
    f"{_WITH_BACKWARD} {' '.join(name + '_backward' for name in _WITH_BACKWARD.split())} "
    "_softmax_backward_data _log_softmax_backward_data log_sigmoid_forward batch_norm_backward "
    "_native_batch_norm_legit _batch_norm_with_update mm bmm addmm baddbmm mv addmv dot _grouped_mm _scaled_mm "
    "_addmm_activation add sub rsub mul div addcmul addcdiv lerp pow sqrt rsqrt reciprocal exp exp2 expm1 log log2 "
    "log10 log1p sin cos tan atan2 erf erfinv sum mean var std var_mean std_mean logsumexp cumsum prod "
    "linalg_vector_norm norm dist mse_loss smooth_l1_loss huber_loss nll_loss_forward nll_loss2d_forward"
)
"""Operators whose results are rounded. Not those that only move or compare numbers, whose results may have to be
equal to others."""
