"""Reads the Triton kernels of a tuning job's file, and makes their candidates and grids.

An entry says which Triton function, what it is called with, over which grid, and what to try. Numbers are expressions
of compiler/request/size_expr.py over the entry's `sizes`, the arguments before, and in a grid what a configuration
sets. No torch and no Triton: the function itself is looked up where the user's code is."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from ...compiler.api.tuning.kernels import MAX_ARGUMENTS, MAX_CANDIDATES, config_text, constant_text
from ...compiler.errors import BadExpression, RequestError
from ...compiler.request import allowed_names, schema, size_expr
from ...compiler.tuning.queries import Space
from ...compiler.tuning.records import WRITTEN, Operand, contiguous
from .yaml_lines import YamlPath, YamlReader, listed

MAX_ITEMS = 1000
"""The most items of one entry."""
_TENSOR = re.compile(r"([a-z][a-z0-9_]*)\[([^\[\]]*)\](?::(.+))?", re.ASCII)
_QUOTED = re.compile(r"(['\"])(.*)\1", re.DOTALL)
_POWER = re.compile(r"next_power_of_2\((.*)\)")
_SYMPY_NAMES = {"cdiv": "CeilDiv", "min": "Min", "max": "Max"}
_WORDS: Mapping[str, bool | None] = {"": None, "null": None, "~": None, "true": True, "false": False}
_NUMBERS = range(1 << 40)
Number = int | float
_Name = Annotated[str, Meta(pattern=f"^{allowed_names.IDENTIFIER.pattern}$")]
_Length = Annotated[int, Meta(ge=0, lt=1 << 40)]
_PART = r"[A-Za-z_]\w*"


class _Fields(Struct, forbid_unknown_fields=True):
    kernel: Annotated[
        str,
        Meta(pattern=rf"^{_PART}(\.{_PART})*:{_PART}$", description="module:function, as Python imports it"),
    ]
    arguments: dict[_Name, Any]
    grid: Annotated[list[str], Meta(min_length=1, max_length=3)]
    sizes: dict[_Name, Annotated[list[_Length], Meta(min_length=1)]] = {}
    tune: dict[_Name, Annotated[list[str], Meta(min_length=1)]] = {}
    num_warps: list[Annotated[int, Meta(ge=1, le=64)]] = []
    num_stages: list[Annotated[int, Meta(ge=1, le=32)]] = []
    space: Space | None = None


class _TensorFields(Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[str]
    stride: list[str] | None = None


class _FilePart(Struct, frozen=True, kw_only=True):
    reader: YamlReader
    path: YamlPath

    @property
    def line(self) -> int:
        return self.reader.line(self.path)

    def bad(self, message: str, *path: str | int) -> RequestError:
        """The error for the part at `path`, from here."""
        return self.reader.wrong((*self.path, *path), message)


class KernelEntry(_FilePart, frozen=True, kw_only=True):
    """One kernel on one set of arguments, as the file has it.

    module, function: where the Triton kernel is. text: the item for people. arguments: by parameter; tensors are
    Operands. grid: one to three expressions. numbers: what they may name, with those of a configuration. tune: values
    to try for parameters. num_warps, num_stages: to try; () leaves them to the space. space: default takes what
    @triton.autotune says.
    """

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


def parse(reader: YamlReader, path: YamlPath, value: Any, *, space: Space = "default") -> list[KernelEntry]:
    """The items of the entry at `path`, one for each combination of its sizes. space: the job's; an entry may name its
    own. Raises the reader's error."""
    given = reader.fields(path, value, _Fields.__struct_fields__)
    for name in ("grid", "num_warps", "num_stages"):
        if name in given:
            given[name] = listed(given[name])
    if "sizes" in given:
        sizes = reader.fields((*path, "sizes"), given["sizes"])
        given["sizes"] = {name: listed(size) for name, size in sizes.items()}
    return list(_Entry(reader=reader, path=path, fields=reader.convert(path, given, _Fields)).items(space))


