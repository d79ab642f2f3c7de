"""Changes of what a program asks while it is traced: what it looks up and does not find, what functions answer, and the
order of sets."""

# ruff: noqa: E501 (a row is a program, its change and what the next start does)

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
from program_changes import Change

WITHOUT_BREAKS = "traced" if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12) else "varies"
"""PyTorch 2.11 runs a part of these as it is."""
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


def both_ways(text: str, absent: str, present: str, how: str = "traced") -> Iterator[tuple[str, Change]]:
    """The line `# here` is one of the two, and then the other."""
    assert text.count("# here") == 1
    for name, before, after in (
        ("absent, then present", absent, present),
        ("present, then absent", present, absent),
    ):
        yield (
            name,
            Change(
                text=text.replace("# here", before + "  # here"),
                edits=((before + "  # here", after),),
                how=how,
            ),
        )


def rows(**kinds: Iterator[tuple[str, Change]]) -> dict[str, Change]:
    return {
        f"{kind.replace('_', ' ')}, {name}": change for kind, found in kinds.items() for name, change in found
    }


TRY = "def program(x):\n    try:\n        return x * {}\n    except {}:\n        return x * 3\n"
HERE = "# here\n\n\n"

LOOKUPS = rows(
    os_environ_get=environment(f"return x * float(os.environ.get({NAME!r}, '3'))"),
    os_getenv=environment(f"return x * float(os.getenv({NAME!r}, '3'))"),
    os_environ_membership=environment(f"return x * 2 if {NAME!r} in os.environ else x * 3"),
    os_path_expandvars=environment(f"return x * 2 if '5' in os.path.expandvars('${NAME}') else x * 3"),
    global_instead_of_a_builtin=both_ways(
        f"{HERE}def program(x):\n    return x * max(2, 3)\n", "pass", "max = min"
    ),
    global_instead_of_a_builtin_in_another_module=both_ways(
        f"import json\n\n{HERE}def deep(x):\n    return x * max(2, 3)\n\n\ndef program(x):\n    return deep(x)\n",
        "pass",
        "max = min",
    ),
    os_environ_by_try=environment(
        f"try:\n        return x * float(os.environ[{NAME!r}])\n    except KeyError:\n        return x * 3"
    ),
    dict_by_try=both_ways(
        f"OPTIONS = dict(a=1)\n{HERE}" + TRY.format("OPTIONS['k']", "KeyError"), "pass", "OPTIONS['k'] = 2.0"
    ),
    dict_get=both_ways(
        f"OPTIONS = dict(a=1)\n{HERE}def program(x):\n    return x * OPTIONS.get('k', 3.0)\n",
        "pass",
        "OPTIONS['k'] = 2.0",
    ),
    dict_membership=both_ways(
        f"OPTIONS = dict(a=1)\n{HERE}def program(x):\n    return x * (2 if 'k' in OPTIONS else 3)\n",
        "pass",
        "OPTIONS['k'] = 2.0",
    ),
    dict_with_numbers=both_ways(
        f"OPTIONS = {{1: 1.0}}\n{HERE}" + TRY.format("OPTIONS[2]", "KeyError"), "pass", "OPTIONS[2] = 2.0"
    ),
    dict_with_classes=both_ways(
        f"class A:\n    pass\n\n\nOPTIONS = {{int: 1.0}}\n{HERE}" + TRY.format("OPTIONS[A]", "KeyError"),
        "pass",
        "OPTIONS[A] = 2.0",
    ),
    dict_with_dtypes=both_ways(
        f"OPTIONS = {{torch.float16: 1.0}}\n{HERE}" + TRY.format("OPTIONS[x.dtype]", "KeyError"),
        "pass",
        "OPTIONS[torch.float32] = 2.0",
    ),
    ordered_dict=both_ways(
        f"from collections import OrderedDict\n\nOPTIONS = OrderedDict(a=1)\n{HERE}"
        + TRY.format("OPTIONS['k']", "KeyError"),
        "pass",
        "OPTIONS['k'] = 2.0",
    ),
    own_dict=both_ways(
        f"class D(dict):\n    pass\n\n\nOPTIONS = D(a=1)\n{HERE}" + TRY.format("OPTIONS['k']", "KeyError"),
        "pass",
        "OPTIONS['k'] = 2.0",
    ),
    missing_of_a_dict=both_ways(
        f"class D(dict):\n    def __missing__(self, key):\n        return 3.0\n\n\nOPTIONS = D(a=1)\n{HERE}def program(x):\n    return x * OPTIONS['k']\n",
        "pass",
        "OPTIONS['k'] = 2.0",
    ),
    chain_map=both_ways(
        f"from collections import ChainMap\n\nLAST = {{}}\nOPTIONS = ChainMap(dict(a=1), LAST)\n{HERE}"
        + TRY.format("OPTIONS['k']", "KeyError"),
        "pass",
        "LAST['k'] = 2.0",
    ),
    mapping_proxy=both_ways(
        f"import types\n\nINNER = dict(a=1)\nOPTIONS = types.MappingProxyType(INNER)\n{HERE}"
        + TRY.format("OPTIONS['k']", "KeyError"),
        "pass",
        "INNER['k'] = 2.0",
    ),
    module_dict=both_ways(
        f"class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.parts = nn.ModuleDict(dict(a=nn.ReLU()))\n\n    def forward(self, x):\n        try:\n            return self.parts['k'](x) * 2\n        except KeyError:\n            return x * 3\n\n\nprogram = M()\n{HERE}",
        "pass",
        "program.parts['k'] = nn.ReLU()",
    ),
    sys_modules=both_ways(
        f"import sys\n\n{HERE}def program(x):\n    try:\n        sys.modules[{MODULE!r}]\n        return x * 2\n    except KeyError:\n        return x * 3\n",
        f"sys.modules.pop({MODULE!r}, None)",
        f"sys.modules[{MODULE!r}] = sys",
    ),
    import_by_try=both_ways(
        f"import sys\n\n{HERE}def program(x):\n    try:\n        import {MODULE}\n\n        return x * 2\n    except ImportError:\n        return x * 3\n",
        f"sys.modules.pop({MODULE!r}, None)",
        f"sys.modules[{MODULE!r}] = sys",
        how="varies",
    ),
    attribute_of_a_module_by_try=both_ways(
        f"class M(nn.Module):\n    def forward(self, x):\n        try:\n            self.use_b\n            return x * 2\n        except AttributeError:\n            return x * 3\n\n\nprogram = M()\n{HERE}",
        "pass",
        "program.use_b = True",
    ),
    hasattr_of_a_module=both_ways(
        f"class M(nn.Module):\n    def forward(self, x):\n        return x * 2 if hasattr(self, 'use_b') else x * 3\n\n\nprogram = M()\n{HERE}",
        "pass",
        "program.use_b = True",
    ),
    getattr_of_a_module=both_ways(
        f"class M(nn.Module):\n    def forward(self, x):\n        return x * getattr(self, 'scale', 3.0)\n\n\nprogram = M()\n{HERE}",
        "pass",
        "program.scale = 2.0",
    ),
    submodule_by_try=both_ways(
        f"class M(nn.Module):\n    def forward(self, x):\n        try:\n            return self.part(x) * 2\n        except AttributeError:\n            return x * 3\n\n\nprogram = M()\n{HERE}",
        "pass",
        "program.part = nn.ReLU()",
    ),
    key_of_modules_by_try=both_ways(
        f"class M(nn.Module):\n    def forward(self, x):\n        try:\n            return self._modules['part'](x) * 2\n        except KeyError:\n            return x * 3\n\n\nprogram = M()\n{HERE}",
        "pass",
        "program.part = nn.ReLU()",
    ),
    attribute_of_a_configuration=both_ways(
        f"class C:\n    pass\n\n\nclass M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.cfg = C()\n\n    def forward(self, x):\n        try:\n            return x * self.cfg.scale\n        except AttributeError:\n            return x * 3\n\n\nprogram = M()\n{HERE}",
        "pass",
        "program.cfg.scale = 2.0",
    ),
    attribute_of_a_namespace=both_ways(
        f"import types\n\nbox = types.SimpleNamespace(a=1)\n{HERE}"
        + TRY.format("box.scale", "AttributeError"),
        "pass",
        "box.scale = 2.0",
    ),
    attribute_of_a_function=both_ways(
        f"def helper():\n    return 1\n\n\n{HERE}" + TRY.format("helper.scale", "AttributeError"),
        "pass",
        "helper.scale = 2.0",
    ),
    hasattr_of_a_function_of_torch=both_ways(
        f"undo = [lambda: vars(F.relu).pop('changed_program', None)]\n{HERE}def program(x):\n    return x * 2 if hasattr(F.relu, 'changed_program') else x * 3\n",
        "pass",
        "F.relu.changed_program = 1",
    ),
    attribute_of_a_class=both_ways(
        f"class A:\n    pass\n\n\n{HERE}" + TRY.format("A.scale", "AttributeError"), "pass", "A.scale = 2.0"
    ),
    attribute_of_slots=both_ways(
        f"class A:\n    __slots__ = ('scale',)\n\n\nbox = A()\n{HERE}"
        + TRY.format("box.scale", "AttributeError"),
        "pass",
        "box.scale = 2.0",
    ),
    attribute_by_getattr_method=both_ways(
        f"class A:\n    def __init__(self):\n        self.inner = dict(a=1)\n\n    def __getattr__(self, name):\n        try:\n            return self.inner[name]\n        except KeyError:\n            raise AttributeError(name) from None\n\n\nbox = A()\n{HERE}"
        + TRY.format("box.scale", "AttributeError"),
        "pass",
        "box.inner['scale'] = 2.0",
    ),
    attribute_of_a_tensor=both_ways(
        f"weight = torch.ones(4)\n{HERE}def program(x):\n    return x * weight * (2 if hasattr(weight, 'scale') else 3)\n",
        "pass",
        "weight.scale = 1",
    ),
    list_index=both_ways(
        f"ITEMS = [1.0]\n{HERE}" + TRY.format("ITEMS[1]", "IndexError"), "pass", "ITEMS.append(2.0)"
    ),
    globals_by_name=both_ways(
        f"{HERE}" + TRY.format("globals()['SCALE']", "KeyError"), "pass", "SCALE = 2.0", how="varies"
    ),
    global_name_by_try=both_ways(
        f"{HERE}" + TRY.format("SCALE", "NameError"), "pass", "SCALE = 2.0", how="varies"
    ),
    name_of_builtins_by_try=both_ways(
        f"import builtins\n\nundo = [lambda: vars(builtins).pop('changed_program_scale', None)]\n{HERE}"
        + TRY.format("changed_program_scale(2)", "NameError"),
        "pass",
        "builtins.changed_program_scale = float",
        how="varies",
    ),
    set_membership=both_ways(
        f"NAMES = {{'a', 'b'}}\n{HERE}def program(x):\n    return x * (2 if 'k' in NAMES else 3)\n",
        "pass",
        "NAMES.add('k')",
    ),
)
"""Present and absent, of each place where a program can look for something."""


