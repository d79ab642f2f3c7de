"""Changes of what a program asks while it is traced: what it looks up and does not find, what functions answer, and the
order of sets."""

# ruff: noqa: E501 (a row is a program, its change and what the next start does)

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from program_changes import Change
from program_changes import rows as edits

NAME = "CHANGED_PROGRAM"
MODULE = "changed_program_extra"


def environment(condition: str) -> Iterator[tuple[str, Change]]:
    """A program that asks for an environment variable, which is absent and then there, and the other way round."""
    text = f"import os\n\n\ndef program(x):\n    {condition}\n"
    for before, after in (("absent", "present"), ("present", "absent")):
        values = {"absent": f"os.environ.pop({NAME!r}, None)", "present": f"os.environ[{NAME!r}] = '5'"}
        yield (
            f"{before}, then {after}",
            Change(text=f"import os\n\n{values[before]}\n{text}", edits=((values[before], values[after]),)),
        )


def both_ways(texts: dict[str, str], how: str = "traced") -> dict[str, Change]:
    """`«absent→present»` in a text is changed from the one to the other, and the other way round."""
    turned = {name: re.sub("«(.*?)→(.*?)»", r"«\2→\1»", text) for name, text in texts.items()}
    there = edits({f"{name}, absent, then present": text for name, text in texts.items()}, how=how)
    return there | edits({f"{name}, present, then absent": text for name, text in turned.items()}, how=how)


def rows(**kinds: Iterator[tuple[str, Change]]) -> dict[str, Change]:
    return {
        f"{kind.replace('_', ' ')}, {name}": change for kind, found in kinds.items() for name, change in found
    }


