"""Sees which functions Dynamo calls while it traces, and what they answer: their answers become constants of its code.

What a function answers is one of three: it follows from its arguments (a closed table of names), it can be asked again
in another process (asked.Call), or the frame has no record (asked.Unnamed).
"""

from __future__ import annotations

import copy
import inspect
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .....artifact.programs import digests
from .asked import Asked, Call, Unnamed
from .hooks import Hooks, owners
from .lookups import note_keys

Note = Callable[[Asked], None]

_FOLLOWS = """
builtins: abs all any bool bytes callable chr classmethod complex delattr dict divmod enumerate filter float frozenset
    getattr hasattr int isinstance issubclass iter len list map max min next object ord pow property range reversed
    round set setattr slice sorted staticmethod sum super tuple type zip
functools: reduce
inspect: signature
itertools: *
math: *
_operator: *
operator: *
os: fspath
re: compile escape findall fullmatch match search split sub subn
struct: pack unpack
sys: exc_info intern
torch: _assert autocast_decrement_nesting autocast_increment_nesting can_cast finfo get_autocast_cpu_dtype
    get_autocast_dtype get_autocast_gpu_dtype get_default_dtype iinfo is_autocast_cache_enabled
    is_autocast_cpu_enabled is_autocast_enabled is_complex is_conj is_floating_point is_grad_enabled is_neg
    is_same_size is_tensor numel promote_types result_type are_deterministic_algorithms_enabled
torch._C: _dispatch_keys _get_cublas_allow_tf32 _is_any_autocast_enabled _is_torch_function_all_disabled
    _is_torch_function_enabled _is_torch_function_mode_enabled _log_api_usage_once
torch._functorch.predispatch: *
torch._C._functorch: *
torch.distributed.distributed_c10d: *
torch.distributed: *
torch.fx.experimental.symbolic_shapes: *
torch.jit: annotate
torch.nn.functional: _Reduction.get_enum
torch.nn.modules.utils: _ntuple _pair _quadruple _single _triple
torch.overrides: get_default_nowrap_functions has_torch_function has_torch_function_unary has_torch_function_variadic
    is_tensor_like
torch.utils._pytree: *
torch.utils._cxx_pytree: *
typing: cast
"""
"""Module -> functions whose answers follow from their arguments and from what each record has anyway: guards on modes
of the process, the process groups of its rank. `*`: all of them."""

_REMEMBERS_BY_ID = (copy.__file__, inspect.__file__)
"""deepcopy and unwrap, which inspect.signature calls: what they have seen already."""
_TEXTS = ("ascii", "format", "repr", "str")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
_WITH_TEXT = frozenset({"ExceptionVariable", "SymNodeVariable", "UserDefinedClassVariable"})
"""Variables whose text follows from what was traced, besides constants and objects with methods in Python."""


def observe(hooks: Hooks) -> None:
    """Raises AttributeError where this version of PyTorch has none of what is observed."""
    from torch._dynamo import variables
    from torch._dynamo.variables import builtin, functions, misc, nn_module
    from torch._dynamo.variables.torch import tracing_state_functions

    note = hooks.note
    follows = _Follows(note, list(tracing_state_functions()))

    def put(kind: Any, method: str, judge: Callable[..., Asked | None]) -> None:
        def answered(answer: Any, variable: Any, tx: Any, *args: Any, **named: Any) -> None:
            if (question := judge(variable, tx, *args, *named.values(), answer)) is not None:
                note(question)

        if not hasattr(kind, method):
            raise AttributeError(f"{kind.__name__}.{method}")
        for owner in owners(kind, method):
            hooks.observe(owner, method, after=answered)

    root = getattr(builtin, "BaseBuiltinVariable", variables.BuiltinVariable)  # since PyTorch 2.13
    put(root, "call_function", follows.builtin)
    put(variables.ConstantVariable, "call_method", follows.method_of_constant)
    for kind in (
        variables.TorchInGraphFunctionVariable,
        variables.SkipFunctionVariable,
        variables.PolyfilledFunctionVariable,
        misc.NumpyVariable,
    ):
        put(kind, "call_function", follows.function)
    put(
        misc.ComptimeVariable,
        "call_function",
        lambda *_: Unnamed("code that is run while tracing (comptime)"),
    )
    put(misc.LoggingLoggerVariable, "call_method", _method)
    for name in ("TorchScriptObjectVariable", "OpaqueObjectClassVariable"):  # not in each version
        if (script := getattr(variables, name, None)) is not None:
            put(script, "call_method", _method)

    def constant_observed(own: Callable[..., Any]) -> Callable[..., Any]:
        def invokes(tx: Any, function: Any, name: str, arguments: Any, keywords: Any) -> Any:
            if not hooks.active():
                return own(tx, function, name, arguments, keywords)

            def note_call(args: tuple[Any, ...], named: dict[str, Any], answer: Any) -> None:
                if not follows(function):
                    note(Call(function, args, named, answer))

            def called(*args: Any, **named: Any) -> Any:
                answer = function(*args, **named)
                hooks.see(note_call, args, named, answer)
                return answer

            return own(tx, called, name, arguments, keywords)

        return invokes

    for module in (functions, nn_module):
        hooks.put(module, "invoke_and_store_as_constant", constant_observed)


