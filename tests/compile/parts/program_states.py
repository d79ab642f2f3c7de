"""Tensors, modules, modes and settings that a program meets: further columns of program_matrix.py.

In each text `«2.0→3.0»` is 2.0 before the change and 3.0 after it.
"""

# ruff: noqa: E501 (a row is a program's part and its change)

from __future__ import annotations

TENSORS = {
    "dtype": ("torch.ones(2, 2, dtype=torch.«float32→float64»)", "T.element_size()"),
    "size": ("torch.ones(«2→3», 2)", "T.shape[0]"),
    "dimensions": ("torch.ones(2«→, 1»)", "(T.dim() + 1)"),
    "strides": ("torch.ones(2, 3)«→.t().contiguous().t()»", "T.stride(0)"),
    "contiguity": ("torch.ones(2, 2)«→.t()»", "(2 if T.is_contiguous() else 3)"),
    "memory format": ("torch.ones(1, 2, 2, 2)«→.to(memory_format=torch.channels_last)»", "T.stride(1)"),
    "requires_grad": ("torch.ones(2, requires_grad=«True→False»)", "(2 if T.requires_grad else 3)"),
    "leaf": ("(torch.ones(2, requires_grad=True)«→ * 1»)", "(2 if T.is_leaf else 3)"),
    "gradient": ("graded(«False→True»)", "(2 if T.grad is None else 3)"),
    "gradient's function": ("(torch.ones(2, requires_grad=True)«→ * 1»)", "(2 if T.grad_fn is None else 3)"),
    "parameter": ("«nn.Parameter→torch.Tensor»(torch.ones(2))", "(2 if isinstance(T, nn.Parameter) else 3)"),
    "buffer": ("«nn.Buffer→torch.Tensor»(torch.ones(2))", "(2 if isinstance(T, nn.Buffer) else 3)"),
    "None": ("«torch.ones(2)→None»", "(2 if T is not None else 3)"),
    "number": ("«torch.ones(())→3.0»", "T"),
    "subclass": ("«torch.Tensor→Tripled»(torch.ones(2))", "(2 if type(T) is torch.Tensor else 3)"),
    "layout": ("torch.eye(2)«→.to_sparse()»", "(2 if T.layout is torch.strided else 3)"),
    "conjugate": ("(torch.ones(2) * 1j)«→.conj()»", "(3 if T.is_conj() else 2)"),
    "attribute": ("marked(«2.0→3.0»)", "T.by"),
    "expanded": ("torch.ones(2)«→[:1].expand(2)»", "(T.stride(0) + 1)"),
    "view": ("torch.ones(2, 2)«→.view(2, 2)»", "(3 if T._is_view() else 2)"),
    "inference": ("inferred(«False→True»)", "(3 if T.is_inference() else 2)"),
    "device": ("torch.ones(2, device='«cpu→meta»')", "len(T.device.type)"),
    "offset": ("torch.ones(3)[«:2→1:»]", "(T.storage_offset() + 2)"),
}
"""What a program may ask a tensor T."""
TENSORS_NEED = """class Tripled(torch.Tensor):
    pass


def graded(has):
    t = torch.ones(2)
    t.grad = torch.ones(2) if has else None
    return t


def marked(by):
    t = torch.ones(2)
    t.by = by
    return t


def inferred(has):
    with torch.inference_mode(has):
        return torch.ones(2)


"""
ARGUMENTS = {
    "argument": ("(TENSOR,)", "t", "t"),
    "list": ("([TENSOR],)", "t", "t[0]"),
    "dict": ("({'t': TENSOR},)", "t", "t['t']"),
    "tuple in a tuple": ("((1, (TENSOR,)),)", "t", "t[1][0]"),
    "object": ("(types.SimpleNamespace(t=TENSOR),)", "t", "t.t"),
    "one of several": ("(TENSOR, 5)", "*t", "t[0]"),
}
"""How an argument comes to the program: it, the parameter, and the expression for it."""

