"""Reads a batch tuning job from a YAML file: the problems, graphs and kernels that it names, with lines. No torch.

docs/tuning/jobs.md describes the file. Lists and ranges expand to all combinations. Errors name file and line.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ...compiler.api.tuning.jobs import (
    TUNE_ITEMS,
    GraphTuneItem,
    OperatorTuneItem,
    TuneBudget,
    TuneMode,
    TuneOptions,
)
from ...compiler.api.tuning.operators import OPERATORS, result_of
from ...compiler.errors import BadTuneJob
from ...compiler.tuning.queries import Space
from ...compiler.tuning.records import Operand, Problem, parse_operand
from . import kernel_entries, yaml_lines
from .operator_fields import FIELDS, SETTINGS, OperatorFields
from .yaml_lines import YamlPath, listed

_LINED = ("device", "torch", "threads")
_SHORT = {"convolution": "conv"}
"""Operators that a file calls otherwise than PyTorch does."""
_OPERATORS = {_SHORT.get(name, name): name for name in FIELDS}

Precision = Literal["highest", "high", "medium"]
_Positive = Annotated[int, Meta(ge=1, le=1 << 40)]


class _Top(TuneOptions, frozen=True, kw_only=True):
    name: Annotated[str, Meta(max_length=200)] = ""
    space: Space = "default"
    precision: tuple[Precision, ...] = ("highest",)
    operators: list[Any] = msgspec.field(default_factory=list)
    graphs: list[Any] = msgspec.field(default_factory=list)
    kernels: list[Any] = msgspec.field(default_factory=list)


class _OperatorEntry(Struct):
    """Fields of every operator; None: what the file's top says."""

    op: str = ""
    space: Space | None = None
    precision: list[Precision] | None = None
    constant: bool = False
    operands: list[str] | None = None


class _GraphEntry(Struct):
    file: Annotated[str, Meta(max_length=4096)] = ""
    key: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64})?$",
            description="64 hexadecimal digits; `torchrelay explain` and `cache ls --json` show it",
        ),
    ] = ""
    mode: TuneMode = ""


class _Range(Struct):
    """Up to `to`, in steps or multiplied by `times`."""

    first: _Positive = msgspec.field(name="from")
    last: _Positive = msgspec.field(name="to")
    step: _Positive | None = None
    times: Annotated[int, Meta(ge=2, le=1 << 20)] | None = None


class GraphFilePath(Struct, frozen=True):
    """A file of `torchrelay capture`: all its graphs. `path`: relative to the job's file."""

    line: int
    path: str
    mode: TuneMode = ""


class TuneFile(TuneOptions, frozen=True, kw_only=True):
    """A job's file. `name`: '' if it gives none."""

    file: str
    name: str
    operators: list[OperatorTuneItem]
    graphs: list[GraphTuneItem]
    files: list[GraphFilePath]
    kernels: list[kernel_entries.KernelEntry]


def load(path: Path) -> TuneFile:
    """Raises BadTuneJob, which names file and line; SettingsError without ruamel.yaml."""
    return read(yaml_lines.read_file(path, BadTuneJob), str(path))


def read(data: bytes, name: str) -> TuneFile:
    """A file's bytes; `name`: what errors call it. Raises as `load`."""
    return _TuneFileReader(name, yaml_lines.tree(data, name, BadTuneJob)).spec()


# --- the file's parts --------------------------------------------------------------------------------------


