"""A batch job as people write it: YAML in; the problems, graphs and kernels that it names, with lines, out. No torch.

docs/tuning-jobs.md describes the file. Lists and ranges expand to all combinations. What is wrong is named by line.
Values are read as they stand: no tags, no anchors, no words that YAML 1.1 takes for truth values.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

from msgspec import Struct

from . import tune_kernels
from .errors import BadTuneJob, SettingsError
from .records import TUNE_ITEMS, Budget, GraphItem, OperatorItem
from .tune_operators import OPERATORS, PRECISIONS, result_of
from .tune_writing import NEEDED, WRITING, Field, Writing
from .tuning import Operand, Problem, operand_of

BYTES = 1 << 20
"""Of a file."""
_DEPTH = 12
_MODES = ("max-autotune", "max-autotune-no-cudagraphs")
_AIM: tuple[Literal["device", "torch", "threads"], ...] = ("device", "torch", "threads")
_SPACES = ("default", "exhaustive")
_UNITS = {"s": 1, "m": 60, "h": 3600}

Mode = Literal["", "max-autotune", "max-autotune-no-cudagraphs"]
Space = Literal["default", "exhaustive"]
Path_ = tuple[str | int, ...]


class GraphFile(Struct, frozen=True):
    """A file of `torchrelay capture`: all its graphs. `path`: relative to the job's file."""

    line: int
    path: str
    mode: Mode = ""


class Spec(Struct, frozen=True, kw_only=True):
    """A job's file. `name`: '' if it gives none."""

    file: str
    name: str = ""
    device: str = ""
    torch: str = ""
    threads: int = 0
    budget: Budget = Budget()
    operators: list[OperatorItem] = []
    graphs: list[GraphItem] = []
    files: list[GraphFile] = []
    kernels: list[tune_kernels.KernelItem] = []
    lines: dict[Literal["device", "torch", "threads"], int] = {}
    """Of those that the file has."""


def load(path: Path) -> Spec:
    """Raises BadTuneJob, which names file and line; SettingsError without PyYAML."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadTuneJob(f"{path} cannot be read: {error.strerror}", hint="Name a job's file") from None
    return read(data, str(path))


def read(data: bytes, name: str) -> Spec:
    """A file's bytes; `name`: what errors call it. Raises as `load`."""
    return _Reader(name, _tree(data, name)).spec()


# --- YAML --------------------------------------------------------------------------------------------------


class _Tree(Struct, frozen=True):
    """A file's values, and the line of each by its path."""

    value: Any
    lines: dict[Path_, int]


def _tree(data: bytes, name: str) -> _Tree:
    try:
        import yaml
    except ImportError:
        raise SettingsError("a job's file needs PyYAML", hint="Run `pip install 'torchrelay[cli]'`") from None
    if len(data) > BYTES:
        raise BadTuneJob(f"{name} has {len(data)} bytes, limit {BYTES}", hint="Split the job")
    lines: dict[Path_, int] = {}

    def fail(mark: Any, message: str) -> NoReturn:
        where = f"{name}, line {mark.line + 1}" if mark is not None else name
        raise BadTuneJob(f"{where}: {message}")

    def plain(node: Any, path: Path_) -> Any:
        if len(path) > _DEPTH:
            fail(node.start_mark, "this is nested too deep")
        lines[path] = node.start_mark.line + 1
        if isinstance(node, yaml.ScalarNode):
            return node.value if node.style in ("'", '"', "|", ">") else _scalar(node.value)
        if isinstance(node, yaml.SequenceNode):
            return [plain(item, (*path, i)) for i, item in enumerate(node.value)]
        found: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                fail(key.start_mark, "a field's name is a word")
            if key.value in found:
                fail(key.start_mark, f"{key.value[:40]} is given twice")
            found[key.value] = plain(value, (*path, key.value))
            lines[(*path, key.value)] = key.start_mark.line + 1
        return found

    try:
        text = data.decode()
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if getattr(event, "anchor", None) is not None:
                fail(event.start_mark, "anchors and aliases are not used here")
            if getattr(event, "tag", None) is not None:
                fail(event.start_mark, "tags are not used here")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadTuneJob(f"{name}, line {line}: this is not UTF-8 text") from None
    except yaml.YAMLError as error:
        fail(
            getattr(error, "problem_mark", None),
            f"this is no YAML: {getattr(error, 'problem', None) or error}",
        )
    except RecursionError:
        raise BadTuneJob(f"{name}: this is nested too deep") from None
    return _Tree(plain(node, ()) if node is not None else {}, lines)


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


