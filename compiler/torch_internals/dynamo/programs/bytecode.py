"""Bytecode of Dynamo's as bytes, and back: marshal, but for constants of PyTorch's, which are named apart."""

from __future__ import annotations

import marshal
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ....artifact.programs.records import ConstantRecord, NotPortable

# Names of the global variables that Dynamo makes for its bytecode.
GRAPH = "__compiled_fn"
RESUME = "__resume_at"
BUILTINS = "__builtins_dict__"
VALUE = "__program_value"
ALIAS = "__import_"
"""Of a module; as long as the module is imported, all frames share it."""

_SCOPE = "globals"


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
        code = _replaced(code, record.path, _constant(record, scope))
    return code


def shown(data: bytes, named: Sequence[ConstantRecord]) -> types.CodeType:
    """Does what `read` does, but with text in the place of PyTorch's constants."""
    code: types.CodeType = marshal.loads(data)
    for record in named:
        code = _replaced(code, record.path, f"{record.kind} {record.value}")
    return code


def _named(code: types.CodeType, path: tuple[int, ...], scope: Mapping[str, Any]) -> Iterator[ConstantRecord]:
    for position, constant in enumerate(code.co_consts):
        here = [*path, position]
        match constant:
            case types.CodeType():
                yield from _named(constant, tuple(here), scope)
            case torch.device():
                yield ConstantRecord(here, "device", str(constant))
            case torch.dtype() | torch.layout() | torch.memory_format():
                yield ConstantRecord(here, type(constant).__name__, str(constant).removeprefix("torch."))
            case dict() if constant is scope:
                yield ConstantRecord(here, _SCOPE, "")


def _constant(record: ConstantRecord, scope: Mapping[str, Any]) -> Any:
    if record.kind == _SCOPE:
        return scope
    if record.kind == "device":
        return torch.device(record.value)
    kinds = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
    found = getattr(torch, record.value, None)
    if record.kind not in kinds or not isinstance(found, kinds[record.kind]):
        raise ValueError(f"no constant {record.kind} {record.value}")
    return found


def _replaced(code: types.CodeType, path: Sequence[int], value: Any) -> types.CodeType:
    position, *inner = path
    constants = list(code.co_consts)
    constants[position] = _replaced(constants[position], inner, value) if inner else value
    return code.replace(co_consts=tuple(constants))
