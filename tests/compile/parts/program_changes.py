"""Changes of a program's text, each with what the next start must do: trace again, or use what was recorded."""

# ruff: noqa: E501 (a row is a program, its change and what the next start does)

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from types import ModuleType

import pytest
from msgspec import Struct
from program_starts import Around

PRELUDE = """
import torch
from torch import nn
from torch.nn import functional as F


def inputs():
    return [(torch.linspace(-1, 2, 12).view(3, 4).requires_grad_(),)]


"""
Patch = Callable[[pytest.MonkeyPatch, ModuleType], None]


class Change(Struct, frozen=True, kw_only=True):
    """A program, and one change of its text, of objects after it was imported, or of what is around its calls."""

    text: str
    edits: tuple[tuple[str, str], ...] = ()
    patch: Patch | None = None
    around: Around = contextlib.nullcontext
    how: str = "traced"
    """What the start after the change does; "unfit": the program has no record at all; "varies": it depends
    on PyTorch's version."""
    differs: bool = True
    """Whether the results are others, so that the recorded program would be wrong."""

    def before(self) -> str:
        return PRELUDE + self.text

    def after(self) -> str:
        text = self.before()
        for old, new in self.edits:
            assert text.count(old) >= 1, f"no {old!r}"
            text = text.replace(old, new)
        return text


def edit(text: str, *edits: tuple[str, str], how: str = "traced", differs: bool = True) -> Change:
    return Change(text=text, edits=edits, how=how, differs=differs)