ASSUMED = "@torch.compiler.assume_constant_result\ndef factor(*arguments):\n    return {}\n\n\ndef program(x):\n    return x * factor({})\n"


def answers(text: str, before: str, after: str, how: str = "traced") -> Change:
    """The line `# here` is one of the two, and then the other: it sets what the program asks a function for."""
    assert text.count("# here") == 1
    return Change(
        text=text.replace("# here", before + "  # here"), edits=((before + "  # here", after),), how=how
    )


ANSWERS = {
    "assume_constant_result, environment": answers(
        "import os\n\n# here\n\n\n" + ASSUMED.format(f"float(os.environ[{NAME!r}])", ""),
        f"os.environ[{NAME!r}] = '2'",
        f"os.environ[{NAME!r}] = '3'",
    ),
    "assume_constant_result with arguments": answers(
        "import os\n\n# here\n\n\n"
        + ASSUMED.format("float(os.environ[arguments[0]]) + arguments[1]", f"{NAME!r}, 1"),
        f"os.environ[{NAME!r}] = '2'",
        f"os.environ[{NAME!r}] = '3'",
    ),
    "assume_constant_result, a method": answers(
        "import os\n\n# here\n\n\nclass M(nn.Module):\n    @torch.compiler.assume_constant_result\n    def factor(self):\n        return float(os.environ['CHANGED_PROGRAM'])\n\n    def forward(self, x):\n        return x * self.factor()\n\n\nprogram = M()\n",
        f"os.environ[{NAME!r}] = '2'",
        f"os.environ[{NAME!r}] = '3'",
        how="unfit",
    ),
    "assume_constant_result, a function inside": answers(
        "import os\n\n# here\n\n\ndef make():\n    @torch.compiler.assume_constant_result\n    def factor():\n        return float(os.environ['CHANGED_PROGRAM'])\n\n    return factor\n\n\nfactor = make()\n\n\ndef program(x):\n    return x * factor()\n",
        f"os.environ[{NAME!r}] = '2'",
        f"os.environ[{NAME!r}] = '3'",
    ),
    "marked constant under a cache": answers(
        "import functools\nimport os\n\n# here\n\n\ndef mark(function):\n    function._dynamo_marked_constant = True\n    return function\n\n\n@functools.lru_cache\n@mark\ndef is_there():\n    return 'CHANGED_PROGRAM' in os.environ\n\n\ndef program(x):\n    return x * 2 if is_there() else x * 3\n",
        f"os.environ.pop({NAME!r}, None)",
        f"os.environ[{NAME!r}] = '3'",
    ),
    "find_spec": answers(
        f"import importlib.util\nimport sys\n\n# here\n\n\ndef program(x):\n    return x * 2 if importlib.util.find_spec({MODULE!r}) is not None else x * 3\n",
        f"sys.modules.pop({MODULE!r}, None)",
        f"sys.modules[{MODULE!r}] = importlib.util",
        how=WITHOUT_BREAKS,
    ),
    "metadata.version": answers(
        "import importlib.metadata\nimport sys\n\n# here\nsys.path.insert(0, FOLDER)\nundo = [lambda: sys.path.remove(FOLDER)]\n\n\ndef program(x):\n    return x * int(importlib.metadata.version('changed_program')[0])\n".replace(
            "# here",
            "import pathlib, tempfile\nFOLDER = tempfile.mkdtemp()\nINFO = pathlib.Path(FOLDER, 'changed_program-1.dist-info')\nINFO.mkdir()\n# here",
        ),
        "INFO.joinpath('METADATA').write_text('Metadata-Version: 2.1\\nName: changed_program\\nVersion: 2.0\\n')",
        "INFO.joinpath('METADATA').write_text('Metadata-Version: 2.1\\nName: changed_program\\nVersion: 3.0\\n')",
        how=WITHOUT_BREAKS,
    ),
    "sys.getrecursionlimit": answers(
        "import sys\n\nundo = [lambda limit=sys.getrecursionlimit(): sys.setrecursionlimit(limit)]\n# here\n\n\ndef program(x):\n    return x * sys.getrecursionlimit()\n",
        "sys.setrecursionlimit(3000)",
        "sys.setrecursionlimit(3001)",
    ),
    "torch.xpu.is_available": Change(
        text="def program(x):\n    return x * 2 if torch.xpu.is_available() else x * 3\n",
        patch=lambda m, module: (
            m.setattr("torch._C._has_xpu", True),
            m.setattr("torch._C._xpu_getDeviceCount", lambda: 1, raising=False),
            # PyTorch 2.11 asks for it once in a process
            m.setattr("torch.xpu.device_count", inspect.unwrap(torch.xpu.device_count)),
        ),
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
        text="def program(x):\n    return x * (hash('abc') % 5 + 1)\n",
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
    "isinstance by a metaclass": answers(
        "import os\n\n# here\n\n\nclass Meta(type):\n    def __instancecheck__(cls, value):\n        return 'CHANGED_PROGRAM' in os.environ\n\n\nclass A(metaclass=Meta):\n    pass\n\n\nbox = [1]\n\n\ndef program(x):\n    return x * 2 if isinstance(box, A) else x * 3\n",
        f"os.environ.pop({NAME!r}, None)",
        f"os.environ[{NAME!r}] = '3'",
        how="varies",
    ),
}
"""What functions answer that Dynamo calls while it traces."""

UNROLLED = "# here\n\n\ndef program(x):\n    y = x * 0 + 2\n    for n in NUMBERS:\n        y = y * n + n\n    return y\n"
ORDERS = {
    "set of numbers": answers(
        "NUMBERS = {8, 0, 3}  # there\n" + UNROLLED, "pass", "NUMBERS = set([0, 8, 3])"
    ),
    "set of numbers in an attribute": answers(
        "# here\n\n\nclass M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.numbers = NUMBERS\n\n    def forward(self, x):\n        y = x * 0 + 2\n        for n in self.numbers:\n            y = y * n + n\n        return y\n\n\nprogram = M()\n",
        "NUMBERS = set([8, 0, 3])",
        "NUMBERS = set([0, 8, 3])",
    ),
    "set of numbers of a class": answers(
        "# here\n\n\nclass A:\n    numbers = NUMBERS\n\n\ndef program(x):\n    y = x * 0 + 2\n    for n in A.numbers:\n        y = y * n + n\n    return y\n",
        "NUMBERS = set([8, 0, 3])",
        "NUMBERS = set([0, 8, 3])",
    ),
    "set of numbers in the code": Change(
        text="def program(x):\n    y = x * 0 + 2\n    for n in {8, 0, 3}:\n        y = y * n + n\n    return y\n",
        edits=(("{8, 0, 3}", "{0, 8, 3}"),),
    ),
    "default that is a set of numbers": answers(
        "# here\n\n\ndef helper(x, numbers=NUMBERS):\n    y = x * 0 + 2\n    for n in numbers:\n        y = y * n + n\n    return y\n\n\ndef program(x):\n    return helper(x)\n",
        "NUMBERS = frozenset([8, 0, 3])",
        "NUMBERS = frozenset([0, 8, 3])",
    ),
    "closure with a set of numbers": answers(
        "# here\n\n\ndef make(numbers):\n    def helper(x):\n        y = x * 0 + 2\n        for n in numbers:\n            y = y * n + n\n        return y\n\n    return helper\n\n\nhelper = make(NUMBERS)\n\n\ndef program(x):\n    return helper(x)\n",
        "NUMBERS = frozenset([8, 0, 3])",
        "NUMBERS = frozenset([0, 8, 3])",
    ),
    "first of a set": answers(
        "# here\n\n\ndef program(x):\n    return x * (next(iter(NUMBERS)) + 2)\n",
        "NUMBERS = set([8, 0, 3])",
        "NUMBERS = set([0, 8, 3])",
    ),
    "list of a set": answers(
        "# here\n\n\ndef program(x):\n    return x * (list(NUMBERS)[0] + 2)\n",
        "NUMBERS = set([8, 0, 3])",
        "NUMBERS = set([0, 8, 3])",
    ),
    "unpacked set": answers(
        "# here\n\n\ndef program(x):\n    a, *rest = NUMBERS\n    return x * (a + 2)\n",
        "NUMBERS = set([8, 0, 3])",
        "NUMBERS = set([0, 8, 3])",
    ),
    "set with map": answers(
        "# here\n\n\ndef program(x):\n    y = x * 0 + 2\n    for n in map(lambda n: n + 1, NUMBERS):\n        y = y * n + n\n    return y\n",
        "NUMBERS = set([8, 0, 3])",
        "NUMBERS = set([0, 8, 3])",
    ),
    "keys of a set": answers(
        "# here\n\n\ndef program(x):\n    y = x * 0 + 2\n    for n in dict.fromkeys(NUMBERS):\n        y = y * n + n\n    return y\n",
        "NUMBERS = set([8, 0, 3])",
        "NUMBERS = set([0, 8, 3])",
    ),
    "order of a dict": answers(
        "# here\n\n\ndef program(x):\n    y = x * 0 + 2\n    for n in NUMBERS:\n        y = y * n + n\n    return y\n",
        "NUMBERS = {8: 1, 0: 2, 3: 1}",
        "NUMBERS = {0: 2, 8: 1, 3: 1}",
    ),
    "two names of one list": answers(
        "ONE = [1.0, 2.0]\n# here\n\n\ndef program(x):\n    return x * 2 if ONE is OTHER else x * 3\n",
        "OTHER = ONE",
        "OTHER = [1.0, 2.0]",
    ),
    "two names of one list that is changed": answers(
        "ONE = [1.0, 2.0]\n# here\n\n\ndef program(x):\n    ONE.append(x)\n    return x * len(OTHER)\n",
        "OTHER = ONE",
        "OTHER = [1.0, 2.0]",
    ),
    "two names of one object": answers(
        "class A:\n    pass\n\n\nONE = A()\n# here\n\n\ndef program(x):\n    return x * 2 if ONE is OTHER else x * 3\n",
        "OTHER = ONE",
        "OTHER = A()",
    ),
    "two names of one object that is changed": answers(
        "class A:\n    by = 2\n\n\nONE = A()\nONE.by = 1\n# here\n\n\ndef program(x):\n    ONE.by = 5\n    return x * OTHER.by\n",
        "OTHER = ONE",
        "OTHER = A(); OTHER.by = 1",
    ),
    "two attributes with one module": answers(
        "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.one = nn.ReLU()\n        # here\n\n    def forward(self, x):\n        return x * 2 if self.one is self.other else x * 3\n\n\nprogram = M()\n",
        "self.other = self.one",
        "self.other = nn.ReLU()",
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
