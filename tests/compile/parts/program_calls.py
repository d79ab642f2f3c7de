"""Changes of what a program is called with, and of PyTorch's state around its calls."""

# ruff: noqa: E501 (a row is a program, its change and what the next start does)

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from program_changes import FUNCTION, Change, edit, rows
from program_modules import MODEL
from program_starts import Around
from program_values import AUTOCAST

determinism: Any = torch.utils.deterministic

CALL = """
def inputs():
    return [(torch.linspace(1, 2, 12).view(3, 4).clone(),)]


def program(x, *more, **named):
    y = x * 2
    for each in more:
        y = y + (1 if each is None else each)
    for key, value in named.items():
        y = y * (len(key) + value)
    return y.sum(0) + 1 / y.shape[0] + x.dim() + y.stride(0)
"""
ONE = "(torch.linspace(1, 2, 12).view(3, 4).clone(),)"


def call(arguments: str, how: str = "traced", differs: bool = True) -> Change:
    return edit(CALL, (ONE, arguments), how=how, differs=differs)


def two(body: str, before: str, after: str, how: str = "traced", differs: bool = True) -> Change:
    text = f"def inputs():\n    x = torch.ones(4)\n    y = torch.ones(4) * 3\n    return [({before},)]\n\n\ndef program(*a):\n    {body}\n"
    return edit(text, (before, after), how=how, differs=differs)