class _Entry(_FilePart, frozen=True, kw_only=True):
    fields: _Fields

    def items(self, space: Space) -> Iterator[KernelEntry]:
        fields = self.fields
        module, _, function = fields.kernel.partition(":")
        tune = tuple((name, self._tried(name, values)) for name, values in fields.tune.items())
        if any(warps & (warps - 1) for warps in fields.num_warps):
            raise self.bad("num_warps are powers of two", "num_warps")
        for sizes in self._sizes():
            arguments, numbers = self._arguments(sizes)
            for name, _ in tune:
                if name in arguments:
                    raise self.bad(f"{name} is both an argument and tuned", "tune", name)
            shown = ", ".join(f"{name}={_shown(value)}" for name, value in arguments.items())
            yield KernelEntry(
                reader=self.reader,
                path=self.path,
                module=module,
                function=function,
                text=f"{fields.kernel}({shown})"[:1000],
                arguments=tuple(arguments.items()),
                grid=tuple(fields.grid),
                numbers=numbers,
                tune=tune,
                num_warps=tuple(dict.fromkeys(fields.num_warps)),
                num_stages=tuple(dict.fromkeys(fields.num_stages)),
                space=fields.space or space,
            )

    def _sizes(self) -> Iterator[dict[str, Number]]:
        """Each combination; the first size varies slowest."""
        sizes = self.fields.sizes
        count = math.prod(map(len, sizes.values()))
        if count > MAX_ITEMS:
            raise self.bad(f"the sizes have {count} combinations, {MAX_ITEMS} allowed", "sizes")
        for combination in itertools.product(*sizes.values()):
            yield dict(zip(sizes, combination, strict=True))

    def _arguments(
        self, sizes: dict[str, Number]
    ) -> tuple[dict[str, Operand | schema.KernelConstant], dict[str, Number]]:
        """The arguments in the file's order; and the numbers among them, with the sizes."""
        numbers = dict(sizes)
        made: dict[str, Operand | schema.KernelConstant] = {}
        for name, value in self.fields.arguments.items():
            argument = made[name] = self._argument(value, numbers, "arguments", name)
            if isinstance(argument, int | float) and not isinstance(argument, bool):
                if sizes.get(name, argument) != argument:
                    raise self.bad(f"{name} is another number among the sizes", "arguments", name)
                numbers[name] = argument
        if len(made) > MAX_ARGUMENTS:
            raise self.bad(f"the kernel has {len(made)} arguments, {MAX_ARGUMENTS} allowed", "arguments")
        if not any(isinstance(value, Operand) for value in made.values()):
            raise self.bad("no argument is a tensor, like f32[1024, 512]", "arguments")
        return made, numbers

    def _argument(
        self, value: Any, numbers: Mapping[str, Number], *path: str | int
    ) -> Operand | schema.KernelConstant:
        if isinstance(value, dict):
            tensor = self.reader.convert((*self.path, *path), value, _TensorFields)
            return self._tensor(tensor.dtype, tensor.shape, tensor.stride, numbers, *path)
        if not isinstance(value, str):
            raise self.bad("a list is neither a tensor, a number nor a text", *path)
        if found := _TENSOR.fullmatch(value.strip()):
            strides = None if found[3] is None else _split(found[3])
            return self._tensor(found[1], _split(found[2]), strides, numbers, *path)
        return self._constant(value.strip(), numbers, *path)

    def _tensor(
        self,
        dtype: str,
        shape: list[str],
        stride: list[str] | None,
        numbers: Mapping[str, Number],
        *path: str | int,
    ) -> Operand:
        name = WRITTEN.get(dtype, dtype)
        if name not in allowed_names.DTYPE_BYTES:
            raise self.bad(f"{dtype[:40]!r} is not a dtype such as float32 or bf16", *path)
        size = self._lengths(shape, numbers, *path)
        strides = contiguous(size) if stride is None else self._lengths(stride, numbers, *path)
        if len(strides) != len(size):
            raise self.bad(f"a tensor of {len(size)} dimensions has {len(strides)} strides", *path)
        return Operand(name, size, strides)

    def _lengths(self, texts: list[str], numbers: Mapping[str, Number], *path: str | int) -> tuple[int, ...]:
        if len(texts) > 16:
            raise self.bad("a tensor has up to 16 dimensions", *path)
        lengths = []
        for text in texts:
            length = self._number(text, numbers, *path)
            if type(length) is not int or length not in _NUMBERS:
                raise self.bad(f"length {text:.60} is {length}, no whole number from 0 up", *path)
            lengths.append(length)
        return tuple(lengths)

    def _constant(self, text: str, numbers: Mapping[str, Number], *path: str | int) -> schema.KernelConstant:
        if text in _WORDS:
            return _WORDS[text]
        if quoted := _QUOTED.fullmatch(text):
            if not allowed_names.OPTION_TEXT.fullmatch(quoted[2]):
                raise self.bad("the text is longer than 64, or has characters that could end it", *path)
            return quoted[2]
        prefix, _, dtype = text.partition("tl.")
        if not prefix and dtype in allowed_names.TRITON_DTYPES:
            return schema.TritonDType(dtype)
        return self._number(text, numbers, *path)

    def _number(self, text: str, numbers: Mapping[str, Number], *path: str | int) -> Number:
        try:
            number = number_of(text, numbers)
        except BadExpression as error:
            raise self.bad(
                f"{error.message} (write a text in quotes inside quotes: \"'tanh'\")", *path
            ) from None
        if isinstance(number, int) and not -(1 << 63) <= number < 1 << 63:
            raise self.bad(f"{text:.60} is past 64 bits", *path)
        return number

    def _tried(self, name: str, texts: list[str]) -> tuple[schema.KernelConstant, ...]:
        if name in ("num_warps", "num_stages"):
            raise self.bad(f"{name} is a field next to `tune`, not in it", "tune", name)
        return tuple(self._constant(text, {}, "tune", name) for text in dict.fromkeys(texts))


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
    """An expression's value: compiler/request/size_expr.py's grammar, with Triton's names cdiv, min and max, and
    next_power_of_2 around all of it. Raises BadExpression."""
    text = text.strip()
    if power := _POWER.fullmatch(text):
        value = _evaluated(power[1], numbers)
        if type(value) is not int or value not in _NUMBERS:
            raise BadExpression(
                f"expression {text[:60]!r} has no value: {value!s:.40} is not a whole number from 0 up"
            )
        return 1 << max(value - 1, 0).bit_length()
    return _evaluated(text, numbers)


def _evaluated(text: str, numbers: Mapping[str, Number]) -> Number:
    in_grammar = re.sub(r"\b(cdiv|min|max)\(", lambda found: f"{_SYMPY_NAMES[found[1]]}(", text.strip())
    value = size_expr.evaluate(in_grammar, numbers)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise BadExpression(f"expression {text[:60]!r} is not a number")
    number: Number = value
    return number


_WARPS: Mapping[Space, tuple[int, ...]] = {"default": (2, 4, 8), "exhaustive": (1, 2, 4, 8, 16)}
_STAGES: Mapping[Space, tuple[int, ...]] = {"default": (2, 3), "exhaustive": (1, 2, 3, 4, 5)}


def candidates(item: KernelEntry, own: Sequence[schema.KernelConfig]) -> list[schema.KernelConfig]:
    """What is tried: the kernel's own configurations; and if it has none, where the file names values, and where the
    space is exhaustive, each combination of values, warps and stages. Raises the reader's error."""
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
    """The grid in a configuration. Raises the reader's error."""
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
