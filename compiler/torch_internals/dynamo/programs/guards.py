"""Dynamo's guards as records with what they expect, and guards of a live frame made from records that fit it.

Dynamo's guards compare addresses of functions, classes and modules, and take sizes, types and constants from the values
they are made for. So they are not stored: a record says the kind, the source and a description of the value that was
traced. If what describes the value in a live frame is equal, a guard that Dynamo makes of the live value is the one
that it would have after tracing. A kind that is not in the table makes a frame unfit.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .... import decoding
from ....artifact.programs.records import GuardRecord, NotPortable, SizesRecord
from ....request.allowed_names import words
from . import values
from .sources import SourceWriter

Values = Mapping[str, Any]
"""Further arguments of a guard: an attribute's name, a key."""


def _members(value: Any, more: Values) -> Any:
    """What is looked for in a container, of which Dynamo checks that it is there, or that it is not: classes."""
    kinds = [_argument_of(each) for each in more.values()]
    return [values.described(kind) for kind in kinds if isinstance(kind, type)] or None


def _has_attribute(value: Any, more: Values) -> Any:
    return hasattr(value, more["attr"]) if more else value


def _length(value: Any, more: Values) -> Any:
    return [values.type_of(value), len(value)]


def _keys(value: Any, more: Values) -> Any:
    return [values.type_of(value), [values.described(key) for key in value]]


def _type(value: Any, more: Values) -> Any:
    return [values.type_of(value), values.hooks(value), values.attributes(value)]


def _global_state(value: Any, more: Values) -> Any:
    """torch._C._dynamo.guards.GlobalStateGuard: gradients, autocast, determinism, precision. Not the number of threads,
    which kernels depend on and a trace does not: a start compares it for graphs that have kernels on a CPU."""
    told: Any = torch._C._dynamo.guards.GlobalStateGuard().__getstate__()
    state = decoding.from_json(told, type=dict[str, Any])
    return [
        str({name: value for name, value in sorted(state.items()) if name != "num_threads"}),
        torch._C._is_torch_function_enabled(),
        torch._C._len_torch_function_stack(),
        values.hooks_of_all_modules(),
    ]


def _device(value: Any, more: Values) -> Any:
    from torch.utils import _device as current

    return str(current.CURRENT_DEVICE)


def _no_hooks(value: Any, more: Values) -> Any:
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise NotPortable("hooks for saved tensors")
    return None


EXPECTED: dict[str, Callable[[Any, Values], Any]] = {
    **dict.fromkeys(
        words("DUPLICATE_INPUT FUNCTORCH_STACK_MATCH NOT_PRESENT_IN_GENERIC_DICT SHAPE_ENV WEAKREF_ALIVE"),
        lambda value, more: None,
    ),
    **dict.fromkeys(
        words(
            "BOOL_MATCH BUILTIN_MATCH CLASS_MATCH CLOSURE_MATCH CONSTANT_MATCH EQUALS_MATCH FUNCTION_MATCH "
            "ID_MATCH MODULE_MATCH NONE_MATCH NOT_NONE_MATCH"
        ),
        lambda value, more: values.described(value),
    ),
    **dict.fromkeys(
        words("DETERMINISTIC_ALGORITHMS GLOBAL_STATE GRAD_MODE TORCH_FUNCTION_STATE"), _global_state
    ),
    **dict.fromkeys(words("DICT_CONTAINS DICT_NOT_CONTAINS SET_CONTAINS SET_NOT_CONTAINS"), _members),
    **dict.fromkeys(words("DICT_KEYS_MATCH MAPPING_KEYS_CHECK"), _keys),
    "AUTOGRAD_SAVED_TENSORS_HOOKS": _no_hooks,
    "DEFAULT_DEVICE": _device,
    "EMPTY_NN_MODULE_HOOKS_DICT": lambda value, more: len(value),
    "HASATTR": _has_attribute,
    "SEQUENCE_LENGTH": _length,
    "TENSOR_MATCH": lambda value, more: values.tensor(value),
    "TYPE_MATCH": _type,
}
"""Kind -> what describes the value at its source. Guards whose condition does not depend on the value expect nothing:
Dynamo checks them once on the live frame when it makes them. A stack of functorch's is empty in each record."""