def _method(variable: Any, tx: Any, name: str, *more: Any) -> Asked | None:
    return Unnamed(f"what {type(variable).__name__}.{name} answers") if _is_answer(more[-1]) else None


class _Follows:
    """Judges what a function answered."""

    def __init__(self, note: Note, more: Sequence[Any]) -> None:
        """more: functions to which Dynamo always gives the same answer."""
        self._note = note
        self._known = {id(each): each for each in [*_listed(), *more]}
        self._wholly = {name for name, names in _table() if names == ["*"]}

    def __call__(self, function: Any) -> bool:
        module = getattr(function, "__module__", None) or ""
        return id(function) in self._known or module in self._wholly

    def function(self, variable: Any, tx: Any, arguments: Any, keywords: Any, answer: Any) -> Asked | None:
        function = _function(variable)
        given, named = _constants(arguments), _constants(keywords)
        folds = given is not None and named is not None
        if (answer is None or not _is_answer(answer)) and not (
            folds and _is_none(answer) and _folded(variable, function)
        ):
            return None
        if function is not None and self(function):
            return None
        if not folds or not _folded(variable, function):
            return Unnamed(f"what {_shown(function)} answers")
        return Call(function, tuple(given), named, _value(answer))

    def method_of_constant(self, variable: Any, tx: Any, name: str, *more: Any) -> Asked | None:
        return _hash([variable.as_python_constant()], more[-1]) if name == "__hash__" else None

    def builtin(self, variable: Any, tx: Any, arguments: Any, keywords: Any, answer: Any) -> Asked | None:
        if not _is_answer(answer):
            return None
        function = variable.as_python_constant()
        name = getattr(function, "__name__", "")
        if function in (isinstance, issubclass):
            return _classes(arguments)
        if function is id:
            remembers = tx.f_code.co_filename in _REMEMBERS_BY_ID
            return None if remembers or "Fake" in type(answer).__name__ else Unnamed("id()")
        if function in (bool, operator.truth):
            for each in arguments:  # bool() has none
                note_keys(self._note, each)
        if name in _TEXTS or function is str.format:
            if _is_for_error(tx):
                return None
            return _text(function, [*arguments, *keywords.values()], answer)
        if isinstance(value := _value(answer), str) and _ADDRESS.search(value):
            return _text(function, [*arguments, *keywords.values()], answer)
        if function is hash:
            return _hash(_constants(arguments), answer)
        if isinstance(function, type) and issubclass(function, BaseException):
            return None
        return None if self(function) else Unnamed(f"what {_shown(function)} answers")


def _hash(constants: Sequence[Any] | None, answer: Any) -> Asked | None:
    if constants is None:
        return None if "Fake" in type(answer).__name__ else Unnamed("hash() of an object")
    return None if digests.has_fixed_order(constants) else Call(hash, tuple(constants), {}, _value(answer))


def _text(function: Any, arguments: Sequence[Any], answer: Any) -> Asked | None:
    """Judges text that is made of objects."""
    value = _value(answer)
    if isinstance(value, str) and _ADDRESS.search(value):
        return Unnamed("text with an address in memory")
    for each in arguments:
        if _is_set_constant(each):
            return Unnamed("the order of a set, which another process may have otherwise")
        if function is str and _is_object(each):  # its method ran, untraced
            return Unnamed(f"the text of a {type(_value(each)).__qualname__}")
        if each.is_python_constant() or type(each).__name__ in _WITH_TEXT:
            continue
        try:
            kind = each.python_type()
        except NotImplementedError:
            return Unnamed(f"the text of a {type(each).__name__}")
        own = kind.__module__.partition(".")[0] not in digests.LIBRARIES
        plain = kind in (dict, list, set, tuple, frozenset)
        methods = (kind.__str__, kind.__repr__)
        if not plain and not (own and any(hasattr(method, "__code__") for method in methods)):
            return Unnamed(f"the text of a {kind.__module__}.{kind.__qualname__}")
    return None


