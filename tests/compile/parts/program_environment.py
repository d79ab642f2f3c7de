"""Changes around a program's text: names that come or go, registrations, modules that are imported, process state."""

# ruff: noqa: E501 (a row is a program, its change and what the next start does)

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from program_changes import Change, Patch, edit, patched, rows


def asks(condition: str, before: str = "", how: str = "traced", patch: Patch | None = None) -> Change:
    """A program that asks whether a module has the name `extra_name`, which torch has after the change."""
    return Change(
        text=f"import sys\nimport types\n{before}\n\n\ndef program(x):\n    return x * 2 if {condition} else x * 3\n",
        patch=patch or (lambda m, module: m.setattr("torch.extra_name", 1, raising=False)),
        how=how,
    )


def imported(name: str) -> Patch:
    return lambda m, module: m.setitem(sys.modules, name, types.ModuleType(name))


OWN = "me = sys.modules[__name__]\n# here\n"
OPERATOR = """
@torch.library.custom_op("changed_program::OP", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(5)


@op.register_fake
def _(x):
    return x.new_empty(5)


"""


def operator(name: str, more: str, *edits: tuple[str, str]) -> Change:
    """Of an operator that no known library registers."""
    return edit(OPERATOR.replace("OP", name) + more, *edits, how="unfit")


