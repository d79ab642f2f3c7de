"""Changes of classes and objects that a program uses."""

# ruff: noqa: E501 (a row is a program, its change and what the next start does)

from __future__ import annotations

import numpy
from program_changes import Change, edit, patched, rows

BOX = """
class Base:
    rate = 2.0

    def shifted(self, x):
        return x + 1


class Box(Base):
    table = {"a": 2.0}
    steps = [1.0, 2.0]

    def __init__(self):
        self.scale = 2.0
        self.sizes = [1.0, 2.0]
        self.act = torch.sin

    # here
    def scaled(self, x):
        return x * self.scale

    @property
    def half(self):
        return self.scale / 2

    @classmethod
    def made(cls, x):
        return x * cls.rate + 1

    @staticmethod
    def plain(x):
        return x - 1

    def __call__(self, x):
        return x * 1.5

    def __len__(self):
        return 3


box = Box()


def other(x):
    return x - 7


def program(x):
    y = box.scaled(x) * box.half + box.shifted(x) * box.table["a"] - box.steps[0]
    y = box.act(box.made(y)) + box.plain(y) * len(box) + box.sizes[1]
    return box(y)
"""


def attribute(kind: str, before: str, after: str, use: str, how: str = "traced") -> Change:
    text = f"""
class Box:
    {kind}


box = Box()


def program(x):
    {use}
"""
    return edit(text, (before, after), how=how)


