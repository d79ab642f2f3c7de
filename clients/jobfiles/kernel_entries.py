"""Kernels in a tuning job's file: an entry of `kernels:` in, KernelEntry items, candidates and grids out.

An item says which Triton function, what it is called with, over which grid, and what to try. Numbers are expressions of
compiler/request/size_expr.py over the entry's `sizes`, the arguments before, and in a grid what a configuration sets.
No torch and no Triton: the function itself is looked up where the user's code is."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from ...compiler.api.tuning.kernels import MAX_ARGUMENTS, MAX_CANDIDATES, config_text, constant_text
from ...compiler.errors import BadExpression
from ...compiler.request import allowed_names, schema, size_expr
from ...compiler.tuning.records import WRITTEN, Operand, contiguous

Lines = Mapping[tuple[str | int, ...], int]
"""The line of each part of an entry, by its path: () is the entry, ("arguments", "x_ptr") that value."""
Space = Literal["default", "exhaustive"]
MAX_ITEMS = 1000
"""Of one entry."""
SETTINGS = ("num_warps", "num_stages")
_KEYS = frozenset({"kernel", "sizes", "arguments", "grid", "tune", "space", *SETTINGS})
_MODULE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)", re.ASCII)
_TENSOR = re.compile(r"([a-z][a-z0-9_]*)\[([^\[\]]*)\](?::(.+))?", re.ASCII)
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_QUOTED = re.compile(r"(['\"])(.*)\1", re.DOTALL)
_POWER = re.compile(r"next_power_of_2\((.*)\)")
_SPELLED = {"cdiv": "CeilDiv", "min": "Min", "max": "Max"}
_NUMBERS = range(1 << 40)
Number = int | float


class BadKernelEntry(Exception):
    """An entry that cannot be: `line` of the file, and what is wrong."""

    def __init__(self, line: int, message: str) -> None:
        self.line = line
        self.message = message
        super().__init__(f"line {line}: {message}")


class KernelEntry(Struct, frozen=True, kw_only=True):
    """One kernel on one set of arguments, as the file has it.

    module, function: where the Triton kernel is. text: the item for people. arguments: by parameter; tensors are
    Operands. grid: one to three expressions. numbers: what they may name, beside a configuration's. tune: values to try
    for parameters. num_warps, num_stages: to try; () leaves them to the space. space: default takes what
    @triton.autotune says.
    """

    line: int
    lines: Lines
    module: str
    function: str
    text: str
    arguments: tuple[tuple[str, Operand | schema.KernelConstant], ...]
    grid: tuple[str, ...]
    numbers: Mapping[str, Number]
    tune: tuple[tuple[str, tuple[schema.KernelConstant, ...]], ...] = ()
    num_warps: tuple[int, ...] = ()
    num_stages: tuple[int, ...] = ()
    space: Space = "default"

    def bad(self, message: str, *path: str | int) -> BadKernelEntry:
        """What is wrong with the part at `path`."""
        return BadKernelEntry(line_of(self.lines, path), message)


def parse(entry: Mapping[str, Any], lines: Lines, *, space: Space = "default") -> list[KernelEntry]:
    """The items of an entry of `kernels:`, one for each combination of its sizes. Raises BadKernelEntry.

    space: the job's; an entry may say its own.
    """
    return _Entry(entry, lines).items(space)


def line_of(lines: Lines, path: tuple[str | int, ...]) -> int:
    """The line of a part, or of what it is in."""
    while path not in lines and path:
        path = path[:-1]
    return lines.get(path, 0)


class _Entry:
    def __init__(self, entry: Mapping[str, Any], lines: Lines) -> None:
        self._lines = lines
        if not isinstance(entry, Mapping):
            raise self._bad("a kernel is a mapping with `kernel: module:function`, `arguments` and `grid`")
        self._entry = entry
        for name in entry:
            if name not in _KEYS:
                raise self._bad(f"{str(name)[:40]!r} is none of {', '.join(sorted(_KEYS))}", name)
        for name in ("kernel", "arguments", "grid"):
            if name not in entry:
                raise self._bad(f"the kernel has no `{name}`")

    def _bad(self, message: str, *path: str | int) -> BadKernelEntry:
        return BadKernelEntry(line_of(self._lines, path), message)

    def items(self, space: Space) -> list[KernelEntry]:
        found = _MODULE.fullmatch(str(self._entry["kernel"]))
        if found is None:
            raise self._bad(f"{str(self._entry['kernel'])[:80]!r} is no `module:function`", "kernel")
        chosen = self._entry.get("space", space)
        if chosen not in ("default", "exhaustive"):
            raise self._bad(f"space {str(chosen)[:40]!r} is neither default nor exhaustive", "space")
        tune = self._tune()
        grid = self._grid()
        made = []
        for sizes in self._sizes():
            arguments, numbers = self._arguments(sizes)
            for name, _ in tune:
                if name in dict(arguments):
                    raise self._bad(f"{name} is both an argument and tuned", "tune", name)
            shown = ", ".join(f"{n}={_shown(value)}" for n, value in arguments)
            made.append(
                KernelEntry(
                    line=line_of(self._lines, ()),
                    lines=self._lines,
                    module=found[1],
                    function=found[2],
                    text=f"{found[1]}:{found[2]}({shown})"[:1000],
                    arguments=tuple(arguments),
                    grid=grid,
                    numbers=numbers,
                    tune=tune,
                    num_warps=self._settings("num_warps", power=True, most=64),
                    num_stages=self._settings("num_stages", power=False, most=32),
                    space=chosen,
                )
            )
        return made

    def _mapping(self, name: str) -> Mapping[str, Any]:
        given = self._entry.get(name) or {}
        if not isinstance(given, Mapping):
            raise self._bad(f"`{name}` is no mapping of names to values", name)
        for key in given:
            if not isinstance(key, str) or not allowed_names.IDENTIFIER.fullmatch(key):
                raise self._bad(f"{str(key)[:40]!r} is no name of a parameter or size", name, key)
        return given

    def _sizes(self) -> Iterator[dict[str, Number]]:
        """Each combination, the first size varying slowest."""
        given = self._mapping("sizes")
        lists: list[list[Number]] = []
        for name, value in given.items():
            values = value if isinstance(value, list) else [value]
            for number in values:
                if type(number) is not int or number not in _NUMBERS:
                    raise self._bad(f"size {name} is no whole number, nor a list of them", "sizes", name)
            if not values:
                raise self._bad(f"size {name} is an empty list", "sizes", name)
            lists.append(values)
        count = math.prod(map(len, lists))
        if count > MAX_ITEMS:
            raise self._bad(f"the sizes have {count} combinations, {MAX_ITEMS} allowed", "sizes")
        return (dict(zip(given, combination, strict=True)) for combination in itertools.product(*lists))

    def _arguments(
        self, numbers: dict[str, Number]
    ) -> tuple[list[tuple[str, Operand | schema.KernelConstant]], dict[str, Number]]:
        """In the file's order, and the numbers among them beside the sizes."""
        known = dict(numbers)
        made: list[tuple[str, Operand | schema.KernelConstant]] = []
        for name, value in self._mapping("arguments").items():
            argument = self._argument(value, known, "arguments", name)
            made.append((name, argument))
            if isinstance(argument, int | float) and not isinstance(argument, bool):
                if numbers.get(name, argument) != argument:
                    raise self._bad(f"{name} is another number among the sizes", "arguments", name)
                known[name] = argument
        if len(made) > MAX_ARGUMENTS:
            raise self._bad(f"the kernel has {len(made)} arguments, {MAX_ARGUMENTS} allowed", "arguments")
        if not any(isinstance(value, Operand) for _, value in made):
            raise self._bad("no argument is a tensor, like f32[1024, 512]", "arguments")
        return made, known

    def _argument(
        self, value: Any, numbers: Mapping[str, Number], *path: str | int
    ) -> Operand | schema.KernelConstant:
        if isinstance(value, Mapping):
            if extra := sorted(set(value) - {"dtype", "shape", "stride"}):
                raise self._bad(f"a tensor has dtype, shape and stride, and no {extra[0]!r}", *path, extra[0])
            return self._tensor(
                str(value.get("dtype", "")), value.get("shape"), value.get("stride"), numbers, *path
            )
        if isinstance(value, str) and (found := _TENSOR.fullmatch(value.strip())):
            strides = None if found[3] is None else _split(found[3])
            return self._tensor(found[1], _split(found[2]), strides, numbers, *path)
        return self._constant(value, numbers, *path)

    def _tensor(
        self, dtype: str, shape: Any, stride: Any, numbers: Mapping[str, Number], *path: str | int
    ) -> Operand:
        name = WRITTEN.get(dtype, dtype)
        if name not in allowed_names.DTYPE_BYTES:
            raise self._bad(f"{dtype[:40]!r} is no dtype, like float32 or bf16", *path)
        size = self._lengths(shape, numbers, *path)
        strides = contiguous(size) if stride is None else self._lengths(stride, numbers, *path)
        if len(strides) != len(size):
            raise self._bad(f"a tensor of {len(size)} dimensions has {len(strides)} strides", *path)
        return Operand(name, size, strides)

    def _lengths(self, given: Any, numbers: Mapping[str, Number], *path: str | int) -> tuple[int, ...]:
        if not isinstance(given, list) or len(given) > 16:
            raise self._bad("a tensor's shape and strides are lists of up to 16 lengths", *path)
        made = []
        for each in given:
            length = self._number(each, numbers, *path)
            if type(length) is not int or length not in _NUMBERS:
                raise self._bad(f"length {each!s:.60} is {length}, no whole number from 0 up", *path)
            made.append(length)
        return tuple(made)

    def _constant(self, value: Any, numbers: Mapping[str, Number], *path: str | int) -> schema.KernelConstant:
        if value is None or type(value) is bool:
            return value
        if not isinstance(value, str | int | float):
            raise self._bad(f"a {type(value).__name__} is neither a tensor, a number nor a text", *path)
        if isinstance(value, int | float):
            return self._number(value, numbers, *path)
        if quoted := _QUOTED.fullmatch(value.strip()):
            if not allowed_names.OPTION_TEXT.fullmatch(quoted[2]):
                raise self._bad("the text is longer than 64, or has characters that could end it", *path)
            return quoted[2]
        prefix, _, dtype = value.strip().partition("tl.")
        if not prefix and dtype in allowed_names.TRITON_DTYPES:
            return schema.TritonDType(dtype)
        return self._number(value, numbers, *path)

    def _number(self, value: Any, numbers: Mapping[str, Number], *path: str | int) -> Number:
        if type(value) not in (int, float, str):
            raise self._bad(f"{value!s:.60} is no number and no expression", *path)
        try:
            number: Number = number_of(value, numbers) if isinstance(value, str) else value
        except BadExpression as error:
            raise self._bad(
                f"{error.message} (a text stands in quotes inside quotes: \"'tanh'\")", *path
            ) from None
        if isinstance(number, int) and not -(1 << 63) <= number < 1 << 63:
            raise self._bad(f"{value!s:.60} is past 64 bits", *path)
        return number

    def _tune(self) -> tuple[tuple[str, tuple[schema.KernelConstant, ...]], ...]:
        made = []
        for name, values in self._mapping("tune").items():
            if not isinstance(values, list) or not values:
                raise self._bad(f"what is tried for {name} is no list of values", "tune", name)
            if name in SETTINGS:
                raise self._bad(f"{name} stands beside `tune`, not in it", "tune", name)
            constants = tuple(self._constant(value, {}, "tune", name) for value in values)
            if len({repr(constant) for constant in constants}) != len(constants):
                raise self._bad(f"a value of {name} stands there twice", "tune", name)
            made.append((name, constants))
        return tuple(made)

    def _settings(self, name: str, *, power: bool, most: int) -> tuple[int, ...]:
        given = self._entry.get(name, [])
        values = given if isinstance(given, list) else [given]
        for value in values:
            if type(value) is not int or not 1 <= value <= most or (power and value & (value - 1)):
                kind = "powers of two" if power else "whole numbers"
                raise self._bad(f"{name} are {kind} from 1 to {most}", name)
        if len(set(values)) != len(values):
            raise self._bad(f"a value of {name} stands there twice", name)
        return tuple(values)

    def _grid(self) -> tuple[str, ...]:
        given = self._entry["grid"]
        parts = given if isinstance(given, list) else [given]
        if not 1 <= len(parts) <= 3:
            raise self._bad("a grid has one to three sizes", "grid")
        for part in parts:
            if type(part) is int:
                continue
            if not isinstance(part, str):
                raise self._bad(f"{part!s:.60} in the grid is no number and no expression", "grid")
            try:
                check(part)
            except BadExpression as error:
                raise self._bad(error.message, "grid") from None
        return tuple(map(str, parts))


