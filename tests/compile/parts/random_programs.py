"""Random programs of few operators, as text: what a client may describe or bind in the wrong way.

A program has inputs that are views of one to three memories of one to four dimensions (some overlap), 0-d tensors of
each dtype, Python numbers and DTensors, in nested containers; tensors that its graph holds as attributes; changes in
place; outputs that are inputs, views of inputs, or one another.
"""

from __future__ import annotations

import contextlib
import linecache
import math
import random
import warnings
from types import ModuleType
from typing import Any

import torch

FLOATS = ("float32", "float32", "float32", "float64", "bfloat16", "float16", "complex64")
OTHERS = ("int64", "int32", "bool")
SCALARS = (
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64"
)  # fmt: skip
MESH = "mesh"
"""The global that a program with DTensors finds its device mesh in."""


VALUES = (
    "torch.sin({a})", "-{a}", "{a} * 2", "{a} + 1", "{a}.abs()", "{a}.clone()", "{a}.float()",
    "{a} * {b}", "{a} * {b}", "{a} + {b}", "{a} - {b}.sum()", "{a} + {b}.mean(-1, keepdim=True)",
    "torch.where({a} > 0, {a}, {b})", "torch.cat([{a}.flatten(), {b}.flatten()])",
    "{a}[0]", "{a}[1:]", "{a}.t()", "{a}.unsqueeze(0)", "{a}.view(-1)", "{a}.flatten()", "{a}.expand(2, *{a}.shape)",
    "{a}.detach()", "{a}[..., 0]", "{a}.transpose(0, -1)", "{a}.narrow(0, 0, 1)",
    "{a}.sum(0)", "{a}.sum()", "{a}.amax(-1)", "{a}.mean(-1)",
    "{b} * {n}", "{b} + {n}", "{b} - {a}.size(0)",
)  # fmt: skip
"""Expressions of tensors a and b, and a number n."""
CHANGES = (
    "{a}.add_(1)", "{a}.mul_(2)", "{a}.copy_({b})", "{a}[0] = {b}.sum()", "{a}[..., -1].mul_(0.5)", "{a}.add_({b})",
    "{a}.zero_()", "{a}.sub_({b}.mean())",
)  # fmt: skip
HELD_VALUES = ("{a}.sum() * {h} - {i}", "{h} - {a}.mean()", "{a} * {h} + {i}")
HELD_CHANGES = ("{h}.add_(1)", "{h}.sub_({a}.detach().float().mean())")
"""h, i: tensors that the graph holds."""


class Invalid(Exception):
    """Eager refuses what was drawn."""


def program_of(seed: int) -> str:
    """The text of one program. It has `make(step)`: leaves and arguments; `program(*arguments)`; HELD; DYNAMIC, MARKED
    (positions whose first dimension is marked dynamic)."""
    with warnings.catch_warnings(action="ignore"):  # of DTensors, as statements are tried
        for attempt in range(200):
            draft = _Draft(random.Random(f"{seed}/{attempt}"), seed)
            with contextlib.suppress(Invalid):
                return draft.text()
    raise AssertionError(f"no valid program was found for seed {seed}")


def module_of(source: str, name: str, **names: Any) -> Any:
    """A new module with a program, whose source Dynamo and tracebacks find."""
    module = ModuleType(name)
    vars(module).update(names)
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), vars(module))  # text that this module made
    return module


