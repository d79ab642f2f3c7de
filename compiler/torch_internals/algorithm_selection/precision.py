"""The precision settings that decide how an operator is computed."""

from __future__ import annotations

from collections.abc import Collection

import torch

from .. import precision


def precision_settings(name: str, device: str, dtypes: Collection[str]) -> dict[str, str]:
    """What else decides how an operator on these dtypes (`torch.float32`) is computed."""
    settings: dict[str, str] = {}
    if "torch.float32" in dtypes:
        settings["precision"] = precision.matmul_precision()
        if device == "cuda" and name == "convolution":
            settings["cudnn.allow_tf32"] = str(precision.read_precisions()[precision.CUDNN_TF32])
    if device == "cuda" and not {"torch.float16", "torch.bfloat16"}.isdisjoint(dtypes):
        matmul = torch.backends.cuda.matmul
        reduced = {
            "fp16": matmul.allow_fp16_reduced_precision_reduction,
            "bf16": matmul.allow_bf16_reduced_precision_reduction,
        }
        if limited := [f"{name}={allowed}" for name, allowed in reduced.items() if allowed is not True]:
            settings["reduced_precision"] = " ".join(limited)
    return settings
