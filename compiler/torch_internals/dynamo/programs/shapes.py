"""Conditions on symbolic sizes, as text of size_expr's grammar over numbered sources; and what Dynamo remembers of
sizes that change, so that it makes the same ones symbolic in the next process."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ....artifact.programs.records import AutomaticRecord, NotPortable
from ....errors import BadExpression
from ....request import size_expr
from .guards import Frame
from .sources import SourceWriter

_NAME = re.compile(r"\bs(\d+)\b")
"""A source in a condition, by its position."""
_NOT_NAN = re.compile(r"not math\.isnan\((s\d+)\)")
"""The condition that Dynamo makes for each symbolic float."""
_CALL = re.compile(r"([A-Za-z_][\w.]*) *\(")
_CALLS = {"min": "Min", "max": "Max", "torch.sym_min": "Min", "torch.sym_max": "Max", "torch.sym_float": ""}
_PYTHON = {"Min": "min", "Max": "max"}
"""What PyTorch prints -> the grammar's name -> what is called for numbers."""
_DYNAMIC, _UNSET, _INFERRED, _SIZES = "dynamic", "unset", "inferred", "sizes"


def write(graph: Any, sources: SourceWriter) -> list[str]:
    """The conditions under which a frame's code holds that was traced with symbolic sizes. Raises NotPortable."""
    env = graph.shape_env
    if not env.var_to_range:
        return []
    if any(map(env.is_unbacked_symint, env.var_to_range)) or any(env.deferred_runtime_asserts.values()):
        raise NotPortable("sizes that depend on data")
    fakes = env.tracked_fakes or []
    (found,) = env.produce_guards_verbose(
        [each.fake for each in fakes],
        [each.source for each in fakes],
        source_ref=lambda source: f"s{sources.add(source)}",
        input_contexts=[each.symbolic_context for each in fakes],
        langs=("python",),
    )
    plain = [_NOT_NAN.sub(r"\1 == \1", text) for text in found.exprs]
    written = [_CALL.sub(lambda call: _CALLS.get(call[1], call[1]) + "(", text) for text in plain]
    for text in written:
        _check(text, len(sources.records))
    return written


def differing(shapes: Sequence[str], sources: Sequence[Any], frame: Frame) -> str | None:
    """Which condition does not hold in the live frame, in words; None: all hold."""
    for text in shapes:
        used = {int(position) for position in _NAME.findall(text)}
        try:
            sizes = {f"s{position}": frame.value(sources[position]) for position in used}
            if not all(map(_is_number, sizes.values())):
                return f"a size that is no number in {_shown(text, sources)}"
            if size_expr.evaluate(text, sizes) is not True:
                return f"{_shown(text, sources)} does not hold"
        except Exception as error:
            return f"{text}: {type(error).__name__}: {error}"
    return None


def _is_number(size: Any) -> bool:
    """A float that code compares has a condition too. -0.0 equals 0.0, but tracing makes another constant of it."""
    return type(size) in (int, bool) or (type(size) is float and str(size) != "-0.0")


def code(shapes: Sequence[str], sources: Sequence[Any]) -> list[str]:
    """The conditions as Python text, for Dynamo to make a guard of. Raises NotPortable for other text than `write`
    makes: only what the grammar has is run."""
    for text in shapes:
        _check(text, len(sources))
    return [_shown(text, sources) for text in shapes]


def _check(text: str, count: int) -> None:
    """Raises NotPortable for text outside the grammar, or with functions of it that Python has not."""
    try:
        size_expr.check(text, [f"s{position}" for position in range(count)])
    except BadExpression as error:
        raise NotPortable(f"a condition on sizes: {error}") from None
    if other := set(_CALL.findall(text)) - {*_PYTHON, "and", "or", "not"}:
        raise NotPortable(f"a condition on sizes that calls {', '.join(sorted(other))}")


def _shown(text: str, sources: Sequence[Any]) -> str:
    text = _CALL.sub(lambda call: _PYTHON.get(call[1], call[1]) + "(", text)
    return _NAME.sub(lambda found: sources[int(found[1])].name, text)


def remembered(call: Mapping[str, Any]) -> list[AutomaticRecord]:
    """What Dynamo remembers of a frame's sizes (torch._dynamo.pgo), after it has been traced."""
    return [
        AutomaticRecord(name, {field.name: _written(getattr(entry, field.name)) for field in _fields()})
        for name, entry in sorted(_state(call).items())
    ]


def remember(records: Sequence[AutomaticRecord], call: Mapping[str, Any]) -> None:
    """Have Dynamo remember it in this process. Raises ValueError for what `remembered` does not make."""
    if not torch._dynamo.config.automatic_dynamic_shapes:
        return
    from torch._dynamo.pgo import FrameStateSizeEntry

    state, known = _state(call), {field.name for field in _fields()}
    for record in records:
        if set(record.values) != known:
            raise ValueError(f"sizes have {', '.join(sorted(known))}")
        kind: Any = FrameStateSizeEntry
        entry = kind(**{name: _read(value) for name, value in record.values.items()})
        if record.name in state:
            state[record.name] |= entry
        else:
            state[record.name] = entry


def _state(call: Mapping[str, Any]) -> Any:
    from torch._dynamo import pgo

    identify: Callable[..., Any] = pgo.CodeId.make
    count = len(inspect.signature(identify).parameters)
    found = identify(*(call["code"], call.get("closure"))[:count])
    return pgo.get_code_state()[found].automatic_dynamic


def _fields() -> Sequence[Any]:
    from torch._dynamo.pgo import FrameStateSizeEntry

    return dataclasses.fields(FrameStateSizeEntry)


def _written(value: Any) -> Any:
    from torch._dynamo import pgo

    match value:
        case pgo.AutoDynamic():
            return _DYNAMIC
        case pgo.AutoUnset():
            return _UNSET
        case pgo.InferStride():
            return [_INFERRED, value.dim]
        case tuple():
            return [_SIZES, *map(_written, value)]
        case None | int() | float():
            return value
    raise NotPortable(f"what Dynamo remembers of a size, a {type(value).__name__}")


def _read(record: Any) -> Any:
    from torch._dynamo import pgo

    match record:
        case "dynamic":
            return pgo.auto_dynamic
        case "unset":
            return pgo.auto_unset
        case ["inferred", int(dim)]:
            return pgo.InferStride(dim)
        case ["sizes", *parts]:
            return tuple(map(_read, parts))
        case None | int() | float():
            return record
    raise ValueError("no size")
