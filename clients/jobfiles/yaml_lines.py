"""Reads YAML files of jobs: plain values with their lines, converted to the types that the API has. No torch.

Values are read as they stand: no tags, no anchors, no words that YAML 1.1 takes for truth values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, get_args

import msgspec
from msgspec import Struct, inspect

from ...compiler import decoding
from ...compiler.errors import RequestError, SettingsError

BYTES = 1 << 20
"""Of a file."""
_DEPTH = 12
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

YamlPath = tuple[str | int, ...]
"""Where a value stands: names of fields, positions in lists."""


class YamlTree(Struct, frozen=True):
    """A file's values; the line and, for a single value, the text of each by its path."""

    value: Any
    lines: dict[YamlPath, int] = {}
    texts: dict[YamlPath, str] = {}


def tree(data: bytes, name: str, wrong: type[RequestError]) -> YamlTree:
    """Of a file's bytes; `name`: what errors call the file.

    Raises `wrong`, with the line; SettingsError if ruamel.yaml is missing."""
    try:
        from ruamel.yaml import YAML, ScalarNode, SequenceNode
        from ruamel.yaml.error import YAMLError
    except ImportError:
        raise SettingsError(
            "a job's file needs ruamel.yaml", hint="Run `pip install 'torchrelay[cli]'`"
        ) from None
    if len(data) > BYTES:
        raise wrong(f"{name} has {len(data)} bytes, limit {BYTES}", hint="Split the job")
    lines: dict[YamlPath, int] = {}
    texts: dict[YamlPath, str] = {}

    def fail(mark: Any, message: str) -> NoReturn:
        where = f"{name}, line {mark.line + 1}" if mark is not None else name
        raise wrong(f"{where}: {message}")

    def plain(node: Any, path: YamlPath) -> Any:
        if len(path) > _DEPTH:
            fail(node.start_mark, "this is nested too deep")
        lines[path] = node.start_mark.line + 1
        if isinstance(node, ScalarNode):
            texts[path] = node.value
            return node.value if node.style in ("'", '"', "|", ">") else _scalar(node.value)
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
        text = data.decode()
        for event in YAML(typ="safe", pure=True).parse(text):
            if getattr(event, "anchor", None) is not None:
                fail(event.start_mark, "anchors and aliases are not used here")
            if getattr(event, "tag", None) is not None:
                fail(event.start_mark, "tags are not used here")
        node = YAML(typ="safe", pure=True).compose(text)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise wrong(f"{name}, line {line}: this is not UTF-8 text") from None
    except YAMLError as error:
        fail(
            getattr(error, "problem_mark", None),
            f"this is no YAML: {getattr(error, 'problem', None) or error}",
        )
    except RecursionError:
        raise wrong(f"{name}: this is nested too deep") from None
    return YamlTree(plain(node, ()) if node is not None else {}, lines, texts)


def _scalar(text: str) -> bool | int | float | str | None:
    if text in ("true", "false"):
        return text == "true"
    if text in ("", "null", "~"):
        return None
    if re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    if re.fullmatch(r"-?[0-9]+\.[0-9]+(e-?[0-9]{1,3})?", text):
        return float(text)
    return text


class YamlReader:
    """Takes values by their paths, and raises `wrong`, with file and line, for what does not suit."""

    def __init__(self, name: str, tree: YamlTree, wrong: type[RequestError]) -> None:
        self._name = name
        self._lines = tree.lines
        self._texts = tree.texts
        self._top = tree.value
        self._wrong = wrong

    def mapping(self, path: YamlPath, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(path, "fields are expected here, like `name: value`")
        return value

    def only(
        self, path: YamlPath, given: Mapping[str, Any], known: Iterable[str], also: Iterable[str] = ()
    ) -> None:
        for name in given:
            if name not in known:
                allowed = ", ".join(sorted({*known, *also}))
                self.fail((*path, name), f"{name[:40]!r} is no field here; there are {allowed}")

    def value(self, path: YamlPath, value: Any, type: Any, expected: str = "") -> Any:
        """`value` as a `type`, and a text as it was written: 3.10 is not 3.1. expected: what the error says is
        allowed; '': what `type` says."""
        info = inspect.type_info(type)
        if isinstance(info, inspect.StrType) and not isinstance(value, list | dict):
            value = self._texts.get(path, "" if value is None else str(value))
        if isinstance(info, inspect.ListType) and isinstance(value, list):
            value = [self.value((*path, i), item, _item_type(type)) for i, item in enumerate(value)]
        try:
            return decoding.convert(value, type=type)
        except msgspec.ValidationError:
            self.fail(path, f"{_called(path)} is {expected or _expected(type, info, value)}")

    def seconds(self, path: YamlPath, value: Any, type: Any) -> float:
        """A number, or a text like 90s, 10m, 2h or 3d."""
        if isinstance(value, str) and (found := re.fullmatch(r"([0-9]{1,6})([smhd])", value)):
            value = int(found[1]) * _UNITS[found[2]]
        return float(self.value(path, value, type, "a number, or like 90s, 10m or 2h"))

    def line(self, path: YamlPath) -> int:
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 0)

    def fail(self, path: YamlPath, message: str) -> NoReturn:
        line = self.line(path)
        raise self._wrong(f"{self._name}, line {line}: {message}" if line else f"{self._name}: {message}")


def _called(path: YamlPath) -> str:
    return f"{path[-2]}, item {path[-1] + 1}," if isinstance(path[-1], int) else path[-1]


def _item_type(type: Any) -> Any:
    """Of a list's type, which may be Annotated."""
    return get_args(get_args(type)[0] if hasattr(type, "__metadata__") else type)[0]


def _expected(type: Any, info: inspect.Type, value: Any) -> str:
    """What a type allows, in words."""
    match info:
        case inspect.IntType(ge=int(least), le=int(most)):
            return f"a whole number from {least} to {most}"
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType(max_length=int(most)):
            return f"a text of at most {most} characters"
        case inspect.ListType(max_length=int(most)):
            return f"a list of at most {most} texts"
        case inspect.LiteralType():
            return f"{str(value)[:40]!r}; allowed: {', '.join(each for each in get_args(type) if each)}"
    return f"not {str(value)[:40]!r}"
