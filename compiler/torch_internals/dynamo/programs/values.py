"""Values of a frame as plain ones that two processes can compare, by what they mean and not by their addresses."""

from __future__ import annotations

import builtins
import enum
import re
import sys
import types
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from ....artifact.programs import digests
from ....artifact.programs.records import NotPortable
from ....request.allowed_names import words
from . import operators

_LEAVES = (torch.dtype, torch.layout, torch.memory_format, torch.device, torch.Size)
_UNNAMED = {kind.__qualname__: kind for kind in vars(types).values() if isinstance(kind, type)}
"""Classes that Python's `builtins` has no names for."""
_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
"""Kinds of constants that are attributes of torch."""
_NUMPY = frozenset({"numpy.ufunc", "numpy._ArrayFunctionDispatcher"})
"""Classes of NumPy's functions. Dynamo traces functions of PyTorch's in their place, by their names."""
_CYTHON = "cython_function_or_method"
"""A class of each version of Cython's. Dynamo traces none of its functions; it breaks the graph there."""
_CONTENTS = (frozenset, tuple, str, bytes, list, dict, set)
"""A method of such an object is described by what is in it. Dynamo does not guard all of that in each version."""
_ELEMENTS = 1000
_DEPTH = 8
_HOOKS = words(
    "_forward_hooks _forward_pre_hooks _forward_hooks_with_kwargs _forward_pre_hooks_with_kwargs _backward_hooks "
    "_backward_pre_hooks"
)
"""Attributes of modules."""
_DIMENSIONS = words(
    "_dynamo_dynamic_indices _dynamo_weak_dynamic_indices _dynamo_unbacked_indices _dynamo_strict_unbacked_indices "
    "_dynamo_static_indices"
)
"""Attributes of tensors that torch._dynamo.mark_dynamic and its like set."""


def described(value: Any) -> Any:
    """A description that msgpack can carry: equal in two processes if and only if the values mean the same to a trace.

    Functions and classes are their names and digests, and must be found under these names. Raises NotPortable.
    """
    return _described(value, _DEPTH)


def constant(value: Any) -> Any:
    """A constant in a source, a guard or bytecode, to be read by `constant_of`. Raises NotPortable."""
    match value:
        case None | bool() | int() | float() | str() if type(value) in (type(None), bool, int, float, str):
            return value
        case bytes() if type(value) is bytes:
            return ["bytes", value.hex()]
        case tuple() if type(value) is tuple:
            return ["tuple", *(constant(part) for part in value)]
        case torch.device():
            return ["device", str(value)]
        case torch.dtype() | torch.layout() | torch.memory_format():
            return [type(value).__name__, str(value).removeprefix("torch.")]
    raise NotPortable(f"a key or index that is a {type(value).__name__}")


def constant_of(record: Any) -> Any:
    """The inverse of `constant`. Raises ValueError."""
    match record:
        case None | bool() | int() | float() | str():
            return record
        case ["tuple", *parts]:
            return tuple(constant_of(part) for part in parts)
        case ["bytes", str(digits)]:
            return bytes.fromhex(digits)
        case ["device", str(name)]:
            return torch.device(name)
        case [str(kind), str(name)] if isinstance(found := getattr(torch, name, None), _NAMED.get(kind, ())):
            return found
    raise ValueError("no constant")


def class_name(kind: type) -> tuple[str, str]:
    """Module and name by which `class_of` finds the class. Raises NotPortable."""
    module, name = kind.__module__, kind.__qualname__
    try:
        found = class_of(module, name)
    except LookupError:
        found = None
    if found is not kind:
        raise NotPortable(f"a class that its name does not find, {module}.{name}")
    return module, name


def class_of(module: str, name: str) -> Any:
    """What is found under a class's name. Raises LookupError."""
    if module == "builtins" and name not in vars(builtins):  # as that of None
        return _UNNAMED[name]
    return digests.resolve(module, name)


def type_of(value: Any) -> Any:
    """A description of the value's class."""
    return _class(type(value))