def override(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Another kernel of aten::igamma for a back end that is not there."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("igamma", lambda x, y: x.new_empty(5), "XLA")
    module.undo = [library._destroy]


READ = "def program(x):\n    return op(x.detach()) * op(x.detach()).shape[0]\n"

ABSENT = {
    "hasattr of torch": asks("hasattr(torch, 'extra_name')"),
    "hasattr of a module inside torch": asks(
        "hasattr(torch.nn.functional, 'extra_name')",
        patch=lambda m, module: m.setattr("torch.nn.functional.extra_name", 1, raising=False),
    ),
    "hasattr of torch.ops": asks(
        "hasattr(torch.ops.changed_program, 'extra_name')",
        patch=lambda m, module: m.setattr(torch.ops.changed_program, "extra_name", 1, raising=False),
    ),
    "hasattr of torch.ops, imported inside": Change(
        text="def program(x):\n    from torch import ops\n\n"
        "    return x * 2 if hasattr(ops.changed_program, 'extra_name') else x * 3\n",
        patch=lambda m, module: m.setattr(torch.ops.changed_program, "extra_name", 1, raising=False),
    ),
    "hasattr of a library": asks(
        "hasattr(math, 'extra_name')",
        "import math",
        patch=lambda m, module: m.setattr("math.extra_name", 1, raising=False),
    ),
    "hasattr of a module imported inside, patched": patched(
        "def program(x):\n    import math\n\n    return x * 2 if hasattr(math, 'extra_name') else x * 3\n",
        "math.extra_name",
        1,
        raising=False,
    ),
    "hasattr, a name that goes": asks(
        "hasattr(math, 'tau')", "import math", patch=lambda m, module: m.delattr("math.tau")
    ),
    "hasattr, a name made of parts": asks("hasattr(torch, 'extra_' + NAME)", "NAME = 'name'"),
    "hasattr, a name in a list": asks(
        "any(hasattr(torch, n) for n in NAMES)", "NAMES = ['a_name', 'extra_name']"
    ),
    "hasattr of the own module": asks(
        "hasattr(me, 'extra')", OWN, patch=lambda m, module: m.setattr(module, "extra", 1, raising=False)
    ),
    "hasattr, __getattr__ of the module": edit(
        "import sys\n" + OWN + "\n\ndef program(x):\n    return x * 2 if hasattr(me, 'extra') else x * 3\n",
        (
            "# here",
            "\n\ndef __getattr__(name):\n    if name == 'extra':\n        return 1\n    raise AttributeError(name)",
        ),
    ),
    "getattr's default, of a module": edit(
        "import sys\n" + OWN + "\n\ndef program(x):\n    return x * getattr(me, 'extra', 2.0)\n",
        ("# here", "extra = 3.0"),
    ),
    "getattr's default, of torch": patched(
        "def program(x):\n    return x * getattr(torch, 'extra_name', 2.0)\n",
        "torch.extra_name",
        3.0,
        raising=False,
    ),
    "AttributeError of a module": edit(
        "import sys\n"
        + OWN
        + "\n\ndef program(x):\n    try:\n        return x * me.extra\n    except AttributeError:\n        return x * 2\n",
        ("# here", "extra = 3.0"),
    ),
    "AttributeError of torch": patched(
        "def program(x):\n    try:\n        return x * torch.extra_name\n    except AttributeError:\n        return x * 2\n",
        "torch.extra_name",
        3.0,
        raising=False,
    ),
    "ImportError of a name": patched(
        "def program(x):\n    try:\n        from math import extra_name\n    except ImportError:\n        extra_name = 2.0\n    return x * extra_name\n",
        "math.extra_name",
        3.0,
        raising=False,
        how="unfit",
    ),
    "ImportError of a module": Change(
        text="def program(x):\n    try:\n        import extra_module\n\n        return x * 2\n    except ImportError:\n        return x * 3\n",
        patch=imported("extra_module"),
        how="unfit",
    ),
    "name in dir": asks("'extra_name' in dir(torch)", how="unfit"),
    "name in vars": asks("'extra_name' in vars(torch)"),
    "name in __dict__": asks("'extra_name' in torch.__dict__"),
    "__dict__.get": asks("torch.__dict__.get('extra_name') is not None"),
    "name in sys.modules": asks("'extra_module' in sys.modules", patch=imported("extra_module")),
    "get of sys.modules": asks("sys.modules.get('extra_module') is not None", patch=imported("extra_module")),
    "find_spec": asks(
        "importlib.util.find_spec('extra_module') is not None",
        "import importlib.util",
        patch=lambda m, module: m.setattr("importlib.util.find_spec", lambda name: 1),
    ),
    "hasattr of a function of torch": patched(
        "def program(x):\n    return x * 2 if hasattr(F.relu, 'extra') else x * 3\n",
        "torch.nn.functional.relu.extra",
        1,
        raising=False,
    ),
    "hasattr of a class of torch": patched(
        "def program(x):\n    return x * 2 if hasattr(nn.Linear, 'extra') else x * 3\n",
        "torch.nn.Linear.extra",
        1,
        raising=False,
    ),
    "hasattr of torch.Tensor": patched(
        "def program(x):\n    return x * 2 if hasattr(torch.Tensor, 'extra') else x * 3\n",
        "torch.Tensor.extra",
        1,
        raising=False,
    ),
    "hasattr of a tensor, by its class": patched(
        "def program(x):\n    return x * 2 if hasattr(x, 'extra') else x * 3\n",
        "torch.Tensor.extra",
        1,
        raising=False,
    ),
    "hasattr of an nn.Module, by its class": patched(
        "program = nn.Sequential(nn.ReLU())\n\n\nclass M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.inner = nn.ReLU()\n\n    def forward(self, x):\n        return x * 2 if hasattr(self.inner, 'extra') else x * 3\n\n\nprogram = M()\n",
        "torch.nn.ReLU.extra",
        1,
        raising=False,
    ),
    "hasattr of an operator": Change(
        text="def program(x):\n    return torch.ops.aten.sin(x) * (2 if hasattr(torch.ops.aten.sin, 'extra') else 3)\n",
        patch=lambda m, module: m.setattr(torch.ops.aten.sin, "extra", 1, raising=False),
    ),
    "hasattr of a dtype's module": Change(
        text="import types\n\nspace = types.ModuleType('space')\n\n\ndef program(x):\n    return x * 2 if hasattr(space, 'extra') else x * 3\n",
        patch=lambda m, module: m.setattr(module.space, "extra", 1, raising=False),
    ),
    "names of a module counted": asks("len(vars(torch)) % 2 == 0"),
    **rows(
        {
            "hasattr of a module imported inside": "def program(x):\n    import math\n\n    return x * 2 if hasattr(math, «'extra_name'→'pi'») else x * 3\n",
            "hasattr in a callee, of an argument": "import sys\n\nme = sys.modules[__name__]\n«# here→extra = 1»\n\n\ndef has(module, name):\n    return hasattr(module, name)\n\n\ndef program(x):\n    return x * 2 if has(me, 'ex' + 'tra') else x * 3\n",
            "hasattr of a module in a list": "import sys\n\nmodules = [sys.modules[__name__]]\n«# here→extra = 1»\n\n\ndef program(x):\n    return x * 2 if hasattr(modules[0], 'extra') else x * 3\n",
            "hasattr of a module in a closure": "import sys\n\n«# here→extra = 1»\n\n\ndef make(module):\n    def program(x):\n        return x * 2 if hasattr(module, 'extra') else x * 3\n\n    return program\n\n\nprogram = make(sys.modules[__name__])\n",
            "hasattr of a module that is an attribute": "import sys\n\n«# here→extra = 1»\n\n\nclass Box:\n    lib = sys.modules[__name__]\n\n\ndef program(x):\n    return x * 2 if hasattr(Box().lib, 'extra') else x * 3\n",
            "hasattr of a module that is an argument": "import sys\n\n«# here→extra = 1»\n\n\ndef inputs():\n    return [(torch.ones(3), sys.modules[__name__])]\n\n\ndef program(x, module):\n    return x * 2 if hasattr(module, 'extra') else x * 3\n",
            "hasattr of a module of sys.modules": "import sys\n\n«# here→extra = 1»\n\n\ndef program(x):\n    return x * 2 if hasattr(sys.modules[__name__], 'extra') else x * 3\n",
            "hasattr of a function": "def inner(x):\n    return x\n\n\n«# here→inner.extra = 1»\n\n\ndef program(x):\n    return x * 2 if hasattr(inner, 'extra') else x * 3\n",
            "getattr's default, of a function": "def inner(x):\n    return x\n\n\n«# here→inner.extra = 3.0»\n\n\ndef program(x):\n    return x * getattr(inner, 'extra', 2.0)\n",
            "hasattr of a method": "class A:\n    def inner(self):\n        return 1\n\n\nbox = A()\n«# here→A.inner.extra = 1»\n\n\ndef program(x):\n    return x * 2 if hasattr(box.inner, 'extra') else x * 3\n",
            "hasattr of a partial": "import functools\n\nact = functools.partial(torch.sin)\n«# here→act.extra = 1»\n\n\ndef program(x):\n    return act(x) * 2 if hasattr(act, 'extra') else x * 3\n",
            "hasattr of a class": "class A:\n    pass\n\n\n«# here→A.extra = 1»\n\n\ndef program(x):\n    return x * 2 if hasattr(A, 'extra') else x * 3\n",
            "hasattr of a tensor": "def inputs():\n    x = torch.ones(3)\n    «# here→x.extra = 1»\n    return [(x,)]\n\n\ndef program(x):\n    return x * 2 if hasattr(x, 'extra') else x * 3\n",
            "hasattr of an nn.Module": "class M(nn.Module):\n    def forward(self, x):\n        return x * 2 if hasattr(self, 'extra') else x * 3\n\n\nprogram = M()\n«# here→program.extra = 1»\n",
            "hasattr of a parameter": "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.a = nn.Parameter(torch.ones(4))\n\n    def forward(self, x):\n        return x * self.a * (2 if hasattr(self.a, 'extra') else 3)\n\n\nprogram = M()\n«# here→program.a.extra = 1»\n",
            "hasattr of a copy of a module, which another has": "import colorsys\nimport types\n\ncolorsys.copy = types.ModuleType('math')\nundo = [lambda: delattr(colorsys, 'copy')]\n«# here→colorsys.copy.extra = 1»\n\n\ndef program(x):\n    import colorsys\n\n    return x * 2 if hasattr(colorsys.copy, 'extra') else x * 3\n",
            "class in a dict": "class A:\n    pass\n\n\nKINDS = {A: 1}\n«# here→KINDS.pop(A)»\n\n\ndef program(x):\n    return x * (2 if A in KINDS else 3)\n",
            "class in a dict, another of its name": "class A:\n    pass\n\n\nKINDS = {A: 1}\n«# here→class A:\n    pass»\n\n\ndef program(x):\n    return x * (2 if A in KINDS else 3)\n",
            "type of a value in a dict": "KINDS = {int: 1, type(None): 2}\nVALUE = None\n«# here→KINDS.pop(type(None))»\n\n\ndef program(x):\n    return x * (2 if type(VALUE) in KINDS else 3)\n",
        }
    ),
    **rows(
        {
            "name in globals()": "«# here→extra = 1»\n\n\ndef program(x):\n    return x * 2 if 'extra' in globals() else x * 3\n",
            "get of globals()": "«# here→extra = 3.0»\n\n\ndef program(x):\n    return x * globals().get('extra', 2.0)\n",
        },
        how="partly",
    ),
}

OPERATORS = {
    "fake read": operator("a", READ, ("torch.ones(5)", "torch.ones(6)"), ("new_empty(5)", "new_empty(6)")),
    "fake's dtype": operator(
        "b",
        "def program(x):\n    return x * (2 if op(x.detach()).dtype == torch.float32 else 3)\n",
        ("torch.ones(5)", "torch.ones(5).double()"),
        ("new_empty(5)", "new_empty(5, dtype=torch.float64)"),
    ),
    "what a fake calls": operator(
        "c",
        "def program(x):\n    return op(x.detach()) * op(x.detach()).shape[0]\n\n\ndef size():\n    return 5\n",
        ("torch.ones(5)", "torch.ones(size())"),
        ("new_empty(5)", "new_empty(size())"),
        ("return 5\n", "return 5 + 1\n"),
    ),
    "fake by its name": operator(
        "d",
        "def program(x):\n    return torch.ops.changed_program.d(x.detach()) * torch.ops.changed_program.d(x.detach()).shape[0]\n",
        ("torch.ones(5)", "torch.ones(6)"),
        ("new_empty(5)", "new_empty(6)"),
    ),
    "fake by its overload": operator(
        "e",
        "def program(x):\n    return x * torch.ops.changed_program.e.default(x.detach()).shape[0]\n",
        ("torch.ones(5)", "torch.ones(6)"),
        ("new_empty(5)", "new_empty(6)"),
    ),
    "fake in a callee": operator(
        "f",
        "def inner(x):\n    return op(x).shape[0]\n\n\ndef program(x):\n    return x * inner(x.detach())\n",
        ("torch.ones(5)", "torch.ones(6)"),
        ("new_empty(5)", "new_empty(6)"),
    ),
    "kernel": operator(
        "g", "def program(x):\n    return op(x.detach()) * 2\n", ("torch.ones(5)", "torch.zeros(5)")
    ),
    "autograd's formula": operator(
        "i",
        "def inputs():\n    return [(torch.linspace(-1, 2, 5).requires_grad_(),)]\n\n\nop.register_autograd(lambda ctx, g: g * 3)\n\n\ndef program(x):\n    return op(x) + 1\n",
        ("g * 3", "g * 4"),
    ),
    "kernel of an operator of PyTorch's": Change(
        text="def program(x):\n    return x * torch.sin(x).shape[0]\n", patch=override, differs=False
    ),
    **rows(
        {
            "operator of a known library": "import transformers.integrations.moe\n\n\ndef inputs():\n    return [(torch.ones(8, 4), torch.ones(2, 4, 4), torch.tensor([3, 8]))]\n\n\ndef program(x, weight, ends):\n    return torch.ops.transformers.grouped_mm_fallback(x, weight, ends) «* 2→* 3»\n"
        }
    ),
    **rows(
        {
            "kernel of an operator of PyTorch's, before": "library = torch.library.Library('aten', 'IMPL')\nlibrary.impl('igamma', lambda x, y: x.new_empty(5), 'XLA')\n\n\ndef undo_library():\n    library._destroy()\n\n\nundo = [undo_library]\n\n\ndef program(x):\n    return «x * 2→x * 3»\n"
        },
        how="unfit",
    ),
}

PROCESS = {
    "default device read": Change(
        text="def program(x):\n    return x * len(torch.get_default_device().type)\n",
        around=lambda: torch.device("meta"),
    ),
    "current directory": Change(
        text="import os\n\n\ndef program(x):\n    return x * len(os.getcwd())\n",
        patch=lambda m, module: m.chdir("/"),
        how="partly",
    ),
    "torch.cuda.is_available": Change(
        text="def program(x):\n    return x * 2 if torch.cuda.is_available() else x * 3\n",
        patch=lambda m, module: m.setattr(
            "torch.cuda.is_available", lambda: not module.torch.cuda.device_count()
        ),
    ),
    "torch.distributed.is_initialized": patched(
        "import torch.distributed\n\n\ndef program(x):\n    return x * 2 if torch.distributed.is_initialized() else x * 3\n",
        "torch.distributed.is_initialized",
        lambda: True,
    ),
    "maximal size": patched(
        "import sys\n\n\ndef program(x):\n    return x * (2 if sys.maxsize > 3 else 3)\n", "sys.maxsize", 2
    ),
    **rows(
        {
            "class of an nn.Module assigned": "class A(nn.Module):\n    def forward(self, x):\n        return x * 2\n\n\nclass B(nn.Module):\n    def forward(self, x):\n        return x * 3\n\n\nprogram = nn.Sequential(A())\n«# here→program[0].__class__ = B»\n",
            "class of a module assigned": "import sys\nimport types\n\nme = sys.modules[__name__]\n\n\nclass Own(types.ModuleType):\n    @property\n    def extra(self):\n        return 3.0\n\n\n«# here→me.__class__ = Own»\n\n\ndef program(x):\n    return x * getattr(me, 'extra', 2.0)\n",
            "property of a module's class": "import sys\nimport types\n\nme = sys.modules[__name__]\n\n\nclass Own(types.ModuleType):\n    @property\n    def extra(self):\n        «return 2.0→return 3.0»\n\n\nme.__class__ = Own\n\n\ndef program(x):\n    return x * me.extra\n",
            "__getattr__ of a module edited": "import sys\n\nme = sys.modules[__name__]\n\n\ndef __getattr__(name):\n    if name != 'extra':\n        raise AttributeError(name)\n    «return 2.0→return 3.0»\n\n\ndef program(x):\n    return x * me.extra\n",
            "cached function that has its answer": "import functools\n\n«kept = [2.0]→kept = [3.0]»\n\n\n@functools.cache\ndef factor():\n    return kept[0]\n\n\n# here\n\n\ndef program(x):\n    return x * factor()\n",
            "hasattr of a cached function": "import functools\n\n\n@functools.cache\ndef factor():\n    return 2.0\n\n\n«# here→factor.extra = 1»\n\n\ndef program(x):\n    return x * (2 if hasattr(factor, 'extra') else 3)\n",
            "attribute of a method, made inside": "class A:\n    def f(self):\n        return 1\n\n    f.«by = 2.0→by = 3.0»\n\n\ndef program(x):\n    return x * A().f.by\n",
            "signature": "import inspect\n\n\n«def inner(x)→def inner(x, y=1)»:\n    return x\n\n\ndef program(x):\n    return x * len(inspect.signature(inner).parameters)\n",
            "subclass registered after": "class A:\n    pass\n\n\n«# here→class B(A):\n    pass»\n\n\ndef program(x):\n    return x * (1 + len(A.__subclasses__()))\n",
            "__contains__": "class A:\n    def __contains__(self, key):\n        «return True→return False»\n\n\nbox = A()\n\n\ndef program(x):\n    return x * (2 if 'a' in box else 3)\n",
            "__bool__": "class A:\n    def __bool__(self):\n        «return True→return False»\n\n\nbox = A()\n\n\ndef program(x):\n    return x * (2 if box else 3)\n",
            "__eq__": "class A:\n    def __eq__(self, other):\n        «return True→return False»\n\n\nbox, other = A(), A()\n\n\ndef program(x):\n    return x * (2 if box == other else 3)\n",
            "__set__ of a descriptor": "class D:\n    def __get__(self, owner, kind=None):\n        return owner.__dict__.get('v', 1.0)\n\n    def __set__(self, owner, value):\n        owner.__dict__['v'] = «value * 2→value * 5»\n\n\nclass A:\n    d = D()\n\n\ndef program(x):\n    a = A()\n    a.d = 3.0\n    return x * a.d\n",
            "__set_name__": "class D:\n    def __set_name__(self, owner, name):\n        owner.«by = 2.0→by = 3.0»\n\n\nclass A:\n    d = D()\n\n\ndef program(x):\n    return x * A.by\n",
            "__slots__ without a value": "class A:\n    __slots__ = ('extra',)\n\n\nbox = A()\n«# here→box.extra = 3.0»\n\n\ndef program(x):\n    return x * getattr(box, 'extra', 2.0)\n",
            "__dict__ of a class": "class A:\n    «pass  # here→extra = 1»\n\n\ndef program(x):\n    return x * (2 if 'extra' in A.__dict__ else 3)\n",
            "number of attributes of a class": "class A:\n    «pass  # here→extra = 1»\n\n\ndef program(x):\n    return x * len(vars(A))\n",
            "callable": "class A:\n    «pass  # here→def __call__(self):\n        return 1»\n\n\nbox = A()\n\n\ndef program(x):\n    return x * (2 if callable(box) else 3)\n",
        }
    ),
    **rows(
        {
            "annotations of a function": "«def inner(x)→def inner(x: int)»:\n    return x\n\n\ndef program(x):\n    return x * len(inner.__annotations__)\n",
            "first line": "«# here→# here\n»\ndef inner(x):\n    return x\n\n\ndef program(x):\n    return x * inner.__code__.co_firstlineno\n",
            "docstring of a function, read": "def inner(x):\n    «'one'→'three'»\n    return x\n\n\ndef program(x):\n    return x * len(inner.__doc__)\n",
            "module's docstring, read": "__doc__ = «'one'→'three'»\n\n\ndef program(x):\n    return x * len(__doc__)\n",
        },
        how="unfit",
    ),
    **rows(
        {
            "torch.fx.wrap": "import torch.fx\n\n\ndef inner(x):\n    return x * 2\n\n\n«# here→torch.fx.wrap('inner')»\n\n\ndef program(x):\n    return inner(x) + 1\n"
        },
        how="used",
        differs=False,
    ),
    **rows(
        {
            "__torch_function__ of an argument's class": "class A:\n    by = 2.0\n\n    @classmethod\n    def __torch_function__(cls, f, types, args=(), kwargs=None):\n        return «args[0] * 2→args[0] * 3»\n\n\nbox = A()\n\n\ndef program(x):\n    return torch.add(x, box)\n"
        },
        how="varies",
    ),
}
