"""What a program may read, where it may keep it, and where it may read it: the columns of program_matrix.py.

In each text `«2.0→3.0»` is 2.0 before the change and 3.0 after it.
"""

# ruff: noqa: E501 (a row is a program's part and its change)

from __future__ import annotations

from msgspec import Struct


class Kind(Struct, frozen=True):
    """made: an expression for the value. read: one for a number, in which V is the value. define: what both need."""

    made: str
    read: str
    define: str = ""


BOX = "class Box:\n    def __init__(self, by):\n        self.by = by\n\n\n"
ENUM = "class E(enum.{}):\n    A = {}\n    B = {}\n\n\n"


def of_class(body: str, read: str, made: str = "A()", base: str = "") -> Kind:
    """A value of a class whose body is changed."""
    lines = "\n    ".join(body.split("\n"))
    return Kind(made, read, f"class A{base}:\n    {lines}\n\n\n")


def of_function(text: str, read: str = "V()", made: str = "f") -> Kind:
    return Kind(made, read, f"{text}\n\n\n")


KINDS = {
    "float": Kind("«2.0→3.0»", "V"),
    "int": Kind("«2→3»", "V"),
    "int that becomes a float": Kind("«2→2.0»", "(2 if type(V) is int else 3)"),
    "int that becomes a bool": Kind("«1→True»", "(2 if V is True else 3)"),
    "bool": Kind("«True→False»", "(2 if V else 3)"),
    "zero's sign": Kind("«0.0→-0.0»", "math.copysign(2.0, V)"),
    "text": Kind("«'a'→'bcd'»", "(len(V) + 1)"),
    "text by equality": Kind("«'a'→'b'»", "(2 if V == 'a' else 3)"),
    "bytes": Kind("«b'a'→b'b'»", "(2 if V == b'a' else 3)"),
    "None": Kind("«None→1.0»", "(2 if V is None else 3)"),
    "complex": Kind("«2j→3j»", "abs(V)"),
    "Ellipsis": Kind("«...→None»", "(2 if V is ... else 3)"),
    "tuple": Kind("(1.0, «2.0→3.0»)", "V[1]"),
    "nested tuple": Kind("((1, («2.0→3.0»,)),)", "V[0][1][0]"),
    "length of a tuple": Kind("(1«→, 2»,)", "len(V) + 1"),
    "list": Kind("[1.0, «2.0→3.0»]", "V[1]"),
    "length of a list": Kind("[1«→, 2»]", "len(V) + 1"),
    "sum of a list": Kind("[1, «2→3»]", "sum(V)"),
    "order of a list": Kind("[«2.0, 3.0→3.0, 2.0»]", "V[0]"),
    "list that becomes a tuple": Kind("«[1]→(1,)»", "(2 if isinstance(V, list) else 3)"),
    "list in a list": Kind("[[1.0], [«2.0→3.0»]]", "V[1][0]"),
    "element of a list by `in`": Kind("['«k→l»']", "(2 if 'k' in V else 3)"),
    "index in a list": Kind("['a', «→'b', »'k']", "(V.index('k') + 1)"),
    "sorted list": Kind("[3.0, «2.0→1.0»]", "sorted(V)[0]"),
    "value of a dict": Kind("{'k': «2.0→3.0»}", "V['k']"),
    "value of a dict by get": Kind("{'k': «2.0→3.0»}", "V.get('k', 9.0)"),
    "key of a dict": Kind("{'«k→l»': 2.0}", "V.get('k', 3.0)"),
    "key of a dict by `in`": Kind("{'«k→l»': 2.0}", "(2 if 'k' in V else 3)"),
    "added key of a dict": Kind("{'a': 1«→, 'k': 2»}", "(len(V) + 1)"),
    "number as a key": Kind("{«1→2»: 2.0}", "V.get(1, 3.0)"),
    "tuple as a key": Kind("{(1, «2→3»): 2.0}", "V.get((1, 2), 3.0)"),
    "type as a key": Kind("{«int→float»: 2.0}", "V.get(int, 3.0)"),
    "order of a dict": Kind("{«'a': 2.0, 'b': 3.0→'b': 3.0, 'a': 2.0»}", "next(iter(V.values()))"),
    "items of a dict": Kind("{'a': 1, 'b': «2→3»}", "sum(v for _, v in V.items())"),
    "list in a dict": Kind("{'k': [«2.0→3.0»]}", "V['k'][0]"),
    "element of a set": Kind("{'«k→l»'}", "(2 if 'k' in V else 3)"),
    "length of a set": Kind("{1«→, 2»}", "(len(V) + 1)"),
    "frozenset": Kind("frozenset([«1→2»])", "(2 if 1 in V else 3)"),
    "range": Kind("range(«2→3»)", "len(V)"),
    "slice": Kind("slice(0, «2→3»)", "V.stop"),
    "OrderedDict": Kind("collections.OrderedDict(k=«2.0→3.0»)", "V['k']"),
    "value of a defaultdict": Kind("collections.defaultdict(int, k=«2.0→3.0»)", "V['k']"),
    "factory of a defaultdict": Kind(
        "collections.defaultdict(«two→three»)",
        "V['k']",
        "def two():\n    return 2.0\n\n\ndef three():\n    return 3.0\n\n\n",
    ),
    "Counter": Kind("collections.Counter(«'aa'→'aaa'»)", "V['a']"),
    "deque": Kind("collections.deque([«2.0→3.0»])", "V[0]"),
    "ChainMap": Kind("collections.ChainMap({}, {'k': «2.0→3.0»})", "V['k']"),
    "mapping proxy": Kind("types.MappingProxyType({'k': «2.0→3.0»})", "V['k']"),
    "namespace": Kind("types.SimpleNamespace(by=«2.0→3.0»)", "V.by"),
    "member of an enum": Kind("E.«A→B»", "V.value", ENUM.format("Enum", "2.0", "3.0")),
    "value of an enum": Kind("E.A", "V.value", ENUM.format("Enum", "«2.0→3.0»", "4.0")),
    "name of an enum": Kind("E.«A→B»", "(2 if V.name == 'A' else 3)", ENUM.format("Enum", "1", "2")),
    "enum by identity": Kind("E.«A→B»", "(2 if V is E.A else 3)", ENUM.format("Enum", "1", "2")),
    "IntEnum": Kind("E.A", "V", ENUM.format("IntEnum", "«2→3»", "4")),
    "StrEnum": Kind("E.A", "len(V)", ENUM.format("StrEnum", "«'ab'→'abc'»", "'x'")),
    "Flag": Kind("E.A«→ | E.B»", "(2 if E.B not in V else 3)", ENUM.format("Flag", "1", "2")),
    "NamedTuple": Kind(
        "P(1.0, «2.0→3.0»)", "V.b", "class P(typing.NamedTuple):\n    a: float\n    b: float\n\n\n"
    ),
    "fields of a NamedTuple": Kind(
        "P(2.0, 3.0)", "V.a", "P = collections.namedtuple('P', «['a', 'b']→['b', 'a']»)\n\n\n"
    ),
    "default of a NamedTuple": Kind(
        "P(1.0)", "V.b", "class P(typing.NamedTuple):\n    a: float\n    b: float = «2.0→3.0»\n\n\n"
    ),
    "dataclass": Kind("A(«2.0→3.0»)", "V.by", "@dataclasses.dataclass\nclass A:\n    by: float\n\n\n"),
    "default of a dataclass": Kind(
        "A()", "V.by", "@dataclasses.dataclass\nclass A:\n    by: float = «2.0→3.0»\n\n\n"
    ),
    "frozen dataclass": Kind(
        "A(«2.0→3.0»)", "V.by", "@dataclasses.dataclass(frozen=True)\nclass A:\n    by: float\n\n\n"
    ),
    "equality of dataclasses": Kind(
        "A(«2.0→3.0»)", "(2 if V == A(2.0) else 3)", "@dataclasses.dataclass\nclass A:\n    by: float\n\n\n"
    ),
    "object": Kind("Box(«2.0→3.0»)", "V.by", BOX),
    "object in an object": Kind("Box(Box(«2.0→3.0»))", "V.by.by", BOX),
    "list of an object": Kind("Box([«2.0→3.0»])", "V.by[0]", BOX),
    "class of an object": Kind(
        "«A→B»()", "(2 if isinstance(V, A) else 3)", "class A:\n    pass\n\n\nclass B:\n    pass\n\n\n"
    ),
    "absent attribute, getattr": Kind(
        "made()",
        "getattr(V, 'by', 2.0)",
        "class A:\n    pass\n\n\ndef made():\n    a = A()\n    «→a.by = 3.0»\n    return a\n\n\n",
    ),
    "absent attribute, hasattr": Kind(
        "made()",
        "(3 if hasattr(V, 'by') else 2)",
        "class A:\n    pass\n\n\ndef made():\n    a = A()\n    «→a.by = 3.0»\n    return a\n\n\n",
    ),
    "class attribute that is hidden": Kind(
        "made()",
        "V.by",
        "class A:\n    by = 2.0\n\n\ndef made():\n    a = A()\n    «→a.by = 3.0»\n    return a\n\n\n",
    ),
    "method on the object": Kind(
        "made()",
        "V.f()",
        "class A:\n    def f(self):\n        return 2.0\n\n\ndef other():\n    return 3.0\n\n\ndef made():\n    a = A()\n    «→a.f = other»\n    return a\n\n\n",
    ),
    "slots": of_class("__slots__ = ('by',)\n\ndef __init__(self):\n    self.by = «2.0→3.0»", "V.by"),
    "class attribute": of_class("by = «2.0→3.0»", "V.by"),
    "class attribute that is a list": of_class("by = [«2.0→3.0»]", "V.by[0]"),
    "class attribute that is a dict": of_class("by = {'k': «2.0→3.0»}", "V.by['k']"),
    "attribute of a class itself": of_class("by = «2.0→3.0»", "V.by", "A"),
    "method": of_class("def f(self):\n    return «2.0→3.0»", "V.f()"),
    "classmethod": of_class("@classmethod\ndef f(cls):\n    return «2.0→3.0»", "V.f()"),
    "staticmethod": of_class("@staticmethod\ndef f():\n    return «2.0→3.0»", "V.f()"),
    "property": of_class("@property\ndef by(self):\n    return «2.0→3.0»", "V.by"),
    "cached property": of_class("@functools.cached_property\ndef by(self):\n    return «2.0→3.0»", "V.by"),
    "bound method": of_class("def f(self):\n    return «2.0→3.0»", "V()", "A().f"),
    "default of a method": of_class("def f(self, by=«2.0→3.0»):\n    return by", "V.f()"),
    "__call__": of_class("def __call__(self):\n    return «2.0→3.0»", "V()"),
    "__len__": of_class("def __len__(self):\n    return «2→3»", "len(V)"),
    "__getitem__": of_class("def __getitem__(self, key):\n    return «2.0→3.0»", "V[0]"),
    "__contains__": of_class("def __contains__(self, key):\n    return «True→False»", "(2 if 1 in V else 3)"),
    "__iter__": of_class("def __iter__(self):\n    yield «2.0→3.0»", "sum(V)"),
    "__bool__": of_class("def __bool__(self):\n    return «True→False»", "(2 if V else 3)"),
    "__eq__": of_class(
        "def __eq__(self, other):\n    return «True→False»\n\n__hash__ = None", "(2 if V == 1 else 3)"
    ),
    "__lt__": of_class("def __lt__(self, other):\n    return «True→False»", "(2 if V < 1 else 3)"),
    "__add__": of_class("def __add__(self, other):\n    return other + «2.0→3.0»", "(V + 0.0)"),
    "__rmul__": of_class("def __rmul__(self, other):\n    return other * «2.0→3.0»", "(1.0 * V)"),
    "__getattr__": of_class("def __getattr__(self, name):\n    return «2.0→3.0»", "V.any_name"),
    "__init__": of_class("def __init__(self):\n    self.by = «2.0→3.0»", "V.by"),
    "__init__ of an object made inside": of_class(
        "def __init__(self):\n    self.by = «2.0→3.0»", "V().by", "A"
    ),
    "__str__": of_class("def __str__(self):\n    return «'ab'→'abc'»", "len(str(V))"),
    "__hash__": of_class("def __hash__(self):\n    return «2→3»", "hash(V)"),
    "descriptor": Kind(
        "A()",
        "V.by",
        "class D:\n    def __get__(self, obj, kind=None):\n        return «2.0→3.0»\n\n\nclass A:\n    by = D()\n\n\n",
    ),
    "attribute of a descriptor": Kind(
        "A()",
        "V.by",
        "class D:\n    def __init__(self, by):\n        self.kept = by\n\n    def __get__(self, obj, kind=None):\n        return self.kept\n\n\nclass A:\n    by = D(«2.0→3.0»)\n\n\n",
    ),
    "inherited method": Kind(
        "B()",
        "V.f()",
        "class A:\n    def f(self):\n        return «2.0→3.0»\n\n\nclass B(A):\n    pass\n\n\n",
    ),
    "inherited attribute": Kind(
        "B()", "V.by", "class A:\n    by = «2.0→3.0»\n\n\nclass B(A):\n    pass\n\n\n"
    ),
    "super()": Kind(
        "B()",
        "V.f()",
        "class A:\n    def f(self):\n        return «2.0→3.0»\n\n\nclass B(A):\n    def f(self):\n        return super().f()\n\n\n",
    ),
    "order of bases": Kind(
        "C()",
        "V.by",
        "class A:\n    by = 2.0\n\n\nclass B:\n    by = 3.0\n\n\nclass C(«A, B→B, A»):\n    pass\n\n\n",
    ),
    "metaclass's attribute": Kind(
        "A", "V.by", "class M(type):\n    by = «2.0→3.0»\n\n\nclass A(metaclass=M):\n    pass\n\n\n"
    ),
    "metaclass's method": Kind(
        "A",
        "V.f()",
        "class M(type):\n    def f(cls):\n        return «2.0→3.0»\n\n\nclass A(metaclass=M):\n    pass\n\n\n",
    ),
    "class made by a function": Kind(
        "make()()", "V.by", "def make():\n    class A:\n        by = «2.0→3.0»\n\n    return A\n\n\n"
    ),
    "registered class": Kind(
        "B()",
        "(3 if isinstance(V, A) else 2)",
        "class A(abc.ABC):\n    pass\n\n\nclass B:\n    pass\n\n\n«→A.register(B)»\n",
    ),
    "dict subclass": of_class("def __missing__(self, key):\n    return «2.0→3.0»", "V['k']", base="(dict)"),
    "list subclass": of_class("by = «2.0→3.0»", "V.by", "A([1])", "(list)"),
    "tuple subclass": of_class("by = «2.0→3.0»", "V.by", "A([1])", "(tuple)"),
    "str subclass": of_class("by = «2.0→3.0»", "V.by", "A('a')", "(str)"),
    "int subclass": of_class("by = «2.0→3.0»", "V.by", "A(1)", "(int)"),
    "float subclass": Kind("A(«2.0→3.0»)", "V", "class A(float):\n    pass\n\n\n"),
    "function": Kind("«f→g»", "V()", "def f():\n    return 2.0\n\n\ndef g():\n    return 3.0\n\n\n"),
    "code of a function": of_function("def f():\n    return «2.0→3.0»"),
    "default of a function": of_function("def f(by=«2.0→3.0»):\n    return by"),
    "keyword's default": of_function("def f(*, by=«2.0→3.0»):\n    return by"),
    "default that is a list": of_function("def f(by=[«2.0→3.0»]):\n    return by[0]"),
    "attribute of a function": of_function("def f():\n    return f.by\n\n\nf.by = «2.0→3.0»"),
    "closure": of_function(
        "def outer(by):\n    def inner():\n        return by\n\n    return inner\n\n\nf = outer(«2.0→3.0»)"
    ),
    "closure two deep": of_function(
        "def outer(by):\n    def inner():\n        def most():\n            return by\n\n        return most\n\n    return inner\n\n\nf = outer(«2.0→3.0»)()"
    ),
    "closure with a list": of_function(
        "def outer(by):\n    def inner():\n        return by[0]\n\n    return inner\n\n\nf = outer([«2.0→3.0»])"
    ),
    "closure with a function": of_function(
        "def a():\n    return 2.0\n\n\ndef b():\n    return 3.0\n\n\ndef outer(by):\n    def inner():\n        return by()\n\n    return inner\n\n\nf = outer(«a→b»)"
    ),
    "nested function": of_function(
        "def f():\n    def inner():\n        return «2.0→3.0»\n\n    return inner()"
    ),
    "callee": of_function("def g():\n    return «2.0→3.0»\n\n\ndef f():\n    return g()"),
    "callee of a callee's closure": of_function(
        "def g():\n    return «2.0→3.0»\n\n\ndef outer():\n    def inner():\n        return g()\n\n    return inner\n\n\nf = outer()"
    ),
    "lambda": of_function("f = lambda: «2.0→3.0»"),
    "generator": of_function("def f():\n    yield 1\n    yield «2→3»", "sum(V())"),
    "decorator": of_function(
        "def twice(g):\n    @functools.wraps(g)\n    def wrapper():\n        return g() * «2→3»\n\n    return wrapper\n\n\n@twice\ndef f():\n    return 1.0"
    ),
    "decorated function": of_function(
        "def twice(g):\n    @functools.wraps(g)\n    def wrapper():\n        return g() * 2\n\n    return wrapper\n\n\n@twice\ndef f():\n    return «2.0→3.0»"
    ),
    "decorator's argument": of_function(
        "def times(n):\n    def decorate(g):\n        def wrapper():\n            return g() * n\n\n        return wrapper\n\n    return decorate\n\n\n@times(«2→3»)\ndef f():\n    return 1.0"
    ),
    "decorator that is a class": of_function(
        "class Twice:\n    def __init__(self, g):\n        self.g = g\n\n    def __call__(self):\n        return self.g() * 2\n\n\n@Twice\ndef f():\n    return «2.0→3.0»"
    ),
    "partial's argument": of_function("def g(by):\n    return by\n\n\nf = functools.partial(g, «2.0→3.0»)"),
    "partial's keyword": of_function("def g(by):\n    return by\n\n\nf = functools.partial(g, by=«2.0→3.0»)"),
    "partial's function": of_function(
        "def a(by):\n    return by\n\n\ndef b(by):\n    return by + 1\n\n\nf = functools.partial(«a→b», 2.0)"
    ),
    "cached function": of_function("@functools.lru_cache\ndef f():\n    return «2.0→3.0»"),
    "single dispatch": of_function(
        "@functools.singledispatch\ndef f(x):\n    return 1.0\n\n\n@f.register\ndef _(x: int):\n    return «2.0→3.0»",
        "V(1)",
    ),
    "added dispatch": of_function(
        "@functools.singledispatch\ndef f(x):\n    return 2.0\n\n\n«→f.register(int)(lambda x: 3.0)»", "V(1)"
    ),
    "raised exception": of_function(
        "def f():\n    try:\n        raise «KeyError→ValueError»\n    except KeyError:\n        return 2.0\n    except ValueError:\n        return 3.0"
    ),
    "exception's argument": of_function(
        "def f():\n    try:\n        raise ValueError(«2.0→3.0»)\n    except ValueError as error:\n        return error.args[0]"
    ),
    "`finally`": of_function(
        "def f():\n    by = []\n    try:\n        by.append(1)\n    finally:\n        by.append(«1→2»)\n    return sum(by)"
    ),
    "context manager": of_function(
        "@contextlib.contextmanager\ndef g():\n    yield «2.0→3.0»\n\n\ndef f():\n    with g() as by:\n        return by"
    ),
    "match statement": of_function(
        "def f():\n    match «(1, 2)→[1, 2]»:\n        case list():\n            return 3.0\n        case tuple():\n            return 2.0"
    ),
    "star arguments": of_function(
        "def g(*args, **kwargs):\n    return sum(args) + sum(kwargs.values())\n\n\ndef f():\n    return g(1, *«(1,)→(2,)», by=0)"
    ),
    "global assigned by a function": of_function(
        "STATE = «2.0→3.0»\n\n\ndef f():\n    return globals()['STATE']"
    ),
    "dtype": Kind("torch.«float32→float64»", "V.itemsize"),
    "dtype by identity": Kind("torch.«float32→float64»", "(2 if V is torch.float32 else 3)"),
    "device": Kind("torch.device('«cpu→meta»')", "(2 if V.type == 'cpu' else 3)"),
    "size": Kind("torch.Size([«2→3», 1])", "V.numel()"),
    "memory format": Kind(
        "torch.«channels_last→contiguous_format»", "(2 if V == torch.channels_last else 3)"
    ),
    "torch function": Kind("torch.«sin→cos»", "V(torch.ones(1))"),
    "function of nn.functional": Kind("F.«relu→silu»", "V(torch.ones(1))"),
    "torch operator": Kind("torch.ops.aten.«sin→cos».default", "V(torch.ones(1))"),
    "method of tensors": Kind("torch.Tensor.«sin→cos»", "V(torch.ones(1))"),
    "math function": Kind("math.«sin→cos»", "V(1.0)"),
    "builtin function": Kind("«min→max»", "V(2.0, 3.0)"),
    "operator's function": Kind("operator.«add→mul»", "V(3, 2)"),
    "operator's itemgetter": Kind("operator.itemgetter(«0→1»)", "V((2.0, 3.0))"),
    "operator's attrgetter": Kind(
        "operator.attrgetter('«a→b»')",
        "V(P(2.0, 3.0))",
        "class P(typing.NamedTuple):\n    a: float\n    b: float\n\n\n",
    ),
    "bound builtin method": Kind("{'k': «2.0→3.0»}.get", "V('k')"),
    "module": Kind("«math→cmath»", "abs(V.sqrt(4) if V is math else 3)"),
    "regular expression": Kind("re.compile('«a→b»')", "(2 if V.match('a') else 3)"),
    "path": Kind("pathlib.PurePosixPath('«a→bc»')", "len(str(V))"),
    "fraction": Kind("fractions.Fraction(«2→3», 1)", "V.numerator"),
    "date": Kind("datetime.date(2000, 1, «2→3»)", "V.day"),
    "UUID": Kind("uuid.UUID(int=«2→3»)", "V.int"),
    "NumPy scalar": Kind("np.float64(«2.0→3.0»)", "float(V)"),
    "NumPy integer": Kind("np.int64(«2→3»)", "int(V)"),
    "NumPy dtype": Kind("np.dtype('«float32→float64»')", "V.itemsize"),
    "shape of a NumPy array": Kind("np.ones(«2→3»)", "V.shape[0]"),
    "context variable": Kind(
        "variable(«2.0→3.0»)",
        "V.get()",
        "def variable(by):\n    v = contextvars.ContextVar('v')\n    v.set(by)\n    return v\n\n\n",
    ),
    "weak reference": Kind("weakref.ref(KEPT)", "V().by", BOX + "KEPT = Box(«2.0→3.0»)\n\n\n"),
    "logger's level": Kind(
        "made()",
        "(2 if V.isEnabledFor(20) else 3)",
        "def made():\n    log = logging.getLogger(__name__)\n    log.setLevel(«10→50»)\n    return log\n\n\n",
    ),
    "layer": Kind("nn.«ReLU→Tanh»()", "V(torch.ones(1))"),
    "attribute of a layer": Kind("nn.LeakyReLU(«0.5→0.25»)", "-V(-torch.ones(1))"),
    "training flag of a layer": Kind("nn.Dropout(1.0).train(«True→False»)", "(V(torch.ones(1)) + 1)"),
    "parameter": Kind(
        "nn.Parameter(torch.ones(1), requires_grad=«True→False»)", "(2 if V.requires_grad else 3)"
    ),
    "size of a tensor": Kind("torch.ones(«2→3»)", "V.shape[0]"),
    "dtype of a tensor": Kind("torch.ones(1, dtype=torch.«float32→float64»)", "V.element_size()"),
    "tensor that becomes a number": Kind("«torch.ones(())→3.0»", "(2 if isinstance(V, torch.Tensor) else V)"),
}
"""Values by name."""


