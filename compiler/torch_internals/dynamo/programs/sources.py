"""Dynamo's sources as records, and back. A closed table: a source of any other class makes a frame unfit."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ....artifact.programs.records import NotPortable, SourceRecord
from ....request.allowed_names import words
from . import values

KINDS = frozenset(
    words(
        """
        AttrSource CallFunctionNoArgsSource CallMethodItemSource CellContentsSource ClosureSource
        CodeSource ConstDictKeySource ConvertIntSource DefaultsSource DictGetItemSource
        DictSubclassGetItemSource FSDPNNModuleSource FloatTensorSource GenericAttrSource GetItemSource
        GlobalSource GlobalStateSource GlobalWeakRefSource GradSource ImportSource ListGetItemSource LocalSource
        NNModuleSource NamedTupleFieldsSource NumpyTensorSource OptimizerSource ParamBufferSource ShapeEnvSource
        SkipGuardSource TensorPropertySource TupleIteratorGetItemSource TypeDictSource TypeMROSource TypeSource
        UnspecializedBuiltinNNModuleSource UnspecializedNNModuleSource UnspecializedParamBufferSource
        """
    )
)
"""Names of classes in torch._dynamo.source (ShapeEnvSource: torch._guards has no other)."""

_PROPERTY = "prop"
"""The field of TensorPropertySource that is an enum."""


class SourceWriter:
    """Records of sources, each once."""

    def __init__(self) -> None:
        self.records: list[SourceRecord] = []
        self._known: dict[Any, int] = {}

    def known(self) -> set[Any]:
        """All that have a record until now."""
        return set(self._known)

    def add(self, source: Any) -> int:
        """The position of the source's record. Raises NotPortable."""
        if (known := self._known.get(source)) is not None:
            return known
        kind: Any = type(source)
        if kind.__name__ not in KINDS or kind is not _classes()[kind.__name__]:
            raise NotPortable(f"a source of the class {kind.__name__}")
        bases: dict[str, int] = {}
        plain: dict[str, Any] = {}
        for field in _fields(kind):
            value = getattr(source, field)
            if isinstance(value, _classes()["Source"]):
                bases[field] = self.add(value)
            elif field == _PROPERTY:
                plain[field] = value.name
            elif isinstance(value, frozenset):
                plain[field] = ["tuple", *sorted(map(values.constant, value))]
            else:
                plain[field] = values.constant(value)
            if field in plain and field != _PROPERTY and not _is_safe(field, value):
                raise NotPortable(f"an attribute that is called {value!r}")
        self.records.append(SourceRecord(kind.__name__, bases, plain))
        self._known[source] = len(self.records) - 1
        return len(self.records) - 1


def read(records: Sequence[SourceRecord], renamed: Mapping[str, str]) -> list[Any]:
    """The sources, with other names for some global variables. Raises ValueError for a record that is not what
    SourceWriter makes."""
    found: list[Any] = []
    for record in records:
        if record.kind not in KINDS or record.kind not in _classes():
            raise ValueError(f"no source of the class {record.kind}")
        kind = _classes()[record.kind]
        arguments: dict[str, Any] = {}
        for field, position in record.bases.items():
            if position >= len(found):
                raise ValueError("a source before its base")
            arguments[field] = found[position]
        for field, value in record.values.items():
            arguments[field] = _value(record.kind, field, value)
            if field == "global_name":
                arguments[field] = renamed.get(arguments[field], arguments[field])
        if set(arguments) != set(_fields(kind)):
            raise ValueError(f"a {record.kind} has the fields {', '.join(_fields(kind))}")
        found.append(_made(kind, arguments))
    return found


def _made(kind: Any, arguments: Mapping[str, Any]) -> Any:
    if kind.__name__ != "ImportSource":
        return kind(**arguments)
    made = object.__new__(kind)  # before PyTorch 2.15 it asks for a guard, which is a record of its own
    for field, value in arguments.items():
        object.__setattr__(made, field, value)
    return made


def _value(kind: str, field: str, record: Any) -> Any:
    value = values.constant_of(record)
    if field == _PROPERTY:
        return _classes()["TensorProperty"][str(value)]
    if field == "dynamism" and value is not None:
        return frozenset(value)
    if not _is_safe(field, value):
        raise ValueError("no name of an attribute")
    return value


def _is_safe(field: str, value: Any) -> bool:
    """A source's name becomes part of an expression: that of an attribute or argument has nothing but a name in it,
    that of a module is one that is imported."""
    if field == "module_name":
        return value in sys.modules
    named = field in ("member", "freevar_name") or (field == "idx_key" and isinstance(value, str))
    return not named or value == "" or str(value).isidentifier()


@functools.cache
def _classes() -> dict[str, Any]:
    from torch import _guards
    from torch._dynamo import source

    found = {name: getattr(source, name) for name in KINDS if hasattr(source, name)}
    return found | {"Source": _guards.Source, "TensorProperty": source.TensorProperty}


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)
