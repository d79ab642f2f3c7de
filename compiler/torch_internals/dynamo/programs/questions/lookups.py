"""Sees what tracing looks up and does not find, and in which order it takes the elements of sets."""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable
from typing import Any

from .....artifact.programs import digests
from .asked import Asked, Attribute, Dropped, Key, ModuleName, Order, Unnamed
from .hooks import Around, Hooks, owners

Note = Callable[[Asked], None]
_ATTRIBUTE = ("tp_getattro_impl", "var_getattr")
"""Methods that look up an attribute; which there are depends on the version, as for those below."""
_ABSENT = ("getitem_const", "getitem_const_raise_exception_if_absent", "maybe_getitem_const", "__contains__")
"""Methods of a dict that look up a key, which is their last argument."""
_TEXT = ("repr_impl", "tp_repr_impl")
_ORDER = ("tp_iter_impl", "unpack_var_sequence", *_TEXT)
"""Methods of a set whose answers depend on its order."""


def observe(hooks: Hooks, note: Note, active: Callable[[], bool]) -> None:
    """Raises AttributeError where this version of PyTorch has none of the methods."""
    from torch._dynamo.exc import ObservedAttributeError
    from torch._dynamo.source import AttrSource
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.dicts import ConstDictVariable

    def getattr_observed(method: Callable[..., Any]) -> Callable[..., Any]:
        def asks(variable: Any, tx: Any, name: Any, *more: Any, **others: Any) -> Any:
            if not active():
                return method(variable, tx, name, *more, **others)
            if type(variable).__name__ == "PythonModuleVariable":
                note(ModuleName(variable.source, variable.value, _text(name)))
            try:
                found = method(variable, tx, name, *more, **others)
            except ObservedAttributeError:
                _note_attribute(note, variable, _text(name))
                raise
            if (source := getattr(found, "source", None)) is not None:
                _note_attribute(note, variable, _text(name), source)
            elif _is_set_of_a_class(variable, name):  # PyTorch 2.11 forgets where it has found one of numbers
                note(Order(AttrSource(variable.source, _text(name))))
            return found

        return asks

    def has(variable: Any, tx: Any, name: Any, *_: Any, **__: Any) -> None:
        if type(variable).__name__ == "PythonModuleVariable":
            note(ModuleName(variable.source, variable.value, _text(name)))
        else:
            _note_attribute(note, variable, _text(name))

    def key_observed(method: Callable[..., Any]) -> Callable[..., Any]:
        def asks(variable: Any, *arguments: Any) -> Any:
            if not active():
                return method(variable, *arguments)
            try:
                found = method(variable, *arguments)
            except Exception:
                _note_key(note, variable, arguments[-1])
                raise
            _note_key(note, variable, arguments[-1], getattr(found, "source", None))
            return found

        return asks

    def builtin(frame: Any, name: str) -> None:
        if name not in frame.f_builtins:  # since PyTorch 2.15 a NameError that may be caught
            note(ModuleName(None, builtins, name))

    hooks.put(InstructionTranslatorBase, "load_builtin_from_argval", _first(active, builtin))
    for names, observed in ((_ATTRIBUTE, getattr_observed), (("call_obj_hasattr",), _first(active, has))):
        found = [(owner, name) for name in names for owner in owners(VariableTracker, name)]
        if not found:
            raise AttributeError(f"VariableTracker.{names[0]}")
        for owner, name in found:
            hooks.put(owner, name, observed)
    for name in _ABSENT:
        if not hasattr(ConstDictVariable, name):
            raise AttributeError(f"ConstDictVariable.{name}")
        for owner in owners(ConstDictVariable, name):
            hooks.put(owner, name, key_observed)
    _observe_sets(hooks, note, active)
    _observe_guards(hooks, note, active)


def _observe_guards(hooks: Hooks, note: Note, active: Callable[[], bool]) -> None:
    from torch._dynamo import guards
    from torch._dynamo.source import is_from_skip_guard_source

    install_guard = guards.install_guard

    def installs(*wanted: Any, **_: Any) -> None:
        for guard in wanted:
            if is_from_skip_guard_source(guard.originating_source):
                note(Dropped(guard))

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch._dynamo") and (
            vars(module).get("install_guard") is install_guard
        ):
            hooks.put(module, "install_guard", _first(active, installs))


