"""Changes of a program's text, each with what the next start must do: trace again, or use what was recorded."""

# ruff: noqa: E501 (a row is a program, its change and what the next start does)

from __future__ import annotations

import contextlib
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
    "-0.0 for 0.0": edit(
        "def program(x):\n    return 1 / (x.detach() * 0 + 0.0) * 0.0, torch.full((2,), 0.0)\n",
        ("((2,), 0.0)", "((2,), -0.0)"),
    ),
    "operator": edit(FUNCTION, ("return deep(x) + 1", "return deep(x) - 1")),
    "default argument": edit(FUNCTION, ("by=2.0", "by=3.0")),
    "keyword's default": edit(FUNCTION, ("plus=1.0", "plus=3.0")),
    "global float": edit(FUNCTION, ("SCALE = 2.0", "SCALE = 2.5")),
    "global int": edit(FUNCTION, ("NUMBER = 3", "NUMBER = 4")),
    "global int becomes bool": edit(
        "ONE = 1\n\n\ndef program(x):\n    return x * 2 if ONE is True else x * ONE\n",
        ("ONE = 1", "ONE = True"),
    ),
    "global float becomes NaN": edit(
        "SCALE = 2.0\n\n\ndef program(x):\n    return x * SCALE\n", ("SCALE = 2.0", "SCALE = float('nan')")
    ),
    "global string": edit(FUNCTION, ('NAME = "sin"', 'NAME = "cos"')),
    "global bool": edit(FUNCTION, ("FLAG = True", "FLAG = False")),
    "global tuple": edit(FUNCTION, ("PAIR = (1, 2)", "PAIR = (1, 3)")),
    "global list": edit(FUNCTION, ("LIST = [1.0", "LIST = [3.0")),
    "global dict": edit(FUNCTION, ('"scale": 2.0', '"scale": 3.0')),
    "global None": edit(
        "BIAS = None\n\n\ndef program(x):\n    return x * 2 if BIAS is None else x + BIAS\n",
        ("BIAS = None", "BIAS = 1.0"),
    ),
    "global tensor's values": edit(
        "T = torch.ones(4)\n\n\ndef program(x):\n    return x * T\n",
        ("torch.ones(4)", "torch.zeros(4)"),
        how="used",
    ),
    "global tensor's shape": edit(
        "T = torch.ones(4)\n\n\ndef program(x):\n    return x * T\n",
        ("torch.ones(4)", "torch.ones(3, 1)"),
        differs=False,
    ),
    "global tensor becomes float": edit(
        "T = torch.ones(4)\n\n\ndef program(x):\n    return x * T\n", ("torch.ones(4)", "2.0")
    ),
    "length of a global list": edit(
        "L = [1.0, 2.0]\n\n\ndef program(x):\n    for each in L:\n        x = x * each + 1\n    return x\n",
        ("[1.0, 2.0]", "[1.0, 2.0, 3.0]"),
    ),
    "order of a global dict": edit(
        'D = {"a": 2.0, "b": 3.0}\n\n\ndef program(x):\n    for key, value in D.items():\n        x = x * value + 1\n    return x\n',
        ('{"a": 2.0, "b": 3.0}', '{"b": 3.0, "a": 2.0}'),
    ),
    "key of a global dict": edit(
        'D = {"a": 2.0}\n\n\ndef program(x):\n    return x * D.get("a", 1.0)\n', ('{"a"', '{"c"')
    ),
    "global set": edit(
        'S = {"a"}\n\n\ndef program(x):\n    return x * (2 if "a" in S else 3)\n', ('{"a"}', '{"b"}')
    ),
    "global frozenset": edit(
        'S = frozenset({"a", "c"})\n\n\ndef program(x):\n    return x * (2 if "a" in S else 3)\n',
        ('{"a", "c"}', '{"b", "c"}'),
    ),
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
    "a callee's default that is a list": edit(
        "def scaled(x, by=[2.0]):\n    return x * by[0]\n\n\ndef program(x):\n    return scaled(x)\n",
        ("[2.0]", "[3.0]"),
    ),
    "a callee's default that is a dict": edit(
        "def scaled(x, by={'a': 2.0}):\n    return x * by['a']\n\n\ndef program(x):\n    return scaled(x)\n",
        ("2.0}", "3.0}"),
    ),
    "a callee's default that is an object": edit(
        "class Box:\n    def __init__(self, v):\n        self.v = v\n\n\ndef scaled(x, by=Box(2.0)):\n    return x * by.v\n\n\ndef program(x):\n    return scaled(x)\n",
        ("Box(2.0)", "Box(3.0)"),
    ),
    "a callee's default that is a function": edit(
        "def a(x):\n    return x + 1\n\n\ndef b(x):\n    return x - 1\n\n\ndef scaled(x, by=a):\n    return by(x)\n\n\ndef program(x):\n    return scaled(x)\n",
        ("by=a", "by=b"),
    ),
    "a callee's default that is a function, edited": edit(
        "def a(x):\n    return x + 1\n\n\ndef scaled(x, by=a):\n    return by(x)\n\n\ndef program(x):\n    return scaled(x)\n",
        ("x + 1", "x + 2"),
    ),
    "generator": edit(
        "def parts(x):\n    for i in range(2):\n        yield x + i\n\n\ndef program(x):\n    return sum(parts(x))\n",
        ("range(2)", "range(3)"),
    ),
    "iterator class": edit(
        "class Parts:\n    def __init__(self, n):\n        self.n = n\n\n    def __iter__(self):\n        return iter([1.0, 2.0][: self.n])\n\n\ndef program(x):\n    for each in Parts(2):\n        x = x * each + 1\n    return x\n",
        ("[1.0, 2.0]", "[1.5, 2.0]"),
    ),
    "nested function": edit(
        "def program(x):\n    def inner(y):\n        return y * 2\n\n    return inner(x)\n",
        ("y * 2", "y * 3"),
    ),
    "nested function of a callee": edit(
        "def outer(x):\n    def inner(y):\n        return y * 2\n\n    return inner(x)\n\n\ndef program(x):\n    return outer(x)\n",
        ("y * 2", "y * 3"),
    ),
    "lambda": edit(
        "act = lambda x: x * 2\n\n\ndef program(x):\n    return act(x)\n", ("x * 2", "x * 3"), how="unfit"
    ),
    "lambdas in a list": edit(
        "acts = [lambda x: x * 2, lambda x: x * 5]\n\n\ndef program(x):\n    return acts[0](x)\n",
        ("acts[0]", "acts[0]"),
        ("x: x * 2", "x: x * 3"),
        how="unfit",
    ),
    "two lambdas on one line swapped": edit(
        "first, second = lambda x: x * 2, lambda x: x * 5\n\n\ndef program(x):\n    return first(x)\n",
        ("first, second =", "second, first ="),
        how="unfit",
    ),
    "comprehension": edit(
        "def program(x):\n    return sum([x * i for i in range(3)])\n", ("range(3)", "range(4)")
    ),
    "slice": edit("def program(x):\n    return x[:2] * 2\n", ("[:2]", "[1:]")),
    "print": edit(
        "def program(x):\n    y = x * 2\n    print(y.sum().item())\n    return y + 1\n",
        ("y + 1", "y + 2"),
        how="traced",
    ),
    "exception's text": edit(
        "def check(x):\n    if x.dim() == 2:\n        raise ValueError('one')\n    return x\n\n\ndef program(x):\n    return check(x * 2)\n",
        ("'one'", "'two'"),
        how="unfit",
    ),
    "exception that is caught": edit(
        "def check(x):\n    if x.dim() == 2:\n        raise ValueError('one')\n    return x\n\n\ndef program(x):\n    try:\n        return check(x)\n    except ValueError:\n        return x * 2\n",
        ("raise ValueError", "raise TypeError"),
    ),
    "assertion": edit(
        "def program(x):\n    assert x.dim() == 2\n    return x * 2\n", ("== 2", "== 3"), how="varies"
    ),
}