def tensor(value: torch.Tensor) -> Any:
    """What Dynamo's guard on a tensor compares, besides its sizes and strides; and what isinstance asks without a guard
    to tell parameters and buffers. Raises NotPortable for a subclass."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise NotPortable(f"a tensor subclass, {type(value).__name__}")
    marks = [[name, sorted(map(str, getattr(value, name)))] for name in _DIMENSIONS if hasattr(value, name)]
    return [
        _class(type(value)),
        str(torch._C._dispatch_keys(value)),
        str(value.dtype),
        str(value.device),
        value.requires_grad,
        value.is_leaf,
        [bool(getattr(value, name, False)) for name in ("_is_param", "_is_buffer")],
        str(value.layout),
        marks,
        getattr(value, "_dynamo_static_input_type", None)
        == "guarded",  # Dynamo itself marks parameters "unguarded"
    ]


def hooks(value: Any) -> list[Any]:
    """How many hooks of each kind a module has. By default Dynamo has no guards against new ones."""
    if not isinstance(value, torch.nn.Module):
        return []
    found = ((name, vars(value).get(name)) for name in _HOOKS)
    return [[name, len(each)] for name, each in found if each]


def attributes(value: Any) -> list[str]:
    """Names of an object's own attributes, unless it is a module. Dynamo has no guards against new ones, which
    isinstance may ask for, or code that reads `__dict__`."""
    own = getattr(value, "__dict__", None)
    if isinstance(value, torch.nn.Module | torch.Tensor) or type(own) is not dict:
        return []
    return sorted(name for name in own if isinstance(name, str))


def hooks_of_all_modules() -> list[int]:
    """How many there are of each kind that torch.nn.modules.module registers for every module."""
    found = vars(torch.nn.modules.module).items()
    return [
        len(each) for name, each in sorted(found) if name.startswith("_global_") and isinstance(each, dict)
    ]


def _described(value: Any, depth: int) -> Any:
    if depth == 0:
        raise NotPortable("a value with many levels")
    match value:
        case None | bool() | int() | float() | str() | bytes() if type(value) in (
            type(None),
            bool,
            int,
            float,
            str,
            bytes,
        ):
            return [type(value).__name__, repr(value)]  # by its text: NaN equals itself, 1 is not 1.0
        case complex() | range() | slice() | types.EllipsisType():
            return [type(value).__name__, repr(value)]
        case _ if isinstance(value, _LEAVES):
            return [type(value).__name__, str(value)]
        case tuple() | list():
            return [type_of(value), *(_described(part, depth - 1) for part in value)]
        case set() | frozenset():
            parts = [_described(part, depth - 1) for part in value]
            return [type_of(value), *(parts if digests.has_fixed_order(value) else sorted(parts, key=repr))]
        case dict():
            return [
                type_of(value),
                *([_described(k, depth - 1), _described(v, depth - 1)] for k, v in value.items()),
            ]
        case enum.Enum():
            return ["enum", type_of(value), value.name]
        case types.ModuleType():
            digests.meet_module(value.__name__)
            return ["module", value.__name__]
        case type():
            return _class(value)
        case OpOverload() | OpOverloadPacket() | HigherOrderOperator():
            return operators.described(value)
        case types.FunctionType():
            return _function(value)
        case types.MethodType():
            return ["method", _described(value.__func__, depth - 1)]
        case types.CodeType():
            return ["code", digests.code_digest(value)]
        case types.BuiltinFunctionType() | types.MethodDescriptorType() | types.WrapperDescriptorType():
            owner = getattr(value, "__self__", None)
            module = getattr(value, "__module__", None) or ""
            digests.meet_module(module)
            if owner is None or isinstance(owner, types.ModuleType | type):
                return ["builtin", module, value.__qualname__]
            name = str(getattr(value, "__name__", ""))
            if getattr(sys.modules.get(module), name, None) is value:  # a function of pybind11's
                return ["builtin", module, name]
            if type(owner) in _CONTENTS and len(owner) <= _ELEMENTS:  # as keyword.iskeyword
                return ["builtin", value.__qualname__, _described(owner, depth - 1)]
            raise NotPortable(f"a method of an object, {value.__qualname__}")
        case _ if (
            f"{type(value).__module__}.{type(value).__name__}" in _NUMPY or type(value).__name__ == _CYTHON
        ):
            module, name = value.__module__, value.__name__
            if digests.resolve(module, name) is not value:
                raise NotPortable(f"a function of an extension that its name does not find, {module}.{name}")
            digests.meet_module(module)
            return ["extension", module, name]
        case types.GetSetDescriptorType() | types.MemberDescriptorType() | types.ClassMethodDescriptorType():
            return ["member", _described(value.__objclass__, depth - 1), value.__name__]
        case types.MethodWrapperType():
            return ["member", _described(type(value.__self__), depth - 1), value.__name__]
        case torch.optim.Optimizer() if type(value).__module__.startswith("torch.optim."):
            return [type_of(value), attributes(value)]
        case re.Pattern():
            return [type_of(value), _described(value.pattern, depth - 1), value.flags]
        case torch.autocast():
            own = ("device", "fast_dtype", "_enabled", "_cache_enabled")
            return [type_of(value), *(_described(getattr(value, name), depth - 1) for name in own)]
        case types.UnionType() | types.GenericAlias():
            return [type(value).__name__, *(_described(part, depth - 1) for part in value.__args__)]
        case _ if type(value).__module__ == "typing":
            return ["typing", repr(value)]
    raise NotPortable(f"a {type(value).__module__}.{type(value).__qualname__}")


def _function(value: types.FunctionType) -> Any:
    digests.meet_module(value.__module__)
    return ["function", value.__module__, value.__qualname__, digests.function_digest(value)]


def _class(value: type) -> Any:
    digests.meet_class(value)
    return digests.once("described class", value, _class_now)


def _class_now(value: type) -> Any:
    try:
        known = digests.resolve(value.__module__, value.__qualname__)
    except LookupError:
        known = None
    local = "<locals>" in value.__qualname__
    # classes of extensions, torch.Tensor and dict_keys too, have a module where they are not found
    own = value.__module__.partition(".")[0] in digests.LIBRARIES
    if known is not value and not local and not own:
        raise NotPortable(f"a class that its name does not find, {value.__module__}.{value.__qualname__}")
    if (
        vars(value).get("_is_protocol") and not own
    ):  # isinstance asks for attributes, and Dynamo has no guards on them
        raise NotPortable(f"a protocol, {value.__module__}.{value.__qualname__}")
    return ["class", value.__module__, value.__qualname__, digests.class_digest(value)]
