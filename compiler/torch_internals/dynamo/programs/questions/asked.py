"""Questions that tracing asks of the world without a guard, and their answers: kept in a record, and asked again.

Dynamo has guards on values that it finds. It has none on what it does not find (a key, an attribute, a name of a
module), on what a function answered that it called while it traced, and on the order of a set.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from .....artifact.programs import digests
from .....artifact.programs.records import AskedRecord, NotPortable
from .. import bytecode, values
from ..guards import Frame
from ..sources import SourceWriter

_WRAPPERS = 4
"""Around a function that is found by its name (`functools.wraps`, `functools.lru_cache`)."""
_BY_TEXT = frozenset({"_CudaDeviceProperties", "_XpuDeviceProperties"})
"""Classes of torch._C whose objects say all that they are in their text."""


class ModuleName(Struct, frozen=True):
    """Whether a module has a name. source: the module's, or None."""

    source: Any
    module: types.ModuleType
    name: str


class Attribute(Struct, frozen=True):
    """Whether the object at a source has an attribute. value_source: the attribute's own source, if it has one."""

    source: Any
    name: str
    value_source: Any = None


class Key(Struct, frozen=True):
    """Whether the container at a source has a key. value_source: the value's source, if there is one."""

    source: Any
    key: Any
    value_source: Any = None


class Order(Struct, frozen=True):
    """The order in which the container at a source gives its keys or elements."""

    source: Any


class Value(Struct, frozen=True):
    """What is at a source: a method of a class in C, of which Dynamo says that nobody exchanges it in a process."""

    source: Any


class Call(Struct, frozen=True):
    """What a function answers to constant arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    answer: Any


class Unnamed(Struct, frozen=True):
    """What another process could not ask again; the text says what."""

    reason: str


class Dropped(Struct, frozen=True):
    """A guard that Dynamo makes and drops: within a process, it says, nobody changes what Python's own modules have."""

    guard: Any


Question = ModuleName | Attribute | Key | Order | Value | Call | Unnamed
Asked = Question | Dropped


def write(questions: Iterable[Asked], frame: Frame, sources: SourceWriter) -> list[AskedRecord]:
    """Records of all but dropped guards; to be called after those of the guards were written. Raises NotPortable for a
    question that another process could not ask."""
    found: dict[str, AskedRecord] = {}
    guarded = sources.known()
    for question in _distinct(questions):
        if isinstance(question, Attribute | Key) and question.value_source in guarded:
            continue  # it was found, and is looked up for a guard
        if not isinstance(question, Dropped):
            record = _record(question, frame, sources)
            found.setdefault(repr(record), record)
    return list(found.values())


def _distinct(questions: Iterable[Asked]) -> Iterator[Asked]:
    """Most questions are asked many times."""
    seen: set[Asked] = set()
    for question in questions:
        try:
            if question in seen:
                continue
            seen.add(question)
        except TypeError:  # a call with keywords, a key that cannot be compared
            pass
        yield question


def dropped(questions: Iterable[Asked]) -> list[Any]:
    """Dropped guards, each once."""
    guards = (question.guard for question in questions if isinstance(question, Dropped))
    found = {(each.create_fn_name(), each.originating_source, _keywords(each)): each for each in guards}
    return list(found.values())


def _keywords(guard: Any) -> str:
    return repr(getattr(guard.create_fn, "keywords", None))


def _record(question: Question, frame: Frame, sources: SourceWriter) -> AskedRecord:
    match question:
        case Unnamed(reason):
            raise NotPortable(reason)
        case ModuleName(source, module, name):
            has = hasattr(module, name)
            if source is not None and not _is_dynamos(source) and frame.value(source) is module:
                return AskedRecord("attribute", has, source=sources.add(source), arguments=[name])
            paths = module.__name__, _path(source, frame)
            path = next((each for each in paths if _module(each) is module), None)
            if path is None:
                raise NotPortable(f"a module that its name does not find, {module.__name__}")
            return AskedRecord("attribute", has, module=path, arguments=[name])
        case Attribute(source, name, _):
            has = hasattr(frame.value(source), name)
            return AskedRecord("attribute", has, source=sources.add(source), arguments=[name])
        case Key(source, key, _):
            try:
                named = values.constant(key)
            except NotPortable:
                return _order_record(source, frame, sources)
            return AskedRecord(
                "key", key in frame.value(source), source=sources.add(source), arguments=[named]
            )
        case Order(source):
            return _order_record(source, frame, sources)
        case Value(source):
            return AskedRecord("value", values.described(frame.value(source)), source=sources.add(source))
        case Call(function, arguments, keywords, answer):
            return _call(function, arguments, keywords, answer)