CLOSURES = {
    "closure's float": edit(
        "def make(by):\n    def program(x):\n        return x * by\n\n    return program\n\n\nprogram = make(2.0)\n",
        ("make(2.0)", "make(3.0)"),
    ),
    "closure's list": edit(
        "def make(by):\n    def program(x):\n        return x * by[0]\n\n    return program\n\n\nprogram = make([2.0])\n",
        ("make([2.0])", "make([3.0])"),
    ),
    "closure's function": edit(
        "def double(x):\n    return x * 2\n\n\ndef triple(x):\n    return x * 3\n\n\ndef make(f):\n    def program(x):\n        return f(x)\n\n    return program\n\n\nprogram = make(double)\n",
        ("make(double)", "make(triple)"),
    ),
    "closure's function edited": edit(
        "def double(x):\n    return x * 2\n\n\ndef make(f):\n    def program(x):\n        return f(x)\n\n    return program\n\n\nprogram = make(double)\n",
        ("x * 2", "x * 3"),
    ),
    "closure of a callee": edit(
        "def make(by):\n    def inner(x):\n        return x * by\n\n    return inner\n\n\ninner = make(2.0)\n\n\ndef program(x):\n    return inner(x)\n",
        ("make(2.0)", "make(3.0)"),
    ),
    "closure of a callee, a list": edit(
        "def make(by):\n    def inner(x):\n        return x * by[0]\n\n    return inner\n\n\ninner = make([2.0])\n\n\ndef program(x):\n    return inner(x)\n",
        ("make([2.0])", "make([3.0])"),
    ),
    "closure of a callee, a function": edit(
        "def double(x):\n    return x * 2\n\n\ndef triple(x):\n    return x * 3\n\n\ndef make(f):\n    def inner(x):\n        return f(x)\n\n    return inner\n\n\ninner = make(double)\n\n\ndef program(x):\n    return inner(x)\n",
        ("make(double)", "make(triple)"),
    ),
    "closures of one factory swapped": edit(
        "def make(by):\n    def inner(x):\n        return x * by\n\n    return inner\n\n\na, b = make(2.0), make(3.0)\n\n\ndef program(x):\n    return a(x) - b(x) * 2\n",
        ("a, b =", "b, a ="),
    ),
    "decorator added": edit(
        "import functools\n\n\ndef twice(f):\n    @functools.wraps(f)\n    def wrapper(x):\n        return f(x) * 2\n\n    return wrapper\n\n\n# here\ndef inner(x):\n    return x + 1\n\n\ndef program(x):\n    return inner(x)\n",
        ("# here", "@twice"),
    ),
    "decorator removed": edit(
        "import functools\n\n\ndef twice(f):\n    @functools.wraps(f)\n    def wrapper(x):\n        return f(x) * 2\n\n    return wrapper\n\n\n@twice\ndef inner(x):\n    return x + 1\n\n\ndef program(x):\n    return inner(x)\n",
        ("@twice\n", ""),
    ),
    "decorator edited": edit(
        "import functools\n\n\ndef twice(f):\n    @functools.wraps(f)\n    def wrapper(x):\n        return f(x) * 2\n\n    return wrapper\n\n\n@twice\ndef inner(x):\n    return x + 1\n\n\ndef program(x):\n    return inner(x)\n",
        ("f(x) * 2", "f(x) * 3"),
    ),
    "decorated function edited": edit(
        "import functools\n\n\ndef twice(f):\n    @functools.wraps(f)\n    def wrapper(x):\n        return f(x) * 2\n\n    return wrapper\n\n\n@twice\ndef inner(x):\n    return x + 1\n\n\ndef program(x):\n    return inner(x)\n",
        ("x + 1", "x + 2"),
    ),
    "decorator without wraps, decorated function edited": edit(
        "def twice(f):\n    def wrapper(x):\n        return f(x) * 2\n\n    return wrapper\n\n\n@twice\ndef inner(x):\n    return x + 1\n\n\ndef program(x):\n    return inner(x)\n",
        ("x + 1", "x + 2"),
    ),
    "decorator's argument": edit(
        "def times(n):\n    def decorate(f):\n        def wrapper(x):\n            return f(x) * n\n\n        return wrapper\n\n    return decorate\n\n\n@times(2)\ndef inner(x):\n    return x + 1\n\n\ndef program(x):\n    return inner(x)\n",
        ("@times(2)", "@times(3)"),
    ),
    "decorator of the program itself": edit(
        "def twice(f):\n    def wrapper(x):\n        return f(x) * 2\n\n    return wrapper\n\n\n@twice\ndef program(x):\n    return x + 1\n",
        ("x + 1", "x + 2"),
    ),
    "decorator that is a class": edit(
        "class Twice:\n    def __init__(self, f):\n        self.f = f\n\n    def __call__(self, x):\n        return self.f(x) * 2\n\n\n@Twice\ndef inner(x):\n    return x + 1\n\n\ndef program(x):\n    return inner(x)\n",
        ("x + 1", "x + 2"),
        how="unfit",
    ),
    "cached function": edit(
        "import functools\n\n\n@functools.cache\ndef factor(n):\n    return n * 2.0\n\n\ndef program(x):\n    return x * factor(3)\n",
        ("n * 2.0", "n * 3.0"),
    ),
    "partial's argument": edit(
        "import functools\n\n\ndef scaled(x, by):\n    return x * by\n\n\nact = functools.partial(scaled, by=2.0)\n\n\ndef program(x):\n    return act(x)\n",
        ("by=2.0", "by=3.0"),
    ),
    "partial's positional argument": edit(
        "import functools\n\n\ndef scaled(by, x):\n    return x * by\n\n\nact = functools.partial(scaled, 2.0)\n\n\ndef program(x):\n    return act(x)\n",
        ("scaled, 2.0", "scaled, 3.0"),
    ),
    "partial's function": edit(
        "import functools\n\n\ndef double(x, by):\n    return x * by\n\n\ndef plus(x, by):\n    return x + by\n\n\nact = functools.partial(double, by=3.0)\n\n\ndef program(x):\n    return act(x)\n",
        ("partial(double", "partial(plus"),
    ),
    "partial's function edited": edit(
        "import functools\n\n\ndef double(x, by):\n    return x * by\n\n\nact = functools.partial(double, by=3.0)\n\n\ndef program(x):\n    return act(x)\n",
        ("x * by", "x + by"),
    ),
    "registry's function": edit(
        "def relu(x):\n    return x.relu()\n\n\ndef tanh(x):\n    return x.tanh()\n\n\nACTS = {'act': relu}\n\n\ndef program(x):\n    return ACTS['act'](x)\n",
        ("{'act': relu}", "{'act': tanh}"),
    ),
    "registry's function edited": edit(
        "def relu(x):\n    return x.relu()\n\n\nACTS = {'act': relu}\n\n\ndef program(x):\n    return ACTS['act'](x)\n",
        ("x.relu()", "x.relu() + 1"),
    ),
    "registry of torch's functions": edit(
        "ACTS = {'act': torch.relu}\n\n\ndef program(x):\n    return ACTS['act'](x)\n",
        ("torch.relu", "torch.tanh"),
    ),
    "registry of classes": edit(
        "class A:\n    def __call__(self, x):\n        return x + 1\n\n\nclass B:\n    def __call__(self, x):\n        return x + 2\n\n\nR = {'a': A}\n\n\ndef program(x):\n    return R['a']()(x)\n",
        ("{'a': A}", "{'a': B}"),
    ),
    "context manager's class": edit(
        "class Doubled:\n    by = 2.0\n\n    def __enter__(self):\n        return self.by\n\n    def __exit__(self, *_):\n        return None\n\n\ndef program(x):\n    with Doubled() as by:\n        return x * by\n",
        ("return self.by", "return self.by + 1"),
    ),
    "context manager's attribute": edit(
        "class Doubled:\n    by = 2.0\n\n    def __enter__(self):\n        return self.by\n\n    def __exit__(self, *_):\n        return None\n\n\ndef program(x):\n    with Doubled() as by:\n        return x * by\n",
        ("by = 2.0", "by = 3.0"),
    ),
    "context manager of contextlib": edit(
        "import contextlib\n\n\n@contextlib.contextmanager\ndef doubled():\n    yield 2.0\n\n\ndef program(x):\n    with doubled() as by:\n        return x * by\n",
        ("yield 2.0", "yield 3.0"),
    ),
    "torch.compiler.disable on a callee": edit(
        "# here\ndef inner(x):\n    return x + 1\n\n\ndef program(x):\n    return inner(x * 2)\n",
        ("# here", "@torch.compiler.disable"),
        differs=False,
        how="traced",
    ),
    "allow_in_graph on a callee": edit(
        "# here\ndef inner(x):\n    return x + 1\n\n\ndef program(x):\n    return inner(x * 2)\n",
        ("# here", "@torch._dynamo.allow_in_graph"),
        differs=False,
        how="used",
    ),
    "edit under torch.compiler.disable": edit(
        "@torch.compiler.disable\ndef inner(x):\n    return x + 1\n\n\ndef program(x):\n    return inner(x * 2) + 1\n",
        ("return x + 1", "return x + 2"),
        how="used",
    ),
}

