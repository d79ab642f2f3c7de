"""What PyTorch chooses a kernel of scaled dot product attention by, beside which ones are enabled."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import Unsupported

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
