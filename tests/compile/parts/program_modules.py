"""Changes of nn.Modules, of their hooks, and of what is written while a program runs."""

# ruff: noqa: E501 (a row is a program, its change and what the next start does)

from __future__ import annotations

from program_changes import Change, edit, rows

MODEL = """
class Double(nn.Module):
    def forward(self, x):
        return x * 2


class Triple(nn.Module):
    def forward(self, x):
        return x * 3


class Model(nn.Module):
    version = 1

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 4)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.5)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), Double(), Triple()])
        self.steps = nn.Sequential(Double(), nn.Tanh())
        self.named = nn.ModuleDict({"a": Double(), "b": nn.Sigmoid()})
        self.register_buffer("offset", torch.ones(4))
        self.count, self.rate, self.flag, self.extra, self.mode = 2, 0.5, True, None, "sum"
        self.sizes, self.table, self.function = [1, 2], {"a": 2.0}, F.relu
        # here

    def forward(self, x):
        x = self.act(self.first(x)) + self.offset
        for block in self.blocks:
            x = block(x) + 1
        x = self.function(self.drop(self.steps(x)))
        for block in self.named.values():
            x = block(x) - 1
        x = x * self.count + self.rate + (1 if self.flag else 2) + (0 if self.extra is None else 1)
        return getattr(x, self.mode)(1) * self.sizes[1] * self.table["a"]


program = Model()
# after
"""


def model(*edits: tuple[str, str], how: str = "traced", differs: bool = True) -> Change:
    return edit(MODEL, *edits, how=how, differs=differs)


def after(line: str, how: str = "traced", differs: bool = True) -> Change:
    return model(("# after", line), how=how, differs=differs)


HOOK = "def hook(module, *args):\n    return args[-1] * 2\n\n\n"
PRE = "def hook(module, args):\n    return (args[0] * 2,)\n\n\n"
BACK = "def hook(module, gin, gout):\n    return (gin[0] * 2,)\n\n\n"
GLOBAL = "nn.modules.module."

CALLED = "net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))\nfor each in net.parameters():\n    nn.init.constant_(each, 0.25)\nweights = {'0.weight': torch.ones(4, 4)}\n"