def _observe_sets(hooks: Hooks, note: Note, active: Callable[[], bool]) -> None:
    from torch._dynamo import variables
    from torch._dynamo.variables.dicts import ConstDictVariable

    def call_of_set(variable: Any, tx: Any, name: Any, *more: Any, **others: Any) -> None:
        if isinstance(variable, root):
            if name in ("pop", "__iter__", "__repr__", "__str__"):
                _note_order(note, variable)
            for each in more[0] if more else others["args"]:
                note_keys(note, each)

    every: Any = variables
    root = every.SetVariable
    while "Set" in root.__base__.__name__:  # PyTorch 2.15 has one class above those of sets and frozensets
        root = root.__base__
    for name in _ORDER:
        for owner in owners(_class_with(root, name), name):
            hooks.put(owner, name, _first(active, lambda variable, *_, **__: _note_order(note, variable)))
    for owner in {*owners(root, "call_method"), _class_with(root, "call_method")}:
        hooks.put(owner, "call_method", _first(active, call_of_set))

    def whole_observed(method: Callable[..., Any]) -> Callable[..., Any]:
        def takes(variable: Any, *others: Any) -> Any:
            found = method(variable, *others)
            if active():
                for each in (variable, *others):
                    note_keys(note, each)
            return found

        return takes

    for name in ("as_python_constant", "is_python_equal", *_TEXT):
        for owner in {*owners(root, name), *owners(ConstDictVariable, name)}:
            hooks.put(owner, name, whole_observed)

    def call_of_list(variable: Any, tx: Any, name: Any, *more: Any, **others: Any) -> None:
        if name in ("extend", "__iadd__"):  # takes the elements without a method of the set
            for each in more[0] if more else others["args"]:
                _note_order(note, each)

    for owner in owners(variables.BaseListVariable, "call_method"):
        hooks.put(owner, "call_method", _first(active, call_of_list))
    for name in ("sq_inplace_concat_impl", "nb_inplace_add_impl"):
        for owner in owners(variables.BaseListVariable, name):
            hooks.put(owner, name, _first(active, lambda variable, tx, other, *_: _note_order(note, other)))


def _first(active: Callable[[], bool], look: Callable[..., None]) -> Around:
    """Around a function: `look` gets its arguments before it runs, while a frame is recorded."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def looked_at(*args: Any, **kwargs: Any) -> Any:
            if active():
                look(*args, **kwargs)
            return function(*args, **kwargs)

        return looked_at

    return around


def _class_with(root: type, name: str) -> type:
    """The class whose method a set has: some versions have it in that of a dict, or of all variables."""
    return next((each for each in root.__mro__ if name in vars(each)), root)


def _note_attribute(note: Note, variable: Any, name: str, value_source: Any = None) -> None:
    source = getattr(variable, "source", None)
    if source is not None:
        note(Attribute(source, name, value_source))


def _note_key(note: Note, variable: Any, key: Any, value_source: Any = None) -> None:
    """Notes a key of a dict that was there before the trace. What the trace puts into it follows from the trace."""
    source = getattr(variable, "source", None)
    if source is None:
        return
    try:
        constant = key.as_python_constant()
    except Exception:
        note(Order(source))
    else:
        note(Key(source, constant, value_source))


def note_keys(note: Note, variable: Any, depth: int = 8) -> None:
    """Notes each dict that was there before the trace, in a container or not: Dynamo has guards on its values, and none
    on its keys, where it takes the whole of it for text, say."""
    variable = _realized(variable)
    inner = _own(variable, "_base_vt")  # of a class that inherits from dict or list
    items = _own(variable if inner is None else inner, "items")
    if depth == 0 or not isinstance(items, dict | list):
        return
    source = _own(variable, "source")
    if isinstance(items, dict) and source is not None and not _is_of_hooks(source):
        note(Order(source))
    for each in items.values() if isinstance(items, dict) else items:
        note_keys(note, each, depth - 1)


def _own(variable: Any, name: str) -> Any:
    """An attribute of the variable itself: some classes have properties of these names, which raise."""
    return getattr(variable, "__dict__", {}).get(name)


def _is_of_hooks(source: Any) -> bool:
    """Whether it is a module's dict of hooks, which has guards, and whose keys are counted in a process."""
    return str(getattr(source, "member", "")).endswith("_hooks")


def _realized(variable: Any) -> Any:
    realize = getattr(variable, "realize", None)
    return realize() if callable(realize) and type(variable).__name__.startswith("Lazy") else variable


def _note_order(note: Note, variable: Any) -> None:
    variable = _realized(variable)
    if not _is_set(variable) or len(getattr(variable, "items", ())) < 2:
        return
    if variable.source is not None:
        note(Order(variable.source))
        return
    try:
        fixed = digests.has_fixed_order(each.vt.as_python_constant() for each in variable.items)
    except Exception:
        fixed = False
    if not fixed:
        note(Unnamed("the order of a set, which another process may have otherwise"))


def _is_set_of_a_class(variable: Any, name: Any) -> bool:
    if type(variable).__name__ != "UserDefinedClassVariable" or variable.source is None:
        return False
    return type(inspect.getattr_static(variable.value, _text(name), None)) in (set, frozenset)


def _is_set(variable: Any) -> bool:
    try:
        return variable.python_type() in (set, frozenset)
    except Exception:  # a variable without a type that Dynamo knows
        return False


def _text(name: Any) -> str:
    return name if isinstance(name, str) else str(name.as_python_constant())