def _is_for_error(tx: Any) -> bool:
    """Whether the text is that of what vmap maps, which is in messages of its errors alone."""
    from torch._functorch.vmap import _get_name

    while tx is not None and tx.f_code is not _get_name.__code__:
        tx = getattr(tx, "parent", None)
    return tx is not None


def _is_object(variable: Any) -> bool:
    from torch._dynamo.variables import UserDefinedObjectVariable

    realize = getattr(variable, "realize", None)
    return isinstance(realize() if callable(realize) else variable, UserDefinedObjectVariable)


def _classes(arguments: Sequence[Any]) -> Asked | None:
    """Judges isinstance and issubclass: whether a class answers with code of its own, which may ask anything."""
    for kind in _flat(_value(arguments[1])) if len(arguments) == 2 else ():
        for owner, name in (
            (type(kind), "__instancecheck__"),
            (type(kind), "__subclasscheck__"),
            (kind, "__subclasshook__"),
        ):
            defined = next((each for each in getattr(owner, "__mro__", ()) if name in vars(each)), object)
            if defined.__module__.partition(".")[0] not in digests.LIBRARIES:
                return Unnamed(f"what {defined.__module__}.{defined.__qualname__}.{name} answers")
    return None


def _flat(kinds: Any) -> Iterator[type]:
    if isinstance(kinds, type):
        yield kinds
    elif isinstance(kinds, tuple):
        for each in kinds:
            yield from _flat(each)


def _is_answer(answer: Any) -> bool:
    """Whether a variable is a constant, or an object that was there before, that comes from nowhere."""
    if answer is None or getattr(answer, "source", None) is not None:
        return False
    if answer.is_python_constant():
        return not _is_none(answer)
    existing = type(getattr(answer, "mutation_type", None)).__name__ not in (
        "AttributeMutationNew",
        "ValueMutationNew",
    )
    return type(answer).__name__ == "UserDefinedObjectVariable" and existing


def _is_none(answer: Any) -> bool:
    return answer is not None and answer.is_python_constant() and answer.as_python_constant() is None


def _is_set_constant(variable: Any) -> bool:
    return isinstance(_value(variable), set | frozenset) and len(_value(variable)) > 1


def _value(variable: Any) -> Any:
    """What stands behind a variable; None if nothing does."""
    try:
        return variable.as_python_constant()
    except Exception:
        return getattr(variable, "value", None)


def _constants(variables: Any) -> Any:
    """Their values, in a list or a dict as they are; None if one is no constant."""
    each = list(variables.values()) if isinstance(variables, Mapping) else list(variables)
    if not all(one.is_python_constant() for one in each):
        return None
    values = [one.as_python_constant() for one in each]
    return dict(zip(variables, values, strict=True)) if isinstance(variables, Mapping) else values


def _function(variable: Any) -> Any:
    if type(variable).__name__ == "PolyfilledFunctionVariable":
        return variable.fn
    return getattr(variable, "value", None)


def _folded(variable: Any, function: Any) -> bool:
    """Whether Dynamo itself calls the function where all its arguments are constants."""
    if type(variable).__name__ == "SkipFunctionVariable":
        return _shown(function) in ("importlib.util.find_spec", "importlib.metadata.version")
    if type(variable).__name__ == "NumpyVariable":
        return True
    return bool(variable.can_constant_fold_through())


def _shown(function: Any) -> str:
    module = getattr(function, "__module__", None) or "builtins"
    return f"{module}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _table() -> Iterator[tuple[str, list[str]]]:
    for entry in re.split(r"\n(?=\S)", _FOLLOWS.strip()):
        module, _, names = entry.partition(":")
        yield module, names.split()


def _listed() -> Iterator[Any]:
    for module, names in _table():
        for name in names:
            try:
                if name != "*":
                    yield digests.resolve(module, name)
            except LookupError:
                continue  # another version has it