MODULES = {
    "module's int": model(("self.mode = 2, 0.5", "self.mode = 3, 0.5")),
    "module's float": model(("2, 0.5, True", "2, 0.75, True")),
    "module's bool": model(("0.5, True", "0.5, False")),
    "module's None": model(("True, None", "True, 1")),
    "module's string": model(('None, "sum"', 'None, "prod"')),
    "module's list": model(("[1, 2],", "[1, 3],")),
    "module's dict": model(('{"a": 2.0}', '{"a": 3.0}')),
    "module's function": model((", F.relu", ", F.silu")),
    "module's forward edited": model(("(x) + 1", "(x) + 2")),
    "submodule's forward edited": model(("x * 3", "x * 4")),
    "forward assigned to the module": Change(
        text=MODEL,
        patch=lambda m, module: m.setattr(module.program, "forward", lambda x: x * 2, raising=False),
    ),
    "forward assigned to a submodule": Change(
        text=MODEL,
        patch=lambda m, module: m.setattr(module.program.first, "forward", lambda x: x * 2, raising=False),
    ),
    "forward assigned to a submodule, a method": Change(
        text=MODEL,
        patch=lambda m, module: m.setattr(
            module.program.first, "forward", module.program.act.forward, raising=False
        ),
    ),
    "forward assigned to the submodule's class": Change(
        text=MODEL, patch=lambda m, module: m.setattr(module.Double, "forward", module.Triple.forward)
    ),
    "submodule of another class": after("program.act = nn.GELU()"),
    "submodule of another class and the same form": after("program.blocks[1] = Triple()"),
    "submodule becomes Identity": after("program.act = nn.Identity()"),
    "submodule added to ModuleList": after("program.blocks.append(Triple())"),
    "submodule added to Sequential": after("program.steps.append(nn.Tanh())"),
    "submodule added to ModuleDict": after("program.named['c'] = Triple()"),
    "submodule removed": after("del program.blocks[1]"),
    "order of ModuleList": after(
        "program.blocks[1], program.blocks[2] = program.blocks[2], program.blocks[1]", differs=True
    ),
    "order of ModuleDict": after("program.named['a'] = program.named.pop('a')"),
    "forward hook": after(HOOK + "program.register_forward_hook(hook)"),
    "forward hook of a submodule": after(HOOK + "program.first.register_forward_hook(hook)"),
    "forward pre-hook": after(PRE + "program.register_forward_pre_hook(hook)"),
    "forward pre-hook of a submodule": after(PRE + "program.first.register_forward_pre_hook(hook)"),
    "backward hook": after(BACK + "program.first.register_full_backward_hook(hook)"),
    "backward pre-hook": after(
        "def hook(module, gout):\n    return (gout[0] * 2,)\n\n\nprogram.first.register_full_backward_pre_hook(hook)"
    ),
    "global forward hook": after(HOOK + f"undo = [{GLOBAL}register_module_forward_hook(hook).remove]"),
    "global forward pre-hook": after(PRE + f"undo = [{GLOBAL}register_module_forward_pre_hook(hook).remove]"),
    "global backward hook": after(BACK + f"undo = [{GLOBAL}register_module_full_backward_hook(hook).remove]"),
    "forward hook edited": edit(
        MODEL + HOOK + "program.first.register_forward_hook(hook)\n", ("args[-1] * 2", "args[-1] * 3")
    ),
    "forward hook removed": edit(
        MODEL + HOOK + "handle = program.first.register_forward_hook(hook)\n# there\n",
        ("# there", "handle.remove()"),
    ),
    "forward hook replaced": edit(
        MODEL
        + HOOK
        + "def other(module, *args):\n    return args[-1] * 5\n\n\nprogram.first.register_forward_hook(hook)\n",
        ("forward_hook(hook)", "forward_hook(other)"),
    ),
    "second forward hook": edit(
        MODEL + HOOK + "program.first.register_forward_hook(hook)\n# there\n",
        ("# there", "program.first.register_forward_hook(hook)"),
    ),
    "hook of a parameter": after("program.first.weight.register_hook(lambda g: g * 2)", how="used"),
    "hook after accumulation": after(
        "def hook(p):\n    p.grad.mul_(2)\n\n\nprogram.first.weight.register_post_accumulate_grad_hook(hook)",
        how="used",
    ),
    "eval": after("program.eval()"),
    "eval of one submodule": after("program.drop.eval()"),
    "dropout's p": model(("Dropout(0.5)", "Dropout(0.25)")),
    "requires_grad of a parameter": after("program.first.weight.requires_grad_(False)"),
    "requires_grad of all": after("program.requires_grad_(False)"),
    "parameter's shape": after("program.first = nn.Linear(4, 1)"),
    "parameter's dtype": after(
        "program.double()\ndef inputs():\n    return [(torch.linspace(-1, 2, 12).view(3, 4).double(),)]"
    ),
    "parameter's strides": after(
        "program.first.weight = nn.Parameter(program.first.weight.detach().t().contiguous().t())"
    ),
    "parameter becomes None": after("program.first.bias = None"),
    "parameter becomes a tensor": after(
        "w = program.first.weight.detach()\ndel program.first.weight\nprogram.first.weight = w"
    ),
    "weights tied": after("program.blocks[0].weight = program.first.weight"),
    "weights untied": edit(
        MODEL.replace("# after", "program.blocks[0].weight = program.first.weight\n# after"),
        ("# after", "program.blocks[0].weight = nn.Parameter(program.first.weight.detach().clone())"),
    ),
    "buffer's values": after("program.offset.add_(1)", how="used"),
    "buffer's shape": after("program.offset = torch.ones(3, 1) * 2"),
    "buffer's dtype": after("program.offset = torch.ones(4, dtype=torch.float64)"),
    "layer's eps": edit("program = nn.Sequential(nn.LayerNorm(4, eps=1e-5))\n", ("1e-5", "1e-1")),
    "layer's stride": edit("program = nn.Sequential(nn.MaxPool1d(2, stride=1))\n", ("stride=1", "stride=2")),
    "parametrization": after(
        "from torch.nn.utils import parametrize\nparametrize.register_parametrization(program.first, 'weight', Double())"
    ),
    "weight norm": after(
        "nn.utils.parametrizations.weight_norm(program.first)\nprogram.first.parametrizations.weight.original0.data.mul_(2)"
    ),
    "spectral norm, older form": after("nn.utils.spectral_norm(program.first)"),
    "other weights": after("nn.init.ones_(program.first.weight)", how="used"),
    **rows(
        {
            "module's int becomes a float": "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        «self.n = 2→self.n = 2.0»\n\n    def forward(self, x):\n        return x.int() * self.n\n\n\nprogram = M()\n",
            "module's class attribute": "class M(nn.Module):\n«    n = 2→    n = 3»\n\n    def forward(self, x):\n        return x * self.n\n\n\nprogram = M()\n",
            "module's class attribute hidden by its own": "class M(nn.Module):\n    n = 2\n\n    def forward(self, x):\n        return x * self.n\n\n\nprogram = M()\n«# here→program.n = 3»\n",
            "module's property": "class M(nn.Module):\n    @property\n    def n(self):\n        «return 2→return 3»\n\n    def forward(self, x):\n        return x * self.n\n\n\nprogram = M()\n",
            "module's __getattr__": "class M(nn.Module):\n    def forward(self, x):\n        return x * getattr(self, 'n', 2.0)\n\n    «# here→def __getattr__(self, name):\n        return 3.0 if name == 'n' else super().__getattr__(name)»\n\n\nprogram = M()\n",
            "module's __call__": "class M(nn.Module):\n    def forward(self, x):\n        return x * 2\n\n    «# here→def __call__(self, x):\n        return super().__call__(x) + 1»\n\n\nprogram = nn.Sequential(M())\n",
            "forward decorated, decorator's argument": "import functools\n\n\ndef times(n):\n    def decorate(f):\n        @functools.wraps(f)\n        def wrapper(self, *args, **kwargs):\n            return f(self, *args, **kwargs) * n\n\n        return wrapper\n\n    return decorate\n\n\nclass M(nn.Module):\n    @«times(2.0)→times(3.0)»\n    def forward(self, x):\n        return x + 1\n\n\nprogram = M()\n",
            "submodule's forward decorated, decorator's argument": "import functools\n\n\ndef times(n):\n    def decorate(f):\n        @functools.wraps(f)\n        def wrapper(self, *args, **kwargs):\n            return f(self, *args, **kwargs) * n\n\n        return wrapper\n\n    return decorate\n\n\nclass M(nn.Module):\n    @«times(2.0)→times(3.0)»\n    def forward(self, x):\n        return x + 1\n\n\nprogram = nn.Sequential(M(), M())\n",
            "submodule shared": "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        torch.manual_seed(1)\n        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)\n\n    def forward(self, x):\n        return self.b(self.a(x))\n\n\nprogram = M()\n«# here→program.b = program.a»\n",
            "buffer becomes None": "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.register_buffer('b', torch.ones(4))\n\n    def forward(self, x):\n        return x * 2 if self.b is None else x + self.b\n\n\nprogram = M()\n«# here→program.b = None»\n",
            "buffer added": "class M(nn.Module):\n    def forward(self, x):\n        for b in self.buffers():\n            x = x + b\n        return x * 2\n\n\nprogram = M()\n«# here→program.register_buffer('b', torch.ones(4))»\n",
            "parameter added": "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.p = nn.Parameter(torch.ones(4))\n\n    def forward(self, x):\n        return x * sum(p.sum() for p in self.parameters())\n\n\nprogram = M()\n«# here→program.q = nn.Parameter(torch.ones(2))»\n",
            "child added and counted": "class M(nn.Module):\n    def forward(self, x):\n        return x * (1 + len(list(self.children())))\n\n\nprogram = M()\n«# here→program.q = nn.ReLU()»\n",
            "batch norm's momentum": "program = nn.BatchNorm1d(4, momentum=«0.1→0.3»)\n\n\ndef state():\n    return program.running_mean\n",
            "two modules of one class": "class M(nn.Module):\n    def __init__(self, n):\n        super().__init__()\n        self.n = n\n\n    def forward(self, x):\n        return x * self.n\n\n\na, b = «M(2.0), M(3.0)→M(3.0), M(2.0)»\n\n\ndef program(x):\n    return a(x) - b(x) * 5\n",
            "autograd.Function's forward": "class Fn(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        return «x * 2→x * 3»\n\n    @staticmethod\n    def backward(ctx, g):\n        return g * 5\n\n\ndef program(x):\n    return Fn.apply(x)\n",
            "autograd.Function's backward": "class Fn(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        return x * 2\n\n    @staticmethod\n    def backward(ctx, g):\n        return «g * 5→g * 6»\n\n\ndef program(x):\n    return Fn.apply(x)\n",
            "what an autograd.Function's backward calls": "def scaled(g):\n    return «g * 5→g * 6»\n\n\nclass Fn(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        return x * 2\n\n    @staticmethod\n    def backward(ctx, g):\n        return scaled(g)\n\n\ndef program(x):\n    return Fn.apply(x)\n",
            "what an autograd.Function's backward reads": "«BY = 5.0→BY = 6.0»\n\n\nclass Fn(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        return x * 2\n\n    @staticmethod\n    def backward(ctx, g):\n        return g * BY\n\n\ndef program(x):\n    return Fn.apply(x)\n",
            "checkpointed function": "from torch.utils.checkpoint import checkpoint\n\n\ndef inner(x):\n    return «x.sin() * 2→x.sin() * 3»\n\n\ndef program(x):\n    return checkpoint(inner, x, use_reentrant=False)\n",
            "branch of torch.cond": "def yes(x):\n    return «x * 2→x * 4»\n\n\ndef no(x):\n    return x * 3\n\n\ndef program(x):\n    return torch.cond(x.sum() > 0, yes, no, (x,))\n",
            "mapped function": "def inner(x):\n    return «x * 2→x * 4»\n\n\ndef program(x):\n    return torch.vmap(inner)(x)\n",
            "function whose gradient is taken": "def inner(x):\n    return («x**2→x**3»).sum()\n\n\ndef program(x):\n    return torch.func.grad(inner)(x)\n",
        }
    ),
    **rows(
        {
            "custom operator's fake": "@torch.library.custom_op('changed_program::op', mutates_args=())\ndef op(x: torch.Tensor) -> torch.Tensor:\n    return x.clone()\n\n\n@op.register_fake\ndef _(x):\n    return x.new_empty(x.shape)\n\n\ndef program(x):\n    return op(x.detach()) «* 2→* 3»\n"
        },
        how="unfit",
    ),
    **rows(
        {
            "functional call, tied weights": f"{CALLED}«→net[2].weight = net[0].weight\n»\n\ndef program(x):\n    return torch.func.functional_call(net, weights, (x,))\n",
            "functional call, weights no longer tied": f"{CALLED}«net[2].weight = net[0].weight\n→»\n\ndef program(x):\n    return torch.func.functional_call(net, weights, (x,))\n",
            "functional call, another name": f"{CALLED}weights = {{'«0→2».weight': torch.ones(4, 4)}}\n\n\ndef program(x):\n    return torch.func.functional_call(net, weights, (x,))\n",
            "functional call, strict": f"{CALLED}\n\ndef program(x):\n    try:\n        return torch.func.functional_call(net, weights, (x,), strict=«False→True»)\n    except RuntimeError:\n        return x * 2\n",
            "functional call, a loss of gradients": f"{CALLED}\n\ndef loss(weights, x):\n    return torch.func.functional_call(net, weights, (x,)).«sum→square().sum»()\n\n\ndef program(x):\n    return torch.func.grad(loss)(weights, x)['0.weight']\n",
        }
    ),
    **rows(
        {
            "hook of an input": "def inputs():\n    x = torch.ones(3, requires_grad=True)\n    «# here→x.register_hook(lambda g: g * 2)»\n    return [(x,)]\n\n\ndef program(x):\n    return x * x\n"
        },
        how="used",
    ),
    **rows(
        {
            "count of a batch norm": "program = nn.BatchNorm1d(4)\nprogram.num_batches_tracked.«fill_(3)→fill_(7)»\n\n\ndef inputs():\n    return [(torch.arange(12.0).view(3, 4),)]\n"
        },
        how="used",
        differs=False,
    ),
    **rows(
        {
            "module as an argument": "class M(nn.Module):\n    def __init__(self, n):\n        super().__init__()\n        self.n = n\n\n    def forward(self, x):\n        return x * self.n\n\n\ndef inputs():\n    return [(torch.ones(3), «M(2.0)→M(4.0)»), (torch.ones(3), M(3.0))]\n\n\ndef program(x, m):\n    return m(x)\n"
        },
        how="varies",
    ),
    **rows(
        {
            "count of a batch norm without momentum": "program = nn.BatchNorm1d(4, momentum=None)\nprogram.num_batches_tracked.«fill_(3)→fill_(7)»\n\n\ndef inputs():\n    return [(torch.arange(12.0).view(3, 4),)]\n"
        },
        how="varies",
        differs=False,
    ),
}