INPUTS = {
    "first dimension": call("(torch.linspace(1, 2, 20).view(5, 4).clone(),)"),
    "dimension of one": call("(torch.linspace(1, 2, 4).view(1, 4).clone(),)"),
    "dimension of zero": call("(torch.ones(0, 4),)"),
    "number of dimensions": call("(torch.linspace(1, 2, 12).clone(),)"),
    "strides": call("(torch.linspace(1, 2, 12).view(4, 3).t(),)"),
    "dtype": call("(torch.linspace(1, 2, 12).view(3, 4).double(),)"),
    "dtype int": call("(torch.arange(12).view(3, 4),)"),
    "requires_grad": call("(torch.linspace(1, 2, 12).view(3, 4).clone().requires_grad_(),)"),
    "Parameter": call("(nn.Parameter(torch.linspace(1, 2, 12).view(3, 4).clone()),)"),
    "another tensor": call("(torch.linspace(3, 4, 12).view(3, 4).clone(),)", how="used"),
    "number of arguments": call("(torch.ones(3, 4), torch.ones(3, 4))"),
    "None for a tensor": two("return a[0] + (1 if a[1] is None else a[1])", "x, y", "x, None"),
    "float for a tensor": two("return a[0] + a[1]", "x, y", "x, 2.0"),
    "float": two("return a[0] * a[1]", "x, 2.0", "x, 3.0"),
    "int": two("return a[0] * a[1]", "x, 2", "x, 3"),
    "bool for an int": two("return a[0] * (5 if a[1] is True else a[1])", "x, 1", "x, True"),
    "string": two("return getattr(a[0], a[1])()", "x, 'sin'", "x, 'cos'"),
    "length of a list": two("return sum(a[0])", "[x, y]", "[x, y, y]"),
    "list becomes tuple": two("return a[0][0] * (2 if isinstance(a[0], list) else 3)", "[x, y]", "(x, y)"),
    "order of a list": two("return a[0][0] - a[0][1]", "[x, y]", "[y, x]", how="used"),
    "keys of a dict": two("return a[0].get('b', x := a[0]['a']) + x", "{'a': x, 'b': y}", "{'a': x, 'c': y}"),
    "order of a dict": two(
        "return [v * i for i, v in enumerate(a[0].values())]", "{'a': x, 'b': y}", "{'b': y, 'a': x}"
    ),
    "values of a dict": two("return a[0]['n'] * a[0]['a']", "{'a': x, 'n': 2}", "{'a': x, 'n': 3}"),
    "nested list": two(
        "return a[0]['n'][1][0] * x if False else a[0]['n'][1][0] * a[0]['a']",
        "{'a': x, 'n': (1, [2])}",
        "{'a': x, 'n': (1, [3])}",
    ),
    "function": two("return a[1](a[0])", "x, torch.sin", "x, torch.cos"),
    "one tensor twice": two("a[0].add_(1)\n    return a[0] * a[1]", "x.clone(), y - 2", "*[x.clone()] * 2"),
    "two tensors for one": two(
        "a[0].add_(1)\n    return a[0] * a[1]", "*[x.clone()] * 2", "x.clone(), x.clone()"
    ),
    "view of the other": two("a[0].add_(1)\n    return a[0] * a[1]", "x.clone(), x.clone()", "x, x.view(4)"),
    "break before any graph, a number": two(
        "torch._dynamo.graph_break()\n    return a[0] * a[1]", "x, 2", "x, 3", how="partly"
    ),
    "break before any graph, another tensor": two(
        "torch._dynamo.graph_break()\n    return a[0] * a[1]", "x, 2", "y, 2", how="used"
    ),
    "function of pybind11's": two(
        "return a[0] * (3 if a[1]() is None else 2)", "x, torch._C._get_tracing_state", "x, lambda: 1"
    ),
    "same storage, other part": two("a[0].add_(1)\n    return a[0] * a[1]", "x[:3], y[:3]", "x[:3], x[1:]"),
    "is": two("return a[0] * 2 if a[0] is a[1] else a[0] * 3", "x, y", "x, x"),
    "is not": two("return a[0] * 2 if a[0] is a[1] else a[0] * 3", "x, x", "x, x.clone()"),
    "conjugate": two(
        "return torch.view_as_real(torch.resolve_conj(a[0]) * 2)",
        "torch.ones(3) * 1j",
        "(torch.ones(3) * 1j).conj()",
    ),
    "expanded": two("return a[0] * 2 + a[0].stride(0)", "torch.ones(3, 4)", "torch.ones(4).expand(3, 4)"),
    "channels last": two(
        "return a[0] * 2 + a[0].stride(1)",
        "torch.ones(1, 2, 3, 3)",
        "torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last)",
    ),
    "storage offset": two(
        "return a[0] * 2 + a[0].storage_offset()", "torch.ones(4)", "torch.ones(5)[1:]", how="varies"
    ),
    "other shapes after": edit(CALL, (ONE, ONE + ", (torch.ones(5, 4),)"), how="partly"),
    "two dtypes in another order": edit(
        CALL.replace(ONE, "(torch.ones(3, 4),), (torch.ones(3, 4).double(),)"),
        (
            "(torch.ones(3, 4),), (torch.ones(3, 4).double(),)",
            "(torch.ones(3, 4).double(),), (torch.ones(3, 4),)",
        ),
        how="used",
    ),
    "mark_dynamic": call(
        "(lambda x: (torch._dynamo.mark_dynamic(x, 0), (x,))[1])(torch.linspace(1, 2, 12).view(3, 4).clone())",
        differs=False,
    ),
    "mark_static_address": call(
        "(lambda x: (torch._dynamo.mark_static_address(x), (x,))[1])(torch.linspace(1, 2, 12).view(3, 4).clone())",
        differs=False,
        how="used",
    ),
    "inference tensor": edit(
        CALL,
        (ONE, "(make(),)"),
        (
            "def program",
            "def make():\n    with torch.inference_mode():\n        return torch.linspace(1, 2, 12).view(3, 4).clone()\n\n\ndef program",
        ),
        differs=False,
    ),
    **rows(
        {
            "tensor subclass": "class S(torch.Tensor):\n    @classmethod\n    def __torch_function__(cls, f, types, args=(), kwargs=None):\n        return super().__torch_function__(f, types, args, kwargs or {}) * 2\n\n\ndef inputs():\n    return «[(torch.ones(3),)]→[(torch.ones(3).as_subclass(S),)]»\n\n\ndef program(x):\n    return x.sin()\n",
            "tensor's gradient": "def inputs():\n    x = torch.ones(3)\n    «# here→x.grad = torch.ones(3)»\n    return [(x,)]\n\n\ndef program(x):\n    return x * 2 if x.grad is None else x * 3\n",
            "tensor's attribute": "def inputs():\n    x = torch.ones(3)\n    «x.by = 2.0→x.by = 3.0»\n    return [(x,)]\n\n\ndef program(x):\n    return x * x.by\n",
            "tensor's attribute added": "def inputs():\n    x = torch.ones(3)\n    «# here→x.by = 3.0»\n    return [(x,)]\n\n\ndef program(x):\n    return x * getattr(x, 'by', 2.0)\n",
            "leaf or not": "def inputs():\n    x = torch.ones(3, requires_grad=True)\n    «# here→x = x * 1»\n    return [(x,)]\n\n\ndef program(x):\n    return x * (2 if x.is_leaf else 3)\n",
            "keyword": "def inputs():\n    return [(torch.ones(3), {«'by': 2.0→'by': 7.0»})]\n\n\ndef inner(x, by=1.0, **named):\n    return x * by + len(named)\n\n\ndef program(x, named):\n    return inner(x, **named)\n",
        }
    ),
    **rows(
        {
            "branch on a tensor": "def inputs():\n    return [(«torch.ones(3)→-torch.ones(3)»,)]\n\n\ndef program(x):\n    if x.sum() > 0:\n        return x * 2\n    return x * 3\n",
            "item of a tensor": "def inputs():\n    return [(«torch.ones(3)→2 * torch.ones(3)»,)]\n\n\ndef program(x):\n    return x * x.sum().item()\n",
        },
        how="partly",
    ),
}

