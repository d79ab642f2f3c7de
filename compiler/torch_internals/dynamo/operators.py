"""What registers an operator, what its schema says of its arguments, and an operator that computes nothing."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch._ops import OpOverload

from ...request.operator_table.rules import REGISTERED_BY

LOG_API_USAGE: Any = getattr(torch._C, "_log_api_usage_once", None)
"""Counts API usage and computes nothing; some libraries' graphs hold calls of it."""


def register(name: str) -> None:
    """Register the operators of the library that torch.ops.<library>.<...> names, if it is one of PyTorch's. Raises
    ImportError where this torch does not have it."""
    if name.startswith("torch.ops."):
        library = name.split(".")[2]
        if library in REGISTERED_BY:
            importlib.import_module(REGISTERED_BY[library])


def mutates_inputs(target: Any) -> bool:
    """Whether an operator's schema says that it writes to an argument."""
    return isinstance(target, OpOverload) and bool(target._schema.is_mutable)


def is_pytorchs(target: Any) -> bool:
    """Whether an operator is in one of PyTorch's own libraries."""
    return isinstance(target, OpOverload) and target.namespace in REGISTERED_BY


def schema_argument(node: torch.fx.Node, name: str) -> Any:
    """An operator call's argument by its name in the schema, its default where the call has none."""
    for position, declared in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if declared.name == name:
            given = node.kwargs.get(name, declared.default_value)
            return node.args[position] if position < len(node.args) else given
    return None


def result_name(node: torch.fx.Node, position: int) -> str:
    """The name that the schema of an operator has for one of its results; '' for another kind of call."""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.returns[position].name)


def is_left_out(node: torch.fx.Node) -> bool:
    """Whether a request leaves a node out: it counts uses of an API and computes nothing."""
    return node.target is LOG_API_USAGE and not node.users