def leaves_of(value: Any) -> list[Any]:
    """The tensors and other values in nested containers, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves_of(item)]
    return [value]


class _Draft:
    def __init__(self, draw: random.Random, seed: int) -> None:
        self._draw = draw
        self._seed = seed
        self._dynamic = draw.random() < 0.3
        self._marks = not self._dynamic and draw.random() < 0.15
        self._trained = draw.random() < 0.45
        self._spread = draw.random() < 0.08
        self._make: list[str] = []
        self._leaves: list[str] = []
        self._inputs: list[str] = []
        self._held: list[str] = []
        self._body: list[str] = []
        self._results: list[str] = []

    def text(self) -> str:
        self._draw_inputs()
        self._draw_held()
        parameters, unpacking = self._draw_parameters()
        header = self._header(parameters)
        self._body = list(unpacking)
        self._draw_body(header)
        source = self._source(header)
        _try_eagerly(source)
        return source

    def _pick(self, *choices: Any) -> Any:
        return self._draw.choice(choices)

    # --- inputs ------------------------------------------------------------------------------------------

    def _draw_inputs(self) -> None:
        for number in range(self._draw.randint(1, 3)):
            self._draw_memory(f"m{number}")
        for number in range(self._pick(0, 0, 1, 1, 2)):
            dtype = self._draw.choice(SCALARS)
            value = self._draw.randint(0, 3)
            self._add_input(f"z{number}", f"torch.tensor({value} + step, dtype=torch.{dtype})")
        if self._draw.random() < 0.25:
            self._add_input("n0", self._pick("2", "3 + step", "1.5", "0.5 + step", "True"))
        if self._spread:
            placement = self._pick("Shard(0)", "Replicate()")
            self._make.append(
                f"    d0 = distribute_tensor(torch.randn(4, 3, generator=g), mesh, [{placement}])"
            )
            self._inputs.append("d0")
        self._draw.shuffle(self._inputs)

    def _draw_memory(self, name: str) -> None:
        draw = self._draw
        dims = draw.randint(1, 4)
        sizes = [draw.randint(2, 5) for _ in range(dims)]
        shape = ", ".join(map(str, sizes))
        if self._dynamic or self._marks:
            shape = f"{sizes[0]} + 2 * step" + "".join(f", {size}" for size in sizes[1:])
        dtype = draw.choice(FLOATS if draw.random() < 0.8 else OTHERS)
        if dtype in OTHERS:
            made = f"torch.randint(0, 2, ({shape},), generator=g).to(torch.{dtype})"
        elif dtype == "complex64" and not self._trained:
            made = f"torch.randn({shape}, generator=g, dtype=torch.complex64)"
        else:
            dtype = "float32" if dtype == "complex64" else dtype
            made = f"torch.randn({shape}, generator=g).to(torch.{dtype})"
        self._make.append(f"    {name} = {made}")
        if self._trained and dtype not in OTHERS and draw.random() < 0.7:
            self._make.append(f"    {name}.requires_grad_()")
            self._leaves.append(name)
            if draw.random() < 0.7:
                self._make.append(f"    {name}a = {name} * 1")
                name = f"{name}a"
        for view in range(self._pick(1, 1, 2, 2, 3)):
            self._add_input(f"{name}v{view}", self._view(name, dims, sizes))

    def _view(self, name: str, dims: int, sizes: list[int]) -> str:
        stop = self._draw.randint(1, max(1, sizes[0] - 1))
        choices = [
            name,
            name,
            f"{name}[{stop}:]",
            f"{name}[:{stop}]",
            f"{name}[0]",
            f"{name}[-1]",
            f"{name}[::2]",
        ]
        choices += [f"{name}.reshape(-1)", f"{name}.unsqueeze(1)", f"{name}.as_strided((2, 2), (1, 1))"]
        if dims >= 2:
            choices += [f"{name}.transpose(0, 1)", f"{name}[:, 0]", f"{name}[:, 1:]", f"{name}.diagonal()"]
        if dims >= 3:
            choices += [
                f"{name}.flatten(1)",
                f"{name}[1, :, 0]",
                f"{name}.permute({', '.join(map(str, range(dims - 1, -1, -1)))})",
            ]
        return self._draw.choice(choices)

    def _add_input(self, name: str, value: str) -> None:
        self._make.append(f"    {name} = {value}")
        self._inputs.append(name)

    def _draw_held(self) -> None:
        shape = self._pick("3", "2, 3", "")
        for number in range(self._pick(0, 0, 1, 2, 2, 3)):
            other = self._pick(shape, shape, "1", "")
            self._held.append(f"torch.full(({other}{',' if other else ''}), {number + 2}.0)")

    def _draw_parameters(self) -> tuple[list[str], list[str]]:
        """Names of the program's parameters with what is passed, and the lines that take the inputs from them."""
        names, parameters, lines = list(self._inputs), [], []
        while names:
            form = self._pick("plain", "plain", "plain", "dict", "list", "deep")
            if form == "plain" or len(names) < 2:
                name = names.pop()
                parameters.append(f"{name}={name}")
                continue
            first, second = names.pop(), names.pop()
            box = f"p{len(parameters)}"
            if form == "dict":
                parameters.append(f"{box}={{'x': {first}, 'y': {second}}}")
                lines.append(f"    {first}, {second} = {box}['x'], {box}['y']")
            elif form == "list":
                parameters.append(f"{box}=[{first}, {second}]")
                lines.append(f"    {first}, {second} = {box}")
            else:
                parameters.append(f"{box}=({{'x': [{first}, (None, {second})]}}, 1)")
                lines.append(f"    {first}, {second} = {box}[0]['x'][0], {box}[0]['x'][1][1]")
        return parameters, lines

    # --- the program's text ---------------------------------------------------------------------------------

    def _header(self, parameters: list[str]) -> str:
        lines = ["import torch"]
        if self._spread:
            lines.append("from torch.distributed.tensor import Replicate, Shard, distribute_tensor")
        lines += ["", f"DYNAMIC = {True if self._dynamic else None}", f"MARKED = {self._marks}"]
        lines.append(f"HELD = [{', '.join(self._held)}]")
        for number in range(len(self._held)):
            lines += [
                "",
                "@torch.compiler.assume_constant_result",
                f"def held_{number}():",
                f"    return HELD[{number}]",
            ]
        lines += ["", "def make(step):", f"    g = torch.Generator().manual_seed({self._seed} * 2 + step)"]
        lines += self._make
        passed = ", ".join(text.partition("=")[2] for text in parameters)
        lines.append(f"    return [{', '.join(self._leaves)}], [{passed}]")
        taken = ", ".join(text.partition("=")[0] for text in parameters)
        lines += ["", f"def program({taken}):"]
        return "\n".join(lines)

    def _source(self, header: str) -> str:
        return "\n".join([header, *self._body, f"    return {self._result()}", ""])

    # --- the program's body ---------------------------------------------------------------------------------

    def _draw_body(self, header: str) -> None:
        """Each statement runs as it is drawn, on values that eager gives; what eager refuses is drawn again."""
        module = module_of(header + "\n    pass\n", f"<draft {self._seed}>", **_globals())
        try:
            _, arguments = module.make(0)
        except RuntimeError as error:  # a view past its memory
            raise Invalid(str(error)) from None
        names = dict(vars(module))
        code = header.rpartition("def program(")[2].rstrip("):")
        names.update(zip(code.split(", "), arguments, strict=True))
        for line in self._body:
            exec(line.strip(), names)
        known = list(self._inputs)
        for number in range(self._draw.randint(3, 8)):
            for _ in range(8):
                made, line = self._statement(known, names, f"t{number}")
                if line and _runs(line, names):
                    break
            else:
                continue
            self._body.append(f"    {line}")
            if made:
                known.append(made)
        self._results = known

    def _statement(self, known: list[str], names: dict[str, Any], new: str) -> tuple[str, str]:
        """A new name, or '', and the line."""
        tensors = [name for name in known if isinstance(names[name], torch.Tensor)]
        numbers = [name for name in known if not isinstance(names[name], torch.Tensor)]
        a, b = self._draw.choice(tensors), self._draw.choice(tensors)
        n = self._draw.choice(numbers) if numbers else f"{a}.shape[0]"
        kinds = [*VALUES, *CHANGES, *([] if not self._held else [*HELD_VALUES, *HELD_CHANGES] * 2)]
        form = self._draw.choice(kinds)
        h, i = (f"held_{self._draw.randrange(len(self._held) or 1)}()" for _ in range(2))
        line = form.format(a=a, b=b, n=n, h=h, i=i)
        return ("", line) if form in CHANGES or form in HELD_CHANGES else (new, f"{new} = {line}")

    def _result(self) -> str:
        drawn = [self._draw.choice(self._results) for _ in range(self._draw.randint(2, 5))]
        if self._results:
            drawn.append(self._results[-1])
        if self._held and self._draw.random() < 0.2:
            drawn.append("held_0()")
        if self._draw.random() < 0.2:
            drawn.append(self._pick("None", "3", f"{drawn[0]}"))
        self._draw.shuffle(drawn)
        flat = ", ".join(drawn)
        if len(drawn) > 1 and self._draw.random() < 0.5:
            return f"{{'a': {drawn[0]}, 'b': [({', '.join(drawn[1:])},)]}}"
        return f"({flat},)"


