"""Digests of functions and classes, which say the same in every process that has the same program.

A digest covers what a function computes: bytecode, constants, names and defaults, those of functions inside it, in its
closure and behind its decorators. It does not cover files, line numbers and comments.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import functools
import hashlib
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, TypeVar

_DEPTH = 16
"""Decorators around a function."""
LIBRARIES = frozenset({"torch", "builtins", *sys.stdlib_module_names})
"""Whose classes are those of their version, which is in the key of each program."""
_UNREAD = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__"})
"""Names in each class."""
_ADDRESS = "_torchdynamo_wrapper_id"
"""An attribute of functions that says where in memory another function is, which their closures hold."""
_INLINED = "_torchdynamo_inline"
"""An attribute of what torch.jit.script and trace make of a function, which Dynamo traces instead."""


K = TypeVar("K")
V = TypeVar("V")

_codes: dict[int, tuple[weakref.ref[types.CodeType], str]] = {}
"""Digests by id: a code object cannot change. By equality, one that returns 1 would be one that returns True."""


class Met:
    """Classes, functions and modules of one record. What a class is by ABC.register is read here, and not into digests:
    most such classes come with packages that the program does not use, and another start may import others."""

    def __init__(self) -> None:
        self._packages = {"builtins"}
        self._classes: set[type] = set()

    def add_class(self, added: type) -> None:
        if added not in self._classes:
            self._classes.update(added.__mro__)
            self._packages.update(_package(kind.__module__) for kind in added.__mro__)

    def add_module(self, name: str | None) -> None:
        if name is not None:
            self._packages.add(_package(name))

    def registered(self) -> list[tuple[str, list[str]]]:
        """Virtual subclasses that abstract classes among those met have in packages that were met."""
        abstract = [kind for kind in self._classes if isinstance(kind, abc.ABCMeta)]
        found = ((f"{kind.__module__}.{kind.__qualname__}", self._virtual(kind)) for kind in abstract)
        return sorted((name, sorted(virtual)) for name, virtual in found if virtual)

    def _virtual(self, kind: abc.ABCMeta) -> set[str]:
        found = once("registered", kind, _registered)
        return {
            f"{each.__module__}.{each.__qualname__}"
            for each in found
            if _package(each.__module__) in self._packages
        }


class _Snapshot(threading.local):
    known: dict[tuple[str, int], tuple[Any, Any]] | None = None
    """Descriptions by kind and id, with the object, which keeps its id; None outside a snapshot."""
    met: Met | None = None


_snapshot = _Snapshot()


@contextlib.contextmanager
def snapshot() -> Iterator[None]:
    """Within the block, no function or class of the program changes: each one's digest is taken once."""
    before, _snapshot.known = _snapshot.known, {}
    try:
        yield
    finally:
        _snapshot.known = before


@contextlib.contextmanager
def meeting() -> Iterator[Met]:
    """What `meet_class` and `meet_module` are told in the block."""
    before, _snapshot.met = _snapshot.met, Met()
    try:
        yield _snapshot.met
    finally:
        _snapshot.met = before


def meet_class(kind: type) -> None:
    if _snapshot.met is not None:
        _snapshot.met.add_class(kind)


def meet_module(name: str | None) -> None:
    """name: of the module that a function is of."""
    if _snapshot.met is not None:
        _snapshot.met.add_module(name)


def once(kind: str, subject: K, describe: Callable[[K], V]) -> V:
    """`describe` of a function or class; in a snapshot, only the first time that this kind of it is asked for."""
    known = _snapshot.known
    if known is None:
        return describe(subject)
    place = kind, id(subject)
    if place not in known:
        known[place] = subject, describe(subject)
    described: V = known[place][1]
    return described


def code_digest(code: types.CodeType) -> str:
    """The digest of one code object, with those in its constants."""
    place = id(code)
    if (known := _codes.get(place)) is not None and known[0]() is code:
        return known[1]
    found = hashlib.sha256()
    _add_code(found, code)
    digest = found.hexdigest()
    _codes[place] = weakref.ref(code, lambda reference: _forget(place, reference)), digest
    return digest


def frame_digest(code: types.CodeType, scope: Mapping[str, Any]) -> str:
    """The digest of a frame's code, with which of its names its module has."""
    return hashlib.sha256(repr((code_digest(code), _known(code, scope))).encode()).hexdigest()


def function_digest(function: Any) -> str:
    """The digest of a function, method, property or decorated function, with all that it wraps. Raises ValueError for
    anything else."""
    return once("function", function, _function_digest)