class _TuneFileReader(yaml_lines.YamlReader):
    error = BadTuneJob

    def spec(self) -> TuneFile:
        given = self.fields((), self._top, {*_Top.__struct_fields__} - {"lines"})
        given["lines"] = {name: self.line((name,)) for name in _LINED if name in self._top}
        if "precision" in given:
            given["precision"] = listed(given["precision"])
        if "budget" in given:
            given["budget"] = self._budget(given["budget"])
        top = self.convert((), given, _Top)
        graphs, files = self._graphs(top.graphs)
        operators: dict[tuple[Problem, Space], OperatorTuneItem] = {}
        for path, entry in self.entries(("operators",), top.operators):
            for item in self._problems(path, entry, top, TUNE_ITEMS - len(operators)):
                operators.setdefault((item.problem, item.space), item)
        kernels: list[kernel_entries.KernelEntry] = []
        for path, entry in self.entries(("kernels",), top.kernels):
            kernels += kernel_entries.parse(self, path, entry, space=top.space)
        if not (operators or graphs or files or kernels):
            self.fail((), "this job names no operators, graphs or kernels")
        if len(operators) + len(graphs) + len(kernels) > TUNE_ITEMS:
            self.fail((), f"a job has at most {TUNE_ITEMS} problems, and this more")
        options = {name: getattr(top, name) for name in TuneOptions.__struct_fields__}
        return TuneFile(
            file=self._name,
            name=top.name,
            operators=list(operators.values()),
            graphs=graphs,
            files=files,
            kernels=kernels,
            **options,
        )

    def _budget(self, value: Any) -> dict[str, Any]:
        given = self.fields(("budget",), value, TuneBudget.__struct_fields__)
        if "seconds" in given:
            given["seconds"] = self.seconds(("budget", "seconds"), given["seconds"])
        return given

    def _graphs(self, entries: list[Any]) -> tuple[list[GraphTuneItem], list[GraphFilePath]]:
        keys: list[GraphTuneItem] = []
        files: list[GraphFilePath] = []
        for path, value in self.entries(("graphs",), entries):
            given = self.fields(path, value, _GraphEntry.__struct_fields__)
            entry = self.convert(path, given, _GraphEntry)
            if bool(entry.file) == bool(entry.key):
                self.fail(path, "a graph has a file of `torchrelay capture`, or a key")
            if entry.file:
                files.append(GraphFilePath(self.line(path), entry.file, entry.mode))
            else:
                keys.append(GraphTuneItem(self.line(path), entry.key, entry.mode))
        return keys, files

    # --- operators -----------------------------------------------------------------------------------------

    def _problems(self, path: YamlPath, value: Any, top: _Top, most: int) -> Iterator[OperatorTuneItem]:
        """One for each combination of the fields' values."""
        given = self.fields(path, value)
        if "precision" in given:
            given["precision"] = listed(given["precision"])
        entry = self.convert(path, given, _OperatorEntry)
        if entry.op not in _OPERATORS:
            there = ", ".join(sorted(_OPERATORS))
            self.fail((*path, "op"), f"{entry.op[:40]!r} is not an operator; there are {there}")
        op = _OPERATORS[entry.op]
        if entry.constant and not OPERATORS[op].constants:
            self.fail((*path, "constant"), f"{entry.op} has no operand that may be constant")
        operands = None if entry.operands is None else self._operands(path, entry.operands)
        type = FIELDS[op] if operands is None else SETTINGS.get(op, OperatorFields)
        common = _OperatorEntry.__struct_fields__
        self.fields(path, given, (*type.__struct_encode_fields__, *common))
        axes = {
            name: self._values((*path, name), value) for name, value in given.items() if name not in common
        }
        precisions = entry.precision or top.precision
        if math.prod(map(len, axes.values())) * len(precisions) > most:
            self.fail(path, f"this expands to more problems than a job may have, {TUNE_ITEMS}")
        for values in itertools.product(*axes.values()):
            fields = self.convert(path, dict(zip(axes, values, strict=True)), type)
            for precision in precisions:
                try:
                    problem = _problem(op, fields, operands, precision, entry.constant)
                except ValueError as error:
                    self.fail((*path, "op" if operands is None else "operands"), str(error))
                yield OperatorTuneItem(self.line(path), problem, entry.space or top.space)

    def _operands(self, path: YamlPath, texts: list[str]) -> list[Operand]:
        try:
            return [parse_operand(text) for text in texts]
        except ValueError as error:
            self.fail((*path, "operands"), str(error))

    def _values(self, path: YamlPath, value: Any) -> list[Any]:
        """The values that a field takes, one after the other."""
        values = self._range(path, value) if isinstance(value, dict) else listed(value)
        if not values:
            self.fail(path, f"{path[-1]} is an empty list")
        return values

    def _range(self, path: YamlPath, value: Any) -> list[int]:
        found = self.convert(path, self.fields(path, value, _Range.__struct_encode_fields__), _Range)
        if (found.step is None) == (found.times is None):
            self.fail(path, "a range is {from: 128, to: 1024, step: 128} or {from: 128, to: 1024, times: 2}")
        if found.first > found.last:
            self.fail(path, f"the range begins at {found.first} and ends before, at {found.last}")
        values = []
        number = found.first
        while number <= found.last:
            values.append(number)
            if len(values) > TUNE_ITEMS:
                self.fail(path, f"this expands to more problems than a job may have, {TUNE_ITEMS}")
            number = number + found.step if found.step else number * (found.times or 2)
        return values


def _problem(
    op: str, fields: OperatorFields, operands: list[Operand] | None, precision: str, constant: bool
) -> Problem:
    """Raises ValueError."""
    operands = fields.operands() if operands is None else operands
    settings = fields.settings(len(operands[0].size) - 2 if operands else 0)
    if operands and operands[0].dtype == "float32":
        settings["precision"] = precision
    if constant:
        settings["constants"] = " ".join(map(str, OPERATORS[op].constants))
    result = result_of(op, operands, settings, fields.result())
    return Problem(op, tuple(operands), result, tuple(sorted(settings.items())))