class Holder(Struct, frozen=True):
    """define: where MADE is kept. value: an expression for what is kept."""

    define: str
    value: str


HOLDERS = {
    "global": Holder("kept = MADE\n", "kept"),
    "closure": Holder(
        "def hold(kept):\n    def get():\n        return kept\n\n    return get\n\n\nget = hold(MADE)\n",
        "get()",
    ),
    "default": Holder("def get(kept=MADE):\n    return kept\n", "get()"),
    "keyword's default": Holder("def get(*, kept=MADE):\n    return kept\n", "get()"),
    "attribute of an object": Holder(
        "class Keeper:\n    def __init__(self, kept):\n        self.kept = kept\n\n\nkeeper = Keeper(MADE)\n",
        "keeper.kept",
    ),
    "attribute of a class": Holder("class Keeper:\n    pass\n\n\nKeeper.kept = [MADE]\n", "Keeper.kept[0]"),
    "attribute two deep": Holder(
        "keeper = types.SimpleNamespace(inner=types.SimpleNamespace(kept=MADE))\n", "keeper.inner.kept"
    ),
    "attribute of a module": Holder(
        "class Keeper(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.kept = MADE\n\n\nkeeper = Keeper()\n",
        "keeper.kept",
    ),
    "dataclass": Holder(
        "@dataclasses.dataclass\nclass Keeper:\n    kept: object\n\n\nkeeper = Keeper(MADE)\n", "keeper.kept"
    ),
    "list": Holder("kept = [0, MADE]\n", "kept[1]"),
    "tuple": Holder("kept = (0, MADE)\n", "kept[1]"),
    "dict": Holder("kept = {'of': MADE}\n", "kept['of']"),
    "dict in a dict": Holder("kept = {'of': {'of': MADE}}\n", "kept['of']['of']"),
    "partial": Holder("def same(kept):\n    return kept\n\n\nget = functools.partial(same, MADE)\n", "get()"),
    "attribute of a function": Holder("def get():\n    return get.kept\n\n\nget.kept = MADE\n", "get()"),
    "property": Holder(
        "KEPT = MADE\n\n\nclass Keeper:\n    @property\n    def kept(self):\n        return KEPT\n\n\nkeeper = Keeper()\n",
        "keeper.kept",
    ),
    "made inside": Holder("", "MADE"),
    "made by a function": Holder("def get():\n    return MADE\n", "get()"),
}
"""Where a value is kept."""