MODULE = """class Child(nn.Module):
    by = 2.0

    def __init__(self):
        super().__init__()
        self.own = 1.0
        self.numbers = [1.0, 2.0]
        self.layer = nn.Linear(4, 4, bias=False)
        self.parts = nn.ModuleList([nn.ReLU(), nn.Tanh()])
        self.named = nn.ModuleDict({'a': nn.ReLU(), 'b': nn.Tanh()})
        self.drop = nn.Dropout(1.0)
        self.register_buffer('shift', torch.ones(4))
        self.maybe = None
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(4))

    def scaled(self, x):
        return x * self.by

    def forward(self, x):
        x = self.scaled(self.layer(x)) * self.own + self.shift
        for number, part in enumerate(self.parts):
            x = part(x) * (number + 2) / 5
        for name, part in self.named.items():
            x = part(x) * (ord(name) - 90) / 20
        x = x + self.drop(x)
        x = x + len(list(self.children())) + len(list(self.parameters())) + len(dict(self.named_buffers()))
        x = x * 2 if self.training else x * 3
        return x if self.maybe is None else x + self.maybe


def other_forward(self, x):
    return x * 7


def only(x):
    return x * 7


def hook(module, args, output):
    return output * 7


def hook_before(module, args):
    return (args[0] * 7,)


def hook_with_keywords(module, args, kwargs, output):
    return output * 7


FORWARD = nn.Tanh.forward
child = Child()
"""
MODULES = {
    "training": "child.eval()",
    "training of a part": "child.drop.eval()",
    "training by the flag": "child.training = False",
    "attribute": "child.own = 3.0",
    "attribute that hides the class's": "child.by = 3.0",
    "attribute of the class": "Child.by = 3.0",
    "element of a list": "child.numbers[0] = 3.0\nchild.own = child.numbers[0]",
    "None that becomes a number": "child.maybe = 3.0",
    "None that becomes a tensor": "child.maybe = torch.ones(4)",
    "method of the class": "Child.scaled = lambda self, x: x * 9",
    "method on the object": "child.scaled = only",
    "forward of the class": "Child.forward = other_forward",
    "forward on the object": "child.forward = only",
    "forward of a part": "child.layer.forward = only",
    "forward of a part's class": "nn.Tanh.forward = other_forward\nundo = [lambda: setattr(nn.Tanh, 'forward', FORWARD)]",
    "class of the object": "class Grown(Child):\n    by = 3.0\n\n\nchild.__class__ = Grown",
    "forward hook": "child.register_forward_hook(hook)",
    "forward hook of a part": "child.layer.register_forward_hook(hook)",
    "forward hook with keywords": "child.register_forward_hook(hook_with_keywords, with_kwargs=True)",
    "forward hook always called": "child.register_forward_hook(hook, always_call=True)",
    "hook before": "child.register_forward_pre_hook(hook_before)",
    "hook before, of a part": "child.parts[1].register_forward_pre_hook(hook_before)",
    "hook of all modules": "handle = nn.modules.module.register_module_forward_hook(hook)\nundo = [handle.remove]",
    "hook of all modules, before": "handle = nn.modules.module.register_module_forward_pre_hook(hook_before)\nundo = [handle.remove]",
    "child added": "child.more = nn.ReLU()",
    "child removed": "del child.drop\nchild.drop = child.parts[0]",
    "child swapped": "child.layer = nn.ReLU()",
    "child in a list swapped": "child.parts[0] = nn.Sigmoid()",
    "child in a list added": "child.parts.append(nn.Sigmoid())",
    "order of a list": "child.parts = nn.ModuleList(reversed(child.parts))",
    "child in a dict swapped": "child.named['a'] = nn.Sigmoid()",
    "keys of a dict": "child.named['c'] = child.named.pop('b')",
    "order of a dict": "child.named['a'] = child.named.pop('a')",
    "attribute of a part": "child.drop.p = 0.0",
    "parameter removed": "child.layer.weight = None\nchild.layer.forward = torch.sin",
    "parameter added": "child.layer.register_parameter('bias', nn.Parameter(torch.ones(4)))",
    "size of a parameter": "child.layer = nn.Linear(4, 1, bias=False)\nwith torch.no_grad():\n    child.layer.weight.fill_(1)",
    "buffer removed": "del child.shift\nchild.shift = 3.0",
    "buffer added": "child.register_buffer('more', torch.ones(4))",
    "buffer's size": "child.shift = torch.ones(3, 1)",
    "parametrized": "nn.utils.parametrize.register_parametrization(child.layer, 'weight', nn.Tanh())",
    "pruned": "import torch.nn.utils.prune\ntorch.nn.utils.prune.l1_unstructured(child.layer, 'weight', 12)",
    "spectral norm": "child.layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=False))\nwith torch.no_grad():\n    child.layer.parametrizations.weight.original0.fill_(2)\n    child.layer.parametrizations.weight.original1.fill_(1)",
    "alias of a child": "child.parts[1] = child.parts[0]",
    "double": "child.double()\ninputs = lambda: [(torch.linspace(0.2, 1.2, 4).double(),)]",
}
"""What happens to a module `child`."""
POSITIONS = {
    "itself": "program = child\n",
    "in a module": "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.inner = child\n\n    def forward(self, x):\n        return self.inner(x) + 1\n\n\nprogram = M()\n",
    "in Sequential": "program = nn.Sequential(nn.ReLU(), child)\n",
    "in a list": "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.layers = nn.ModuleList([child])\n\n    def forward(self, x):\n        for layer in self.layers:\n            x = layer(x)\n        return x\n\n\nprogram = M()\n",
    "in a dict of a module": "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.layers = nn.ModuleDict({'a': child})\n\n    def forward(self, x):\n        return self.layers['a'](x)\n\n\nprogram = M()\n",
    "in a global": "def program(x):\n    return child(x)\n",
    "in a closure": "def hold(module):\n    def program(x):\n        return module(x)\n\n    return program\n\n\nprogram = hold(child)\n",
    "in an object": "class Trainer:\n    def __init__(self):\n        self.model = child\n\n    def step(self, x):\n        return self.model(x)\n\n\nprogram = Trainer().step\n",
    "after a break": "def program(x):\n    x = x + 1\n    torch._dynamo.graph_break()\n    return child(x)\n",
}

