"""What products of low precision give in float64, where PyTorch's own kernel does not take float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Tensor = torch.Tensor


def _int_mm(a: Tensor, b: Tensor) -> Tensor:
    """Exact: sums of products of 8-bit integers are far below 2^53."""
    return a @ b


def _scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *bias: Tensor) -> Tensor | None:
    """One scale for a tensor, or one for each row of `a` and each column of `b`; not one for each block."""
    rows, columns = a.shape[0], b.shape[1]
    if scale_a.shape not in _scales(rows, 1) or scale_b.shape not in _scales(1, columns):
        return None
    product = (a * scale_a) @ (b * scale_b)
    return product + bias[0] if bias else product


def _scales(rows: int, columns: int) -> list[tuple[int, ...]]:
    return [(), (1,), (1, 1), (rows, columns)]


def _grouped_mm(a: Tensor, b: Tensor, *offsets: Tensor) -> Tensor | None:
    """torch.nn.functional.grouped_mm: of two tensors of 2 or 3 dimensions, of which one may be cut by offsets."""
    if not offsets:
        return a @ b if a.dim() == b.dim() == 3 else None
    ends = [int(end) for end in offsets[0].tolist()]
    groups = list(zip([0, *ends], ends, strict=False))
    if a.dim() == 2 and b.dim() == 3:
        result = a.new_zeros(a.shape[0], b.shape[2])
        for group, (begin, end) in enumerate(groups):
            result[begin:end] = a[begin:end] @ b[group]
        return result
    if a.dim() == 3 and b.dim() == 2:
        result = a.new_zeros(a.shape[1], b.shape[1])
        for group, (begin, end) in enumerate(groups):
            result[:, begin:end] = a[group] @ b[:, begin:end]
        return result
    if a.dim() == b.dim() == 2:
        return torch.stack([a[:, begin:end] @ b[begin:end] for begin, end in groups])
    return None


def _scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *offsets: Tensor
) -> Tensor | None:
    """One scale for each row of `a`, and for each column of each matrix of `b`."""
    if (a.dim(), b.dim()) != (2, 3) or scale_a.shape != a.shape[:1] or scale_b.shape != b.shape[::2]:
        return None
    return _grouped_mm(a * scale_a[:, None], b * scale_b[:, None, :], *offsets)


_PRODUCTS: dict[str, Callable[..., Tensor | None]] = {
    "int_mm": _int_mm,
    "scaled_mm": _scaled_mm,
    "grouped_mm": _grouped_mm,
    "scaled_grouped_mm": _scaled_grouped_mm,
}


def product(op: str, inputs: Sequence[Tensor]) -> Tensor | None:
    """A product of the operands of `op`, as PyTorch's own kernel takes them, in float64. None: it is not known how."""
    function = _PRODUCTS.get(op)
    wide = [x.double() if x.is_floating_point() or x.dtype.itemsize == 1 else x for x in inputs]
    return None if function is None else function(*wide)