def patched(
    text: str, name: str, value: object, *, raising: bool = True, how: str = "traced", differs: bool = True
) -> Change:
    """A name of a library gets another value."""

    def patch(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        monkeypatch.setattr(name, value, raising=raising)

    return Change(text=text, patch=patch, how=how, differs=differs)


_CHANGE = re.compile("«(.*?)→(.*?)»", re.DOTALL)


def rows(texts: dict[str, str], *, how: str = "traced", differs: bool = True) -> dict[str, Change]:
    """Changes by name. In a text, `«2.0→3.0»` is 2.0 before the change and 3.0 after it."""
    changes = {}
    for name, text in texts.items():
        before, after = (_CHANGE.sub(part, text) for part in (lambda found: found[1], lambda found: found[2]))
        changes[name] = edit(before, (before, after), how=how, differs=differs)
    return changes


FUNCTION = """
OTHER = 1
TABLE = {"scale": 2.0, "unused": 5}
PAIR = (1, 2)
LIST = [1.0, 2.0]
NAME = "sin"
FLAG = True
NUMBER = 3
SCALE = 2.0


def deep(x):
    return x * 3


def middle(x):
    return deep(x) + 1


def unrelated(x):
    return x - 1


def scaled(x, by=2.0, *, plus=1.0):
    \"\"\"A docstring.\"\"\"
    return x * by + plus


def program(x):
    y = middle(x) * SCALE + NUMBER  # a comment
    y = y * TABLE["scale"] + PAIR[1] - LIST[0]
    if FLAG:
        y = y + 1
    return scaled(getattr(torch, NAME)(y) * 0.5)
"""

FUNCTIONS = {
    "constant in the code": edit(FUNCTION, ("* 0.5", "* 0.25")),
    "constant three calls deep": edit(FUNCTION, ("x * 3", "x * 4")),
    "a float for an equal int": edit("def program(x):\n    return x.int() * 2\n", ("* 2", "* 2.0")),
    "operator": edit(FUNCTION, ("return deep(x) + 1", "return deep(x) - 1")),
    "default argument": edit(FUNCTION, ("by=2.0", "by=3.0")),
    "keyword's default": edit(FUNCTION, ("plus=1.0", "plus=3.0")),
    "global float": edit(FUNCTION, ("SCALE = 2.0", "SCALE = 2.5")),
    "global int": edit(FUNCTION, ("NUMBER = 3", "NUMBER = 4")),
    "global string": edit(FUNCTION, ('NAME = "sin"', 'NAME = "cos"')),
    "global bool": edit(FUNCTION, ("FLAG = True", "FLAG = False")),
    "global tuple": edit(FUNCTION, ("PAIR = (1, 2)", "PAIR = (1, 3)")),
    "global list": edit(FUNCTION, ("LIST = [1.0", "LIST = [3.0")),
    "global dict": edit(FUNCTION, ('"scale": 2.0', '"scale": 3.0')),
    "global function edited": edit(
        FUNCTION, ("def deep(x):\n    return x * 3", "def deep(x):\n    return x + 3")
    ),
    "global function rebound": edit(
        FUNCTION + "\n\nscaled = scaled\n", ("scaled = scaled\n", "scaled = unrelated\n")
    ),
    "deep function monkeypatched": Change(
        text=FUNCTION, patch=lambda m, module: m.setattr(module, "deep", module.unrelated)
    ),
    "deep function's code assigned": Change(
        text=FUNCTION, patch=lambda m, module: m.setattr(module.deep, "__code__", module.unrelated.__code__)
    ),
    "defaults assigned": Change(
        text=FUNCTION, patch=lambda m, module: m.setattr(module.scaled, "__defaults__", (5.0,))
    ),
    "keyword defaults assigned": Change(
        text=FUNCTION, patch=lambda m, module: m.setattr(module.scaled, "__kwdefaults__", {"plus": 9.0})
    ),
    "keyword defaults changed in place": Change(
        text=FUNCTION, patch=lambda m, module: module.scaled.__kwdefaults__.update(plus=9.0)
    ),
    "the function itself edited": edit(FUNCTION, ("return scaled(", "return unrelated(")),
    "a default that is a list, changed in place": Change(
        text="def program(x, by=[2.0]):\n    return x * by[0]\n",
        patch=lambda m, module: module.program.__defaults__[0].__setitem__(0, 3.0),
    ),
    "slice": edit("def program(x):\n    return x[:2] * 2\n", ("[:2]", "[1:]")),
    **rows(
        {
            "-0.0 for 0.0": "def program(x):\n    return 1 / (x.detach() * 0 + 0.0) * 0.0, torch.full«((2,), 0.0)→((2,), -0.0)»\n",
            "global int becomes bool": "«ONE = 1→ONE = True»\n\n\ndef program(x):\n    return x * 2 if ONE is True else x * ONE\n",
            "global float becomes NaN": "«SCALE = 2.0→SCALE = float('nan')»\n\n\ndef program(x):\n    return x * SCALE\n",
            "global None": "«BIAS = None→BIAS = 1.0»\n\n\ndef program(x):\n    return x * 2 if BIAS is None else x + BIAS\n",
            "global tensor becomes float": "T = «torch.ones(4)→2.0»\n\n\ndef program(x):\n    return x * T\n",
            "length of a global list": "L = «[1.0, 2.0]→[1.0, 2.0, 3.0]»\n\n\ndef program(x):\n    for each in L:\n        x = x * each + 1\n    return x\n",
            "order of a global dict": 'D = «{"a": 2.0, "b": 3.0}→{"b": 3.0, "a": 2.0}»\n\n\ndef program(x):\n    for key, value in D.items():\n        x = x * value + 1\n    return x\n',
            "key of a global dict": 'D = «{"a"→{"c"»: 2.0}\n\n\ndef program(x):\n    return x * D.get("a", 1.0)\n',
            "global set": 'S = «{"a"}→{"b"}»\n\n\ndef program(x):\n    return x * (2 if "a" in S else 3)\n',
            "truth of a set": 'S = «{"a"}→set()»\n\n\ndef program(x):\n    return x * (2 if S else 3)\n',
            "truth of a frozenset": 'S = {1: frozenset(«{"a"}→set()»)}\n\n\ndef program(x):\n    found = S.get(1)\n    return x * (2 if found and "a" in found else 3)\n',
            "global frozenset": 'S = frozenset(«{"a", "c"}→{"b", "c"}»)\n\n\ndef program(x):\n    return x * (2 if "a" in S else 3)\n',
            "a callee's default that is a list": "def scaled(x, by=«[2.0]→[3.0]»):\n    return x * by[0]\n\n\ndef program(x):\n    return scaled(x)\n",
            "a callee's default that is a dict": "def scaled(x, by={'a': «2.0}→3.0}»):\n    return x * by['a']\n\n\ndef program(x):\n    return scaled(x)\n",
            "a callee's default that is an object": "class Box:\n    def __init__(self, v):\n        self.v = v\n\n\ndef scaled(x, by=«Box(2.0)→Box(3.0)»):\n    return x * by.v\n\n\ndef program(x):\n    return scaled(x)\n",
            "a callee's default that is a function": "def a(x):\n    return x + 1\n\n\ndef b(x):\n    return x - 1\n\n\ndef scaled(x, «by=a→by=b»):\n    return by(x)\n\n\ndef program(x):\n    return scaled(x)\n",
            "a callee's default that is a function, edited": "def a(x):\n    return «x + 1→x + 2»\n\n\ndef scaled(x, by=a):\n    return by(x)\n\n\ndef program(x):\n    return scaled(x)\n",
            "generator": "def parts(x):\n    for i in «range(2)→range(3)»:\n        yield x + i\n\n\ndef program(x):\n    return sum(parts(x))\n",
            "iterator class": "class Parts:\n    def __init__(self, n):\n        self.n = n\n\n    def __iter__(self):\n        return iter(«[1.0, 2.0]→[1.5, 2.0]»[: self.n])\n\n\ndef program(x):\n    for each in Parts(2):\n        x = x * each + 1\n    return x\n",
            "nested function": "def program(x):\n    def inner(y):\n        return «y * 2→y * 3»\n\n    return inner(x)\n",
            "nested function of a callee": "def outer(x):\n    def inner(y):\n        return «y * 2→y * 3»\n\n    return inner(x)\n\n\ndef program(x):\n    return outer(x)\n",
            "comprehension": "def program(x):\n    return sum([x * i for i in «range(3)→range(4)»])\n",
            "print": "def program(x):\n    y = x * 2\n    print(y.sum().item())\n    return «y + 1→y + 2»\n",
            "exception that is caught": "def check(x):\n    if x.dim() == 2:\n        «raise ValueError→raise TypeError»('one')\n    return x\n\n\ndef program(x):\n    try:\n        return check(x)\n    except ValueError:\n        return x * 2\n",
        }
    ),
    **rows(
        {
            "global tensor's shape": "T = «torch.ones(4)→torch.ones(3, 1)»\n\n\ndef program(x):\n    return x * T\n"
        },
        differs=False,
    ),
    **rows(
        {
            "lambda": "act = lambda x: «x * 2→x * 3»\n\n\ndef program(x):\n    return act(x)\n",
            "lambdas in a list": "acts = [lambda «x: x * 2→x: x * 3», lambda x: x * 5]\n\n\ndef program(x):\n    return «acts[0]→acts[0]»(x)\n",
            "two lambdas on one line swapped": "«first, second =→second, first =» lambda x: x * 2, lambda x: x * 5\n\n\ndef program(x):\n    return first(x)\n",
            "exception's text": "def check(x):\n    if x.dim() == 2:\n        raise ValueError(«'one'→'two'»)\n    return x\n\n\ndef program(x):\n    return check(x * 2)\n",
        },
        how="unfit",
    ),
    **rows(
        {
            "global tensor's values": "T = «torch.ones(4)→torch.zeros(4)»\n\n\ndef program(x):\n    return x * T\n"
        },
        how="used",
    ),
    **rows(
        {"assertion": "def program(x):\n    assert x.dim() «== 2→== 3»\n    return x * 2\n"}, how="varies"
    ),
}

CLOSURES = {
    **rows(
        {
            "closure's float": "def make(by):\n    def program(x):\n        return x * by\n\n    return program\n\n\nprogram = «make(2.0)→make(3.0)»\n",
            "closure's list": "def make(by):\n    def program(x):\n        return x * by[0]\n\n    return program\n\n\nprogram = «make([2.0])→make([3.0])»\n",
            "closure's function": "def double(x):\n    return x * 2\n\n\ndef triple(x):\n    return x * 3\n\n\ndef make(f):\n    def program(x):\n        return f(x)\n\n    return program\n\n\nprogram = «make(double)→make(triple)»\n",
            "closure's function edited": "def double(x):\n    return «x * 2→x * 3»\n\n\ndef make(f):\n    def program(x):\n        return f(x)\n\n    return program\n\n\nprogram = make(double)\n",
            "closure of a callee": "def make(by):\n    def inner(x):\n        return x * by\n\n    return inner\n\n\ninner = «make(2.0)→make(3.0)»\n\n\ndef program(x):\n    return inner(x)\n",
            "closure of a callee, a list": "def make(by):\n    def inner(x):\n        return x * by[0]\n\n    return inner\n\n\ninner = «make([2.0])→make([3.0])»\n\n\ndef program(x):\n    return inner(x)\n",
            "closure of a callee, a function": "def double(x):\n    return x * 2\n\n\ndef triple(x):\n    return x * 3\n\n\ndef make(f):\n    def inner(x):\n        return f(x)\n\n    return inner\n\n\ninner = «make(double)→make(triple)»\n\n\ndef program(x):\n    return inner(x)\n",
            "closures of one factory swapped": "def make(by):\n    def inner(x):\n        return x * by\n\n    return inner\n\n\n«a, b =→b, a =» make(2.0), make(3.0)\n\n\ndef program(x):\n    return a(x) - b(x) * 2\n",
            "decorator added": "import functools\n\n\ndef twice(f):\n    @functools.wraps(f)\n    def wrapper(x):\n        return f(x) * 2\n\n    return wrapper\n\n\n«# here→@twice»\ndef inner(x):\n    return x + 1\n\n\ndef program(x):\n    return inner(x)\n",
            "decorator removed": "import functools\n\n\ndef twice(f):\n    @functools.wraps(f)\n    def wrapper(x):\n        return f(x) * 2\n\n    return wrapper\n\n\n«@twice\n→»def inner(x):\n    return x + 1\n\n\ndef program(x):\n    return inner(x)\n",
            "decorator edited": "import functools\n\n\ndef twice(f):\n    @functools.wraps(f)\n    def wrapper(x):\n        return «f(x) * 2→f(x) * 3»\n\n    return wrapper\n\n\n@twice\ndef inner(x):\n    return x + 1\n\n\ndef program(x):\n    return inner(x)\n",
            "decorated function edited": "import functools\n\n\ndef twice(f):\n    @functools.wraps(f)\n    def wrapper(x):\n        return f(x) * 2\n\n    return wrapper\n\n\n@twice\ndef inner(x):\n    return «x + 1→x + 2»\n\n\ndef program(x):\n    return inner(x)\n",
            "decorator without wraps, decorated function edited": "def twice(f):\n    def wrapper(x):\n        return f(x) * 2\n\n    return wrapper\n\n\n@twice\ndef inner(x):\n    return «x + 1→x + 2»\n\n\ndef program(x):\n    return inner(x)\n",
            "decorator's argument": "def times(n):\n    def decorate(f):\n        def wrapper(x):\n            return f(x) * n\n\n        return wrapper\n\n    return decorate\n\n\n«@times(2)→@times(3)»\ndef inner(x):\n    return x + 1\n\n\ndef program(x):\n    return inner(x)\n",
            "decorator of the program itself": "def twice(f):\n    def wrapper(x):\n        return f(x) * 2\n\n    return wrapper\n\n\n@twice\ndef program(x):\n    return «x + 1→x + 2»\n",
            "cached function": "import functools\n\n\n@functools.cache\ndef factor(n):\n    return «n * 2.0→n * 3.0»\n\n\ndef program(x):\n    return x * factor(3)\n",
            "partial's argument": "import functools\n\n\ndef scaled(x, by):\n    return x * by\n\n\nact = functools.partial(scaled, «by=2.0→by=3.0»)\n\n\ndef program(x):\n    return act(x)\n",
            "partial's positional argument": "import functools\n\n\ndef scaled(by, x):\n    return x * by\n\n\nact = functools.partial(«scaled, 2.0→scaled, 3.0»)\n\n\ndef program(x):\n    return act(x)\n",
            "partial's function": "import functools\n\n\ndef double(x, by):\n    return x * by\n\n\ndef plus(x, by):\n    return x + by\n\n\nact = functools.«partial(double→partial(plus», by=3.0)\n\n\ndef program(x):\n    return act(x)\n",
            "partial's function edited": "import functools\n\n\ndef double(x, by):\n    return «x * by→x + by»\n\n\nact = functools.partial(double, by=3.0)\n\n\ndef program(x):\n    return act(x)\n",
            "registry's function": "def relu(x):\n    return x.relu()\n\n\ndef tanh(x):\n    return x.tanh()\n\n\nACTS = «{'act': relu}→{'act': tanh}»\n\n\ndef program(x):\n    return ACTS['act'](x)\n",
            "registry's function edited": "def relu(x):\n    return «x.relu()→x.relu() + 1»\n\n\nACTS = {'act': relu}\n\n\ndef program(x):\n    return ACTS['act'](x)\n",
            "registry of torch's functions": "ACTS = {'act': «torch.relu→torch.tanh»}\n\n\ndef program(x):\n    return ACTS['act'](x)\n",
            "registry of classes": "class A:\n    def __call__(self, x):\n        return x + 1\n\n\nclass B:\n    def __call__(self, x):\n        return x + 2\n\n\nR = «{'a': A}→{'a': B}»\n\n\ndef program(x):\n    return R['a']()(x)\n",
            "context manager's class": "class Doubled:\n    by = 2.0\n\n    def __enter__(self):\n        «return self.by→return self.by + 1»\n\n    def __exit__(self, *_):\n        return None\n\n\ndef program(x):\n    with Doubled() as by:\n        return x * by\n",
            "context manager's attribute": "class Doubled:\n    «by = 2.0→by = 3.0»\n\n    def __enter__(self):\n        return self.by\n\n    def __exit__(self, *_):\n        return None\n\n\ndef program(x):\n    with Doubled() as by:\n        return x * by\n",
            "context manager of contextlib": "import contextlib\n\n\n@contextlib.contextmanager\ndef doubled():\n    «yield 2.0→yield 3.0»\n\n\ndef program(x):\n    with doubled() as by:\n        return x * by\n",
        }
    ),
    **rows(
        {
            "torch.compiler.disable on a callee": "«# here→@torch.compiler.disable»\ndef inner(x):\n    return x + 1\n\n\ndef program(x):\n    return inner(x * 2)\n"
        },
        differs=False,
    ),
    **rows(
        {
            "decorator that is a class": "class Twice:\n    def __init__(self, f):\n        self.f = f\n\n    def __call__(self, x):\n        return self.f(x) * 2\n\n\n@Twice\ndef inner(x):\n    return «x + 1→x + 2»\n\n\ndef program(x):\n    return inner(x)\n"
        },
        how="unfit",
    ),
    **rows(
        {
            "edit under torch.compiler.disable": "@torch.compiler.disable\ndef inner(x):\n    «return x + 1→return x + 2»\n\n\ndef program(x):\n    return inner(x * 2) + 1\n"
        },
        how="used",
    ),
    **rows(
        {
            "allow_in_graph on a callee": "«# here→@torch._dynamo.allow_in_graph»\ndef inner(x):\n    return x + 1\n\n\ndef program(x):\n    return inner(x * 2)\n"
        },
        how="used",
        differs=False,
    ),
}

NAMES = {
    "builtin shadowed: max, by assignment": Change(
        text="def program(x):\n    return x * max(1, 2)\n",
        patch=lambda m, module: m.setattr(module, "max", min, raising=False),
    ),
    "builtin replaced in builtins": patched(
        "def program(x):\n    return x * max(1, 2)\n", "builtins.max", min
    ),
    "math constant": patched("import math\n\n\ndef program(x):\n    return x * math.pi\n", "math.pi", 3.0),
    "math function": patched(
        "import math\n\n\ndef program(x):\n    return x * math.sqrt(4)\n", "math.sqrt", lambda x: 3.0
    ),
    "torch.nn.functional.relu": Change(
        text="def program(x):\n    return F.relu(x)\n\n\ndef other(x, inplace=False):\n    return x * 2\n",
        patch=lambda m, module: m.setattr("torch.nn.functional.relu", module.other),
    ),
    "torch function": Change(
        text="def program(x):\n    return torch.sin(x)\n\n\ndef other(x):\n    return x * 2\n",
        patch=lambda m, module: m.setattr("torch.sin", module.other),
    ),
    "torch function for another of torch's": Change(
        text="def program(x):\n    return torch.sin(x)\n",
        patch=lambda m, module: m.setattr("torch.sin", module.torch.cos),
    ),
    "torch function that nn.ReLU calls": Change(
        text="program = nn.Sequential(nn.ReLU())\n\n\ndef other(x, inplace=False):\n    return x * 2\n",
        patch=lambda m, module: m.setattr("torch.nn.functional.relu", module.other),
    ),
    "method of torch.Tensor": Change(
        text="def program(x):\n    return x.relu()\n\n\ndef other(x):\n    return x * 2\n",
        patch=lambda m, module: m.setattr("torch.Tensor.relu", module.other),
    ),
    "operator of torch.Tensor": Change(
        text="def program(x):\n    return x * 3\n\n\ndef other(x, y):\n    return x + y\n",
        patch=lambda m, module: m.setattr("torch.Tensor.__mul__", module.other),
    ),
    "forward of nn.Linear": Change(
        text="program = nn.Linear(4, 2)\n\n\ndef other(self, x):\n    return x * 2\n",
        patch=lambda m, module: m.setattr("torch.nn.Linear.forward", module.other),
    ),
    "forward of nn.LayerNorm inside": Change(
        text="program = nn.Sequential(nn.LayerNorm(4))\n\n\ndef other(self, x):\n    return x * 2\n",
        patch=lambda m, module: m.setattr("torch.nn.LayerNorm.forward", module.other),
    ),
    "__call__ of nn.Module": Change(
        text="program = nn.Sequential(nn.LayerNorm(4), nn.ReLU())\n\n\ndef other(self, x):\n    return self.forward(x) * 2\n",
        patch=lambda m, module: m.setattr("torch.nn.LayerNorm.__call__", module.other),
    ),
    "argument of the interpreter": patched(
        "import sys\n\n\ndef program(x):\n    return x * len(sys.argv)\n", "sys.argv", ["a"] * 17
    ),
    **rows(
        {
            "builtin shadowed: len": "«# here→def len(x):\n    return 5\n»\n\n\ndef program(x):\n    return x * len((1, 2))\n",
            "builtin shadowed: sum, in a callee": "«# here→def sum(x):\n    return x[0] * 5\n»\n\n\ndef inner(x):\n    return sum([x, x])\n\n\ndef program(x):\n    return inner(x)\n",
            "builtin shadowed: float": "«# here→def float(x):\n    return 5.0\n»\n\n\ndef program(x):\n    return x * float(2)\n",
            "hasattr of an object": "class Box:\n    pass\n\n\nbox = Box()\n«# here→box.extra = 1»\n\n\ndef program(x):\n    return x * 2 if hasattr(box, 'extra') else x * 3\n",
            "hasattr by a class": "class Box:\n    «pass  # here→extra = 1»\n\n\nbox = Box()\n\n\ndef program(x):\n    return x * 2 if hasattr(box, 'extra') else x * 3\n",
            "hasattr of a module": "import types\n\nspace = types.SimpleNamespace(a=1)\n«# here→space.extra = 1»\n\n\ndef program(x):\n    return x * 2 if hasattr(space, 'extra') else x * 3\n",
            "getattr's default": "class Box:\n    pass\n\n\nbox = Box()\n«# here→box.extra = 3.0»\n\n\ndef program(x):\n    return x * getattr(box, 'extra', 1.0)\n",
            "__getattr__ added to a class": "class Box:\n    «pass  # here→def __getattr__(self, name):\n        return 3.0»\n\n\nbox = Box()\n\n\ndef program(x):\n    return x * getattr(box, 'extra', 1.0)\n",
            "__getattr__ edited": "class Box:\n    def __getattr__(self, name):\n        «return 2.0→return 3.0»\n\n\nbox = Box()\n\n\ndef program(x):\n    return x * box.extra\n",
            "import under another name": "from torch import «sin as act→cos as act»\n\n\ndef program(x):\n    return act(x)\n",
            "import in the function": "def program(x):\n    from math «import pi as→import e as» number\n\n    return x * number\n",
            "module's __name__ test": "def program(x):\n    return x * 2 if __name__ «== 'changed→!= 'changed»_program' else x * 3\n",
        }
    ),
    **rows(
        {
            "name in globals()": "«# here→EXTRA = 2.0»\n\n\ndef program(x):\n    return x * 2 if 'EXTRA' in globals() else x * 3\n"
        },
        how="partly",
    ),
    **rows(
        {
            "name that was missing": "«# here→EXTRA = 2.0»\n\n\ndef program(x):\n    try:\n        return x * EXTRA\n    except NameError:\n        return x * 3\n"
        },
        how="varies",
    ),
}