PLACES = {
    "the function": "def program(x):\n    return x * (READ)\n",
    "a callee": "def inner(x):\n    return x * (READ)\n\n\ndef program(x):\n    return inner(x) + 1\n",
    "a callee's callee": "def inmost(x):\n    return x * (READ)\n\n\ndef inner(x):\n    return inmost(x)\n\n\ndef program(x):\n    return inner(x) + 1\n",
    "a nested function": "def program(x):\n    def inner(y):\n        def inmost(z):\n            return z * (READ)\n\n        return inmost(y)\n\n    return inner(x)\n",
    "a lambda": "def program(x):\n    return (lambda y: y * (READ))(x)\n",
    "a comprehension": "def program(x):\n    return sum([y * (READ) for y in (x, x)])\n",
    "a generator": "def parts(x):\n    yield x * (READ)\n\n\ndef program(x):\n    return sum(parts(x))\n",
    "a context manager": "@contextlib.contextmanager\ndef scope():\n    yield READ\n\n\ndef program(x):\n    with scope() as by:\n        return x * by\n",
    "a `try`": "def program(x):\n    try:\n        raise KeyError\n    except KeyError:\n        return x * (READ)\n",
    "a branch": "def program(x):\n    if (READ) is not None:\n        x = x * (READ)\n    return x + 1\n",
    "a decorator": "def around(f):\n    @functools.wraps(f)\n    def wrapper(x):\n        return f(x) * (READ)\n\n    return wrapper\n\n\n@around\ndef inner(x):\n    return x + 1\n\n\ndef program(x):\n    return inner(x)\n",
    "the program's own decorator": "def around(f):\n    @functools.wraps(f)\n    def wrapper(x):\n        return f(x) * (READ)\n\n    return wrapper\n\n\n@around\ndef program(x):\n    return x + 1\n",
    "a method": "class User:\n    def use(self, x):\n        return x * (READ)\n\n\nuser = User()\n\n\ndef program(x):\n    return user.use(x)\n",
    "a forward": "class M(nn.Module):\n    def forward(self, x):\n        return x * (READ)\n\n\nprogram = M()\n",
    "the forward of a child": "class M(nn.Module):\n    def forward(self, x):\n        return x * (READ)\n\n\nprogram = nn.Sequential(M(), nn.ReLU())\n",
    "a forward hook": "def hook(module, args, output):\n    return output * (READ)\n\n\nprogram = nn.Sequential(nn.ReLU())\nprogram[0].register_forward_hook(hook)\n",
    "a hook before": "def hook(module, args):\n    return (args[0] * (READ),)\n\n\nprogram = nn.Sequential(nn.ReLU())\nprogram[0].register_forward_pre_hook(hook)\n",
    "after a break": "def program(x):\n    y = x + 1\n    torch._dynamo.graph_break()\n    return y * (READ)\n",
    "a checkpoint": "def inner(x):\n    return x * (READ)\n\n\ndef program(x):\n    return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)\n",
    "an autograd function": "class Twice(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        return x * (READ)\n\n    @staticmethod\n    def backward(ctx, g):\n        return g\n\n\ndef program(x):\n    return Twice.apply(x)\n",
    "another module": "OTHER\ndef inner(x):\n    return x * (READ)\nMAIN\n\n\ndef program(x):\n    return other.inner(x) + 1\n",
    "a method of another module": "OTHER\nclass Base(nn.Module):\n    def use(self, x):\n        return x * (READ)\nMAIN\n\n\nclass M(other.Base):\n    def forward(self, x):\n        return self.use(x)\n\n\nprogram = M()\n",
}
"""Where it is read. What is between OTHER and MAIN, and all that it needs, is in a module that the program imports."""