def class_digest(kind: type) -> str:
    """The digest of a class and its bases: names, functions and plain attributes of each."""
    return once("class", kind, _class_digest)


def reached_functions(value: Any) -> Iterator[types.FunctionType]:
    """The function, what it wraps, and the functions in its closure; each once, in a fixed order."""
    yield from _reached(value, set(), 0)


def has_fixed_order(items: Iterable[Any]) -> bool:
    """Whether a set of these values has one order in every process that makes it in one way: numbers do. Texts do not
    (PYTHONHASHSEED), nor do objects, whose hashes are addresses."""
    return all(type(each) in (bool, int, float, complex) for each in items)


def names_in(code: types.CodeType) -> set[str]:
    """Names and texts of a function, without those inside it."""
    return {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}


def resolve(module: str, name: str) -> Any:
    """What an imported module has under a qualified name; of `f.<locals>.g` it is f. Raises LookupError."""
    found: Any = sys.modules.get(module)
    if found is None:
        raise LookupError(module)
    for part in name.split("."):
        if part.startswith("<"):
            break
        try:
            found = inspect.getattr_static(found, part)
        except AttributeError:
            raise LookupError(f"{module}.{name}") from None
    return found


def _forget(code_id: int, reference: weakref.ref[types.CodeType]) -> None:
    if code_id in _codes and _codes[code_id][0] is reference:
        del _codes[code_id]


def _function_digest(subject: Any) -> str:
    digest = hashlib.sha256()
    functions = list(reached_functions(subject))
    if not functions:
        raise ValueError(f"{type(subject).__name__} is no function")
    for function in functions:
        digest.update(code_digest(function.__code__).encode())
        known = _known(function.__code__, function.__globals__)
        # Dynamo has no guards on attributes that are missing, and treats a function by some in another way.
        own = sorted((name, _simple(value)) for name, value in vars(function).items() if name != _ADDRESS)
        # Of a method of an object that is made while tracing, Dynamo reads these without guards.
        values = (function.__defaults__, function.__kwdefaults__, _cells(function))
        digest.update(repr((function.__module__, known, own, [*map(_simple, values)])).encode())
    digest.update(type(subject).__name__.encode())
    return digest.hexdigest()


def _class_digest(subject: type) -> str:
    digest = hashlib.sha256()
    if not _of_library(type(subject)):
        digest.update(class_digest(type(subject)).encode())
    for kind in subject.__mro__:
        digest.update(once("own part", kind, _own_part))
    return digest.hexdigest()


def _own_part(kind: type) -> bytes:
    """What a class adds to the digests of those that inherit from it."""
    parts = [f"{kind.__module__}.{kind.__qualname__}\0"]
    if _of_library(kind):
        return "".join([*parts, repr(_assigned(kind))]).encode()
    if isinstance(kind, enum.EnumMeta):
        members: Any = kind.__members__.items()
        parts.append(repr([(name, each.name, _simple(each.value)) for name, each in members]))
    for name, value in sorted(vars(kind).items()):
        if name in _UNREAD:
            continue
        try:
            shown = function_digest(value)
        except ValueError:
            shown = repr(_simple(value, 0) if isinstance(value, list | dict | set) else _simple(value))
        parts.append(f"{name}={shown}\0")
    return "".join(parts).encode()


def _reached(subject: Any, seen: set[int], depth: int) -> Iterator[types.FunctionType]:
    if depth > _DEPTH or id(subject) in seen:
        return
    seen.add(id(subject))
    match subject:
        case types.FunctionType():
            yield subject
            for cell in subject.__closure__ or ():
                try:
                    inner = cell.cell_contents
                except ValueError:
                    continue
                yield from _reached(inner, seen, depth + 1)
            if (wrapped := vars(subject).get("__wrapped__")) is not None:
                yield from _reached(wrapped, seen, depth + 1)
        case staticmethod() | classmethod() | types.MethodType():
            yield from _reached(subject.__func__, seen, depth + 1)
        case property() | types.DynamicClassAttribute():
            for part in (subject.fget, subject.fset, subject.fdel):
                yield from _reached(part, seen, depth + 1)
        case functools.partial() | functools.cached_property():
            yield from _reached(subject.func, seen, depth + 1)
        case _ if isinstance(subject, functools._lru_cache_wrapper):
            yield from _reached(subject.__wrapped__, seen, depth + 1)
        case _ if type(subject).__module__ == "torch.jit":
            yield from _reached(getattr(subject, _INLINED, None), seen, depth + 1)