def _order_record(source: Any, frame: Frame, sources: SourceWriter) -> AskedRecord:
    return AskedRecord("order", _in_order(frame.value(source)), source=sources.add(source))


def _in_order(container: Iterable[Any]) -> list[Any]:
    return [values.described(each) for each in container]


def _call(function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], answer: Any) -> AskedRecord:
    shown = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"
    module, name, wrappers = _location(function, shown)
    try:
        return AskedRecord(
            "call",
            _answer(answer),
            module=module,
            name=name,
            wrappers=wrappers,
            arguments=[values.constant(each) for each in arguments],
            keywords={key: values.constant(each) for key, each in keywords.items()},
        )
    except NotPortable as error:
        raise NotPortable(f"what {shown} answered while tracing, {error}") from None


def _location(function: Any, shown: str) -> tuple[str, str, int]:
    """Module and name by which the function is found, and behind how many wrappers. Raises NotPortable."""
    name = getattr(function, "__qualname__", "")
    for module in (getattr(function, "__module__", None) or "builtins", "torch", "torch._C"):
        for place in (name, name.rpartition(".")[2]):
            for wrappers in range(_WRAPPERS):
                try:
                    if _function(module, place, wrappers) is function:
                        return module, place, wrappers
                except LookupError:
                    break
    raise NotPortable(f"what a function answered that its name does not find, {shown}")


def _function(module: str, name: str, wrappers: int) -> Any:
    """Raises LookupError."""
    found = digests.resolve(module, name)
    for _ in range(wrappers):
        found = inspect.getattr_static(found, "__wrapped__", None)
        if found is None:
            raise LookupError(f"{module}.{name}")
    return found


def _answer(answer: Any) -> Any:
    kind = type(answer)
    if kind.__module__ == "torch._C" and kind.__qualname__ in _BY_TEXT:
        return [kind.__qualname__, repr(answer)]
    if kind.__qualname__ == "ModuleSpec":  # of importlib: the loader may be any object
        return [kind.__qualname__, answer.name, str(answer.origin), type(answer.loader).__name__]
    return values.described(answer)


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
    return str(getattr(source, "global_name", "")).startswith(bytecode.ALIAS)


def differing(records: Sequence[AskedRecord], sources: Sequence[Any], frame: Frame) -> str | None:
    """Which question has another answer now, in words; None: none."""
    for record in records:
        asks = ANSWERS.get(record.kind)
        if asks is None:
            return f"a question of the kind {record.kind}"
        shown = _shown(record, sources)
        try:
            now = asks(record, _target(record, sources, frame))
        except Exception as error:
            return f"{shown}: {type(error).__name__}: {error}"
        if now != record.answer:
            return f"{shown} is not what was traced"
    return None


def _shown(record: AskedRecord, sources: Sequence[Any]) -> str:
    place = record.module if record.source is None else sources[record.source].name
    more = ", ".join([*map(repr, record.arguments), *record.keywords])
    match record.kind:
        case "attribute":
            return f"whether {place} has the attribute {more}"
        case "key":
            return f"whether {place} has the key {more}"
        case "order":
            return f"the order of {place}"
        case "value":
            return place
    return f"what {place}.{record.name}({more}) answers"


def _target(record: AskedRecord, sources: Sequence[Any], frame: Frame) -> Any:
    """The object that is asked. Raises LookupError, and whatever the source's look-up raises."""
    if record.source is not None:
        return frame.value(sources[record.source])
    if record.kind == "call":
        return _function(record.module, record.name, record.wrappers)
    module = _module(record.module)
    if module is None:
        raise LookupError(f"{record.module} is not imported")
    return module


def _called(record: AskedRecord, function: Any) -> Any:
    arguments = [values.constant_of(each) for each in record.arguments]
    keywords = {name: values.constant_of(each) for name, each in record.keywords.items()}
    return _answer(function(*arguments, **keywords))


ANSWERS: dict[str, Callable[[AskedRecord, Any], Any]] = {
    "attribute": lambda record, target: hasattr(target, record.arguments[0]),
    "call": _called,
    "key": lambda record, target: values.constant_of(record.arguments[0]) in target,
    "order": lambda record, target: _in_order(target),
    "value": lambda record, target: values.described(target),
}
"""Kind -> what asks the object again."""
