"""Ambient state in private parts of PyTorch: precision of products, choice of attention's kernels, multiprocessors.

Each is read here, and a process is set to what another one has read. Precision of float32 products has two interfaces.
The older interface is torch.set_float32_matmul_precision and torch.backends.cudnn.allow_tf32. The newer one is
`fp32_precision` of torch.backends and of its parts, which Inductor reads. Each setting of the older one changes some of
the newer one's values; the getters of the older one raise RuntimeError where the newer one has been set otherwise.
So a state is what the older one says, and the values of the newer one that do not follow from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import Unsupported

_PARTS = (
    ("generic", "all"),
    *((backend, part) for backend in ("cuda", "mkldnn") for part in ("all", "matmul", "conv", "rnn")),
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


def precision_settings(name: str, device: str, dtypes: Collection[str]) -> dict[str, str]:
    """What else decides how an operator on these dtypes (`torch.float32`) is computed."""
    settings: dict[str, str] = {}
    if "torch.float32" in dtypes:
        settings["precision"] = matmul_precision()
        if device == "cuda" and name == "convolution":
            settings["cudnn.allow_tf32"] = str(read_precisions()[CUDNN_TF32])
    if device == "cuda" and not {"torch.float16", "torch.bfloat16"}.isdisjoint(dtypes):
        matmul = torch.backends.cuda.matmul
        reduced = {
            "fp16": matmul.allow_fp16_reduced_precision_reduction,
            "bf16": matmul.allow_bf16_reduced_precision_reduction,
        }
        if limited := [f"{name}={allowed}" for name, allowed in reduced.items() if allowed is not True]:
            settings["reduced_precision"] = " ".join(limited)
    return settings


# --- scaled dot product attention ------------------------------------------------------------------------

MATH_REDUCED = "sdp.math_reduced_precision"
PRIORITY = "sdp.priority"

_DEFAULT_PRIORITY = "1 2 0 3 4"
"""Numbers of torch.nn.attention.SDPBackend: flash, memory-efficient, math, cuDNN, overrideable (at::Context)."""

_settled = False


def read_choices() -> dict[str, bool | int | str]:
    """Flags, each only if it is not PyTorch's default.

    `sdp.math_reduced_precision` (torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp) and `sdp.priority`
    (torch.nn.attention.sdpa_kernel with set_priority): the backends' numbers. Raises Unsupported where FlashAttention 3
    has taken the place of PyTorch's kernel.
    """
    if getattr(torch._C, "_get_fa3_sdp_enabled", bool)():
        raise Unsupported("scaled dot product attention by FlashAttention 3")
    _settle_priority()
    found: dict[str, bool | int | str] = {}
    if torch._C._get_math_sdp_allow_fp16_bf16_reduction():
        found[MATH_REDUCED] = True
    priority = " ".join(map(str, torch._C._get_sdp_priority_order()))
    if priority != _DEFAULT_PRIORITY:
        found[PRIORITY] = priority
    return found


def apply_choices(flags: Mapping[str, bool | int | str]) -> None:
    """Set this process to what `read_choices` read; other flags are ignored."""
    _settle_priority()
    torch._C._set_math_sdp_allow_fp16_bf16_reduction(bool(flags.get(MATH_REDUCED, False)))
    priority = str(flags.get(PRIORITY, _DEFAULT_PRIORITY)).split()
    torch._C._set_sdp_priority_order([int(number) for number in priority])


def _settle_priority() -> None:
    """Make PyTorch choose its order for this GPU now. It does so once, at a process' first attention on a GPU: on some
    (Hopper), that puts cuDNN first, whatever order was set before (priority_order in sdp_utils.cpp)."""
    global _settled
    if _settled or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    with _disable_current_modes(), torch.no_grad():
        query = torch.empty(1, 1, 1, 8, dtype=torch.float16, device="cuda")
        torch._fused_sdp_choice(query, query, query)
    _settled = True


# --- multiprocessors -------------------------------------------------------------------------------------


def sm_carveout() -> int:
    """Multiprocessors that Inductor's persistent kernels leave to others (torch._C._get_sm_carveout_experimental)."""
    return torch._C._get_sm_carveout_experimental() or 0