def _of_library(kind: type) -> bool:
    return _package(kind.__module__) in LIBRARIES


def _package(module: str) -> str:
    return module.partition(".")[0]


def _registered(kind: abc.ABCMeta) -> list[type]:
    """Virtual subclasses: its own, and those of real and virtual subclasses."""
    found: dict[type, None] = {}
    seen: set[type] = set()
    waiting: list[type] = [kind]
    while waiting:
        each = waiting.pop()
        if each in seen or not isinstance(each, abc.ABCMeta):
            continue
        seen.add(each)
        virtual = [one for reference in abc._get_dump(each)[0] if (one := reference()) is not None]  # type: ignore[attr-defined]
        found.update(dict.fromkeys(virtual))
        waiting += virtual
        waiting += type.__subclasses__(each)  # type: ignore[arg-type]  # of `type`'s own it takes an argument
    return list(found)


def _assigned(kind: type) -> list[tuple[str, str]]:
    """Functions in a library's class that come from elsewhere."""
    return [
        (name, function_digest(value))
        for name, value in sorted(vars(kind).items())
        if isinstance(value, types.FunctionType)
        and value.__module__ is not None
        and _package(value.__module__) not in LIBRARIES
    ]


def _cells(function: types.FunctionType) -> list[Any]:
    found: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(None)
    return found


def _known(code: types.CodeType, scope: Mapping[str, Any]) -> list[str]:
    """Which names the module has: one that is a builtin today is another function once its module has it, and Dynamo
    has no guards on one that is missing."""
    return sorted({name for each in nested(code) for name in each.co_names if name in scope})


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code itself, and that of all functions and classes inside it, in order."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested(constant)


def _add_code(digest: Any, code: types.CodeType) -> None:
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    digest.update(repr((code.co_name, counts, names)).encode())
    digest.update(code.co_code + b"\0" + code.co_exceptiontable + b"\0")
    for constant in code.co_consts:
        _add_constant(digest, constant)


def _add_constant(digest: Any, constant: Any) -> None:
    if isinstance(constant, types.CodeType):
        digest.update(f"code:{code_digest(constant)}\0".encode())
    elif isinstance(constant, tuple):
        digest.update(b"(")
        for part in constant:
            _add_constant(digest, part)
        digest.update(b")")
    elif isinstance(constant, frozenset):
        digest.update(repr(_ordered(constant, repr)).encode())
    else:
        digest.update(f"{type(constant).__name__}:{constant!r}\0".encode())


def _ordered(items: Set[Any], shown: Callable[[Any], str]) -> list[str]:
    """The elements of a set as texts: in its order if all processes have the same."""
    texts = [shown(each) for each in items]
    return texts if has_fixed_order(items) else sorted(texts)


def _plain_attributes(kind: type, depth: int) -> list[Any]:
    found = [(name, value) for name, value in sorted(vars(kind).items()) if name not in _UNREAD]
    return [
        (name, _simple(value, 0 if isinstance(value, list | dict | set) else depth)) for name, value in found
    ]


def _simple(value: Any, depth: int = _DEPTH) -> Any:
    """The value if it is plain, else the name of its type: what is read of an object has guards."""
    if depth == 0:
        return f"<{type(value).__name__}>"
    match value:
        case enum.Enum():
            return (
                type(value).__module__,
                type(value).__qualname__,
                value.name,
                _simple(value.value, depth - 1),
            )
        case None | bool() | int() | float() | str() | bytes():
            return value
        case tuple() | list():
            fields = getattr(value, "_fields", None)
            return type(value).__qualname__, str(fields), [_simple(part, depth - 1) for part in value]
        case dict():
            return "dict", [(_simple(k, depth - 1), _simple(v, depth - 1)) for k, v in value.items()]
        case set() | frozenset():
            return _ordered(value, lambda part: repr(_simple(part, depth - 1)))
        case types.FunctionType():
            return value.__module__, value.__qualname__, code_digest(value.__code__)
        case type():
            every = (*value.__mro__, *inspect.getmro(type(value)))
            kinds = [kind for kind in every if not _of_library(kind)]
            inner = min(depth, 3) - 1
            return f"{value.__module__}.{value.__qualname__}", [
                once(f"attributes {inner}", kind, lambda kind: _plain_attributes(kind, inner))
                for kind in kinds
            ]
    return f"<{type(value).__module__}.{type(value).__qualname__}>"
