"""Reads YAML files of jobs: texts with their lines, converted to the types that the API has. No torch.

Every value is a text until its type is known: 3.10 stays 3.10 in a list of arguments. No tags, no anchors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from ...compiler import decoding, install_hint
from ...compiler.errors import RequestError, SettingsError
from ..atomic_file import file_errors

BYTES = 1 << 20
"""The most bytes of a file."""
_DEPTH = 12
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_UNSET = ("", "null", "~")
"""A field with one of these texts has its default."""

YamlPath = tuple[str | int, ...]
"""The place of a value: names of fields, positions in lists."""

T = TypeVar("T")


class YamlTree(Struct, frozen=True):
    """A file's mappings, lists and texts; the line of each by its path."""

    value: Any
    lines: dict[YamlPath, int] = {}


def read_file(path: Path, wrong: type[RequestError]) -> bytes:
    """Raises `wrong`."""
    with file_errors(path, "read", hint="Name a job's file", kind=wrong):
        return path.read_bytes()


def tree(data: bytes, name: str, wrong: type[RequestError]) -> YamlTree:
    """A file's values; `name`: what errors call the file.

    Raises `wrong`, with the line; SettingsError if ruamel.yaml is missing."""
    try:
        from ruamel.yaml import YAML, ScalarNode, SequenceNode
        from ruamel.yaml.error import YAMLError
        from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent
    except ImportError:
        raise SettingsError("a job's file needs ruamel.yaml", hint=install_hint("cli")) from None
    if len(data) > BYTES:
        raise wrong(f"{name} has {len(data)} bytes, limit {BYTES}", hint="Split the job")
    lines: dict[YamlPath, int] = {}

    def fail(mark: Any, message: str) -> NoReturn:
        where = f"{name}, line {mark.line + 1}" if mark is not None else name
        raise wrong(f"{where}: {message}")

    def plain(node: Any, path: YamlPath) -> Any:
        lines[path] = node.start_mark.line + 1
        if isinstance(node, ScalarNode):
            return node.value
        if isinstance(node, SequenceNode):
            return [plain(item, (*path, i)) for i, item in enumerate(node.value)]
        found: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                fail(key.start_mark, "a field's name is a word")
            if key.value in found:
                fail(key.start_mark, f"{key.value[:40]} is given twice")
            found[key.value] = plain(value, (*path, key.value))
            lines[(*path, key.value)] = key.start_mark.line + 1
        return found

    try:
        text, depth = data.decode(), 0
        for event in YAML(typ="safe", pure=True).parse(text):
            if getattr(event, "anchor", None) is not None:
                fail(event.start_mark, "anchors and aliases are not used here")
            if getattr(event, "tag", None) is not None:
                fail(event.start_mark, "tags are not used here")
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if depth > _DEPTH + 1:  # to read on takes time that grows with the square of the depth
                fail(event.start_mark, "this is nested too deep")
        node = YAML(typ="safe", pure=True).compose(text)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise wrong(f"{name}, line {line}: this is not UTF-8 text") from None
    except YAMLError as error:
        fail(
            getattr(error, "problem_mark", None),
            f"this is not YAML: {getattr(error, 'problem', None) or error}",
        )
    return YamlTree(plain(node, ()) if node is not None else {}, lines)


class YamlReader:
    """Converts the values of a file. Raises `error`, with file and line, for a value that does not suit."""

    error: type[RequestError]

    def __init__(self, name: str, tree: YamlTree) -> None:
        self._name = name
        self._lines = tree.lines
        self._top = tree.value

    def fields(self, path: YamlPath, value: Any, known: Iterable[str] | None = None) -> dict[str, Any]:
        """The fields of a mapping that are set. known: the names that are allowed."""
        if not isinstance(value, dict):
            self.fail(path, "fields are expected here, like `name: value`")
        for name in value:
            if known is not None and name not in known:
                allowed = ", ".join(sorted(known))
                self.fail((*path, name), f"{name[:40]!r} is not a field here; the fields are {allowed}")
        return {name: given for name, given in value.items() if given not in _UNSET}

    def entries(self, path: YamlPath, value: Any) -> Iterator[tuple[YamlPath, Any]]:
        if not isinstance(value, list):
            self.fail(path, f"{path[-1]} is a list")
        for position, entry in enumerate(value):
            yield (*path, position), entry

    def convert(self, path: YamlPath, value: Any, type: type[T], written: Mapping[str, str] = {}) -> T:
        """`value` as a struct. written: what the file calls fields of the struct that have another name there."""
        try:
            return decoding.convert(value, type=type, strict=False)
        except msgspec.ValidationError as error:
            self._fail_to_convert(path, value, type, written, str(error))

    def _fail_to_convert(
        self, path: YamlPath, value: Any, type: Any, written: Mapping[str, str], error: str
    ) -> NoReturn:
        problem, _, place = error.partition(" - at ")
        for json_name, name in (("array", "list"), ("object", "mapping"), (" | null", "")):
            problem = problem.replace(json_name, name)
        steps = re.findall(r"\.(\w+)|\[(\d+)\]", place.partition("[...]")[0])
        field = steps[0][0] if steps else ""
        at = (*path, *(written.get(name, name) if name else int(index) for name, index in steps))
        if allowed := _allowed(type, field):
            self.fail(at, f"{_called(at)} is {str(value[field])[:40]!r}; allowed: {allowed}")
        self.fail(at, f"{_called(at)}: {problem}" if steps else problem)

    def seconds(self, path: YamlPath, value: Any) -> float:
        """The seconds in a number, or in a text like 90s, 10m, 2h or 3d."""
        found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd]?)", str(value))
        if found is None:
            self.fail(path, f"{path[-1]} is {str(value)[:40]!r}; allowed: a number, or like 90s, 10m or 2h")
        return float(found[1]) * _UNITS[found[2]]

    def line(self, path: YamlPath) -> int:
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 0)

    def wrong(self, path: YamlPath, message: str) -> RequestError:
        """The error for the value at `path`."""
        line = self.line(path)
        return self.error(f"{self._name}, line {line}: {message}" if line else f"{self._name}: {message}")

    def fail(self, path: YamlPath, message: str) -> NoReturn:
        raise self.wrong(path, message)


def listed(value: Any) -> list[Any]:
    """A list as it is; anything else as its only item."""
    return value if isinstance(value, list) else [value]


def _called(path: YamlPath) -> str:
    return f"{path[-2]}, item {path[-1] + 1}" if isinstance(path[-1], int) else path[-1]


def _allowed(type: Any, field: str) -> str:
    """What a struct's field allows, where the type says it better than msgspec's message."""
    hint = get_type_hints(type, include_extras=True).get(field)
    for choice in (hint, *get_args(hint)):  # `Literal[...] | None` too
        if get_origin(choice) is Literal:
            return ", ".join(str(each) for each in get_args(choice) if each)
    return next((meta.description for meta in getattr(hint, "__metadata__", ()) if meta.description), "")
