"""A record compared with what a new trace of the same call makes: the check that does not trust the record's own
conditions.

Both are compared as plain values in which nothing depends on the process: sources by their names, generated global
variables by their order, bytecode without files and lines. What is not compared: kernels that PyTorch registered before
the trace, what Dynamo remembers of other sizes, and which artifact a graph had, for these may differ between two right
starts.
"""

from __future__ import annotations

import dis
import marshal
import types
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from .... import decoding
from ....artifact.programs import digests
from ....artifact.programs.records import AskedRecord, FrameProgram, GuardRecord
from . import bytecode, shapes
from .sources import read

_NOT_COMPARED = frozenset({"automatic", "code", "kernels", "sources"})
_SPLIT_NAMES = frozenset({"bytecode", "constants", "globals", "builtins", "graphs", "splits"})
"""Compared by `_generated`."""
_POSITIONS = frozenset({"key_order", "overlaps", "same_inputs"})
"""Fields with positions of sources alone."""
_WORDS = {
    "asked": "questions",
    "compared": "guards that Dynamo drops",
    "key_order": "dicts whose order matters",
    "registered": "registered classes",
    "overlaps": "inputs that overlap",
    "same_inputs": "equal inputs",
    "shapes": "conditions on sizes",
    "traced": "traced functions",
}
_COUNTED = "___context_manager_"
"""What the names of Dynamo's variables for context managers around a graph break begin with."""
_PARTS_OF_OTHERS = frozenset({"CACHE", "EXTENDED_ARG"})
_EMPTY = compile("", "", "exec")
_SHOWN = 3
"""Differences of a kind that are named."""

Parts = defaultdict[str, Counter[tuple[str, str]]]
"""What is compared, by kind: what it is about, and its content."""


def differing(record: FrameProgram, traced: FrameProgram) -> str | None:
    """How the trace differs from the record, in words: '' if it does not; None if they cannot be compared, because
    Dynamo has made other sizes symbolic, as it does by what a process has seen before."""
    traced = decoding.from_msgpack(msgspec.msgpack.encode(traced), type=FrameProgram)  # as a record is read
    before, now = _parts(record), _parts(traced)
    if (record.shapes or traced.shapes) and any(before[name] != now[name] for name in ("sizes", "shapes")):
        return None
    found = []
    for kind in dict.fromkeys([*before, *now]):
        gone, new = before[kind] - now[kind], now[kind] - before[kind]
        labels = list(dict.fromkeys(label for label, _ in sorted([*gone, *new])))
        if labels:
            more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
            found.append(f"{_WORDS.get(kind, kind)} ({', '.join(labels[:_SHOWN])}{more})")
    return "; ".join(found)


def _parts(program: FrameProgram) -> Parts:
    renamed = dict(_renamed(program))
    sources = read(program.sources, renamed)
    shown = [f"{each.name or type(each).__name__}" for each in sources]
    known = [f"{type(each).__name__} {name}" for each, name in zip(sources, shown, strict=True)]
    parts: Parts = defaultdict(Counter)
    for kind, label, content in _generated(program, renamed):
        parts[kind][label, content] += 1
    for field in FrameProgram.__struct_fields__:
        if field in _NOT_COMPARED or field in _SPLIT_NAMES:
            continue
        value = getattr(program, field)
        if field in ("guards", "compared"):
            items = _guards(value, shown, known)
        elif field == "asked":
            items = _items([_without_count(each) for each in value], shown, known)
        elif field == "shapes":
            items = ((text, "") for text in shapes.code(value, sources))
        elif field in _POSITIONS:
            items = ((str(_named(each, shown)), str(_named(each, known))) for each in value)
        else:
            items = _items(value, shown, known)
        parts[field] = Counter(items)
    return parts


_PREFIXES = (bytecode.GRAPH, *bytecode.FUNCTIONS, bytecode.BUILTINS)


def _renamed(program: FrameProgram) -> Iterator[tuple[str, str]]:
    """Another name for each variable that Dynamo has made, in the order in which bytecode has them: its own name has
    counters, addresses and random numbers of its process."""
    yield from ((each.name, f"{each.module}.{each.function}'s") for each in program.globals if each.function)
    called = [each.name for each in program.graphs] + [each.name for each in program.splits]
    variables = [
        each.name
        for each in program.globals
        if not each.name.startswith(bytecode.ALIAS) and not each.function
    ]
    generated = [*called, *variables, *([program.builtins] if program.builtins else [])]
    codes = [program.bytecode, *(each.code for each in program.globals if each.code)]
    used = [
        name
        for data in codes
        for code in digests.nested(marshal.loads(data))
        for name in code.co_names
        if name in generated
    ]
    for position, name in enumerate(dict.fromkeys([*used, *generated])):
        prefix = next((each for each in _PREFIXES if name.startswith(each)), "")
        yield name, f"{prefix or bytecode.VALUE}_{position}"