LOOKUPS = rows(
    os_environ_get=environment(f"return x * float(os.environ.get({NAME!r}, '3'))"),
    os_getenv=environment(f"return x * float(os.getenv({NAME!r}, '3'))"),
    os_environ_membership=environment(f"return x * 2 if {NAME!r} in os.environ else x * 3"),
    os_path_expandvars=environment(f"return x * 2 if '5' in os.path.expandvars('${NAME}') else x * 3"),
    os_environ_by_try=environment(
        f"try:\n        return x * float(os.environ[{NAME!r}])\n    except KeyError:\n        return x * 3"
    ),
)
LOOKUPS |= both_ways(
    {
        "global instead of a builtin": "«pass→max = min»\n\n\ndef program(x):\n    return x * max(2, 3)\n",
        "global instead of a builtin in another module": "import json\n\n«pass→max = min»\n\n\ndef deep(x):\n    return x * max(2, 3)\n\n\ndef program(x):\n    return deep(x)\n",
        "dict by try": "OPTIONS = dict(a=1)\n«pass→OPTIONS['k'] = 2.0»\n\n\ndef program(x):\n    try:\n        return x * OPTIONS['k']\n    except KeyError:\n        return x * 3\n",
        "dict get": "OPTIONS = dict(a=1)\n«pass→OPTIONS['k'] = 2.0»\n\n\ndef program(x):\n    return x * OPTIONS.get('k', 3.0)\n",
        "dict membership": "OPTIONS = dict(a=1)\n«pass→OPTIONS['k'] = 2.0»\n\n\ndef program(x):\n    return x * (2 if 'k' in OPTIONS else 3)\n",
        "dict with numbers": "OPTIONS = {1: 1.0}\n«pass→OPTIONS[2] = 2.0»\n\n\ndef program(x):\n    try:\n        return x * OPTIONS[2]\n    except KeyError:\n        return x * 3\n",
        "dict with classes": "class A:\n    pass\n\n\nOPTIONS = {int: 1.0}\n«pass→OPTIONS[A] = 2.0»\n\n\ndef program(x):\n    try:\n        return x * OPTIONS[A]\n    except KeyError:\n        return x * 3\n",
        "dict with dtypes": "OPTIONS = {torch.float16: 1.0}\n«pass→OPTIONS[torch.float32] = 2.0»\n\n\ndef program(x):\n    try:\n        return x * OPTIONS[x.dtype]\n    except KeyError:\n        return x * 3\n",
        "ordered dict": "from collections import OrderedDict\n\nOPTIONS = OrderedDict(a=1)\n«pass→OPTIONS['k'] = 2.0»\n\n\ndef program(x):\n    try:\n        return x * OPTIONS['k']\n    except KeyError:\n        return x * 3\n",
        "own dict": "class D(dict):\n    pass\n\n\nOPTIONS = D(a=1)\n«pass→OPTIONS['k'] = 2.0»\n\n\ndef program(x):\n    try:\n        return x * OPTIONS['k']\n    except KeyError:\n        return x * 3\n",
        "missing of a dict": "class D(dict):\n    def __missing__(self, key):\n        return 3.0\n\n\nOPTIONS = D(a=1)\n«pass→OPTIONS['k'] = 2.0»\n\n\ndef program(x):\n    return x * OPTIONS['k']\n",
        "chain map": "from collections import ChainMap\n\nLAST = {}\nOPTIONS = ChainMap(dict(a=1), LAST)\n«pass→LAST['k'] = 2.0»\n\n\ndef program(x):\n    try:\n        return x * OPTIONS['k']\n    except KeyError:\n        return x * 3\n",
        "mapping proxy": "import types\n\nINNER = dict(a=1)\nOPTIONS = types.MappingProxyType(INNER)\n«pass→INNER['k'] = 2.0»\n\n\ndef program(x):\n    try:\n        return x * OPTIONS['k']\n    except KeyError:\n        return x * 3\n",
        "module dict": "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.parts = nn.ModuleDict(dict(a=nn.ReLU()))\n\n    def forward(self, x):\n        try:\n            return self.parts['k'](x) * 2\n        except KeyError:\n            return x * 3\n\n\nprogram = M()\n«pass→program.parts['k'] = nn.ReLU()»\n\n\n",
        "sys modules": "import sys\n\n«sys.modules.pop('changed_program_extra', None)→sys.modules['changed_program_extra'] = sys»\n\n\ndef program(x):\n    try:\n        sys.modules['changed_program_extra']\n        return x * 2\n    except KeyError:\n        return x * 3\n",
        "attribute of a module by try": "class M(nn.Module):\n    def forward(self, x):\n        try:\n            self.use_b\n            return x * 2\n        except AttributeError:\n            return x * 3\n\n\nprogram = M()\n«pass→program.use_b = True»\n\n\n",
        "hasattr of a module": "class M(nn.Module):\n    def forward(self, x):\n        return x * 2 if hasattr(self, 'use_b') else x * 3\n\n\nprogram = M()\n«pass→program.use_b = True»\n\n\n",
        "getattr of a module": "class M(nn.Module):\n    def forward(self, x):\n        return x * getattr(self, 'scale', 3.0)\n\n\nprogram = M()\n«pass→program.scale = 2.0»\n\n\n",
        "submodule by try": "class M(nn.Module):\n    def forward(self, x):\n        try:\n            return self.part(x) * 2\n        except AttributeError:\n            return x * 3\n\n\nprogram = M()\n«pass→program.part = nn.ReLU()»\n\n\n",
        "key of modules by try": "class M(nn.Module):\n    def forward(self, x):\n        try:\n            return self._modules['part'](x) * 2\n        except KeyError:\n            return x * 3\n\n\nprogram = M()\n«pass→program.part = nn.ReLU()»\n\n\n",
        "attribute of a configuration": "class C:\n    pass\n\n\nclass M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.cfg = C()\n\n    def forward(self, x):\n        try:\n            return x * self.cfg.scale\n        except AttributeError:\n            return x * 3\n\n\nprogram = M()\n«pass→program.cfg.scale = 2.0»\n\n\n",
        "attribute of a namespace": "import types\n\nbox = types.SimpleNamespace(a=1)\n«pass→box.scale = 2.0»\n\n\ndef program(x):\n    try:\n        return x * box.scale\n    except AttributeError:\n        return x * 3\n",
        "attribute of a function": "def helper():\n    return 1\n\n\n«pass→helper.scale = 2.0»\n\n\ndef program(x):\n    try:\n        return x * helper.scale\n    except AttributeError:\n        return x * 3\n",
        "hasattr of a function of torch": "undo = [lambda: vars(F.relu).pop('changed_program', None)]\n«pass→F.relu.changed_program = 1»\n\n\ndef program(x):\n    return x * 2 if hasattr(F.relu, 'changed_program') else x * 3\n",
        "attribute of a class": "class A:\n    pass\n\n\n«pass→A.scale = 2.0»\n\n\ndef program(x):\n    try:\n        return x * A.scale\n    except AttributeError:\n        return x * 3\n",
        "attribute of slots": "class A:\n    __slots__ = ('scale',)\n\n\nbox = A()\n«pass→box.scale = 2.0»\n\n\ndef program(x):\n    try:\n        return x * box.scale\n    except AttributeError:\n        return x * 3\n",
        "attribute by getattr method": "class A:\n    def __init__(self):\n        self.inner = dict(a=1)\n\n    def __getattr__(self, name):\n        try:\n            return self.inner[name]\n        except KeyError:\n            raise AttributeError(name) from None\n\n\nbox = A()\n«pass→box.inner['scale'] = 2.0»\n\n\ndef program(x):\n    try:\n        return x * box.scale\n    except AttributeError:\n        return x * 3\n",
        "attribute of a tensor": "weight = torch.ones(4)\n«pass→weight.scale = 1»\n\n\ndef program(x):\n    return x * weight * (2 if hasattr(weight, 'scale') else 3)\n",
        "list index": "ITEMS = [1.0]\n«pass→ITEMS.append(2.0)»\n\n\ndef program(x):\n    try:\n        return x * ITEMS[1]\n    except IndexError:\n        return x * 3\n",
        "set membership": "NAMES = {'a', 'b'}\n«pass→NAMES.add('k')»\n\n\ndef program(x):\n    return x * (2 if 'k' in NAMES else 3)\n",
    }
)
LOOKUPS |= both_ways(
    {
        "import by try": "import sys\n\n«sys.modules.pop('changed_program_extra', None)→sys.modules['changed_program_extra'] = sys»\n\n\ndef program(x):\n    try:\n        import changed_program_extra\n\n        return x * 2\n    except ImportError:\n        return x * 3\n",
        "globals by name": "«pass→SCALE = 2.0»\n\n\ndef program(x):\n    try:\n        return x * globals()['SCALE']\n    except KeyError:\n        return x * 3\n",
        "global name by try": "«pass→SCALE = 2.0»\n\n\ndef program(x):\n    try:\n        return x * SCALE\n    except NameError:\n        return x * 3\n",
        "name of builtins by try": "import builtins\n\nundo = [lambda: vars(builtins).pop('changed_program_scale', None)]\n«pass→builtins.changed_program_scale = float»\n\n\ndef program(x):\n    try:\n        return x * changed_program_scale(2)\n    except NameError:\n        return x * 3\n",
    },
    how="varies",
)
"""Present and absent, of each place where a program can look for something."""


