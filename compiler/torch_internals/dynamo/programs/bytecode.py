"""Bytecode of Dynamo's as bytes, and back: marshal, but for constants of PyTorch's, which are named apart."""

from __future__ import annotations

import marshal
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ....artifact.programs.records import ConstantRecord, NotPortable
from . import values

# Names of the global variables that Dynamo makes for its bytecode.
GRAPH = "__compiled_fn"
RESUME = "__resume_at"
BUILTINS = "__builtins_dict__"
VALUE = "__program_value"
ALIAS = "__import_"
"""Of a module; as long as the module is imported, all frames share it."""


def write(code: types.CodeType, scope: Mapping[str, Any]) -> tuple[bytes, list[ConstantRecord]]:
    """scope: the globals of the frame, which are a constant where Dynamo makes functions. Raises NotPortable for a
    constant that has no name."""
    named = list(_named(code, (), scope))
    for record in named:
        code = _replaced(code, record.path, None)
    try:
        return marshal.dumps(code), named
    except ValueError:
        raise NotPortable("bytecode with a constant that is an object") from None


def read(data: bytes, named: Sequence[ConstantRecord], scope: Mapping[str, Any]) -> types.CodeType:
    """Only for what `write` made, by this Python: marshal is not safe for anything else. Raises ValueError."""
    code = marshal.loads(data)
    if not isinstance(code, types.CodeType):
        raise ValueError("no bytecode")
    for record in named:
        value = scope if record.value is None else values.constant_of(record.value)
        code = _replaced(code, record.path, value)
    return code


def shown(data: bytes, named: Sequence[ConstantRecord]) -> types.CodeType:
    """Does what `read` does, but with text in the place of PyTorch's constants."""
    code: types.CodeType = marshal.loads(data)
    for record in named:
        code = _replaced(code, record.path, f"{record.value}")
    return code


def _named(code: types.CodeType, path: tuple[int, ...], scope: Mapping[str, Any]) -> Iterator[ConstantRecord]:
    for position, constant in enumerate(code.co_consts):
        here = [*path, position]
        match constant:
            case types.CodeType():
                yield from _named(constant, tuple(here), scope)
            case torch.device() | torch.dtype() | torch.layout() | torch.memory_format():
                yield ConstantRecord(here, values.constant(constant))
            case dict() if constant is scope:
                yield ConstantRecord(here, None)


def _replaced(code: types.CodeType, path: Sequence[int], value: Any) -> types.CodeType:
    position, *inner = path
    constants = list(code.co_consts)
    constants[position] = _replaced(constants[position], inner, value) if inner else value
    return code.replace(co_consts=tuple(constants))
