"""The names on the wire of operators, as the operator table has them, and of dtypes, layouts, formats and devices."""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import ForbiddenTarget, Unsupported
from ..request import allowed_names
from ..request.operator_table import table
from ..torch_internals.dynamo import operators
from ..torch_internals.dynamo.types import HigherOrderOperator, OpOverload, OpOverloadPacket
from .dtensors import DTensorCall


def target_name(fn: Any) -> str:
    """A callable's name in the operator table for this torch. Raises Unsupported if it has none."""
    if isinstance(fn, DTensorCall):
        return fn.target
    ops = table.load(torch.__version__)
    if isinstance(fn, HigherOrderOperator):
        name = f"torch.ops.higher_order.{fn}"
        if name in ops.hops or name == allowed_names.TRITON_CALL:
            return name
    elif isinstance(fn, (OpOverload, OpOverloadPacket)):
        name = f"torch.ops.{fn}"
        if name in ops.functions or table.library_of(name) is not None:
            return name
    elif (called := operators.numpy_name(fn, _numpy_names())) is not None:
        name = called
        if name in ops.functions:
            return name
    else:
        try:
            found = function_names().get(fn)
        except TypeError:
            found = None  # not hashable, so it is no operator
        if found is not None:
            return found
        name = f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', type(fn).__name__)}"
        name = name.replace("torch._VariableFunctionsClass.", "torch.")
    raise not_in_table(name)


def not_in_table(name: str, kind: str = "operator") -> Unsupported:
    """The error for an operator that a request cannot name, with the reason if there is a rule."""
    from ..request.operator_table import left_out  # 5 ms of patterns, which no graph needs that can be sent

    reason = left_out.reason(name.removeprefix("Tensor."))
    said = "" if reason is None else f": {reason}"
    version = table.load(torch.__version__).torch
    error = Unsupported(f"{kind} {name} is not in the table for torch {version}{said}")
    error.operator = name
    return error


def resolve_target(name: str) -> Any:
    """The callable of a name in the operator table.

    Raises ForbiddenTarget if the name is not in the table, Unsupported if this torch is newer and no longer has it.
    A library's operator must be registered already (toolchain.require_libraries).
    """
    ops = table.load(torch.__version__)
    if name not in ops.functions and name not in ops.hops and table.library_of(name) is None:
        raise ForbiddenTarget(f"operator {name[:200]!r} is not in the table for torch {ops.torch}")
    try:
        if name.startswith(operators.NUMPY):
            return operators.numpy_wrapper(name, import_name)
        operators.register(name)
        return import_name(name)
    except (AttributeError, ImportError):
        raise Unsupported(f"torch {torch.__version__} has no {name}") from None


def import_name(name: str) -> Any:
    root, *rest = name.split(".")
    value: Any = importlib.import_module(root)
    path = root
    for part in rest:
        path = f"{path}.{part}"
        if isinstance(value, types.ModuleType) and not hasattr(value, part):
            importlib.import_module(path)
        value = getattr(value, part)
    return value


@functools.lru_cache(maxsize=1)
def function_names() -> dict[Any, str]:
    # Higher-order operators and overloads know their own names; other callables are looked up here.
    return _names(lambda name: not name.startswith(("torch.ops.", operators.NUMPY)))


@functools.lru_cache(maxsize=1)
def _numpy_names() -> dict[Any, str]:
    return _names(
        lambda name: (
            name.startswith(operators.NUMPY)
            and not name.startswith((operators.NUMPY_OPERATOR, operators.NUMPY_METHOD))
        )
    )


def _names(wanted: Callable[[str], bool]) -> dict[Any, str]:
    found = {}
    for name in sorted(filter(wanted, table.load(torch.__version__).functions)):
        with contextlib.suppress(AttributeError, ImportError):  # this torch is newer and no longer has it
            found[import_name(name)] = name
    return found


# --- values ------------------------------------------------------------------------------------------------


MEMORY_FORMATS = {getattr(torch, name): name for name in sorted(allowed_names.MEMORY_FORMATS)}


LAYOUTS = {getattr(torch, name): name for name in sorted(allowed_names.LAYOUTS)}


DTYPES = {getattr(torch, name): name for name in allowed_names.DTYPE_BYTES if hasattr(torch, name)}


def torch_device(kind: str, device_index: Mapping[str, int]) -> torch.device:
    if kind not in allowed_names.DEVICES:
        raise Unsupported(f"device {kind[:40]!r} is not known")
    return torch.device(kind, device_index[kind]) if kind in device_index else torch.device(kind)


def torch_value(name: str, allowed: Any) -> Any:
    if name not in allowed or not hasattr(torch, name):
        raise Unsupported(f"torch {torch.__version__} has no {name[:40]!r}")
    return getattr(torch, name)