_WITHOUT_VALUE = frozenset(
    words(
        "AUTOGRAD_SAVED_TENSORS_HOOKS DEFAULT_DEVICE DETERMINISTIC_ALGORITHMS FUNCTORCH_STACK_MATCH GLOBAL_STATE "
        "GRAD_MODE SHAPE_ENV TORCH_FUNCTION_STATE"
    )
)
_GETS_ITEM = frozenset(words("DictGetItemSource DictSubclassGetItemSource GetItemSource"))
_TENSOR = "value"
"""The argument of TENSOR_MATCH and NOT_NONE_MATCH that is the tensor itself."""


class Frame:
    """A frame's values by their sources (Source.get_value, torch._dynamo.guards._get_closure_vars)."""

    def __init__(self, local_scope: Mapping[str, Any], global_scope: Mapping[str, Any]) -> None:
        from torch._dynamo import guards

        self._scope = {"L": local_scope, "G": global_scope}
        self._functions = dict(guards._get_closure_vars())
        self._cache: dict[Any, Any] = {}
        self._known: dict[int, tuple[Any, Any]] = {}
        """Values by their source's id, with the source, which keeps it: a source's own hash is Python."""
        self.numbers: Mapping[int, int] = {}
        """Numbers of the optimizer's tensors, by their ids (optimizers.Step)."""

    def value(self, source: Any) -> Any:
        """Raises whatever the look-up raises."""
        known = self._known.get(id(source))
        if known is None:
            self._check_key(source)
            value = source.get_value(self._scope, self._functions, self._cache)
            known = self._known[id(source)] = source, value
        return known[1]

    def number(self, tensor: torch.Tensor) -> int:
        """Raises NotPortable for one that is not the optimizer's."""
        if id(tensor) not in self.numbers:
            raise NotPortable("a tensor that is known by its address")
        return self.numbers[id(tensor)]

    def _check_key(self, source: Any) -> None:
        """Raises KeyError for a key that a dict, at the source or before it, would add when it is looked up."""
        if (base := getattr(source, "base", None)) is None:
            return
        if type(source).__name__ not in _GETS_ITEM:
            self._check_key(base)
            return
        owner = self.value(base)
        if isinstance(owner, dict) and hasattr(type(owner), "__missing__"):
            key = source.index
            if (key if not hasattr(key, "get_value") else self.value(key)) not in owner:
                raise KeyError(source.name)


def write(guards: Iterable[Any], frame: Frame, sources: SourceWriter) -> list[GuardRecord]:
    """Records of Dynamo's guards on a frame that it has just traced. Raises NotPortable with what is unfit."""
    seen: dict[int, int] = {}
    return [_record(guard, frame, sources, seen) for guard in guards]


def _record(guard: Any, frame: Frame, sources: SourceWriter, seen: dict[int, int]) -> GuardRecord:
    from torch._guards import Source

    kind = guard.create_fn_name()
    if kind not in EXPECTED:
        raise NotPortable(f"a guard of the kind {kind} on {guard.name}")
    given: dict[str, Any] = {}
    if isinstance(guard.create_fn, functools.partial):
        if guard.create_fn.args:
            raise NotPortable(f"a guard of the kind {kind} with arguments")
        given = dict(guard.create_fn.keywords)
    if kind in ("NOT_NONE_MATCH", "TENSOR_MATCH"):
        given.pop(_TENSOR, None)
    others = {name: sources.add(value) for name, value in given.items() if isinstance(value, Source)}
    plain = {name: _argument(value) for name, value in given.items() if name not in others}
    source = sources.add(guard.originating_source)
    value = _value(kind, guard.originating_source, plain, frame)
    try:
        expected = _expected(kind, value, plain, frame)
        return GuardRecord(kind, source, others, plain, expected, _identity(kind, value, seen))
    except NotPortable as error:
        raise NotPortable(f"{error} at {guard.name}") from None


def _expected(kind: str, value: Any, more: Values, frame: Frame) -> Any:
    if kind in ("ID_MATCH", "NOT_NONE_MATCH") and isinstance(value, torch.Tensor):
        return frame.number(value)
    if kind == "DICT_KEYS_MATCH" and any(isinstance(key, torch.Tensor) for key in value):
        return [values.type_of(value), *map(frame.number, value)]
    return EXPECTED[kind](value, more)


