"""Operators and their names in the operator table."""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ForbiddenTarget, Unsupported
from ..request import allowed_names
from ..request.operator_table import left_out, libraries, table
from ..torch_internals.dynamo import numpy_calls, operators
from ..torch_internals.dynamo.types import HigherOrderOperator, OpOverload, OpOverloadPacket
from . import dtensor_calls


def target_name(fn: Any) -> str:
    """A callable's name in the operator table for this torch. Raises Unsupported if it has none."""
    if isinstance(fn, dtensor_calls.DTensorCall):
        return fn.target
    ops = table.load(torch.__version__)
    if isinstance(fn, HigherOrderOperator):
        name = f"torch.ops.higher_order.{fn}"
        if name in ops.hops or name == allowed_names.TRITON_CALL:
            return name
    elif isinstance(fn, (OpOverload, OpOverloadPacket)):
        name = f"torch.ops.{fn}"
        if name in ops.functions or libraries.library_of(name) is not None:
            return name
    elif (called := numpy_calls.name_of(fn, _numpy_names())) is not None:
        name = called
        if name in ops.functions:
            return name
    else:
        try:
            found = _function_names().get(fn)
        except TypeError:
            found = None  # not hashable, so it is no operator
        if found is not None:
            return found
        name = f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', type(fn).__name__)}"
        name = name.replace("torch._VariableFunctionsClass.", "torch.")
    raise not_in_table(name)


def not_in_table(name: str, kind: str = "operator") -> Unsupported:
    """The error for an operator that a request cannot name, with the reason if there is a rule."""
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
    if name not in ops.functions and name not in ops.hops and libraries.library_of(name) is None:
        raise ForbiddenTarget(f"operator {name[:200]!r} is not in the table for torch {ops.torch}")
    try:
        if name.startswith(numpy_calls.PREFIX):
            return numpy_calls.wrapped(name, import_name)
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
def _function_names() -> dict[Any, str]:
    # Higher-order operators and overloads know their own names; other callables are looked up here.
    return _names(lambda name: not name.startswith(("torch.ops.", numpy_calls.PREFIX)))


@functools.lru_cache(maxsize=1)
def _numpy_names() -> dict[Any, str]:
    return _names(
        lambda name: (
            name.startswith(numpy_calls.PREFIX)
            and not name.startswith((numpy_calls.OPERATOR, numpy_calls.METHOD))
        )
    )


def _names(wanted: Callable[[str], bool]) -> dict[Any, str]:
    found = {}
    for name in sorted(filter(wanted, table.load(torch.__version__).functions)):
        with contextlib.suppress(AttributeError, ImportError):  # this torch is newer and no longer has it
            found[import_name(name)] = name
    return found
