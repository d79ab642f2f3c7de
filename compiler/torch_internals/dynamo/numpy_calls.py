"""NumPy code in a graph: Dynamo writes calls of wrappers around PyTorch's own form of NumPy, torch._numpy.

A function's name is that in torch._numpy, an operator's begins with OPERATOR and a method's with METHOD. The wrapper
itself has no name, because it is made for each call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch._dynamo import utils

PREFIX = "torch._numpy."
OPERATOR = "torch._numpy._operator."
METHOD = "torch._numpy.ndarray."


def name_of(target: Any, functions: Mapping[Any, str]) -> str | None:
    """The name of what a wrapper calls; None: not a wrapper. functions: torch._numpy's, with their names."""
    kind = type(target)  # not isinstance: a subclass may do anything else
    if kind is utils.numpy_to_tensor_wrapper:
        return functions.get(target.f, f"{PREFIX}{target.f.__name__}")
    if kind is utils.numpy_operator_wrapper:
        name = target.op.__name__
        return f"{OPERATOR}{name}" if getattr(operator, name, None) is target.op else f"{PREFIX}{name}"
    if kind is utils.numpy_method_wrapper:
        return f"{METHOD}{target.method}"
    return None


def wrapped(name: str, find: Callable[[str], Any]) -> Any:
    """What a graph calls for such a name. find: a function of torch._numpy by its name."""
    if name.startswith(OPERATOR):
        return utils.numpy_operator_wrapper(getattr(operator, name.removeprefix(OPERATOR)))
    if name.startswith(METHOD):
        return utils.numpy_method_wrapper(name.removeprefix(METHOD))
    return utils.numpy_to_tensor_wrapper(find(name))