ASSUMED = "@torch.compiler.assume_constant_result\ndef factor(*arguments):\n    return {}\n\n\ndef program(x):\n    return x * factor({})\n"


def answers(text: str, before: str, after: str, how: str = "traced") -> Change:
    """The line `# here` is one of the two, and then the other: it sets what the program asks a function for."""
    assert text.count("# here") == 1
    return Change(
        text=text.replace("# here", before + "  # here"), edits=((before + "  # here", after),), how=how
    )


def an_xpu(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    monkeypatch.setattr("torch._C._has_xpu", True)
    monkeypatch.setattr("torch._C._xpu_getDeviceCount", lambda: 1, raising=False)
    # PyTorch 2.11 asks for it once in a process
    monkeypatch.setattr("torch.xpu.device_count", inspect.unwrap(torch.xpu.device_count))


ANSWERS = {
    "torch.xpu.is_available": Change(
        text="def program(x):\n    return x * 2 if torch.xpu.is_available() else x * 3\n",
        patch=an_xpu,
    ),
    "id of a function": Change(
        text="def helper():\n    pass\n\n\ndef program(x):\n    return x * 2 if id(helper) > 7 else x * 3\n",
        edits=(("x * 2", "x * 4"),),
        how="unfit",
    ),
    "id of a function inside copy.deepcopy": Change(
        text="import copy\n\nOPTIONS = {'a': [1.0, 2.0]}\n\n\ndef program(x):\n    return x * copy.deepcopy(OPTIONS)['a'][1]\n",
        edits=(("2.0", "3.0"),),
        how="varies",
    ),
    "hash of a text": Change(
        text="def program(x):\n    return x * (hash('abc') % 1000 + 1)\n",
        edits=(("'abc'", "'abd'"),),
        differs=True,
    ),
    "text of an object": Change(
        text="class A:\n    pass\n\n\nbox = A()\n\n\ndef program(x):\n    return x * (len(repr(box)) + 1)\n",
        edits=(("class A", "class AB"), ("box = A()", "box = AB()")),
        how="varies",
    ),
    "comptime": Change(
        text="from torch._dynamo.comptime import comptime\n\nSEEN = []\n\n\ndef program(x):\n    comptime(lambda ctx: SEEN.append(1))\n    return x * 2\n\n\ndef state():\n    return 1\n",
        edits=(("x * 2", "x * 3"),),
        how="unfit",
    ),
    **edits(
        {
            "assume_constant_result, environment": "import os\n\n«os.environ['CHANGED_PROGRAM'] = '2'→os.environ['CHANGED_PROGRAM'] = '3'»\n\n\n@torch.compiler.assume_constant_result\ndef factor(*arguments):\n    return float(os.environ['CHANGED_PROGRAM'])\n\n\ndef program(x):\n    return x * factor()\n",
            "assume_constant_result with arguments": "import os\n\n«os.environ['CHANGED_PROGRAM'] = '2'→os.environ['CHANGED_PROGRAM'] = '3'»\n\n\n@torch.compiler.assume_constant_result\ndef factor(*arguments):\n    return float(os.environ[arguments[0]]) + arguments[1]\n\n\ndef program(x):\n    return x * factor('CHANGED_PROGRAM', 1)\n",
            "assume_constant_result, a function inside": "import os\n\n«os.environ['CHANGED_PROGRAM'] = '2'→os.environ['CHANGED_PROGRAM'] = '3'»\n\n\ndef make():\n    @torch.compiler.assume_constant_result\n    def factor():\n        return float(os.environ['CHANGED_PROGRAM'])\n\n    return factor\n\n\nfactor = make()\n\n\ndef program(x):\n    return x * factor()\n",
            "marked constant under a cache": "import functools\nimport os\n\n«os.environ.pop('CHANGED_PROGRAM', None)→os.environ['CHANGED_PROGRAM'] = '3'»\n\n\ndef mark(function):\n    function._dynamo_marked_constant = True\n    return function\n\n\n@functools.lru_cache\n@mark\ndef is_there():\n    return 'CHANGED_PROGRAM' in os.environ\n\n\ndef program(x):\n    return x * 2 if is_there() else x * 3\n",
            "sys.getrecursionlimit": "import sys\n\nundo = [lambda limit=sys.getrecursionlimit(): sys.setrecursionlimit(limit)]\n«sys.setrecursionlimit(3000)→sys.setrecursionlimit(3001)»\n\n\ndef program(x):\n    return x * sys.getrecursionlimit()\n",
        }
    ),
    **edits(
        {
            "assume_constant_result, a method": "import os\n\n«os.environ['CHANGED_PROGRAM'] = '2'→os.environ['CHANGED_PROGRAM'] = '3'»\n\n\nclass M(nn.Module):\n    @torch.compiler.assume_constant_result\n    def factor(self):\n        return float(os.environ['CHANGED_PROGRAM'])\n\n    def forward(self, x):\n        return x * self.factor()\n\n\nprogram = M()\n"
        },
        how="unfit",
    ),
    **edits(
        {
            "find_spec": "import importlib.util\nimport sys\n\n«sys.modules.pop('changed_program_extra', None)→sys.modules['changed_program_extra'] = importlib.util»\n\n\ndef program(x):\n    return x * 2 if importlib.util.find_spec('changed_program_extra') is not None else x * 3\n",
            "metadata.version": "import importlib.metadata\nimport sys\n\nimport pathlib, tempfile\nFOLDER = tempfile.mkdtemp()\nINFO = pathlib.Path(FOLDER, 'changed_program-1.dist-info')\nINFO.mkdir()\n«INFO.joinpath('METADATA').write_text('Metadata-Version: 2.1\\nName: changed_program\\nVersion: 2.0\\n')→INFO.joinpath('METADATA').write_text('Metadata-Version: 2.1\\nName: changed_program\\nVersion: 3.0\\n')»\nsys.path.insert(0, FOLDER)\nundo = [lambda: sys.path.remove(FOLDER)]\n\n\ndef program(x):\n    return x * int(importlib.metadata.version('changed_program')[0])\n",
        },
    ),
    **edits(
        {
            "isinstance by a metaclass": "import os\n\n«os.environ.pop('CHANGED_PROGRAM', None)→os.environ['CHANGED_PROGRAM'] = '3'»\n\n\nclass Meta(type):\n    def __instancecheck__(cls, value):\n        return 'CHANGED_PROGRAM' in os.environ\n\n\nclass A(metaclass=Meta):\n    pass\n\n\nbox = [1]\n\n\ndef program(x):\n    return x * 2 if isinstance(box, A) else x * 3\n"
        },
        how="varies",
    ),
}
"""What functions answer that Dynamo calls while it traces."""

UNROLLED = "# here\n\n\ndef program(x):\n    y = x * 0 + 2\n    for n in NUMBERS:\n        y = y * n + n\n    return y\n"
ORDERS = {
    "set of numbers in the code": Change(
        text="def program(x):\n    y = x * 0 + 2\n    for n in {8, 0, 3}:\n        y = y * n + n\n    return y\n",
        edits=(("{8, 0, 3}", "{0, 8, 3}"),),
    ),
    **edits(
        {
            "set of numbers": "NUMBERS = {8, 0, 3}  # there\n«pass→NUMBERS = set([0, 8, 3])»\n\n\ndef program(x):\n    y = x * 0 + 2\n    for n in NUMBERS:\n        y = y * n + n\n    return y\n",
            "set of numbers in an attribute": "«NUMBERS = set([8, 0, 3])→NUMBERS = set([0, 8, 3])»\n\n\nclass M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.numbers = NUMBERS\n\n    def forward(self, x):\n        y = x * 0 + 2\n        for n in self.numbers:\n            y = y * n + n\n        return y\n\n\nprogram = M()\n",
            "set of numbers of a class": "«NUMBERS = set([8, 0, 3])→NUMBERS = set([0, 8, 3])»\n\n\nclass A:\n    numbers = NUMBERS\n\n\ndef program(x):\n    y = x * 0 + 2\n    for n in A.numbers:\n        y = y * n + n\n    return y\n",
            "default that is a set of numbers": "«NUMBERS = frozenset([8, 0, 3])→NUMBERS = frozenset([0, 8, 3])»\n\n\ndef helper(x, numbers=NUMBERS):\n    y = x * 0 + 2\n    for n in numbers:\n        y = y * n + n\n    return y\n\n\ndef program(x):\n    return helper(x)\n",
            "closure with a set of numbers": "«NUMBERS = frozenset([8, 0, 3])→NUMBERS = frozenset([0, 8, 3])»\n\n\ndef make(numbers):\n    def helper(x):\n        y = x * 0 + 2\n        for n in numbers:\n            y = y * n + n\n        return y\n\n    return helper\n\n\nhelper = make(NUMBERS)\n\n\ndef program(x):\n    return helper(x)\n",
            "first of a set": "«NUMBERS = set([8, 0, 3])→NUMBERS = set([0, 8, 3])»\n\n\ndef program(x):\n    return x * (next(iter(NUMBERS)) + 2)\n",
            "list of a set": "«NUMBERS = set([8, 0, 3])→NUMBERS = set([0, 8, 3])»\n\n\ndef program(x):\n    return x * (list(NUMBERS)[0] + 2)\n",
            "unpacked set": "«NUMBERS = set([8, 0, 3])→NUMBERS = set([0, 8, 3])»\n\n\ndef program(x):\n    a, *rest = NUMBERS\n    return x * (a + 2)\n",
            "set with map": "«NUMBERS = set([8, 0, 3])→NUMBERS = set([0, 8, 3])»\n\n\ndef program(x):\n    y = x * 0 + 2\n    for n in map(lambda n: n + 1, NUMBERS):\n        y = y * n + n\n    return y\n",
            "keys of a set": "«NUMBERS = set([8, 0, 3])→NUMBERS = set([0, 8, 3])»\n\n\ndef program(x):\n    y = x * 0 + 2\n    for n in dict.fromkeys(NUMBERS):\n        y = y * n + n\n    return y\n",
            "order of a dict": "«NUMBERS = {8: 1, 0: 2, 3: 1}→NUMBERS = {0: 2, 8: 1, 3: 1}»\n\n\ndef program(x):\n    y = x * 0 + 2\n    for n in NUMBERS:\n        y = y * n + n\n    return y\n",
            "two names of one list": "ONE = [1.0, 2.0]\n«OTHER = ONE→OTHER = [1.0, 2.0]»\n\n\ndef program(x):\n    return x * 2 if ONE is OTHER else x * 3\n",
            "two names of one list that is changed": "ONE = [1.0, 2.0]\n«OTHER = ONE→OTHER = [1.0, 2.0]»\n\n\ndef program(x):\n    ONE.append(x)\n    return x * len(OTHER)\n",
            "two names of one object": "class A:\n    pass\n\n\nONE = A()\n«OTHER = ONE→OTHER = A()»\n\n\ndef program(x):\n    return x * 2 if ONE is OTHER else x * 3\n",
            "two names of one object that is changed": "class A:\n    by = 2\n\n\nONE = A()\nONE.by = 1\n«OTHER = ONE→OTHER = A(); OTHER.by = 1»\n\n\ndef program(x):\n    ONE.by = 5\n    return x * OTHER.by\n",
            "two attributes with one module": "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.one = nn.ReLU()\n        «self.other = self.one→self.other = nn.ReLU()»\n\n    def forward(self, x):\n        return x * 2 if self.one is self.other else x * 3\n\n\nprogram = M()\n",
        }
    ),
}
"""The order of sets and dicts, and which names are of one object."""

DICTS = """import collections
import dataclasses

D, EMPTY = {'a': 1.0}, {}
LIST, OUTER, CHAIN = [D], {'o': D}, collections.ChainMap(D, {'b': 1})
ORDERED, DEFAULT = collections.OrderedDict(a=1), collections.defaultdict(int, a=1)


@dataclasses.dataclass
class Box:
    d: dict


class Own:
    def __repr__(self):
        return f'{D}'


BOX, OWN = Box(D), Own()


def message():
    try:
        raise KeyError(BOX)
    except KeyError as error:
        return len(str(error))


def place():
    try:
        return [D].index({'a': 1.0}) + 1
    except ValueError:
        return 3


# here


def program(x):
    return x * (%s)
"""
WHOLE = {
    f"a dict in {expression}": answers(
        DICTS % expression, "pass", "[each.update(k=2.0) for each in (D, EMPTY, ORDERED, DEFAULT)]", "varies"
    )
    for expression in (
        "len(str(D))",
        "len(repr(D))",
        "len(f'{D!r}')",
        "len('%s' % D)",
        "len('{}'.format(D))",
        "len(D.__repr__())",
        "len(str([D]))",
        "len(str((1, D)))",
        "len(str(LIST))",
        "len(str(OUTER))",
        "len(str(ORDERED))",
        "len(str(DEFAULT))",
        "len(str(BOX))",
        "len(f'{BOX}')",
        "len(str(OWN))",
        "message()",
        "len(CHAIN)",
        "2 if bool(EMPTY) else 3",
        "2 if EMPTY else 3",
        "2 if bool() or EMPTY else 3",
        "len(set().union(D))",
        "2 if {'a': 1.0} in [D] else 3",
        "2 if D == {'a': 1.0} else 3",
        "2 if (D,) == ({'a': 1.0},) else 3",
        "[D].count({'a': 1.0}) + 1",
        "place()",
        "len(min([D], key=len))",
    )
}
"""What Dynamo makes of a whole dict, of whose keys it has no guard there."""