def _generated(program: FrameProgram, renamed: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Kind, label and content of what has variables with generated names, and of these."""
    yield from _code(bytecode.shown(program.bytecode, program.constants), renamed, "the function")
    for each in program.globals:
        name = renamed.get(each.name, each.name)
        yield "globals", each.module or name, f"{name} {each.function}"
        if each.code:
            yield from _code(
                bytecode.shown(each.code, each.constants), renamed, f"{name}, after a graph break"
            )
    for graph in program.graphs:
        yield "graphs", graph.key[:12], f"{renamed[graph.name]} {graph.key} {graph.device}"
    for split in program.splits:
        steps = [msgspec.structs.replace(step, graph=renamed.get(step.graph, "")) for step in split.steps]
        yield "splits", renamed[split.name], repr((split.inputs, steps, split.outputs))
    yield "globals", "builtins", renamed.get(program.builtins, "")


def _code(code: types.CodeType, renamed: Mapping[str, str], label: str) -> Iterator[tuple[str, str, str]]:
    """Instructions with what they mean: where a constant or a name lies depends on what Dynamo has traced before."""
    variables = (
        f"{_COUNTED}{at}" if name.startswith(_COUNTED) else name for at, name in enumerate(code.co_varnames)
    )
    code = code.replace(co_varnames=tuple(variables))
    found: Any = dis.Bytecode(code)
    instructions = list(found)
    places, count = {}, 0
    for each in instructions:
        places[each.offset] = count  # a jump leads to the first of an instruction's arguments
        count += each.opname not in _PARTS_OF_OTHERS
    places[len(code.co_code)] = count
    shown: list[Any] = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags]
    shown += [code.co_varnames[: sum(shown[:3])], code.co_freevars, code.co_cellvars]
    shown += [
        (places[e.start], places[e.end], places[e.target], e.depth, e.lasti) for e in found.exception_entries
    ]
    for each in instructions:
        if each.opcode in dis.hasconst:
            yield from _constant(each.argval, renamed, label, len(shown))
            shown.append(each.opname)
        elif each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
            shown.append((each.opname, places[each.argval]))
        elif each.opcode in dis.hasname:
            name = str(each.argval)
            shown.append((each.opname, each.argrepr.replace(name, renamed.get(name, name))))
        elif each.opname not in _PARTS_OF_OTHERS:
            shown.append((each.opname, each.argrepr or each.arg))
    yield "bytecode", label, repr(shown)


def _constant(
    value: Any, renamed: Mapping[str, str], label: str, position: int
) -> Iterator[tuple[str, str, str]]:
    if isinstance(value, types.CodeType):
        name = value.co_name
        if name.startswith(bytecode.COMPREHENSION):  # it ends with a counter
            name = name.rpartition("_")[0]
        yield from _code(value, renamed, f"{name} in {label}")
    else:
        shown = "a set" if isinstance(value, frozenset) else f"{value!r:.60}"
        yield (
            "constants",
            f"{shown} in {label}",
            f"{position} {digests.code_digest(_EMPTY.replace(co_consts=(value,)))}",
        )


def _guards(
    guards: Sequence[GuardRecord], shown: Sequence[str], known: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Does what `_items` does. The number of a memory or function depends on the order of guards, so its first source
    stands for it; and the keys of hooks are counted in a process."""
    first: dict[int, str] = {}
    for each in sorted(guards, key=lambda guard: known[guard.source]):
        if each.identity is not None:
            first.setdefault(each.identity, known[each.source])
    for each in guards:
        if each.identity is not None:
            each = msgspec.structs.replace(
                each, expected=[each.expected, first[each.identity]], identity=None
            )
        if each.kind in ("DICT_CONTAINS", "DICT_NOT_CONTAINS") and isinstance(each.values.get("key"), int):
            each = msgspec.structs.replace(each, values={**each.values, "key": "a number"})
        yield f"{each.kind} on {shown[each.source]}", _content(each, known)


def _items(value: Any, shown: Sequence[str], known: Sequence[str]) -> Iterator[tuple[str, str]]:
    for each in value if isinstance(value, list) else [value]:
        source = getattr(each, "source", None)
        place = [
            "" if source is None else shown[source],
            getattr(each, "module", ""),
            getattr(each, "name", ""),
        ]
        yield ".".join(filter(None, place)) or f"{each!r:.60}", _content(each, known)


def _without_count(question: AskedRecord) -> AskedRecord:
    """The keys of hooks are counted in a process."""
    if question.kind == "key" and isinstance(question.arguments[0], int):
        return msgspec.structs.replace(question, arguments=["a number"])
    return question


def _content(value: Any, known: Sequence[str]) -> str:
    return repr(_plain(value, known))


def _plain(value: Any, known: Sequence[str]) -> Any:
    """Values that are equal in two processes: sources by name."""
    match value:
        case msgspec.Struct():
            return [
                (field, _named(part, known) if field in ("source", "sources") else _plain(part, known))
                for field in value.__struct_fields__
                for part in [getattr(value, field)]
            ]
        case list() | tuple():
            return [_plain(part, known) for part in value]
        case dict():
            return sorted((key, _plain(part, known)) for key, part in value.items())
    return value


def _named(positions: Any, known: Sequence[str]) -> Any:
    """Names for positions of sources."""
    match positions:
        case int():
            return known[positions]
        case list() | tuple():
            return [_named(each, known) for each in positions]
        case dict():
            return sorted((key, _named(each, known)) for key, each in positions.items())
    return positions
