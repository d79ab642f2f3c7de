"""Precision of float32 products: read both of PyTorch's interfaces, and set a process to what another one reads.

The older interface is torch.set_float32_matmul_precision and torch.backends.cudnn.allow_tf32. The newer one is
`fp32_precision` of torch.backends and of its parts, which Inductor reads. Each setting of the older one changes some of
the newer one's values; the getters of the older one raise RuntimeError where the newer one has been set otherwise.
So a state is what the older one says, and the values of the newer one that do not follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

_PARTS = (
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)
"""(backend, operator) of torch._C._get_fp32_precision_getter; the wider ones first, because the others inherit."""

CUDNN_TF32 = "cudnn.allow_tf32"
_PREFIX = "fp32_precision."


def matmul_precision() -> str:
    """torch.get_float32_matmul_precision(); where it raises, the value that CUDA's products have."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if _get("cuda", "matmul") == "tf32" else "highest"


def read_precisions() -> dict[str, bool | int | str]:
    """Flags: `cudnn.allow_tf32`, and `fp32_precision.BACKEND.OPERATOR` where it does not follow from the others."""
    try:
        cudnn = bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        cudnn = _get("cuda", "conv") == "tf32"
    implied = _implied(matmul_precision(), cudnn)
    different = {
        f"{_PREFIX}{backend}.{operator}": value
        for backend, operator in _PARTS
        if (value := _get(backend, operator)) != implied[backend, operator]
    }
    return {CUDNN_TF32: cudnn, **different}


def apply_precisions(matmul: str, flags: Mapping[str, bool | int | str]) -> None:
    """Set this process to a state that was read by matmul_precision and read_precisions; other flags are ignored."""
    cudnn = bool(flags.get(CUDNN_TF32, True))
    wanted = _implied(matmul, cudnn)
    for backend, operator in _PARTS:
        wanted[backend, operator] = str(
            flags.get(f"{_PREFIX}{backend}.{operator}", wanted[backend, operator])
        )
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = cudnn
    for backend, operator in _PARTS:
        if _get(backend, operator) != wanted[backend, operator]:
            torch._C._set_fp32_precision_setter(backend, operator, wanted[backend, operator])


def _get(backend: str, operator: str) -> str:
    """The value in force; "none" and "ieee" are one: full precision."""
    value: str = torch._C._get_fp32_precision_getter(backend, operator)
    return "ieee" if value == "none" else value


def _implied(matmul: str, cudnn: bool) -> dict[tuple[str, str], str]:
    """What the newer interface gives where only the older one was used (at::Context::setFloat32MatmulPrecision)."""
    values = dict.fromkeys(_PARTS, "ieee")
    values["cuda", "matmul"] = {"highest": "ieee"}.get(matmul, "tf32")
    values["mkldnn", "matmul"] = {"highest": "ieee", "high": "tf32"}.get(matmul, "bf16")
    values["cuda", "conv"] = values["cuda", "rnn"] = "tf32" if cudnn else "ieee"
    return values
