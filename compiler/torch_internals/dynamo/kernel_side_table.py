"""User-written Triton kernels, by the numbers that calls of them have in a graph (kernel_side_table)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from ..patching import patched


def user_kernel(index: int) -> Any:
    """A user-written Triton kernel of this process, by what a call of it in a graph says
    (torch._higher_order_ops.triton_kernel_wrap.kernel_side_table)."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    return kernel_side_table.get_kernel(index)


def user_kernel_constants(index: int) -> dict[str, Any]:
    """The constant arguments of such a call (kernel_side_table.get_constant_args)."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    return dict(kernel_side_table.get_constant_args(index))


def register_user_kernel(kernel: Any) -> int:
    """Make a Triton kernel one that graphs of this process may call; the same one twice is one
    (kernel_side_table.add_kernel)."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    return kernel_side_table.add_kernel(kernel)


def register_user_kernel_constants(constants: Mapping[str, Any]) -> int:
    """kernel_side_table.add_constant_args."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    return kernel_side_table.add_constant_args(dict(constants))


@contextlib.contextmanager
def empty_kernel_side_table() -> Iterator[None]:
    """Generated code holds user-written kernels as source, so what is saved need not hold (module, name) of each."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    with patched(kernel_side_table, "id_to_kernel", {}), patched(kernel_side_table, "constant_args", {}):
        yield
