"""Names that a program asks modules for: Dynamo has no guard on one that is missing, nor on `hasattr`'s answer."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ....artifact.programs.records import AskedRecord, NotPortable
from . import names
from .guards import Frame
from .sources import SourceWriter

Asked = tuple[Any, types.ModuleType, str, bool]
"""The module's source or None, the module, the name, and whether the module has it."""
_METHODS = ("call_obj_hasattr", "tp_getattro_impl", "var_getattr")
"""Of PythonModuleVariable: by these Dynamo asks a module; which there are depends on the version."""


def observe(note: Callable[[Asked], None]) -> Callable[[], None]:
    """Call `note` for each name that Dynamo asks a module for; returns what ends it."""
    from torch._dynamo.variables.misc import PythonModuleVariable

    kind: Any = PythonModuleVariable
    own = {name: vars(kind)[name] for name in _METHODS if name in vars(kind)}
    observed = {name: _observed(method, note) for name, method in own.items()}
    for name, method in observed.items():
        setattr(kind, name, method)

    def end() -> None:
        for name, method in own.items():
            if vars(kind)[name] is observed[name]:
                setattr(kind, name, method)

    return end


def _observed(method: Callable[..., Any], note: Callable[[Asked], None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def asks(variable: Any, tx: Any, name: str, *more: Any) -> Any:
        note((variable.source, variable.value, name, hasattr(variable.value, name)))
        return method(variable, tx, name, *more)

    return asks


def write(asked: Iterable[Asked], frame: Frame, sources: SourceWriter) -> list[AskedRecord]:
    """Raises NotPortable for a module that another process would not find."""
    found: dict[AskedRecord, None] = {}
    for source, module, name, present in asked:
        if source is not None and not _is_dynamos(source) and frame.value(source) is module:
            found[AskedRecord(name, present, source=sources.add(source))] = None
        else:
            paths = module.__name__, _path(source, frame)
            path = next((each for each in paths if _module(each) is module), None)
            if path is None:
                raise NotPortable(f"a module that its name does not find, {module.__name__}")
            found[AskedRecord(name, present, module=path)] = None
    return list(found)


def _module(path: str) -> types.ModuleType | None:
    """An imported module, or one that such a module has as an attribute: a namespace of operators, or a copy."""
    if path in sys.modules:
        return sys.modules[path]
    parent, _, name = path.rpartition(".")
    found = getattr(_module(parent), name, None) if parent else None
    return found if isinstance(found, types.ModuleType) else None


def _path(source: Any, frame: Frame) -> str:
    """Where a source that begins at Dynamo's own name of a module leads, from that module on; '' for any other."""
    match type(source).__name__:
        case "AttrSource" if base := _path(source.base, frame):
            return f"{base}.{source.member}"
        case "GlobalSource" if _is_dynamos(source):
            return str(frame.value(source).__name__)
    return ""


def _is_dynamos(source: Any) -> bool:
    """Whether it begins at Dynamo's own name of a module. A frame that Dynamo began to trace once more, as at a graph
    break, may not use that name any more."""
    while (base := getattr(source, "base", None)) is not None:
        source = base
    return str(getattr(source, "global_name", "")).startswith(names.ALIAS)


def differing(records: Sequence[AskedRecord], sources: Sequence[Any], frame: Frame) -> str | None:
    """Which module has a name that it did not have, or has no longer, in words; None: none."""
    for record in records:
        try:
            module = _module(record.module) if record.source is None else frame.value(sources[record.source])
        except Exception as error:
            return f"a module that is asked for {record.name}: {type(error).__name__}: {error}"
        if module is None:
            return f"the module {record.module} is not imported"
        if hasattr(module, record.name) is not record.present:
            return f"{module.__name__}.{record.name} was {'' if record.present else 'not '}there"
    return None
