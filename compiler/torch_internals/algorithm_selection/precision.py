"""The precision settings that decide how an operator is computed."""

from __future__ import annotations

from collections.abc import Collection

import torch

from .. import ambient_state


def precision_settings(name: str, device: str, dtypes: Collection[str]) -> dict[str, str]:
    """What else decides how an operator on these dtypes (`torch.float32`) is computed."""
    settings: dict[str, str] = {}
    if "torch.float32" in dtypes:
        settings["precision"] = ambient_state.matmul_precision()
        if device == "cuda" and name == "convolution":
            settings["cudnn.allow_tf32"] = str(ambient_state.read_precisions()[ambient_state.CUDNN_TF32])
    if device == "cuda" and not {"torch.float16", "torch.bfloat16"}.isdisjoint(dtypes):
        matmul = torch.backends.cuda.matmul
        reduced = {
            "fp16": matmul.allow_fp16_reduced_precision_reduction,
            "bf16": matmul.allow_bf16_reduced_precision_reduction,
        }
        if limited := [f"{name}={allowed}" for name, allowed in reduced.items() if allowed is not True]:
            settings["reduced_precision"] = " ".join(limited)
    return settings