CLASSES = {
    "method": edit(BOX, ("x * self.scale", "x + self.scale")),
    "base's method": edit(BOX, ("return x + 1", "return x + 2")),
    "method overridden in the subclass": edit(
        BOX, ("# here", "def shifted(self, x):\n        return x + 5\n")
    ),
    "class attribute": edit(BOX, ("rate = 2.0", "rate = 3.0")),
    "class attribute of the base hidden": edit(BOX, ("# here", "rate = 7.0\n")),
    "class attribute that is a dict": edit(BOX, ('{"a": 2.0}', '{"a": 3.0}')),
    "class attribute that is a list": edit(BOX, ("steps = [1.0", "steps = [4.0")),
    "class attribute assigned later": Change(
        text=BOX, patch=lambda m, module: m.setattr(module.Base, "rate", 9.0)
    ),
    "method assigned later": Change(
        text=BOX, patch=lambda m, module: m.setattr(module.Box, "scaled", lambda self, x: x * 11)
    ),
    "method assigned to the base later": Change(
        text=BOX, patch=lambda m, module: m.setattr(module.Base, "shifted", lambda self, x: x * 11)
    ),
    "method assigned to the object": Change(
        text=BOX, patch=lambda m, module: m.setattr(module.box, "scaled", module.other)
    ),
    "object's class assigned": Change(
        text=BOX + "\n\nclass Other(Box):\n    rate = 8.0\n",
        patch=lambda m, module: m.setattr(module.box, "__class__", module.Other),
    ),
    "property": edit(BOX, ("self.scale / 2", "self.scale / 4")),
    "classmethod": edit(BOX, ("cls.rate + 1", "cls.rate + 2")),
    "staticmethod": edit(BOX, ("return x - 1", "return x - 2")),
    "__call__": edit(BOX, ("x * 1.5", "x * 2.5")),
    "__len__": edit(BOX, ("return 3", "return 4")),
    "object's float": edit(BOX, ("self.scale = 2.0", "self.scale = 3.0")),
    "object's list": edit(BOX, ("self.sizes = [1.0, 2.0]", "self.sizes = [1.0, 5.0]")),
    "object's function": edit(BOX, ("torch.sin", "torch.cos")),
    "object's attribute set later": Change(
        text=BOX, patch=lambda m, module: m.setattr(module.box, "scale", 4.0)
    ),
    "complex": edit("C = 2j\n\n\ndef program(x):\n    return torch.view_as_real(x * C)\n", ("2j", "3j")),
    "None or a value in an object": edit(BOX, ("self.scale = 2.0", "self.scale = 2"), differs=False),
    **rows(
        {
            "staticmethod becomes classmethod": "class A:\n    «@staticmethod→@classmethod»\n    def f(x=1, y=2):\n        «return y→return y»\n\n\ndef program(x):\n    return x * (A.f(3) if isinstance(A.f(3), int) else 5)\n",
            "another base": "class A:\n    by = 2.0\n\n\nclass B:\n    by = 3.0\n\n\n«class C(A)→class C(B)»:\n    pass\n\n\nbox = C()\n\n\ndef program(x):\n    return x * box.by\n",
            "isinstance after a change of bases": "class A:\n    pass\n\n\nclass B:\n    pass\n\n\n«class C(A)→class C(B)»:\n    pass\n\n\nbox = C()\n\n\ndef program(x):\n    return x * 2 if isinstance(box, A) else x * 3\n",
            "issubclass after a change of bases": "class A:\n    pass\n\n\n«class C(A)→class C»:\n    pass\n\n\ndef program(x):\n    return x * 2 if issubclass(C, A) else x * 3\n",
            "isinstance after a change in a tuple of classes": "class A:\n    pass\n\n\nclass B:\n    pass\n\n\nKINDS = «(A, B)→(B,)»\nbox = A()\n\n\ndef program(x):\n    return x * 2 if isinstance(box, KINDS) else x * 3\n",
            "metaclass's attribute": "class M(type):\n    «by = 2.0→by = 3.0»\n\n\nclass A(metaclass=M):\n    pass\n\n\ndef program(x):\n    return x * A.by\n",
            "__init_subclass__": "class A:\n    def __init_subclass__(cls):\n        cls.«by = 2.0→by = 3.0»\n\n\nclass C(A):\n    pass\n\n\nbox = C()\n\n\ndef program(x):\n    return x * box.by\n",
            "object made inside": "class A:\n    def __init__(self, «by=2.0→by=3.0»):\n        self.by = by\n\n\ndef program(x):\n    return x * A().by\n",
            "object made inside, class attribute": "class A:\n    «by = 2.0→by = 3.0»\n\n\ndef program(x):\n    return x * A().by\n",
            "object made inside, class attribute a list": "class A:\n    by = «[2.0]→[3.0]»\n\n\ndef program(x):\n    return x * A().by[0]\n",
            "__new__": "class A:\n    def __new__(cls):\n        made = super().__new__(cls)\n        made.«by = 2.0→by = 3.0»\n        return made\n\n\ndef program(x):\n    return x * A().by\n",
            "descriptor": "class D:\n    def __get__(self, o, kind):\n        «return 2.0→return 3.0»\n\n\nclass A:\n    by = D()\n\n\nbox = A()\n\n\ndef program(x):\n    return x * box.by\n",
            "descriptor's own attribute": "class D:\n    def __init__(self, v):\n        self.v = v\n\n    def __get__(self, o, kind):\n        return self.v\n\n\nclass A:\n    by = «D(2.0)→D(3.0)»\n\n\nbox = A()\n\n\ndef program(x):\n    return x * box.by\n",
            "class attribute that is an object": "class D:\n    def __init__(self, v):\n        self.v = v\n\n\nclass A:\n    by = «D(2.0)→D(3.0)»\n\n\nbox = A()\n\n\ndef program(x):\n    return x * box.by.v\n",
            "class attribute that is a tuple of functions": "def a(x):\n    return x + 1\n\n\ndef b(x):\n    return x + 2\n\n\nclass A:\n    f = «(a, b)→(b, a)»\n\n\nbox = A()\n\n\ndef program(x):\n    return box.f[0](x)\n",
            "class attribute that is a partial": "import functools\n\n\ndef a(x, by):\n    return x * by\n\n\nclass A:\n    f = functools.partial(a, «by=2.0→by=3.0»)\n\n\nbox = A()\n\n\ndef program(x):\n    return box.f(x)\n",
            "class attribute that is a torch function": "class A:\n    f = «torch.sin→torch.cos»\n\n\ndef program(x):\n    return A.f(x)\n",
            "class attribute that is a class": "class D:\n    v = 2.0\n\n\nclass E:\n    v = 3.0\n\n\nclass A:\n    «by = D→by = E»\n\n\nbox = A()\n\n\ndef program(x):\n    return x * box.by.v\n",
            "decorated method, decorator's argument": "def times(n):\n    def decorate(f):\n        def wrapper(self, x):\n            return f(self, x) * n\n\n        return wrapper\n\n    return decorate\n\n\nclass A:\n    @«times(2.0)→times(3.0)»\n    def f(self, x):\n        return x + 1\n\n\nbox = A()\n\n\ndef program(x):\n    return box.f(x)\n",
            "decorated method, decorator's list": "def times(n):\n    def decorate(f):\n        def wrapper(self, x):\n            return f(self, x) * n[0]\n\n        return wrapper\n\n    return decorate\n\n\nclass A:\n    @times(«[2.0]→[3.0]»)\n    def f(self, x):\n        return x + 1\n\n\nbox = A()\n\n\ndef program(x):\n    return box.f(x)\n",
            "decorated method of an object made inside": "def times(n):\n    def decorate(f):\n        def wrapper(self, x):\n            return f(self, x) * n\n\n        return wrapper\n\n    return decorate\n\n\nclass A:\n    @«times(2.0)→times(3.0)»\n    def f(self, x):\n        return x + 1\n\n\ndef program(x):\n    return A().f(x)\n",
            "decorated classmethod": "def times(n):\n    def decorate(f):\n        def wrapper(self, x):\n            return f(self, x) * n\n\n        return wrapper\n\n    return decorate\n\n\nclass A:\n    @classmethod\n    @«times(2.0)→times(3.0)»\n    def f(self, x):\n        return x + 1\n\n\ndef program(x):\n    return A.f(x)\n",
            "decorated staticmethod": "def times(n):\n    def decorate(f):\n        def wrapper(x):\n            return f(x) * n\n\n        return wrapper\n\n    return decorate\n\n\nclass A:\n    @staticmethod\n    @«times(2.0)→times(3.0)»\n    def f(x):\n        return x + 1\n\n\ndef program(x):\n    return A.f(x)\n",
            "decorated property": "def times(n):\n    def decorate(f):\n        def wrapper(self):\n            return f(self) * n\n\n        return wrapper\n\n    return decorate\n\n\nclass A:\n    @property\n    @«times(2.0)→times(3.0)»\n    def f(self):\n        return 1.5\n\n\nbox = A()\n\n\ndef program(x):\n    return x * box.f\n",
            "method's default that is a list": "class A:\n    def f(self, x, by=«[2.0]→[3.0]»):\n        return x * by[0]\n\n\nbox = A()\n\n\ndef program(x):\n    return box.f(x)\n",
            "method's default that is a list, object made inside": "class A:\n    def f(self, x, by=«[2.0]→[3.0]»):\n        return x * by[0]\n\n\ndef program(x):\n    return A().f(x)\n",
            "staticmethod's default that is a dict": "class A:\n    @staticmethod\n    def f(x, by={'a': «2.0→3.0»}):\n        return x * by['a']\n\n\ndef program(x):\n    return A.f(x)\n",
            "classmethod's default that is an object": "class D:\n    def __init__(self, v):\n        self.v = v\n\n\nclass A:\n    @classmethod\n    def f(cls, x, by=«D(2.0)→D(3.0)»):\n        return x * by.v\n\n\ndef program(x):\n    return A.f(x)\n",
            "property's closure": "def make(n):\n    return property(lambda self: n)\n\n\nclass A:\n    by = «make(2.0)→make(3.0)»\n\n\nbox = A()\n\n\ndef program(x):\n    return x * box.by\n",
            "super()": "class A:\n    def f(self, x):\n        return «x * 2→x * 3»\n\n\nclass B(A):\n    def f(self, x):\n        return super().f(x) + 1\n\n\nbox = B()\n\n\ndef program(x):\n    return box.f(x)\n",
            "super() to a class put between": "class A:\n    def f(self, x):\n        return x * 2\n\n\nclass M(A):\n    def f(self, x):\n        return x * 9\n\n\nclass B(A):\n    def f(self, x):\n        return super().f(x) + 1\n\n\n«class C(B)→class C(B, M)»:\n    pass\n\n\nbox = C()\n\n\ndef program(x):\n    return box.f(x)\n",
            "dataclass's default": "import dataclasses\n\n\n@dataclasses.dataclass\nclass A:\n    by: float «= 2.0→= 3.0»\n\n\ndef program(x):\n    return x * A().by\n",
            "dataclass's default, object made outside": "import dataclasses\n\n\n@dataclasses.dataclass\nclass A:\n    by: float «= 2.0→= 3.0»\n\n\nbox = A()\n\n\ndef program(x):\n    return x * box.by\n",
            "dataclass's factory": "import dataclasses\n\n\ndef values():\n    return «[2.0]→[3.0]»\n\n\n@dataclasses.dataclass\nclass A:\n    by: list = dataclasses.field(default_factory=values)\n\n\ndef program(x):\n    return x * A().by[0]\n",
            "dataclass's metadata": "import dataclasses\n\n\n@dataclasses.dataclass\nclass A:\n    by: float = dataclasses.field(default=1.0, metadata={«'by': 2.0→'by': 3.0»})\n\n\nbox = A()\n\n\ndef program(x):\n    return x * dataclasses.fields(box)[0].metadata['by']\n",
            "frozen dataclass": "import dataclasses\n\n\n@dataclasses.dataclass(frozen=True)\nclass A:\n    by: float = 2.0\n\n\nbox = «A(2.0)→A(3.0)»\n\n\ndef program(x):\n    return x * box.by\n",
            "dataclass as an argument": "import dataclasses\n\n\n@dataclasses.dataclass\nclass A:\n    by: float = 2.0\n\n\ndef inputs():\n    return [(torch.ones(3), «A(2.0)→A(3.0)»)]\n\n\ndef program(x, a):\n    return x * a.by\n",
            "enum's value": "import enum\n\n\nclass E(enum.Enum):\n    «A = 2.0→A = 5.0»\n    B = 3.0\n\n\ndef program(x):\n    return x * E.A.value\n",
            "enum's value, of a global": "import enum\n\n\nclass E(enum.Enum):\n    «A = 2.0→A = 5.0»\n    B = 3.0\n\n\nMODE = E.A\n\n\ndef program(x):\n    return x * MODE.value\n",
            "enum's value, of an argument": "import enum\n\n\nclass E(enum.Enum):\n    «A = 2.0→A = 5.0»\n    B = 3.0\n\n\ndef inputs():\n    return [(torch.ones(3), E.A)]\n\n\ndef program(x, mode):\n    return x * mode.value\n",
            "enum's value, of a module's attribute": "import enum\n\n\nclass E(enum.Enum):\n    «A = 2.0→A = 5.0»\n    B = 3.0\n\n\nclass M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.mode = E.A\n\n    def forward(self, x):\n        return x * self.mode.value\n\n\nprogram = M()\n",
            "enum's member": "import enum\n\n\nclass E(enum.Enum):\n    A = 2.0\n    B = 3.0\n\n\n«MODE = E.A→MODE = E.B»\n\n\ndef program(x):\n    return x * 2 if MODE is E.A else x * 3\n",
            "enum of ints": "import enum\n\n\nclass E(enum.IntEnum):\n    «A = 2→A = 5»\n    B = 3\n\n\ndef program(x):\n    return x * E.A\n",
            "enum of strings": "import enum\n\n\nclass E(str, enum.Enum):\n    A = «'sin'→'cos'»\n    B = 'x'\n\n\ndef program(x):\n    return getattr(torch, E.A.value)(x)\n",
            "enum by its value": "import enum\n\n\nclass E(enum.Enum):\n    «A = 'a'→A = 'b'»\n    «B = 'b'→B = 'a'»\n\n\ndef program(x):\n    return x * 2 if E('a') is E.A else x * 3\n",
            "enum's members counted": "import enum\n\n\nclass E(enum.Enum):\n    A = 2.0\n    «B = 3.0→B = 3.0\n    C = 4.0»\n\n\ndef program(x):\n    return x * len(E)\n",
            "enum as a key": "import enum\n\n\nclass E(enum.Enum):\n    A = 2.0\n    B = 3.0\n\n\nD = {«E.A: 2.0→E.A: 3.0», E.B: 4.0}\n\n\ndef program(x):\n    return x * D[E.A]\n",
            "namedtuple's value": "import collections\n\nP = collections.namedtuple('P', 'a b')\np = «P(2.0→P(4.0», 3.0)\n\n\ndef program(x):\n    return x * p.a\n",
            "namedtuple's order": "import collections\n\nP = collections.namedtuple('P', «'a b'→'b a'»)\np = P(2.0, 3.0)\n\n\ndef program(x):\n    return x * p.a\n",
            "slots": "class A:\n    __slots__ = ('by',)\n\n    def __init__(self):\n        self.«by = 2.0→by = 3.0»\n\n\nbox = A()\n\n\ndef program(x):\n    return x * box.by\n",
            "config object": "class Config:\n    def __init__(self, **given):\n        self.__dict__.update(given)\n\n\nclass M(nn.Module):\n    def __init__(self, config):\n        super().__init__()\n        self.config = config\n\n    def forward(self, x):\n        return x * self.config.scale if self.config.on else x\n\n\nprogram = M(Config(«scale=2.0→scale=3.0», on=True))\n",
            "config object of SimpleNamespace": "import types\n\nconfig = types.SimpleNamespace(«scale=2.0→scale=3.0»)\n\n\ndef program(x):\n    return x * config.scale\n",
            "dict subclass's method": "class D(dict):\n    def __missing__(self, key):\n        «return 2.0→return 3.0»\n\n\nd = D()\n\n\ndef program(x):\n    return x * d['a']\n",
            "defaultdict's factory": "import collections\n\n\ndef two():\n    return 2.0\n\n\ndef three():\n    return 3.0\n\n\nd = collections.«defaultdict(two)→defaultdict(three)»\n\n\ndef program(x):\n    return x * d['a']\n",
            "deque": "import collections\n\nd = collections.deque(«[2.0→[4.0», 3.0])\n\n\ndef program(x):\n    return x * d[0]\n",
            "mapping proxy": "import types\n\nd = types.MappingProxyType({'a': «2.0→3.0»})\n\n\ndef program(x):\n    return x * d['a']\n",
            "function's attribute": "def scaled(x):\n    return x * scaled.by\n\n\nscaled.«by = 2.0→by = 3.0»\n\n\ndef program(x):\n    return scaled(x)\n",
            "function's name": "«def a(x)→def long_name(x)»:\n    return x\n\n\n«b = a→b = long_name»\n\n\ndef program(x):\n    return x * len(b.__name__)\n",
            "class's name": "«class A:→class Longer:»\n    pass\n\n\n«box = A()→box = Longer()»\n\n\ndef program(x):\n    return x * len(type(box).__name__)\n",
            "vars of an object": "class A:\n    pass\n\n\nbox = A()\n«box.a = 1→box.a = 1\nbox.b = 2»\n\n\ndef program(x):\n    return x * len(box.__dict__)\n",
            "bound method of an object": "class A:\n    def __init__(self, by):\n        self.by = by\n\n    def f(self, x):\n        return x * self.by\n\n\nf = «A(2.0)→A(3.0)».f\n\n\ndef program(x):\n    return f(x)\n",
            "thread's variable": "import threading\n\nv = threading.local()\nv.«by = 2.0→by = 3.0»\n\n\ndef program(x):\n    return x * v.by\n",
            "range": "R = «range(3)→range(1, 3)»\n\n\ndef program(x):\n    for i in R:\n        x = x * 2 + i\n    return x\n",
            "slice object": "S = «slice(0, 2)→slice(1, 3)»\n\n\ndef program(x):\n    return x[S] * 2\n",
            "dtype": "D = «torch.float64→torch.bfloat16»\n\n\ndef program(x):\n    return x.to(D) * 2\n",
            "size": "D = torch.Size(«[4, 3]→[2, 6]»)\n\n\ndef program(x):\n    return x.reshape(D) * 2\n",
            "device": "D = torch.device(«'cpu'→'meta'»)\n\n\ndef program(x):\n    return x * len(torch.ones(3, device=D).device.type)\n",
            "module alias": "«import math as lib→import cmath as lib»\n\n\ndef program(x):\n    return x * «lib.sqrt(2)→abs(lib.sqrt(-2 * -2))»\n",
        }
    ),
    **rows(
        {
            "operator.itemgetter": "import operator\n\nget = operator.«itemgetter(0)→itemgetter(1)»\n\n\ndef program(x):\n    return x * get((2.0, 3.0))\n"
        },
        how="partly",
    ),
    **rows(
        {
            "__instancecheck__ of a metaclass": "class M(type):\n    def __instancecheck__(cls, o):\n        «return True→return False»\n\n\nclass A(metaclass=M):\n    pass\n\n\nclass C:\n    pass\n\n\nbox = C()\n\n\ndef program(x):\n    return x * 2 if isinstance(box, A) else x * 3\n",
            "protocol and an attribute": "import typing\n\n\n@typing.runtime_checkable\nclass P(typing.Protocol):\n    extra: int\n\n\nclass C:\n    pass\n\n\nbox = C()\n«# here→box.extra = 1»\n\n\ndef program(x):\n    return x * 2 if isinstance(box, P) else x * 3\n",
            "metaclass's __call__": "class M(type):\n    def __call__(cls):\n        made = super().__call__()\n        made.«by = 2.0→by = 3.0»\n        return made\n\n\nclass A(metaclass=M):\n    pass\n\n\ndef program(x):\n    return x * A().by\n",
            "dataclass's factory, a lambda": "import dataclasses\n\n\n@dataclasses.dataclass\nclass A:\n    by: list = dataclasses.field(default_factory=lambda: «[2.0]→[3.0]»)\n\n\ndef program(x):\n    return x * A().by[0]\n",
            "class's docstring, read": "class A:\n    «'''one'''→'''three'''»\n\n\nbox = A()\n\n\ndef program(x):\n    return x * len(A.__doc__)\n",
            "iterator": "def inputs():\n    return [(torch.ones(3), «iter((2.0→iter((4.0», 3.0)))]\n\n\ndef program(x, it):\n    return x * next(it)\n",
        },
        how="unfit",
    ),
    **rows(
        {
            "numpy's scalar": "import numpy as np\n\nn = np.float64«(2.0)→(3.0)»\n\n\ndef program(x):\n    return x * n\n",
        },
        how="used",
    ),
    **rows(
        {
            "operator.methodcaller": "import operator\n\nget = operator.methodcaller(«'sin'→'cos'»)\n\n\ndef program(x):\n    return get(x)\n",
            "numpy's array": "import numpy as np\n\nn = np.array(«[2.0→[3.0», 1.0, 1.0, 1.0])\n\n\ndef program(x):\n    return x * torch.from_numpy(n).float()\n",
        },
        how="used",
    ),
    **rows(
        {
            "class with a function that is not traced": "class A:\n    @torch.compiler.disable\n    def f(self, x):\n        return x\n\n\nbox = A()\n«# here→# there»\n\n\ndef program(x):\n    return x * 2 if isinstance(box, A) else x * 3\n"
        },
        how="used",
        differs=False,
    ),
    **rows(
        {
            "numpy's array, its size": "import numpy as np\n\nn = np.array([2.0, 1.0, 1.0, 1.0]«)→)[:1]»\n\n\ndef program(x):\n    return x * torch.from_numpy(n).float()\n",
            "numpy's function": "import numpy as np\n\n\ndef inputs():\n    return [(np.linspace(1, 2, 4),)]\n\n\nf = np.«sqrt→square»\n\n\ndef program(x):\n    return f(x)\n",
            "numpy's function in Python": "import numpy as np\n\n\ndef inputs():\n    return [(np.linspace(1, 2, 4),)]\n\n\nf = np.«mean→sum»\n\n\ndef program(x):\n    return x * f(x)\n",
            "numpy's function by name, of its module": "import numpy as np\n\n\ndef inputs():\n    return [(np.linspace(1, 2, 4),)]\n\n\ndef program(x):\n    return x * np.«linalg.norm(x)→prod(x)»\n",
            "numpy's array given, its type": "import numpy as np\n\n\ndef inputs():\n    return [(np.linspace(1, 2, 4)«→.astype(np.float32)»,)]\n\n\ndef program(x):\n    return np.sqrt(x)\n",
        }
    ),
    "numpy's function replaced": patched(
        "import numpy as np\n\n\ndef inputs():\n    return [(np.linspace(1, 2, 4),)]\n\n\ndef program(x):\n    return np.sqrt(x)\n",
        "numpy.sqrt",
        numpy.square,
    ),
    **rows(
        {
            "numpy's functions, unchanged": "import numpy as np\n\n\ndef inputs():\n    return [(np.linspace(1, 2, 4),)]\n\n\n«# here→# there»\n\n\ndef program(x):\n    return x * np.mean(x) + np.sqrt(x)\n",
        },
        how="used",
        differs=False,
    ),
    **rows(
        {
            "namedtuple returned, field's default": "import typing\n\n\nclass P(typing.NamedTuple):\n    a: torch.Tensor\n    b: float = «2.0→3.0»\n\n\ndef program(x):\n    return P(x * 2)\n",
            "namedtuple returned, order of its fields": "import collections\n\nP = collections.namedtuple('P', «'a b'→'b a'»)\n\n\ndef program(x):\n    return P(a=x * 2, b=3.0)\n",
            "namedtuple returned, its class": "import typing\n\n\nclass P(typing.NamedTuple):\n    a: torch.Tensor\n\n\nclass Q(typing.NamedTuple):\n    a: torch.Tensor\n\n\n«# here→P = Q»\n\n\ndef program(x):\n    return P(x * 2)\n",
            "named tuple of PyTorch's returned": "def program(x):\n    return torch.max(x * 2, «dim=0→dim=1»)\n",
            "sizes and types returned": "def program(x):\n    return x * 2, (torch.float32, x.device), x.«shape→view(4, 3).shape»\n",
            "class that a type names, returned": "import typing\n\n\nclass P(typing.NamedTuple):\n    a: torch.Tensor\n    «# here→b: float = 1.0»\n\n\ndef inputs():\n    return [(P(torch.ones(3)),)]\n\n\ndef program(p):\n    return p.a * 2, type(p)(p.a * 3)\n",
        }
    ),
    **rows(
        {
            "two named tuples of equal fields returned, unchanged": "import typing\n\n\nclass P(typing.NamedTuple):\n    a: torch.Tensor\n\n\nclass Q(typing.NamedTuple):\n    a: torch.Tensor\n\n\n«# here→# there»\n\n\ndef program(x):\n    return P(x * 2), Q(x * 3)\n",
            "namedtuple returned, unchanged": "import typing\n\n\nclass P(typing.NamedTuple):\n    a: torch.Tensor\n    b: float = 2.0\n\n\n«# here→# there»\n\n\ndef program(x):\n    return P(x * 2)\n",
            "named tuple of PyTorch's returned, unchanged": "«# here→# there»\n\n\ndef program(x):\n    return torch.max(x * 2, dim=0)\n",
            "sizes and types returned, unchanged": "«# here→# there»\n\n\ndef program(x):\n    return x * 2, (torch.float32, x.device), x.shape\n",
        },
        how="used",
        differs=False,
    ),
    **rows(
        {
            "namedtuple given and returned with another value": "import typing\n\n\nclass P(typing.NamedTuple):\n    a: torch.Tensor\n    b: float = 1.0\n\n    «# here→by = 2»\n\n\ndef inputs():\n    return [(P(torch.ones(3)),)]\n\n\ndef program(p):\n    return p._replace(a=p.a * getattr(p, 'by', 1))\n",
            "default of a dict returned": "import collections\n\n\nclass L(list):\n    by = «2.0→3.0»\n\n\ndef program(x):\n    d = collections.defaultdict(L)\n    d['a'] = x * d['b'].by\n    return d\n",
            "metaclass's property": "class M(type):\n    @property\n    def by(cls):\n        «return 2.0→return 3.0»\n\n\nclass A(metaclass=M):\n    pass\n\n\ndef program(x):\n    return x * A.by\n",
            "metaclass's method": "class M(type):\n    def by(cls):\n        «return 2.0→return 3.0»\n\n\nclass A(metaclass=M):\n    pass\n\n\ndef program(x):\n    return x * A.by()\n",
            "enum iterated": "import enum\n\n\nclass E(enum.Enum):\n    A = 2.0\n    «B = 3.0→B = 4.0»\n\n\ndef program(x):\n    for e in E:\n        x = x * e.value + 1\n    return x\n",
            "flag": "import enum\n\n\nclass E(enum.Flag):\n    A = 1\n    B = 2\n\n\nMODE = «E.A | E.B→E.B»\n\n\ndef program(x):\n    return x * 2 if E.A in MODE else x * 3\n",
            "namedtuple's default": "import typing\n\n\nclass P(typing.NamedTuple):\n    a: float «= 2.0→= 3.0»\n\n\ndef program(x):\n    return x * P().a\n",
            "namedtuple's order, made inside": "import collections\n\nP = collections.namedtuple('P', «'a b'→'b a'»)\n\n\ndef program(x):\n    return x * P(2.0, 3.0).a\n",
            "single dispatch": "import functools\n\n\n@functools.singledispatch\ndef f(x):\n    return 1.0\n\n\n@f.register\ndef _(x: int):\n    «return 2.0→return 3.0»\n\n\ndef program(x):\n    return x * f(3)\n",
            "context variable": "import contextvars\n\nv = contextvars.ContextVar('v')\nv.«set(2.0)→set(3.0)»\n\n\ndef program(x):\n    return x * v.get()\n",
        },
        how="varies",
    ),
    **rows(
        {
            "method of a dict": "get = {'a': «2.0→3.0»}.get\n\n\ndef program(x):\n    return x * get('a')\n",
            "method of a dict given": "def inputs():\n    return [(torch.ones(3), {'a': «2.0→3.0»}.get)]\n\n\ndef program(x, get):\n    return x * get('a')\n",
        }
    ),
    **rows(
        {
            "method of a dict given, unchanged": "def inputs():\n    return [(torch.ones(3), {'a': 2.0}.get)]\n\n\n«# here→# there»\n\n\ndef program(x, get):\n    return x * get('a')\n",
            "method that was taken before a graph break, unchanged": "def inputs():\n    return [(torch.ones(3), 2), (torch.ones(3), 3)]\n\n\n«# here→# there»\n\n\ndef program(x, n):\n    found = [0] * n\n    torch._dynamo.graph_break()\n    found.extend(given(n))\n    return x * len(found)\n\n\ndef given(n):\n    torch._dynamo.graph_break()\n    return [n]\n",
            "numpy's random numbers, unchanged": "import numpy as np\n\n\n«# here→# there»\n\n\ndef program(x):\n    y = x * 2\n    np.random.seed(3)\n    return y + len(np.random.permutation(4))\n",
        },
        how="used",
        differs=False,
    ),
    **rows(
        {
            "method that was taken before a graph break": "def inputs():\n    return [(torch.ones(3), 2), (torch.ones(3), «3→4»)]\n\n\ndef program(x, n):\n    found = [0] * n\n    torch._dynamo.graph_break()\n    found.extend(given(n))\n    return x * len(found)\n\n\ndef given(n):\n    torch._dynamo.graph_break()\n    return [n]\n",
        },
        how="partly",
    ),
    **rows(
        {
            "method of a list given, which another one is": "def inputs():\n    a = [1.0, 2.0]\n    return [(torch.ones(3), a.append, a«→[:]»)]\n\n\ndef program(x, add, a):\n    add(3.0)\n    return x * len(a)\n",
            "method of a list given, its length": "def inputs():\n    return [(torch.ones(3), [1.0«→, 2.0»].__len__)]\n\n\ndef program(x, size):\n    return x * size()\n",
        },
        how="varies",
    ),
}