def _globals() -> dict[str, Any]:
    return {MESH: device_mesh()} if torch.distributed.is_initialized() else {}


def device_mesh() -> Any:
    """A mesh of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (1,))


def _runs(line: str, names: dict[str, Any]) -> bool:
    try:
        exec(line, names)
    except Exception:
        return False
    return True


def _try_eagerly(source: str) -> None:
    """Raises Invalid if eager refuses the program or its backward, or if numbers overflow."""
    module = module_of(source, "<draft>", **_globals())
    for step in (0, 1):
        try:
            leaves, arguments = module.make(step)
            outputs = module.program(*arguments)
            backward(outputs, leaves)
        except Exception as error:
            raise Invalid(str(error)) from None
        found = [
            value for value in (*leaves_of(outputs), *leaves_of(arguments)) if isinstance(value, torch.Tensor)
        ]
        if not any(isinstance(value, torch.Tensor) for value in leaves_of(outputs)):
            raise Invalid("no tensor is returned")
        for value in found:
            if not bool(torch.isfinite(value.detach()).all()):
                raise Invalid("a number that is not finite")


def backward(outputs: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients of the leaves by a sum of all outputs with weights."""
    total: Any = 0
    for position, value in enumerate(leaves_of(outputs)):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            real = torch.view_as_real(value) if value.is_complex() else value
            total = total + (real.double() * math.sqrt(position + 2)).sin().sum()
    if not leaves or not isinstance(total, torch.Tensor):
        return [None for _ in leaves]
    return list(torch.autograd.grad(total, leaves, allow_unused=True))