STATE = """
def inputs():
    return [(torch.linspace(-1, 2, 16).view(4, 4).requires_grad_(),)]


def program(x):
    y = x @ x + torch.ones(4)
    return y.sum(0), torch.full((2,), 1.5)
"""


@contextlib.contextmanager
def restored(get: Any, set_: Any, value: Any) -> Iterator[None]:
    before = get()
    set_(value)
    try:
        yield
    finally:
        set_(before)


def ask(expression: str, around: Around, how: str = "traced", differs: bool = True) -> Change:
    """A program that reads a setting itself."""
    return Change(
        text=f"def program(x):\n    return x * 2 if {expression} else x * 3\n",
        around=around,
        how=how,
        differs=differs,
    )


def surrounding(around: Around, how: str = "traced", differs: bool = True, text: str = STATE) -> Change:
    return Change(text=text, around=around, how=how, differs=differs)


class Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def default_dtype() -> contextlib.AbstractContextManager[None]:
    return restored(torch.get_default_dtype, torch.set_default_dtype, torch.float64)


def precision() -> contextlib.AbstractContextManager[None]:
    return restored(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium")


def deterministic() -> contextlib.AbstractContextManager[None]:
    return restored(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)


def threads() -> contextlib.AbstractContextManager[None]:
    return restored(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1)


SETTINGS = {
    "no_grad": surrounding(torch.no_grad),
    "inference_mode": surrounding(torch.inference_mode),
    "autocast": surrounding(lambda: torch.autocast("cpu", torch.bfloat16)),
    "autocast's dtype": surrounding(lambda: torch.autocast("cpu", torch.float16)),
    "autocast off": surrounding(lambda: torch.autocast("cpu", enabled=False), how="used", differs=False),
    "default dtype": surrounding(default_dtype),
    "deterministic algorithms": surrounding(deterministic, differs=False),
    "precision of products": surrounding(precision, differs=False),
    "threads": surrounding(threads, differs=False, how="used"),
    "anomaly detection": surrounding(torch.autograd.detect_anomaly, differs=False, how="used"),
    "function mode": surrounding(Doubling, differs=False),
    "default device": surrounding(lambda: torch.device("meta")),
    "hooks for saved tensors": surrounding(
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t)
    ),
    "save_on_cpu": surrounding(torch.autograd.graph.save_on_cpu, differs=False),
    "read: grad mode": ask("torch.is_grad_enabled()", torch.no_grad),
    "read: inference mode": ask("torch.is_inference_mode_enabled()", torch.inference_mode),
    "read: autocast": ask("torch.is_autocast_enabled('cpu')", lambda: torch.autocast("cpu")),
    "read: autocast's dtype": ask(
        "torch.get_autocast_dtype('cpu') == torch.bfloat16", lambda: torch.autocast("cpu", torch.float16)
    ),
    "read: default dtype": ask("torch.get_default_dtype() == torch.float32", default_dtype),
    "read: deterministic algorithms": ask("torch.are_deterministic_algorithms_enabled()", deterministic),
    "read: precision": ask("torch.get_float32_matmul_precision() == 'highest'", precision),
    "read: threads": ask(f"torch.get_num_threads() == {torch.get_num_threads()}", threads, how="partly"),
    "read: anomaly": ask("torch.is_anomaly_enabled()", torch.autograd.detect_anomaly, how="partly"),
    "read: cudnn": ask("torch.backends.cudnn.enabled", lambda: torch.backends.cudnn.flags(enabled=False)),
    "read: mkldnn": ask("torch.backends.mkldnn.enabled", lambda: torch.backends.mkldnn.flags(enabled=False)),
    "read: cudnn.benchmark": ask(
        "torch.backends.cudnn.benchmark", lambda: torch.backends.cudnn.flags(enabled=True, benchmark=True)
    ),
    "read: fill uninitialized memory": ask(
        "torch.utils.deterministic.fill_uninitialized_memory",
        lambda: restored(
            lambda: determinism.fill_uninitialized_memory,
            lambda v: setattr(determinism, "fill_uninitialized_memory", v),
            False,
        ),
    ),
    "read: SDPA by flash": ask(
        "torch.backends.cuda.flash_sdp_enabled()",
        lambda: restored(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
        how="partly",
    ),
    "read: multithreading": ask(
        "torch.autograd.is_multithreading_enabled()",
        lambda: torch.autograd.set_multithreading_enabled(False),
        how="partly",
    ),
    "read: Inductor's configuration": ask(
        "torch._inductor.config.max_autotune",
        lambda: torch._inductor.config.patch(max_autotune=True),
        how="varies",
    ),
    "read: Dynamo's configuration": ask(
        "torch._dynamo.config.capture_scalar_outputs",
        lambda: torch._dynamo.config.patch(capture_scalar_outputs=True),
        how="varies",
    ),
    "Dynamo's configuration": surrounding(
        lambda: torch._dynamo.config.patch(specialize_float=True), differs=False, text=FUNCTION
    ),
    "Dynamo's cache limit": surrounding(
        lambda: torch._dynamo.config.patch(recompile_limit=3), differs=False, text=FUNCTION
    ),
    "model under no_grad": surrounding(torch.no_grad, text=MODEL),
    "model under autocast": surrounding(lambda: torch.autocast("cpu", torch.bfloat16), text=MODEL),
}
"""What is around the calls of the start after the change."""


def same(text: str, *edits: tuple[str, str]) -> Change:
    return edit(text, *edits, how="used", differs=False)


SAME = {
    "autocast object": same(AUTOCAST, ("context =", "# a comment\ncontext =")),
    "comment": same(FUNCTION, ("# a comment", "# another comment")),
    "comment of several lines": same(FUNCTION, ("def deep", "# one\n# two\n# three\ndef deep")),
    "blank lines": same(FUNCTION, ("def program", "\n\n\n\ndef program")),
    "blank lines inside": same(FUNCTION, ("    if FLAG", "\n\n    if FLAG")),
    "line wrapped": same(FUNCTION, ("middle(x) * SCALE", "middle(\n        x\n    ) * SCALE")),
    "docstring of a function that is not called": same(
        FUNCTION, ("def unrelated(x):\n", 'def unrelated(x):\n    """More."""\n')
    ),
    "docstring of the module": Change(
        text=FUNCTION,
        patch=lambda m, module: m.setattr(module, "__doc__", "Other"),
        how="used",
        differs=False,
    ),
    "global that is not read": same(FUNCTION, ("OTHER = 1", "OTHER = 2")),
    "key that is not read": same(FUNCTION, ('"unused": 5', '"unused": 6')),
    "global added": same(FUNCTION, ("OTHER = 1", "OTHER = 1\nMORE = [1]")),
    "function that is not called": same(FUNCTION, ("x - 1", "x - 2")),
    "function added": same(FUNCTION, ("def unrelated", "def added(x):\n    return x\n\n\ndef unrelated")),
    "functions in another order": same(
        FUNCTION,
        ("def deep(x):\n    return x * 3\n\n\n", ""),
        ("def program", "def deep(x):\n    return x * 3\n\n\ndef program"),
    ),
    "globals in another order": same(
        FUNCTION, ("OTHER = 1\n", ""), ("SCALE = 2.0\n", "SCALE = 2.0\nOTHER = 1\n")
    ),
    "same values of new objects": same(
        FUNCTION, ("LIST = [1.0, 2.0]", "LIST = [float(each) for each in (1, 2)]")
    ),
    "same number by other text": same(FUNCTION, ("SCALE = 2.0", "SCALE = 4.0 / 2.0")),
    "import added": same(FUNCTION, ("OTHER = 1", "import json\n\nOTHER = 1")),
    "annotation of a parameter": same(FUNCTION, ("def deep(x)", "def deep(x: torch.Tensor) -> torch.Tensor")),
    "module: unchanged": same(MODEL),
    "module: eval and back": same(MODEL, ("# after", "program.eval().train()")),
    "module: attribute that is not read": same(MODEL, ("# after", "program.unread = 3")),
    "module: state loaded": same(MODEL, ("# after", "program.load_state_dict(Model().state_dict())")),
    "module: hook added and removed": same(
        MODEL, ("# after", "program.register_forward_hook(print).remove()")
    ),
    "module: a copy": same(MODEL, ("# after", "import copy\nprogram = copy.deepcopy(program)")),
    "module: other gradients": same(
        MODEL,
        ("# after", "def touch():\n    for p in program.parameters():\n        p.grad = torch.ones_like(p)"),
    ),
    "inputs made in another way": same(
        FUNCTION,
        (
            "def program",
            "def inputs():\n    return [(torch.linspace(-1, 2, 12).view(3, 4).clone().detach().requires_grad_(),)]\n\n\ndef program",
        ),
    ),
    "other values of inputs": edit(FUNCTION, ("linspace(-1, 2", "linspace(-3, 2"), how="used"),
    "random seed": same(FUNCTION, ("def program", "torch.manual_seed(77)\n\n\ndef program")),
    "garbage before": same(FUNCTION, ("OTHER = 1", "JUNK = [object() for _ in range(1000)]\nOTHER = 1")),
}
"""What does not matter."""
