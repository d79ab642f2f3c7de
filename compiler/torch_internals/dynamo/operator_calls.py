"""Runs a function of tensors and shows each operator that it calls, before the operator runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

OnCall = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""Takes an operator, below autograd, and its arguments; runs it and returns its result."""


def watching_calls(on_call: OnCall) -> AbstractContextManager[object]:
    """Inside the block, each operator that runs goes through `on_call`; the operators that it calls itself do not.

    A mode of torch.utils._python_dispatch. A higher-order operator is one call; its graphs are not shown.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return on_call(func, args, kwargs or {})

    return Watch()  # type: ignore[no-any-return, no-untyped-call, unused-ignore]


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors in an operator's arguments or results, in order."""
    from torch.utils._pytree import tree_leaves

    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