NAMES = {
    "builtin shadowed: len": edit(
        "# here\n\n\ndef program(x):\n    return x * len((1, 2))\n", ("# here", "def len(x):\n    return 5\n")
    ),
    "builtin shadowed: sum, in a callee": edit(
        "# here\n\n\ndef inner(x):\n    return sum([x, x])\n\n\ndef program(x):\n    return inner(x)\n",
        ("# here", "def sum(x):\n    return x[0] * 5\n"),
    ),
    "builtin shadowed: max, by assignment": Change(
        text="def program(x):\n    return x * max(1, 2)\n",
        patch=lambda m, module: m.setattr(module, "max", min, raising=False),
    ),
    "builtin shadowed: float": edit(
        "# here\n\n\ndef program(x):\n    return x * float(2)\n",
        ("# here", "def float(x):\n    return 5.0\n"),
    ),
    "builtin replaced in builtins": Change(
        text="def program(x):\n    return x * max(1, 2)\n",
        patch=lambda m, module: m.setattr("builtins.max", min),
    ),
    "name that was missing": edit(
        "# here\n\n\ndef program(x):\n    try:\n        return x * EXTRA\n    except NameError:\n        return x * 3\n",
        ("# here", "EXTRA = 2.0"),
        how="varies",
    ),
    "name in globals()": edit(
        "# here\n\n\ndef program(x):\n    return x * 2 if 'EXTRA' in globals() else x * 3\n",
        ("# here", "EXTRA = 2.0"),
        how="partly",
    ),
    "hasattr of an object": edit(
        "class Box:\n    pass\n\n\nbox = Box()\n# here\n\n\ndef program(x):\n    return x * 2 if hasattr(box, 'extra') else x * 3\n",
        ("# here", "box.extra = 1"),
    ),
    "hasattr by a class": edit(
        "class Box:\n    pass  # here\n\n\nbox = Box()\n\n\ndef program(x):\n    return x * 2 if hasattr(box, 'extra') else x * 3\n",
        ("pass  # here", "extra = 1"),
    ),
    "hasattr of a module": edit(
        "import types\n\nspace = types.SimpleNamespace(a=1)\n# here\n\n\ndef program(x):\n    return x * 2 if hasattr(space, 'extra') else x * 3\n",
        ("# here", "space.extra = 1"),
    ),
    "getattr's default": edit(
        "class Box:\n    pass\n\n\nbox = Box()\n# here\n\n\ndef program(x):\n    return x * getattr(box, 'extra', 1.0)\n",
        ("# here", "box.extra = 3.0"),
    ),
    "__getattr__ added to a class": edit(
        "class Box:\n    pass  # here\n\n\nbox = Box()\n\n\ndef program(x):\n    return x * getattr(box, 'extra', 1.0)\n",
        ("pass  # here", "def __getattr__(self, name):\n        return 3.0"),
    ),
    "__getattr__ edited": edit(
        "class Box:\n    def __getattr__(self, name):\n        return 2.0\n\n\nbox = Box()\n\n\ndef program(x):\n    return x * box.extra\n",
        ("return 2.0", "return 3.0"),
    ),
    "math constant": Change(
        text="import math\n\n\ndef program(x):\n    return x * math.pi\n",
        patch=lambda m, module: m.setattr("math.pi", 3.0),
    ),
    "math function": Change(
        text="import math\n\n\ndef program(x):\n    return x * math.sqrt(4)\n",
        patch=lambda m, module: m.setattr("math.sqrt", lambda x: 3.0),
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
    "import under another name": edit(
        "from torch import sin as act\n\n\ndef program(x):\n    return act(x)\n", ("sin as act", "cos as act")
    ),
    "import in the function": edit(
        "def program(x):\n    from math import pi as number\n\n    return x * number\n",
        ("import pi as", "import e as"),
    ),
    "argument of the interpreter": Change(
        text="import sys\n\n\ndef program(x):\n    return x * len(sys.argv)\n",
        patch=lambda m, module: m.setattr("sys.argv", ["a"] * 17),
    ),
    "module's __name__ test": edit(
        "def program(x):\n    return x * 2 if __name__ == 'changed_program' else x * 3\n",
        ("== 'changed", "!= 'changed"),
    ),
}