def _argument(value: Any) -> Any:
    return ["class", *values.class_name(value)] if isinstance(value, type) else values.constant(value)


def _argument_of(record: Any) -> Any:
    """The inverse. Raises LookupError, ValueError."""
    match record:
        case ["class", str(module), str(name)]:
            return values.class_of(module, name)
    return values.constant_of(record)


def _value(kind: str, source: Any, more: Values, frame: Frame) -> Any:
    """What a guard is on. PyTorch 2.11 has HASATTR on the attribute itself, which may not be there."""
    if kind in _WITHOUT_VALUE:
        return None
    if kind == "HASATTR" and not more:
        if type(source).__name__ == "NNModuleSource":
            source = source.base
        if type(source).__name__ != "AttrSource":
            raise NotPortable(f"whether a {type(source).__name__} is there")
        return hasattr(frame.value(source.base), source.member)
    return frame.value(source)


def _identity(kind: str, value: Any, seen: dict[int, int]) -> int | None:
    """Which of the frame's memories a tensor is in: Dynamo has no guards against tensors that overlap. Which of the
    frame's functions a function is: two of equal code are described alike, and `is` tells them apart."""
    if kind == "TENSOR_MATCH":
        return seen.setdefault(value.untyped_storage()._cdata, len(seen))
    if isinstance(value, types.FunctionType | types.CodeType):
        return seen.setdefault(id(value), len(seen))
    return None


def differing(records: Sequence[GuardRecord], sources: Sequence[Any], frame: Frame) -> str | None:
    """Which of the records does not fit the live frame, in words; None if all fit."""
    cache: dict[Any, Any] = {}
    seen: dict[int, int] = {}
    for record in records:
        if record.kind not in EXPECTED:
            return f"a guard of the kind {record.kind}"
        place = sources[record.source]
        try:
            value = _value(record.kind, place, record.values, frame)
            if record.kind in _WITHOUT_VALUE:
                now = EXPECTED[record.kind](None, record.values)
            else:
                remembered = (record.kind, id(value))
                if record.values or remembered not in cache:
                    cache[remembered] = (
                        _expected(record.kind, value, record.values, frame),
                        value,
                    )  # which keeps its id
                now = cache[remembered][0]
            identity = _identity(record.kind, value, seen)
        except Exception as error:  # the source leads nowhere, or what is there cannot be described
            return f"{place.name or record.kind}: {type(error).__name__}: {error}"
        if now != record.expected or identity != record.identity:
            return f"{place.name or record.kind} ({record.kind}) is not what was traced"
    return None


def make(records: Sequence[GuardRecord], sources: Sequence[Any], frame: Frame) -> Iterator[Any]:
    """Guards of the live frame that `records` fit (torch._guards.Guard with a method of GuardBuilder)."""
    from torch._dynamo.guards import GuardBuilder
    from torch._guards import Guard
    from torch.utils.weak import TensorWeakRef

    for record in records:
        method: Any = getattr(GuardBuilder, record.kind)
        given: dict[str, Any] = {name: _argument_of(value) for name, value in record.values.items()}
        given |= {name: sources[position] for name, position in record.sources.items()}
        if record.kind == "TENSOR_MATCH":
            tensor, source = frame.value(sources[record.source]), sources[record.source]
            # that of a NumPy array is made for the guard
            given[_TENSOR] = tensor if type(source).__name__ == "NumpyTensorSource" else TensorWeakRef(tensor)
        yield Guard(sources[record.source], functools.partial(method, **given) if given else method)


def write_sizes(sizes: Mapping[Any, Any], sources: SourceWriter) -> list[SizesRecord]:
    """Records of OutputGraph.input_source_to_sizes_strides; symbolic sizes, which have conditions, are None, as
    Dynamo's TENSOR_MATCH takes them."""
    return [
        SizesRecord(sources.add(source), _numbers(given["size"]), _numbers(given["stride"]))
        for source, given in sizes.items()
    ]


def _numbers(sizes: Iterable[Any]) -> list[int | None]:
    return [size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size for size in sizes]


def sizes_differ(record: SizesRecord, value: torch.Tensor) -> bool:
    pairs = [*zip(record.size, value.shape, strict=False), *zip(record.stride, value.stride(), strict=False)]
    return len(record.size) != value.dim() or any(want is not None and want != have for want, have in pairs)