SETTINGS = {
    "grad": ("torch.no_grad", "torch.is_grad_enabled()"),
    "inference": ("torch.inference_mode", "torch.is_inference_mode_enabled()"),
    "autocast": ("lambda: torch.autocast('cpu')", "torch.is_autocast_enabled('cpu')"),
    "autocast's dtype": (
        "lambda: torch.autocast('cpu', torch.float16)",
        "torch.get_autocast_dtype('cpu') == torch.bfloat16",
    ),
    "default dtype": (
        "lambda: restored(torch.get_default_dtype, torch.set_default_dtype, torch.float64)",
        "torch.get_default_dtype() == torch.float32",
    ),
    "default dtype's effect": (
        "lambda: restored(torch.get_default_dtype, torch.set_default_dtype, torch.float64)",
        "torch.ones(1).dtype == torch.float32",
    ),
    "default device": ("lambda: torch.device('meta')", "torch.ones(1).device.type == 'cpu'"),
    "determinism": (
        "lambda: restored(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)",
        "torch.are_deterministic_algorithms_enabled()",
    ),
    "precision of products": (
        "lambda: restored(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, 'medium')",
        "torch.get_float32_matmul_precision() == 'highest'",
    ),
    "threads": (
        "lambda: restored(torch.get_num_threads, torch.set_num_threads, 3)",
        "torch.get_num_threads() == 1",
    ),
    "anomaly": ("torch.autograd.detect_anomaly", "torch.is_anomaly_enabled()"),
    "cudnn": ("lambda: torch.backends.cudnn.flags(enabled=False)", "torch.backends.cudnn.enabled"),
    "mkldnn": ("lambda: torch.backends.mkldnn.flags(enabled=False)", "torch.backends.mkldnn.enabled"),
    "Dynamo's configuration": (
        "lambda: torch._dynamo.config.patch(capture_scalar_outputs=True)",
        "torch._dynamo.config.capture_scalar_outputs",
    ),
    "an environment variable": ("lambda: variable('5')", "os.environ.get('CHANGED_VARIABLE') is None"),
    "an environment variable by getenv": (
        "lambda: variable('5')",
        "os.getenv('CHANGED_VARIABLE', '1') == '1'",
    ),
    "an environment variable by `in`": ("lambda: variable('5')", "'CHANGED_VARIABLE' in os.environ"),
    "an imported module": ("lambda: imported('changed_extra')", "'changed_extra' in sys.modules"),
    "a variable of sys": ("lambda: assigned(sys, 'argv', ['a'] * 9)", "len(sys.argv) == 9"),
    "a function of a library": ("lambda: assigned(math, 'floor', math.ceil)", "math.floor(1.5) == 1"),
    "a builtin": ("lambda: assigned(__import__('builtins'), 'min', max)", "min(1, 2) == 1"),
    "a function of torch": ("lambda: assigned(torch, 'sin', torch.cos)", "torch.sin(torch.ones(1)) > 0.7"),
    "recursion limit": (
        "lambda: restored(sys.getrecursionlimit, sys.setrecursionlimit, 4321)",
        "sys.getrecursionlimit() == 4321",
    ),
    "a warning's filter": ("lambda: assigned(warnings, 'filters', [])", "len(warnings.filters) == 0"),
    "a file": ("lambda: a_file()", "os.path.exists('changed_program_file')"),
    "a file by pathlib": ("lambda: a_file()", "pathlib.Path('changed_program_file').exists()"),
    "seed": ("lambda: restored(torch.initial_seed, torch.manual_seed, 5)", "torch.initial_seed() == 5"),
}
"""What is around a call: a context manager, and what a program asks that has another answer in it."""
SETTINGS_NEED = """@contextlib.contextmanager
def restored(get, put, value):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


@contextlib.contextmanager
def assigned(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def variable(value):
    os.environ['CHANGED_VARIABLE'] = value
    try:
        yield
    finally:
        del os.environ['CHANGED_VARIABLE']


@contextlib.contextmanager
def imported(name):
    sys.modules[name] = sys
    try:
        yield
    finally:
        del sys.modules[name]


@contextlib.contextmanager
def a_file():
    path = pathlib.Path('changed_program_file')
    path.write_text('')
    try:
        yield
    finally:
        path.unlink()


"""

