"""Reads a batch tuning job from a YAML file: the problems, graphs and kernels that it names, with lines. No torch.

docs/tuning-jobs.md describes the file. Lists and ranges expand to all combinations. Errors name file and line.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import Meta, Struct

from ...compiler.api.tuning.jobs import TUNE_ITEMS, GraphTuneItem, OperatorTuneItem, TuneBudget, TuneRequest
from ...compiler.api.tuning.operators import OPERATORS, result_of
from ...compiler.errors import BadTuneJob
from ...compiler.tuning.records import Operand, Problem, parse_operand
from . import kernel_entries, yaml_lines
from .operator_fields import OPERATOR_FORMS, REQUIRED, OperatorField, OperatorForm
from .yaml_lines import YamlPath

_AIM: tuple[Literal["device", "torch", "threads"], ...] = ("device", "torch", "threads")
_LONG = {"conv": "convolution"}
"""Operators that a file calls otherwise than PyTorch does."""

Mode = Literal["", "max-autotune", "max-autotune-no-cudagraphs"]
Space = Literal["default", "exhaustive"]
_GivenMode = Literal["max-autotune", "max-autotune-no-cudagraphs"]
_Precision = Literal["highest", "high", "medium"]
_Positive = Annotated[int, Meta(ge=1, le=1 << 40)]
_REQUEST = get_type_hints(TuneRequest, include_extras=True)
_BUDGET = get_type_hints(TuneBudget, include_extras=True)


class GraphFilePath(Struct, frozen=True):
    """A file of `torchrelay capture`: all its graphs. `path`: relative to the job's file."""

    line: int
    path: str
    mode: Mode = ""


class TuneFile(Struct, frozen=True, kw_only=True):
    """A job's file. `name`: '' if it gives none."""

    file: str
    name: str = ""
    device: str = ""
    torch: str = ""
    threads: int = 0
    budget: TuneBudget = TuneBudget()
    operators: list[OperatorTuneItem] = []
    graphs: list[GraphTuneItem] = []
    files: list[GraphFilePath] = []
    kernels: list[kernel_entries.KernelEntry] = []
    lines: dict[Literal["device", "torch", "threads"], int] = {}
    """Of those that the file has."""


def load(path: Path) -> TuneFile:
    """Raises BadTuneJob, which names file and line; SettingsError without ruamel.yaml."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadTuneJob(f"{path} cannot be read: {error.strerror}", hint="Name a job's file") from None
    return read(data, str(path))


def read(data: bytes, name: str) -> TuneFile:
    """A file's bytes; `name`: what errors call it. Raises as `load`."""
    return _Reader(name, yaml_lines.tree(data, name, BadTuneJob)).spec()


# --- the file's parts --------------------------------------------------------------------------------------