# --- the file's parts --------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, name: str, tree: _Tree) -> None:
        self._name = name
        self._lines = tree.lines
        self._top = tree.value
        self._space: Space = "default"
        self._precision: list[str] = ["highest"]

    def spec(self) -> Spec:
        top = self._mapping((), self._top)
        known = {"name", "device", "torch", "threads", "budget", "space", "precision"}
        known |= {"operators", "graphs", "kernels"}
        self._only((), top, known)
        self._space = cast(Space, self._choice(("space",), top.get("space", "default"), _SPACES))
        self._precision = [
            self._choice(("precision",), value, PRECISIONS)
            for value in _listed(top.get("precision", "highest"))
        ]
        graphs, files = self._graphs(top)
        spec = Spec(
            file=self._name,
            name=self._text(("name",), top.get("name", ""), 200),
            device=self._text(("device",), top.get("device", ""), 200),
            torch=self._text(("torch",), top.get("torch", ""), 100),
            threads=self._whole(("threads",), top.get("threads", 0), 0, 1024),
            budget=self._budget(top),
            operators=self._operators(top),
            graphs=graphs,
            files=files,
            kernels=self._kernels(top),
            lines={name: self._line((name,)) for name in _AIM if name in top},
        )
        if not (spec.operators or spec.graphs or spec.files or spec.kernels):
            self._fail((), "this job names no operators, graphs or kernels")
        if len(spec.operators) + len(spec.graphs) + len(spec.kernels) > TUNE_ITEMS:
            self._fail((), f"a job has at most {TUNE_ITEMS} problems, and this more")
        return spec

    def _budget(self, top: Mapping[str, Any]) -> Budget:
        given = self._mapping(("budget",), top.get("budget") or {})
        self._only(("budget",), given, {"seconds", "trials", "samples"})
        seconds = given.get("seconds", 0)
        if isinstance(seconds, str) and (found := re.fullmatch(r"([0-9]{1,6})([smh])", seconds)):
            seconds = int(found[1]) * _UNITS[found[2]]
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= 1e8:
            self._fail(("budget", "seconds"), "seconds is a number, or like 90s, 10m or 2h")
        return Budget(
            float(seconds),
            self._whole(("budget", "trials"), given.get("trials", 0), 0, 1 << 40),
            self._whole(("budget", "samples"), given.get("samples", 0), 0, 1 << 20),
        )

    def _graphs(self, top: Mapping[str, Any]) -> tuple[list[GraphItem], list[GraphFile]]:
        keys: list[GraphItem] = []
        files: list[GraphFile] = []
        for path, entry in self._entries(top, "graphs"):
            self._only(path, entry, {"file", "key", "mode"})
            mode = cast(Mode, self._choice((*path, "mode"), entry["mode"], _MODES) if "mode" in entry else "")
            if ("file" in entry) == ("key" in entry):
                self._fail(path, "a graph has a file of `torchrelay capture`, or a key")
            if "file" in entry:
                file = self._text((*path, "file"), entry["file"], 4096)
                files.append(GraphFile(self._line(path), file, mode))
                continue
            key = str(entry["key"])
            if not re.fullmatch("[0-9a-f]{64}", key):
                self._fail(
                    (*path, "key"), "a key has 64 digits; `torchrelay explain` and `cache ls --json` show it"
                )
            keys.append(GraphItem(self._line(path), key, mode))
        return keys, files

    def _kernels(self, top: Mapping[str, Any]) -> list[tune_kernels.KernelItem]:
        found: list[tune_kernels.KernelItem] = []
        for path, entry in self._entries(top, "kernels"):
            lines = {at[len(path) :]: line for at, line in self._lines.items() if at[: len(path)] == path}
            try:
                found += tune_kernels.parse(entry, lines, space=self._space)
            except tune_kernels.BadEntry as error:
                raise BadTuneJob(f"{self._name}, line {error.line}: {error.message}") from None
        return found

    # --- operators -----------------------------------------------------------------------------------------

    def _operators(self, top: Mapping[str, Any]) -> list[OperatorItem]:
        found: dict[tuple[Problem, Space], OperatorItem] = {}
        for path, entry in self._entries(top, "operators"):
            for item in self._expanded(path, entry, TUNE_ITEMS - len(found)):
                found.setdefault((item.problem, item.space), item)
        return list(found.values())

    def _expanded(self, path: Path_, entry: dict[str, Any], most: int) -> Iterator[OperatorItem]:
        name = str(entry.get("op", ""))
        name = {"conv": "convolution"}.get(name, name)
        writing = WRITING.get(name)
        if writing is None:
            self._fail((*path, "op"), f"{name[:40]!r} is no operator; there are {', '.join(sorted(WRITING))}")
        given = dict(entry)
        del given["op"]
        space = cast(Space, self._choice((*path, "space"), given.pop("space", self._space), _SPACES))
        precision = [
            self._choice((*path, "precision"), value, PRECISIONS)
            for value in _listed(given.pop("precision", self._precision))
        ]
        constant = self._flag((*path, "constant"), given.pop("constant", False))
        if constant and not OPERATORS[name].constants:
            self._fail((*path, "constant"), f"{name} has no operand that may be constant")
        operands: list[Operand] | None = None
        if "operands" in given:
            operands = self._given_operands((*path, "operands"), given.pop("operands"))
        fields = [field for field in writing.fields if operands is None or field.setting]
        self._only(
            path,
            given,
            {field.name for field in fields},
            ("op", "operands", "space", "precision", "constant"),
        )
        axes = [self._axis(path, field, given) for field in fields]
        if math.prod(map(len, axes)) * len(precision) > most:
            self._fail(path, f"this expands to more problems than a job may have, {TUNE_ITEMS}")
        for values in itertools.product(*axes):
            chosen = {field.name: value for field, value in zip(fields, values, strict=True)}
            for each in precision:
                try:
                    problem = _problem(name, writing, chosen, operands, each, constant)
                except ValueError as error:
                    at = "operands" if operands is not None else "op"
                    self._fail((*path, at), str(error))
                yield OperatorItem(self._line(path), problem, space)

    def _given_operands(self, path: Path_, texts: Any) -> list[Operand]:
        if not isinstance(texts, list):
            self._fail(path, 'operands are a list, like ["bf16[128,64]", "bf16[64,32]:1,64"]')
        found = []
        for i, text in enumerate(texts):
            try:
                found.append(operand_of(str(text)))
            except ValueError as error:
                self._fail((*path, i), str(error))
        return found

    def _axis(self, path: Path_, field: Field, given: Mapping[str, Any]) -> list[Any]:
        """The values that a field takes, one after the other."""
        at = (*path, field.name)
        if field.name not in given:
            if field.default is NEEDED:
                self._fail(path, f"{field.name} is missing")
            return [field.default]
        values = given[field.name]
        if isinstance(values, dict):
            values = self._range(at, values)
        found = []
        for value in _listed(values):
            try:
                found.append(field.read(value))
            except ValueError as error:
                self._fail(at, f"{field.name}: {error}")
        if not found:
            self._fail(at, f"{field.name} is an empty list")
        return list(dict.fromkeys(found))

    def _range(self, path: Path_, given: dict[str, Any]) -> list[int]:
        self._only(path, given, {"from", "to", "step", "times"})
        if not {"from", "to"} <= given.keys() or ("step" in given) == ("times" in given):
            self._fail(path, "a range is {from: 128, to: 1024, step: 128} or {from: 128, to: 1024, times: 2}")
        first, last = (self._whole((*path, name), given[name], 1, 1 << 40) for name in ("from", "to"))
        if first > last:
            self._fail(path, f"the range begins at {first} and ends before, at {last}")
        step = self._whole((*path, "step"), given.get("step", 1), 1, 1 << 40)
        times = self._whole((*path, "times"), given.get("times", 2), 2, 1 << 20)
        found = []
        while first <= last:
            found.append(first)
            if len(found) > TUNE_ITEMS:
                self._fail(path, f"this expands to more problems than a job may have, {TUNE_ITEMS}")
            first = first + step if "step" in given else first * times
        return found

    # --- values --------------------------------------------------------------------------------------------

    def _entries(self, top: Mapping[str, Any], name: str) -> Iterator[tuple[Path_, dict[str, Any]]]:
        entries = top.get(name) or []
        if not isinstance(entries, list):
            self._fail((name,), f"{name} is a list")
        for i, entry in enumerate(entries):
            yield (name, i), self._mapping((name, i), entry)

    def _mapping(self, path: Path_, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._fail(path, "fields are expected here, like `op: mm`")
        return value

    def _only(
        self, path: Path_, given: Mapping[str, Any], known: set[str], beside: Sequence[str] = ()
    ) -> None:
        for name in given:
            if name not in known:
                allowed = ", ".join(sorted({*known, *beside}))
                self._fail((*path, name), f"{name[:40]!r} is no field here; there are {allowed}")

    def _choice(self, path: Path_, value: Any, allowed: Sequence[str]) -> str:
        if value not in allowed:
            self._fail(path, f"{path[-1]} is {str(value)[:40]!r}; allowed: {', '.join(allowed)}")
        return str(value)

    def _flag(self, path: Path_, value: Any) -> bool:
        if not isinstance(value, bool):
            self._fail(path, f"{path[-1]} is true or false")
        return value

    def _text(self, path: Path_, value: Any, most: int) -> str:
        text = str(value if value is not None else "")
        if isinstance(value, list | dict) or len(text) > most:
            self._fail(path, f"{path[-1]} is a text of at most {most} characters")
        return text

    def _whole(self, path: Path_, value: Any, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self._fail(path, f"{path[-1]} is a whole number from {least} to {most}")
        return value

    def _line(self, path: Path_) -> int:
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 0)

    def _fail(self, path: Path_, message: str) -> NoReturn:
        line = self._line(path)
        raise BadTuneJob(f"{self._name}, line {line}: {message}" if line else f"{self._name}: {message}")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _problem(
    name: str,
    writing: Writing,
    given: Mapping[str, Any],
    operands: list[Operand] | None,
    precision: str,
    constant: bool,
) -> Problem:
    """Raises ValueError."""
    operands = writing.operands(given) if operands is None else operands
    dims = len(operands[0].size) - 2 if operands else 0
    settings = writing.settings(given, dims)
    if any(operand.dtype == "float32" for operand in operands[:1]):
        settings["precision"] = precision
    if constant:
        settings["constants"] = " ".join(map(str, OPERATORS[name].constants))
    result = result_of(name, operands, settings, writing.result(given))
    return Problem(name, tuple(operands), result, tuple(sorted(settings.items())))