SAME = {
    "an object": ("A()", "class A:\n    pass\n\n\n"),
    "a list": ("[1.0]", ""),
    "a dict": ("{'a': 1}", ""),
    "a tensor": ("torch.ones(2)", ""),
    "a parameter": ("nn.Parameter(torch.ones(2))", ""),
    "a module": ("nn.ReLU()", ""),
    "a function": ("make()", "def make():\n    def f():\n        return 1\n\n    return f\n\n\n"),
    "a class": ("make()", "def make():\n    class A:\n        pass\n\n    return A\n\n\n"),
}
PAIRS = {
    "two globals": ("one = MADE\nother = «one→MADE»\n", "one", "other"),
    "two attributes": (
        "box = types.SimpleNamespace()\nbox.one = MADE\nbox.other = «box.one→MADE»\n",
        "box.one",
        "box.other",
    ),
    "a list's elements": ("one = MADE\nitems = [one, «one→MADE»]\n", "items[0]", "items[1]"),
    "a dict's values": ("one = MADE\nitems = {'a': one, 'b': «one→MADE»}\n", "items['a']", "items['b']"),
    "a global and a closure": (
        "def hold(kept):\n    def get():\n        return kept\n\n    return get\n\n\none = MADE\nget = hold(«one→MADE»)\n",
        "one",
        "get()",
    ),
    "a global and a default": (
        "one = MADE\n\n\ndef get(kept=«one→MADE»):\n    return kept\n\n\n",
        "one",
        "get()",
    ),
    "attributes of a module": (
        "class M(nn.Module):\n    pass\n\n\nbox = M()\nbox.one = MADE\nbox.other = «box.one→MADE»\n",
        "box.one",
        "box.other",
    ),
}
"""Two names, of one object or of two."""