ASKED = {
    "getattr": ("getattr(TARGET, 'by', 2.0)", "attribute"),
    "hasattr": ("(3 if hasattr(TARGET, 'by') else 2)", "attribute"),
    "attribute by `try`": ("by_attribute(TARGET)", "attribute"),
    "get": ("TARGET.get('by', 2.0)", "key"),
    "`in`": ("(3 if 'by' in TARGET else 2)", "key"),
    "key by `try`": ("by_key(TARGET)", "key"),
    "length": ("(len(TARGET) + 1)", "key"),
    "text": ("len(str(sorted(TARGET)))", "key"),
}
"""How a program asks for what may be absent, and of which targets."""
ASKING = "def by_attribute(target):\n    try:\n        return target.by\n    except AttributeError:\n        return 2.0\n\n\ndef by_key(target):\n    try:\n        return target['by']\n    except KeyError:\n        return 2.0\n\n\n"
TARGETS = {
    "an object": ("attribute", "class A:\n    pass\n\n\nt = A()\n", "t", "t.by = 3.0"),
    "an object's class": ("attribute", "class A:\n    pass\n\n\nt = A()\n", "t", "A.by = 3.0"),
    "a base": (
        "attribute",
        "class A:\n    pass\n\n\nclass B(A):\n    pass\n\n\nt = B()\n",
        "t",
        "A.by = 3.0",
    ),
    "a class": ("attribute", "class A:\n    pass\n\n\n", "A", "A.by = 3.0"),
    "a metaclass": (
        "attribute",
        "class M(type):\n    pass\n\n\nclass A(metaclass=M):\n    pass\n\n\n",
        "A",
        "M.by = 3.0",
    ),
    "an object with __getattr__": (
        "attribute",
        "class A:\n    def __getattr__(self, name):\n        if name not in KNOWN:\n            raise AttributeError(name)\n        return KNOWN[name]\n\n\nKNOWN = {}\nt = A()\n",
        "t",
        "KNOWN['by'] = 3.0",
    ),
    "an object with slots": (
        "attribute",
        "class A:\n    __slots__ = ('by',)\n\n\nt = A()\n",
        "t",
        "t.by = 3.0",
    ),
    "a namespace": ("attribute", "t = types.SimpleNamespace()\n", "t", "t.by = 3.0"),
    "a function": ("attribute", "def t():\n    pass\n\n\n", "t", "t.by = 3.0"),
    "a Python module": (
        "attribute",
        "t = types.ModuleType('t')\nsys.modules['t'] = t\nundo = [lambda: sys.modules.pop('t', None)]\n",
        "t",
        "t.by = 3.0",
    ),
    "a Python module with __getattr__": (
        "attribute",
        "KNOWN = {}\n\n\ndef missing(name):\n    if name not in KNOWN:\n        raise AttributeError(name)\n    return KNOWN[name]\n\n\nt = types.ModuleType('t')\nt.__getattr__ = missing\nsys.modules['t'] = t\nundo = [lambda: sys.modules.pop('t', None)]\n",
        "t",
        "KNOWN['by'] = 3.0",
    ),
    "a module": ("attribute", "t = nn.ReLU()\n", "t", "t.by = 3.0"),
    "a tensor": ("attribute", "t = torch.ones(1)\n", "t", "t.by = 3.0"),
    "a parameter": ("attribute", "t = nn.Parameter(torch.ones(1))\n", "t", "t.by = 3.0"),
    "an enum": ("attribute", "class E(enum.Enum):\n    A = 1\n\n\nt = E.A\n", "t", "E.A.by = 3.0"),
    "a dataclass": (
        "attribute",
        "@dataclasses.dataclass\nclass A:\n    a: int = 1\n\n\nt = A()\n",
        "t",
        "t.by = 3.0",
    ),
    "a dict": ("key", "t = {'a': 1}\n", "t", "t['by'] = 3.0"),
    "an empty dict": ("key", "t = {}\n", "t", "t['by'] = 3.0"),
    "a dict in an object": ("key", "t = types.SimpleNamespace(d={'a': 1})\n", "t.d", "t.d['by'] = 3.0"),
    "a dict of an object": ("key", "class A:\n    pass\n\n\nt = A()\nt.a = 1\n", "vars(t)", "t.by = 3.0"),
    "a dict of globals": ("global key", "a = 1\n", "globals()", "by = 3.0"),
    "a dict in a dict": ("key", "t = {'d': {'a': 1}}\n", "t['d']", "t['d']['by'] = 3.0"),
    "an ordered dict": ("key", "t = collections.OrderedDict(a=1)\n", "t", "t['by'] = 3.0"),
    "a defaultdict": ("key", "t = collections.defaultdict(lambda: 2.0, a=1)\n", "t", "t['by'] = 3.0"),
    "a chain of dicts": ("key", "d = {}\nt = collections.ChainMap({'a': 1}, d)\n", "t", "d['by'] = 3.0"),
    "a mapping proxy": ("key", "d = {'a': 1}\nt = types.MappingProxyType(d)\n", "t", "d['by'] = 3.0"),
    "an own dict": ("key", "class D(dict):\n    pass\n\n\nt = D(a=1)\n", "t", "t['by'] = 3.0"),
    "a class's dict": ("key", "class A:\n    t = {'a': 1}\n\n\n", "A.t", "A.t['by'] = 3.0"),
    "a closure's dict": (
        "key",
        "def hold(d):\n    def get():\n        return d\n\n    return get\n\n\nd = {'a': 1}\nget = hold(d)\n",
        "get()",
        "d['by'] = 3.0",
    ),
    "a default's dict": (
        "key",
        "def get(d={'a': 1}):\n    return d\n\n\n",
        "get()",
        "get.__defaults__[0]['by'] = 3.0",
    ),
}
"""What is asked, by attribute or key: its definition, an expression for it, and what adds `by`."""
