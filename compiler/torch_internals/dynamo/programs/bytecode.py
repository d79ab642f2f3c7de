"""Bytecode of Dynamo's as bytes, and back: marshal, but for constants that are objects, which are described apart."""

from __future__ import annotations

import builtins
import enum
import marshal
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ....artifact.programs import digests
from ....artifact.programs.records import ConstantRecord, NotPortable
from . import values

# Names of the global variables that Dynamo makes for its bytecode.
GRAPH = "__compiled_fn"
RESUME = "__resume_at"
COMPREHENSION = "__comprehension_"
"""Dynamo makes a function of a comprehension that breaks a graph, since from Python 3.12 on it is none of its own, and
does not compile it."""
FUNCTIONS = (RESUME, COMPREHENSION)
BUILTINS = "__builtins_dict__"
VALUE = "__program_value"
OPTIMIZER = "__optimizer_"
"""A weak reference to the optimizer whose `_init_group` was called."""
ALIAS = "__import_"
"""Of a module; as long as the module is imported, all frames share it."""


_NOTHING = lambda: None  # noqa: E731
"""What Dynamo calls where it takes a null from the stack (PyCodegen.pop_null)."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, types.EllipsisType)


def write(code: types.CodeType, scope: Mapping[str, Any]) -> tuple[bytes, list[ConstantRecord]]:
    """scope: the globals of the frame, which are a constant where Dynamo makes functions. Raises NotPortable for a
    constant that cannot be described."""
    described = list(_described(code, (), scope))
    for record in described:
        code = _replaced(code, record.path, None)
    return marshal.dumps(code), described


def read(data: bytes, described: Sequence[ConstantRecord], scope: Mapping[str, Any]) -> types.CodeType:
    """Only for what `write` made, by this Python: marshal is not safe for anything else. Raises ValueError, LookupError
    and NotPortable for a constant that means something else now."""
    code = marshal.loads(data)
    if not isinstance(code, types.CodeType):
        raise ValueError("no bytecode")
    for record in described:
        value = scope if record.value is None else _object_of(record.value)
        code = _replaced(code, record.path, value)
    return code


def global_of(module: str, function: str) -> Any:
    """The global variables of a function; a function of `builtins` itself. Raises LookupError."""
    if module == builtins.__name__:
        return vars(builtins)[function]
    return scope_of(module, function)


def scope_of(module: str, function: str) -> dict[str, Any]:
    """The global variables of a function. Raises LookupError."""
    found = next(digests.reached_functions(digests.resolve(module, function)), None)
    if found is None:
        raise LookupError(f"{module}.{function}")
    return found.__globals__


def shown(data: bytes, described: Sequence[ConstantRecord]) -> types.CodeType:
    """Does what `read` does, but with text in the place of objects."""
    code: types.CodeType = marshal.loads(data)
    for record in described:
        code = _replaced(code, record.path, f"{record.value}")
    return code


def _described(
    code: types.CodeType, path: tuple[int, ...], scope: Mapping[str, Any]
) -> Iterator[ConstantRecord]:
    for position, constant in enumerate(code.co_consts):
        here = [*path, position]
        if isinstance(constant, types.CodeType):
            yield from _described(constant, tuple(here), scope)
        elif constant is scope:
            yield ConstantRecord(here, None)
        elif not _is_plain(constant):
            try:
                yield ConstantRecord(here, _object(constant))
            except NotPortable:
                kind = type(constant)
                raise NotPortable(
                    f"bytecode with a constant that is a {kind.__module__}.{kind.__qualname__}"
                ) from None


def _is_plain(constant: Any) -> bool:
    """Whether marshal keeps the value as it is: of other classes it takes bytes where they have a buffer."""
    if type(constant) in (tuple, frozenset, list, set):
        return all(map(_is_plain, constant))
    if type(constant) is dict:
        return all(_is_plain(key) and _is_plain(value) for key, value in constant.items())
    return type(constant) in _PLAIN


def _object(value: Any) -> Any:
    """A description for `_object_of`. Classes are in it with their digests: not each has a guard. Raises
    NotPortable."""
    match value:
        case type():
            values.class_name(value)
            return values.described(value)
        case enum.Enum() if type(value).__members__.get(value.name) is value:
            return ["enum", _object(type(value)), value.name]
        case types.MethodType() if isinstance(owner := value.__self__, type):
            if getattr(owner, value.__name__, None) == value:  # as a named tuple's _make
                return ["method", _object(owner), value.__name__]
        case types.FunctionType() if _is_nothing(value):
            return ["nothing"]
        case torch.Size() | range() | slice():
            state = (value.start, value.stop, value.step) if isinstance(value, range | slice) else value
            return [type(value).__name__, *map(values.constant, state)]
        case tuple() if type(value) is tuple:
            return ["tuple", *map(_object, value)]
    return values.constant(value)


def _is_nothing(function: types.FunctionType) -> bool:
    """Whether it is Dynamo's own function of no argument that returns None."""
    code, known = function.__code__, _NOTHING.__code__
    same = (code.co_code, code.co_consts, code.co_argcount) == (known.co_code, known.co_consts, 0)
    return same and function.__module__ == "torch._dynamo.codegen"


def _object_of(record: Any) -> Any:
    """The inverse of `_object`. Raises ValueError, LookupError and NotPortable."""
    match record:
        case ["class", str(module), str(name), _]:
            found = values.class_of(module, name)
            if values.described(found) != record:
                raise ValueError(f"the class {module}.{name} is not what was traced")
            return found
        case ["enum", kind, str(name)]:
            return _object_of(kind)[name]
        case ["method", kind, str(name)]:
            return getattr(_object_of(kind), name)
        case ["range" | "slice" as name, *parts]:
            return (range if name == "range" else slice)(*map(values.constant_of, parts))
        case ["Size", *parts]:
            return torch.Size(map(values.constant_of, parts))
        case ["tuple", *parts]:
            return tuple(map(_object_of, parts))
        case ["nothing"]:
            return _NOTHING
    return values.constant_of(record)


def _replaced(code: types.CodeType, path: Sequence[int], value: Any) -> types.CodeType:
    position, *inner = path
    constants = list(code.co_consts)
    constants[position] = _replaced(constants[position], inner, value) if inner else value
    return code.replace(co_consts=tuple(constants))