class _Reader(yaml_lines.YamlReader):
    def __init__(self, name: str, tree: yaml_lines.YamlTree) -> None:
        super().__init__(name, tree, BadTuneJob)
        self._space: Space = "default"
        self._precision: list[str] = ["highest"]

    def spec(self) -> TuneFile:
        top = self.mapping((), self._top)
        known = {"name", "device", "torch", "threads", "budget", "space", "precision"}
        known |= {"operators", "graphs", "kernels"}
        self.only((), top, known)
        self._space = self.value(("space",), top.get("space", "default"), Space)
        self._precision = [
            self.value(("precision",), value, _Precision)
            for value in _listed(top.get("precision", "highest"))
        ]
        graphs, files = self._graphs(top)
        spec = TuneFile(
            file=self._name,
            name=self.value(("name",), top.get("name", ""), Annotated[str, Meta(max_length=200)]),
            device=self.value(("device",), top.get("device", ""), _REQUEST["device"]),
            torch=self.value(("torch",), top.get("torch", ""), _REQUEST["torch"]),
            threads=self.value(("threads",), top.get("threads", 0), _REQUEST["threads"]),
            budget=self._budget(top),
            operators=self._operators(top),
            graphs=graphs,
            files=files,
            kernels=self._kernels(top),
            lines={name: self.line((name,)) for name in _AIM if name in top},
        )
        if not (spec.operators or spec.graphs or spec.files or spec.kernels):
            self.fail((), "this job names no operators, graphs or kernels")
        if len(spec.operators) + len(spec.graphs) + len(spec.kernels) > TUNE_ITEMS:
            self.fail((), f"a job has at most {TUNE_ITEMS} problems, and this more")
        return spec

    def _budget(self, top: Mapping[str, Any]) -> TuneBudget:
        given = self.mapping(("budget",), top.get("budget") or {})
        self.only(("budget",), given, {"seconds", "trials", "samples"})
        return TuneBudget(
            self.seconds(("budget", "seconds"), given.get("seconds", 0), _BUDGET["seconds"]),
            self.value(("budget", "trials"), given.get("trials", 0), _BUDGET["trials"]),
            self.value(("budget", "samples"), given.get("samples", 0), _BUDGET["samples"]),
        )

    def _graphs(self, top: Mapping[str, Any]) -> tuple[list[GraphTuneItem], list[GraphFilePath]]:
        keys: list[GraphTuneItem] = []
        files: list[GraphFilePath] = []
        for path, entry in self._entries(top, "graphs"):
            self.only(path, entry, {"file", "key", "mode"})
            mode: Mode = self.value((*path, "mode"), entry["mode"], _GivenMode) if "mode" in entry else ""
            if ("file" in entry) == ("key" in entry):
                self.fail(path, "a graph has a file of `torchrelay capture`, or a key")
            if "file" in entry:
                file = self.value((*path, "file"), entry["file"], Annotated[str, Meta(max_length=4096)])
                files.append(GraphFilePath(self.line(path), file, mode))
                continue
            key = str(entry["key"])
            if not re.fullmatch("[0-9a-f]{64}", key):
                self.fail(
                    (*path, "key"), "a key has 64 digits; `torchrelay explain` and `cache ls --json` show it"
                )
            keys.append(GraphTuneItem(self.line(path), key, mode))
        return keys, files

    def _kernels(self, top: Mapping[str, Any]) -> list[kernel_entries.KernelEntry]:
        found: list[kernel_entries.KernelEntry] = []
        for path, entry in self._entries(top, "kernels"):
            lines = {at[len(path) :]: line for at, line in self._lines.items() if at[: len(path)] == path}
            try:
                found += kernel_entries.parse(entry, lines, space=self._space)
            except kernel_entries.BadKernelEntry as error:
                raise BadTuneJob(f"{self._name}, line {error.line}: {error.message}") from None
        return found

    # --- operators -----------------------------------------------------------------------------------------

    def _operators(self, top: Mapping[str, Any]) -> list[OperatorTuneItem]:
        found: dict[tuple[Problem, Space], OperatorTuneItem] = {}
        for path, entry in self._entries(top, "operators"):
            for item in self._expanded(path, entry, TUNE_ITEMS - len(found)):
                found.setdefault((item.problem, item.space), item)
        return list(found.values())

    def _expanded(self, path: YamlPath, entry: dict[str, Any], most: int) -> Iterator[OperatorTuneItem]:
        name = str(entry.get("op", ""))
        name = _LONG.get(name, name)
        writing = OPERATOR_FORMS.get(name)
        if writing is None:
            short = {long: short for short, long in _LONG.items()}
            there = ", ".join(sorted(short.get(each, each) for each in OPERATOR_FORMS))
            self.fail((*path, "op"), f"{name[:40]!r} is no operator; there are {there}")
        given = dict(entry)
        del given["op"]
        space: Space = self.value((*path, "space"), given.pop("space", self._space), Space)
        precision = [
            self.value((*path, "precision"), value, _Precision)
            for value in _listed(given.pop("precision", self._precision))
        ]
        constant = self.value((*path, "constant"), given.pop("constant", False), bool)
        if constant and not OPERATORS[name].constants:
            self.fail((*path, "constant"), f"{name} has no operand that may be constant")
        operands: list[Operand] | None = None
        if "operands" in given:
            operands = self._given_operands((*path, "operands"), given.pop("operands"))
        fields = [field for field in writing.fields if operands is None or field.setting]
        self.only(
            path,
            given,
            {field.name for field in fields},
            ("op", "operands", "space", "precision", "constant"),
        )
        axes = [self._axis(path, field, given) for field in fields]
        if math.prod(map(len, axes)) * len(precision) > most:
            self.fail(path, f"this expands to more problems than a job may have, {TUNE_ITEMS}")
        for values in itertools.product(*axes):
            chosen = {field.name: value for field, value in zip(fields, values, strict=True)}
            for each in precision:
                try:
                    problem = _problem(name, writing, chosen, operands, each, constant)
                except ValueError as error:
                    at = "operands" if operands is not None else "op"
                    self.fail((*path, at), str(error))
                yield OperatorTuneItem(self.line(path), problem, space)

    def _given_operands(self, path: YamlPath, texts: Any) -> list[Operand]:
        if not isinstance(texts, list):
            self.fail(path, 'operands are a list, like ["bf16[128,64]", "bf16[64,32]:1,64"]')
        found = []
        for i, text in enumerate(texts):
            try:
                found.append(parse_operand(str(text)))
            except ValueError as error:
                self.fail((*path, i), str(error))
        return found

    def _axis(self, path: YamlPath, field: OperatorField, given: Mapping[str, Any]) -> list[Any]:
        """The values that a field takes, one after the other."""
        at = (*path, field.name)
        if field.name not in given:
            if field.default is REQUIRED:
                self.fail(path, f"{field.name} is missing")
            return [field.default]
        values = given[field.name]
        if isinstance(values, dict):
            values = self._range(at, values)
        found = []
        for value in _listed(values):
            try:
                found.append(field.read(value))
            except ValueError as error:
                self.fail(at, f"{field.name}: {error}")
        if not found:
            self.fail(at, f"{field.name} is an empty list")
        return list(dict.fromkeys(found))

    def _range(self, path: YamlPath, given: dict[str, Any]) -> list[int]:
        self.only(path, given, {"from", "to", "step", "times"})
        if not {"from", "to"} <= given.keys() or ("step" in given) == ("times" in given):
            self.fail(path, "a range is {from: 128, to: 1024, step: 128} or {from: 128, to: 1024, times: 2}")
        first, last = (self.value((*path, name), given[name], _Positive) for name in ("from", "to"))
        if first > last:
            self.fail(path, f"the range begins at {first} and ends before, at {last}")
        step = self.value((*path, "step"), given.get("step", 1), _Positive)
        times = self.value((*path, "times"), given.get("times", 2), Annotated[int, Meta(ge=2, le=1 << 20)])
        found = []
        while first <= last:
            found.append(first)
            if len(found) > TUNE_ITEMS:
                self.fail(path, f"this expands to more problems than a job may have, {TUNE_ITEMS}")
            first = first + step if "step" in given else first * times
        return found

    def _entries(self, top: Mapping[str, Any], name: str) -> Iterator[tuple[YamlPath, dict[str, Any]]]:
        entries = top.get(name) or []
        if not isinstance(entries, list):
            self.fail((name,), f"{name} is a list")
        for i, entry in enumerate(entries):
            yield (name, i), self.mapping((name, i), entry)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _problem(
    name: str,
    writing: OperatorForm,
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
