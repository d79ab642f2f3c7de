"""Sees what tracing looks up and does not find, and in which order it takes the elements of sets."""

from __future__ import annotations

import builtins
import inspect
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch.nn.utils import stateless

from .....artifact.programs import digests
from .asked import Asked, Attribute, Dropped, Key, ModuleName, Order, Unnamed, Value
from .hooks import Hooks, owners

Note = Callable[[Asked], None]
_ATTRIBUTE = ("tp_getattro_impl", "var_getattr")
"""Methods that look up an attribute; which there are depends on the version, as for those below."""
_HAS = "call_obj_hasattr"
_ABSENT = ("getitem_const", "getitem_const_raise_exception_if_absent", "maybe_getitem_const", "__contains__")
"""Methods of a dict that look up a key, which is their last argument."""
_TEXT = ("repr_impl", "tp_repr_impl")
_ITERATES = ("tp_iter_impl", "unpack_var_sequence")
"""Methods of a set that take its elements one by one."""
_ANY_ORDER = frozenset({stateless.__file__})
"""Code that does the same in each order: torch.func.functional_call looks in sets of names for tied parameters."""
_IN_C = (
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodWrapperType),
)
"""Values on which Dynamo has no guard."""


def observe(hooks: Hooks) -> None:
    """Raises AttributeError where this version of PyTorch has none of the methods."""
    from torch._dynamo.exc import ObservedAttributeError
    from torch._dynamo.source import AttrSource
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.dicts import ConstDictVariable

    note = hooks.note

    def name_asked(variable: Any, tx: Any, name: Any, *_: Any, **__: Any) -> None:
        if type(variable).__name__ == "PythonModuleVariable":
            note(ModuleName(variable.source, variable.value, _text(name)))

    def attribute_found(answer: Any, variable: Any, tx: Any, name: Any, *_: Any, **__: Any) -> None:
        if (source := getattr(answer, "source", None)) is not None:
            _note_attribute(note, variable, _text(name), source)
        elif _is_set_of_a_class(variable, name):  # PyTorch 2.11 forgets where it has found one of numbers
            note(Order(AttrSource(variable.source, _text(name))))

    def attribute_absent(error: Exception, variable: Any, tx: Any, name: Any, *_: Any, **__: Any) -> None:
        if isinstance(error, ObservedAttributeError):
            _note_attribute(note, variable, _text(name))

    def attribute_asked(variable: Any, tx: Any, name: Any, *_: Any, **__: Any) -> None:
        if type(variable).__name__ == "PythonModuleVariable":
            name_asked(variable, tx, name)
        else:
            _note_attribute(note, variable, _text(name))

    def key_found(answer: Any, variable: Any, *arguments: Any) -> None:
        _note_key(note, variable, arguments[-1], getattr(answer, "source", None))

    def key_absent(_: Exception, variable: Any, *arguments: Any) -> None:
        _note_key(note, variable, arguments[-1])

    def builtin(frame: Any, name: str) -> None:
        if name not in frame.f_builtins:  # since PyTorch 2.15 a NameError that may be caught
            note(ModuleName(None, builtins, name))

    hooks.observe(InstructionTranslatorBase, "load_builtin_from_argval", before=builtin)
    attributes = [(owner, name) for name in _ATTRIBUTE for owner in owners(VariableTracker, name)]
    asking = list(owners(VariableTracker, _HAS))
    for name, found in ((_ATTRIBUTE[0], attributes), (_HAS, asking)):
        if not found:
            raise AttributeError(f"VariableTracker.{name}")
    for owner, name in attributes:
        hooks.observe(owner, name, before=name_asked, after=attribute_found, failed=attribute_absent)
    for owner in asking:
        hooks.observe(owner, _HAS, before=attribute_asked)
    for name in _ABSENT:
        if not hasattr(ConstDictVariable, name):
            raise AttributeError(f"ConstDictVariable.{name}")
        for owner in owners(ConstDictVariable, name):
            hooks.observe(owner, name, after=key_found, failed=key_absent)
    _observe_sets(hooks)
    _observe_guards(hooks)
    _observe_values(hooks)


def _observe_values(hooks: Hooks) -> None:
    from torch._dynamo.variables.builder import VariableBuilder

    def builds(builder: Any, value: Any) -> None:
        if isinstance(value, _IN_C):
            hooks.note(Value(builder.source))

    hooks.observe(VariableBuilder, "__call__", before=builds)


def _observe_guards(hooks: Hooks) -> None:
    from torch._dynamo import guards
    from torch._dynamo.source import is_from_skip_guard_source

    install_guard = guards.install_guard

    def installs(*wanted: Any, **_: Any) -> None:
        for guard in wanted:
            if is_from_skip_guard_source(guard.originating_source):
                hooks.note(Dropped(guard))

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch._dynamo") and (
            vars(module).get("install_guard") is install_guard
        ):
            hooks.observe(module, "install_guard", before=installs)