CELLS = """
BY = 2.0


def callee(z):
    return z * 3


def program(x):
    k = BY

    def inner(y):
        return callee(y - k)

    x = inner(x + NUMBER)
    torch._dynamo.graph_break()
    # a comment
    return inner(x) * k
"""


def cells(number: int) -> str:
    """A text of its own: Dynamo keeps what it made of an equal one, with the path of that."""
    return CELLS.replace("NUMBER", str(number))


EFFECTS = {
    "graph break with a closure, unchanged": edit(
        cells(11), ("# a comment", "# another comment"), differs=False, how="used"
    ),
    "graph break with a closure, edit after it": edit(cells(12), ("y - k", "y - 2 * k")),
    "graph break with a closure, callee edited": edit(cells(13), ("return z * 3", "return z * 4")),
    "graph break with a closure, a value of it": edit(cells(14), ("BY = 2.0", "BY = 3.0")),
    **rows(
        {
            "counter in a module": "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.n = 0\n\n    def forward(self, x):\n        «self.n += 1→self.n += 2»\n        return x * 2\n\n\nprogram = M()\n\n\ndef state():\n    return program.n\n",
            "counter in a global": "N = 0\n\n\ndef program(x):\n    global N\n    «N += 1→N += 2»\n    return x * 2\n\n\ndef state():\n    return N\n",
            "counter that counts on": "«N = 0→N = 10»\n\n\ndef inputs():\n    return [(torch.ones(3),)] * 4\n\n\ndef program(x):\n    global N\n    N += 1\n    return x * N\n\n\ndef state():\n    return N\n",
            "list appended to": "L = []\n\n\ndef program(x):\n    L.append(«x * 2→x * 3»)\n    return x + 1\n\n\ndef state():\n    return L\n",
            "dict written": "D = {}\n\n\ndef program(x):\n    D[«'a'→'b'»] = x * 2\n    return x + 1\n\n\ndef state():\n    return D\n",
            "object's attribute written": "class A:\n    pass\n\n\nbox = A()\n\n\ndef program(x):\n    box.last = «x * 2→x * 3»\n    return x + 1\n\n\ndef state():\n    return box.last\n",
            "class attribute written": "class A:\n    n = 1\n\n\ndef program(x):\n    A.n = «A.n + 1→A.n + 2»\n    return x + 1\n\n\ndef state():\n    return A.n\n",
            "object returned": "class A:\n    def __init__(self, v):\n        self.v = v\n\n    def __repr__(self):\n        return repr(self.v.tolist())\n\n\ndef program(x):\n    return A((«x * 2→x * 3»).detach())\n",
            "input written": "def inputs():\n    return [(torch.ones(3),)]\n\n\ndef program(x):\n    x.«add_(1)→add_(2)»\n    return x * 2\n",
            "buffer written": "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.register_buffer('b', torch.zeros(1))\n\n    def forward(self, x):\n        self.b.«add_(1)→add_(2)»\n        return x + self.b\n\n\nprogram = M()\n\n\ndef inputs():\n    return [(torch.ones(3),)] * 3\n\n\ndef state():\n    return program.b\n",
            "function returned": "def program(x):\n    def inner(y):\n        return «y + 1→y + 2»\n\n    return inner(x) * 2, inner.__name__\n",
            "random numbers": "def program(x):\n    return x + «torch.rand→torch.randn»(3, 4)\n",
            "function of torch.jit.script": "@torch.jit.script\ndef inner(x):\n    return «x * 2→x * 3»\n\n\ndef program(x):\n    return inner(x) + 1\n",
            "graph break, edit after it": "def program(x):\n    y = x * 2\n    torch._dynamo.graph_break()\n    return «y + 1→y + 2»\n",
            "graph break, edit before it": "def program(x):\n    y = «x * 2→x * 3»\n    torch._dynamo.graph_break()\n    return y + 1\n",
            "graph break with a closure": "def program(x):\n    «k = 2.0→k = 3.0»\n\n    def inner(y):\n        return y * k\n\n    x = x + 1\n    torch._dynamo.graph_break()\n    return inner(x)\n",
            "graph break with a closure, of a function made before": "def make(k):\n    def program(x):\n        x = x + k\n        torch._dynamo.graph_break()\n        return x * k\n\n    return program\n\n\nprogram = «make(2.0)→make(3.0)»\n",
            "graph break with a closure that is written": "def program(x):\n    k = 2.0\n\n    def inner(y):\n        nonlocal k\n        k = «k + 1→k + 2»\n        return y * k\n\n    x = inner(x)\n    torch._dynamo.graph_break()\n    return inner(x) - k\n",
            "optimizer's class": "p = nn.Parameter(torch.ones(3))\no = torch.optim.«SGD([p], lr=0.5)→Adagrad([p], lr=0.25)»\n\n\ndef program(x):\n    p.grad = torch.ones(3)\n    o.step()\n    return p * 2\n\n\ndef state():\n    return p\n",
        }
    ),
    **rows(
        {
            "graph break, global read after it": "«BY = 2.0→BY = 3.0»\n\n\ndef program(x):\n    y = x * 2\n    torch._dynamo.graph_break()\n    return y * BY\n",
            "graph break, callee edited after it": "def inner(x):\n    return «x + 1→x + 2»\n\n\ndef program(x):\n    y = x * 2\n    torch._dynamo.graph_break()\n    return inner(y)\n",
            "graph break in a comprehension, callee edited": "def breaks(x):\n    torch._dynamo.graph_break()\n    return «x + 1→x - 1»\n\n\ndef program(x):\n    y = x * 2\n    parts = [breaks(y) * n for n in (1, 2)]\n    return parts[0] * parts[1]\n",
            "graph break in a callee": "def inner(x):\n    y = x + 1\n    torch._dynamo.graph_break()\n    return «y * 2→y * 3»\n\n\ndef program(x):\n    return inner(x * 2) + 1\n",
            "graph break under a context manager": "def inner(x):\n    y = x + 1\n    torch._dynamo.graph_break()\n    return «y * 2→y * 3»\n\n\ndef program(x):\n    with torch.no_grad():\n        y = inner(x * 2)\n    return x * y\n",
            "optimizer's rate": "p = nn.Parameter(torch.ones(3))\no = torch.optim.SGD([p], «lr=0.5→lr=0.25»)\n\n\ndef program(x):\n    p.grad = torch.ones(3)\n    o.step()\n    return p * 2\n\n\ndef state():\n    return p\n",
            "optimizer's compiled step": "p = nn.Parameter(torch.ones(3))\no = torch.optim.SGD([p], lr=0.5, «momentum=0.5→momentum=0.25»)\nprogram = o.step\n\n\ndef inputs():\n    for _ in range(3):\n        p.grad = torch.ones(3)\n        yield ()\n\n\ndef state():\n    return p\n",
        },
        how="partly",
    ),
    **rows(
        {
            "Python's random numbers, of an object": "import random\n\nr = random.«Random(3)→Random(4)»\n\n\ndef program(x):\n    return x * r.random()\n",
            "graph break in a loop": "def program(x):\n    for i in range(2):\n        x = x * 2\n        torch._dynamo.graph_break()\n        x = «x + i→x - i»\n    return x\n",
        },
        how="unfit",
    ),
    **rows(
        {
            "counter in a module, unchanged": "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.n = 0\n\n    def forward(self, x):\n        self.n += 1\n        return x * 2\n\n\nprogram = M()\n\n\ndef state():\n    return program.n\n",
            "counter in a global, unchanged": "N = 0\n\n\ndef program(x):\n    global N\n    N += 1\n    return x * 2\n\n\ndef state():\n    return N\n",
            "list appended to, unchanged": "L = []\n\n\ndef program(x):\n    L.append(x * 2)\n    return x + 1\n\n\ndef state():\n    return L\n",
            "object's attribute written, unchanged": "class A:\n    pass\n\n\nbox = A()\n\n\ndef program(x):\n    box.last = x * 2\n    return x + 1\n\n\ndef state():\n    return box.last\n",
            "input written, unchanged": "def inputs():\n    return [(torch.ones(3),)]\n\n\ndef program(x):\n    x.add_(1)\n    return x * 2\n",
            "buffer replaced, unchanged": "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.register_buffer('b', torch.zeros(1))\n\n    def forward(self, x):\n        self.b = self.b + 1\n        return x + self.b\n\n\nprogram = M()\n\n\ndef inputs():\n    return [(torch.ones(3),)] * 3\n\n\ndef state():\n    return program.b\n",
            "random numbers, unchanged": "def program(x):\n    return x + torch.rand(3, 4) + F.dropout(x, 0.5)\n",
            "module that is called where a trace is given up": "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.b = Breaks()\n\n    def forward(self, x):\n        return self.b(x * 3)\n\n\nclass Breaks(nn.Module):\n    def forward(self, x):\n        torch._dynamo.graph_break()\n        return x * 2\n\n\nprogram = M()\n«# here→# there»\n",
            "function of torch.jit.script, unchanged": "@torch.jit.script\ndef inner(x):\n    return x * 2\n\n\n«# here→# there»\n\n\ndef program(x):\n    return inner(x) + 1\n",
            "graph break, unchanged": "def program(x):\n    y = x * 2\n    torch._dynamo.graph_break()\n    return y + 1\n",
            "graph break with a closure, of a function made before, unchanged": "def make(k):\n    def program(x):\n        x = x + k\n        torch._dynamo.graph_break()\n        return x * k\n\n    return program\n\n\n«# here→# there»\nprogram = make(2.0)\n",
            "graph break in a comprehension, unchanged": "def breaks(x, n):\n    torch._dynamo.graph_break()\n    return x + n\n\n\n«# here→# there»\n\n\ndef program(x):\n    y = x * 2\n    parts = [breaks(y, n) for n in (1, 2)]\n    return parts[0] * parts[1]\n",
            "graph break in a comprehension in a closure, unchanged": "def breaks(x, n):\n    torch._dynamo.graph_break()\n    return x + n\n\n\ndef make(k):\n    def program(x):\n        y = x * 2\n        parts = {n: breaks(y * k, n) for n in (1, 2)}\n        return parts[1] * parts[2] * k\n\n    return program\n\n\n«# here→# there»\nprogram = make(2.0)\n",
            "graph break with a closure that is written, unchanged": "«# here→# there»\n\n\ndef program(x):\n    k = 2.0\n\n    def inner(y):\n        nonlocal k\n        k = k + 1\n        return y * k\n\n    x = inner(x)\n    torch._dynamo.graph_break()\n    return inner(x) - k\n",
        },
        how="used",
        differs=False,
    ),
    **rows(
        {
            "Python's random numbers": "import random\n\n\ndef program(x):\n    random.«seed(3)→seed(4)»\n    return x * random.random()\n"
        },
        how="varies",
    ),
}