def _split(text: str) -> list[str]:
    """At the commas outside parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts] if text.strip() else []


def _shown(value: Operand | schema.KernelConstant) -> str:
    return value.text() if isinstance(value, Operand) else constant_text(value)


def number_of(text: str, numbers: Mapping[str, Number]) -> Number:
    """An expression's value: compiler/request/size_expr.py's grammar, with cdiv, min and max as Triton spells them, and
    next_power_of_2 around all of it. Raises BadExpression."""
    text = text.strip()
    if power := _POWER.fullmatch(text):
        value = _evaluated(power[1], numbers)
        if type(value) is not int or value not in _NUMBERS:
            raise BadExpression(
                f"expression {text[:60]!r} has no value: {value!s:.40} is no whole number from 0 up"
            )
        return 1 << max(value - 1, 0).bit_length()
    return _evaluated(text, numbers)


def check(text: str) -> None:
    """Raise BadExpression unless `text` is in the grammar, whatever its names stand for."""
    inside = _POWER.fullmatch(text.strip())
    spelled = _respelled((inside[1] if inside else text).strip())
    size_expr.check(spelled, set(_WORD.findall(spelled)))


def _evaluated(text: str, numbers: Mapping[str, Number]) -> Number:
    value = size_expr.evaluate(_respelled(text.strip()), numbers)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise BadExpression(f"expression {text[:60]!r} is no number")
    number: Number = value
    return number


def _respelled(text: str) -> str:
    return re.sub(r"\b(cdiv|min|max)\(", lambda found: f"{_SPELLED[found[1]]}(", text)


_WARPS: Mapping[Space, tuple[int, ...]] = {"default": (2, 4, 8), "exhaustive": (1, 2, 4, 8, 16)}
_STAGES: Mapping[Space, tuple[int, ...]] = {"default": (2, 3), "exhaustive": (1, 2, 3, 4, 5)}


def candidates(item: KernelEntry, own: Sequence[schema.KernelConfig]) -> list[schema.KernelConfig]:
    """What is tried: the kernel's own configurations; and if it has none, where the file names values, and where the
    space is exhaustive, each combination of values, warps and stages. Raises BadKernelEntry."""
    made = list(own)
    if not own or item.space == "exhaustive" or item.tune or item.num_warps or item.num_stages:
        warps = item.num_warps or _WARPS[item.space]
        stages = item.num_stages or _STAGES[item.space]
        values = [dict(config.kwargs) for config in own] or [{}]
        lists = [[(name, value) for value in tried] for name, tried in item.tune]
        count = len(values) * math.prod(map(len, lists)) * len(warps) * len(stages)
        if count > MAX_CANDIDATES:  # before they are made: a file may name very many
            raise item.bad(f"the kernel has {count} candidates, {MAX_CANDIDATES} allowed", "tune")
        for base, chosen, w, s in itertools.product(values, itertools.product(*lists), warps, stages):
            kwargs = sorted({**base, **dict(chosen)}.items())
            config = schema.KernelConfig(kwargs, w, s, 1, None)
            if config not in made:
                made.append(config)
    if len(made) > MAX_CANDIDATES:
        raise item.bad(f"the kernel has {len(made)} candidates, {MAX_CANDIDATES} allowed", "kernel")
    return made


def grid_of(item: KernelEntry, config: schema.KernelConfig) -> tuple[int, int, int]:
    """The grid in a configuration. Raises BadKernelEntry."""
    numbers: dict[str, Number] = {
        **item.numbers,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **{name: value for name, value in config.kwargs if type(value) in (int, float)},  # type: ignore[misc]
    }
    made = []
    for text in item.grid:
        try:
            size = number_of(text, numbers)
        except BadExpression as error:
            raise item.bad(error.message, "grid") from None
        if type(size) is not int or not 0 < size < 1 << 31:
            raise item.bad(f"{text[:60]!r} is {size} in {config_text(config)}, and no size of a grid", "grid")
        made.append(size)
    x, y, z = (*made, 1, 1)[:3]
    return x, y, z