def _observe_sets(hooks: Hooks) -> None:
    from torch._dynamo import variables
    from torch._dynamo.variables.dicts import ConstDictVariable

    note = hooks.note

    def iterated(variable: Any, tx: Any = None, *_: Any, **__: Any) -> None:
        if _realized(variable) not in of_lists:
            order_asked(variable, tx)

    def order_asked(variable: Any, tx: Any = None, *_: Any, **__: Any) -> None:
        if tx is None or tx.f_code.co_filename not in _ANY_ORDER:
            _note_order(note, variable)

    def call_of_set(variable: Any, tx: Any, name: Any, *more: Any, **others: Any) -> None:
        if isinstance(variable, root):
            if name in ("pop", "__repr__", "__str__"):
                _note_order(note, variable)
            elif name == "__iter__":
                iterated(variable)
            for each in more[0] if more else others["args"]:
                note_keys(note, each)

    def taken_whole(_: Any, *variables: Any) -> None:
        for each in variables:
            if not (_is_set(each) and _decides_a_jump(sys._getframe(3))):
                note_keys(note, each)

    def call_of_list(variable: Any, tx: Any, name: Any, *more: Any, **others: Any) -> None:
        if name in ("extend", "__iadd__"):  # takes the elements without a method of the set
            for each in more[0] if more else others["args"]:
                iterated(each)

    every: Any = variables
    root = every.SetVariable
    of_lists = _OfLists(every.BaseListVariable)
    if hasattr(every.BuiltinVariable, "call_set"):
        hooks.observe(every.BuiltinVariable, "call_set", after=of_lists.add)
    made_of_keys = "call_custom_dict_fromkeys"  # from PyTorch 2.14 on it takes the elements of a set itself
    for owner in owners(variables.VariableTracker, made_of_keys):
        hooks.observe(owner, made_of_keys, before=lambda tx, kind, keys, *_, **__: iterated(keys))
    while "Set" in root.__base__.__name__:  # PyTorch 2.15 has one class above those of sets and frozensets
        root = root.__base__
    for names, asked in ((_ITERATES, iterated), (_TEXT, order_asked)):
        for name in names:
            for owner in owners(_class_with(root, name), name):
                hooks.observe(owner, name, before=asked)
    for owner in {*owners(root, "call_method"), _class_with(root, "call_method")}:
        hooks.observe(owner, "call_method", before=call_of_set)
    for name in ("as_python_constant", "is_python_equal", *_TEXT):
        for owner in {*owners(root, name), *owners(ConstDictVariable, name)}:
            hooks.observe(owner, name, after=taken_whole)
    for owner in owners(variables.BaseListVariable, "call_method"):
        hooks.observe(owner, "call_method", before=call_of_list)
    for name in ("sq_inplace_concat_impl", "nb_inplace_add_impl"):
        for owner in owners(variables.BaseListVariable, name):
            hooks.observe(owner, name, before=lambda variable, tx, other, *_: iterated(other))


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


class _OfLists:
    """Sets that traced code has made of lists. Dynamo takes their elements in the order of the list, in most versions,
    until something else is done with them."""

    def __init__(self, lists: type) -> None:
        self._lists = lists
        self._sets: dict[int, tuple[weakref.ref[Any], list[Any]]] = {}

    def add(self, variable: Any, _: Any, tx: Any, *arguments: Any, **__: Any) -> None:
        """After a call of `set`."""
        methods = (getattr(type(variable), name, None) for name in _ITERATES)
        codes = (inspect.unwrap(each).__code__ for each in methods if each is not None)
        by_hash = any("set_items" in code.co_names for code in codes)
        of_list = len(arguments) == 1 and isinstance(_realized(arguments[0]), self._lists)
        if _is_set(variable) and of_list and not by_hash:
            place = id(variable)
            self._sets[place] = (
                weakref.ref(variable, lambda _: self._sets.pop(place, None)),
                list(variable.items),
            )

    def __contains__(self, variable: Any) -> bool:
        reference, items = self._sets.get(id(variable), (None, []))
        found = None if reference is None else reference()
        if found is None or found is not variable or len(items) != len(found.items):
            return False
        return all(one is other for one, other in zip(items, found.items, strict=True))


def _decides_a_jump(frame: Any) -> bool:
    """Whether Dynamo takes a container whole for an `if`, as the frame that called says: its length, which has a guard,
    is all that matters then."""
    while frame.f_code.co_name in ("is_python_constant", "realize_and_forward"):
        frame = frame.f_back
    return bool(frame.f_code.co_qualname == "generic_jump.<locals>.inner")


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
