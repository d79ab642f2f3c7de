"""Compares numerical results: tolerances by dtype, random inputs, and the difference of two values."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import VerifyFailed

TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-6,
    torch.complex128: 1e-6,
    torch.float32: 5e-3,
    torch.complex64: 5e-3,
    torch.float16: 3e-2,
    torch.bfloat16: 6e-2,
}
"""The largest relative difference allowed in a graph whose lowest precision is this dtype's."""


def fill(value: torch.Tensor, draw: torch.Generator, integers: tuple[int, int] = (0, 2)) -> torch.Tensor:
    """Floats have mean 0 and standard deviation 0.5; those of scalars and vectors are made
    positive, because they may be variances. Integers are from the first of `integers` to below the second.
    Where elements share memory, as in an expanded tensor, each element of the memory is drawn once."""
    if (memory := memory_of(value)) is not value:
        fill(memory, draw, integers)
        return value
    if value.dtype.is_floating_point or value.dtype.is_complex:
        wide = torch.float32 if not value.dtype.is_complex else torch.complex64
        noise = torch.randn(value.shape, generator=draw, device=value.device, dtype=wide)
        if value.dim() <= 1 and not value.dtype.is_complex:
            noise.abs_()
        return value.copy_(noise.mul_(0.5))
    return value.copy_(torch.randint(*integers, value.shape, generator=draw, device=value.device))


def memory_of(value: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a view that has each element of its memory once: expanded dimensions have size 1 there, and
    what overlaps in another way is a vector over all that the tensor spans."""
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if stride == 0 and size > 1:
            value = value.narrow(dim, 0, 1)
    if not value.numel():
        return value
    reach = 0  # offset of the last element, of the dimensions so far
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride <= reach:
            last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
            return value.as_strided((last + 1,), (1,))
        reach += (size - 1) * stride
    return value


def shared_places(value: torch.Tensor) -> torch.Tensor | None:
    """Each element's place in memory, of the value's shape; None if no two elements share one."""
    if value.layout != torch.strided or memory_of(value) is value:
        return None
    places = torch.zeros((), dtype=torch.int64, device=value.device)
    for size, stride in zip(value.shape, value.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size, device=value.device) * stride
    return places


def rounded_share(tolerance: float) -> float:
    """The share of integers and booleans that may differ where they were computed from floats: the floats may be within
    rounding of a threshold."""
    return max(1e-3, tolerance / 4)


def difference(
    name: str, want: Any, have: Any, floor: float = 1e-3, integer_share: float = 0.0
) -> tuple[float, float]:
    """The largest difference relative to the largest magnitude (at least `floor`), and the largest difference itself.

    Integers and booleans must be equal, but for `integer_share` of them. Raises VerifyFailed if shapes or dtypes
    differ.
    """
    if want is have:
        return 0.0, 0.0
    if not isinstance(want, torch.Tensor) or not isinstance(have, torch.Tensor):
        if want is None or have is None or isinstance(want, torch.Tensor) != isinstance(have, torch.Tensor):
            same = want is have or (want is None and _is_zero(have)) or (have is None and _is_zero(want))
        else:
            same = want == have or (isinstance(want, float) and math.isclose(want, have, rel_tol=1e-3))
        return (0.0, 0.0) if same else (math.inf, math.inf)
    if want.shape != have.shape or want.dtype != have.dtype:
        raise VerifyFailed(
            f"{name} has {tuple(have.shape)} {have.dtype}, eager {tuple(want.shape)} {want.dtype}"
        )
    if want.numel() == 0:
        return 0.0, 0.0
    if not (want.dtype.is_floating_point or want.dtype.is_complex):
        wrong = (want != have).sum().item() / want.numel()
        return (0.0, 0.0) if wrong <= integer_share else (math.inf, math.inf)
    wide = torch.complex128 if want.dtype.is_complex else torch.float64
    a, b = want.to(wide), have.to(wide)
    gap, magnitude = float((a - b).abs().max()), float(a.abs().max())
    if math.isfinite(gap) and math.isfinite(magnitude):  # so all values are finite
        return gap / max(magnitude, floor), gap
    finite = torch.isfinite(a.abs()) & torch.isfinite(b.abs())
    if not _same_non_finite(a, b, half=want.dtype in (torch.float16, torch.bfloat16)):
        return math.inf, math.inf
    if not bool(finite.any()):
        return 0.0, 0.0
    gap = float((a - b)[finite].abs().max())
    return gap / max(float(a[finite].abs().max()), floor), gap


def _same_non_finite(want: torch.Tensor, have: torch.Tensor, *, half: bool) -> bool:
    """Whether NaN and infinities are at the same positions. half: values may also overflow in eager alone, because
    compiled code has more precision between operators."""
    outside = ~torch.isfinite(want.abs())
    if half:
        return not bool((~torch.isfinite(have.abs()) & ~outside).any())
    return torch.equal(torch.isnan(want), torch.isnan(have)) and torch.equal(
        outside, ~torch.isfinite(have.abs())
    )


def _is_zero(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not bool(value.count_nonzero())
