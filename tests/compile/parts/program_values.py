"""Changes of values, modules and hooks that a program uses."""

# ruff: noqa: E501 (a row is a program, its change and what the next start does)

from __future__ import annotations

import sys

from program_changes import edit, rows

OWNER = """
class D:
    def __init__(self, v):
        self.v = v


"""
AUTOCAST = (
    "context = torch.autocast('cpu', dtype=torch.bfloat16, cache_enabled=True)\n\n\n"
    "def program(x):\n    with context:\n        return x @ x.t()\n"
)
WRAPPED = (
    "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.l = nn.Linear(4, 4)\n\n"
    "    def forward(self, x):\n        return self.l(x)\n\n\n"
    "program = M()\ncontext = torch.autocast('cpu', dtype=torch.bfloat16, enabled=True)\n"
)
TRAINERS = WRAPPED + "program.forward = context(program.forward)\n"
ACCELERATES = WRAPPED.replace(
    "class M", "import types\n\nfrom accelerate.utils import convert_outputs_to_fp32\n\n\nclass M", 1
) + (
    "program.forward = types.MethodType(context(program.forward.__func__), program)\n"
    "program.forward = types.MethodType(convert_outputs_to_fp32(program.forward.__func__), program)\n"
)
"""Mixed precision as Hugging Face's libraries put it around a model's forward."""
VALUES = {
    **{
        f"autocast around forward by {name}, {what}": edit(text, edits, how=how, differs=how != "used")
        for name, text in (("a decorator", TRAINERS), ("Accelerate", ACCELERATES))
        for what, edits, how in (
            ("its dtype", ("bfloat16", "float16"), "traced"),
            ("turned off", ("enabled=True", "enabled=False"), "traced"),
            ("unchanged", ("program = M()", "program = M()  # there"), "used"),
        )
    },
    "autocast object's dtype": edit(AUTOCAST, ("bfloat16", "float16")),
    "autocast object, turned off": edit(AUTOCAST, ("cache_enabled", "enabled=False, cache_enabled")),
    "autocast object's cache": edit(AUTOCAST, ("cache_enabled=True", "cache_enabled=False"), differs=False),
    "class attribute an object, made inside": edit(
        OWNER + "class A:\n    by = D(2.0)\n\n\ndef program(x):\n    return x * A().by.v\n",
        ("D(2.0)", "D(3.0)"),
    ),
    "method's default an object, made inside": edit(
        OWNER
        + "class A:\n    def f(self, x, by=D(2.0)):\n        return x * by.v\n\n\ndef program(x):\n    return A().f(x)\n",
        ("D(2.0)", "D(3.0)"),
    ),
    "method's closure an object, made inside": edit(
        OWNER
        + "def make(d):\n    class A:\n        def f(self, x):\n            return x * d.v\n\n    return A\n\n\nA = make(D(2.0))\n\n\ndef program(x):\n    return A().f(x)\n",
        ("D(2.0)", "D(3.0)"),
    ),
    "list of objects": edit(
        OWNER + "L = [D(2.0)]\n\n\ndef program(x):\n    return x * L[0].v\n", ("D(2.0)", "D(3.0)")
    ),
    **rows(
        {
            "method's default a tuple of functions, made inside": "def g(x):\n    return «x + 1→x + 2»\n\n\nclass A:\n    def f(self, x, by=(g,)):\n        return by[0](x)\n\n\ndef program(x):\n    return A().f(x)\n",
            "method's default a class, made inside": "class G:\n    «v = 2.0→v = 3.0»\n\n\nclass A:\n    def f(self, x, by=G):\n        return x * by.v\n\n\ndef program(x):\n    return A().f(x)\n",
            "method's default an enum, made inside": "import enum\n\n\nclass E(enum.Enum):\n    «A = 2.0→A = 3.0»\n\n\nclass A:\n    def f(self, x, by=E.A):\n        return x * by.value\n\n\ndef program(x):\n    return A().f(x)\n",
            "method's default a partial, made inside": "import functools\n\n\ndef g(x, n):\n    return x * n\n\n\nclass A:\n    def f(self, x, by=functools.partial(g, «n=2.0→n=3.0»)):\n        return by(x)\n\n\ndef program(x):\n    return A().f(x)\n",
            "method's default a namedtuple, made inside": "import collections\n\nP = collections.namedtuple('P', «'a b'→'b a'»)\n\n\nclass A:\n    def f(self, x, by=P(2.0, 1.0)):\n        return x * by.a\n\n\ndef program(x):\n    return A().f(x)\n",
            "instance of modules filtered": "program = nn.Sequential(nn.Linear(4, 4), nn.ReLU())\n\n\nclass M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.a, self.b = nn.ReLU(), nn.Tanh()\n\n    def forward(self, x):\n        return x * (1 + sum(isinstance(m, nn.ReLU) for m in self.modules()))\n\n\nprogram = M()\n«# here→program.b = nn.ReLU()»\n",
            "names of parameters": "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        «self.a =→self.longer =» nn.Parameter(torch.ones(4))\n\n    def forward(self, x):\n        for name, p in self.named_parameters():\n            x = x * p * len(name)\n        return x\n\n\nprogram = M()\n",
            "tuple subclass": "class T(tuple):\n    «by = 2.0→by = 3.0»\n\n\nt = T((1.0,))\n\n\ndef program(x):\n    return x * t.by * t[0]\n",
            "str global in f-string": "n = «'si'→'ta'»\n\n\ndef program(x):\n    return getattr(torch, f'{n}n')(x)\n",
            "generator global": "G = [i for i in «(2.0, 3.0)→(3.0, 2.0)»]\n\n\ndef program(x):\n    for a, b in zip(G, reversed(G)):\n        x = x * a + b\n    return x\n",
            "regular expression": "import re\n\nr = re.compile(«'a')\n\n\ndef→'b')\n\n\ndef» program(x):\n    return x * 2 if r.match('a') else x * 3\n",
            "shared batch norm": "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.a, self.b = nn.BatchNorm1d(4, track_running_stats=True), nn.BatchNorm1d(4)\n\n    def forward(self, x):\n        return self.b(self.a(x) * 3 + 1)\n\n\nprogram = M()\n«# here→program.b = program.a»\n\n\ndef state():\n    return [program.a.running_mean, program.b.running_mean]\n",
        }
    ),
    **rows(
        {
            "logging level": "import logging\n\nlog = logging.getLogger('changed')\nlog.«setLevel(10)→setLevel(50)»\n\n\ndef program(x):\n    return x * 2 if log.isEnabledFor(20) else x * 3\n"
        },
        how="partly",
    ),
    **rows(
        {
            "annotations": "class A:\n«    a: int→    a: int\n    b: int»\n\n\nbox = A()\n\n\ndef program(x):\n    return x * len(A.__annotations__)\n",
            "int subclass": "class T(int):\n    by = 2.0\n\n\nt = «T(3)→T(4)»\n\n\ndef program(x):\n    return x * t\n",
        },
        how="unfit",
    ),
    **rows(
        {
            "cached property": "import functools\n\n\nclass A:\n    @functools.cached_property\n    def f(self):\n        «return 2.0→return 3.0»\n\n\nbox = A()\n\n\ndef program(x):\n    return x * box.f\n",
            "cached property filled": "import functools\n\n\nclass A:\n    @functools.cached_property\n    def f(self):\n        return 2.0\n\n\nbox = A()\n«# here→box.__dict__['f'] = 5.0»\n\n\ndef program(x):\n    return x * box.f\n",
        },
        how="traced" if sys.version_info >= (3, 12) else "unfit",  # a lock before
    ),
    **rows(
        {
            "partialmethod": "import functools\n\n\nclass A:\n    def f(self, x, n):\n        return x * n\n\n    g = functools.partialmethod(f, «n=2.0→n=3.0»)\n\n\nbox = A()\n\n\ndef program(x):\n    return box.g(x)\n"
        },
        how="varies",
    ),
}
