"""User-written Triton kernels as text: one canonical form, and what has none."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

import strategies
from torchrelay.compiler import decoding, key, names, user_kernels, wire
from torchrelay.compiler.check import check
from torchrelay.compiler.errors import MalformedRequest, RelayError
from torchrelay.compiler.user_kernels import BadKernel

KERNEL = '''\
def scale_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr = 128):
    """Doubles x."""
    # where this program works
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    x = tl.load(x_ptr + offsets, mask=offsets < n)  # bounds
    tl.store(out_ptr + offsets, doubled(x) * FACTOR, mask=offsets < n)
'''
HELPER = "def doubled(x):\n    return 2 * x\n"


def source(**changes: Any) -> str:
    parts: dict[str, Any] = {
        "imports": [],
        "constants": [user_kernels.constant_text("FACTOR", 1.5, constexpr=True)],
        "functions": {
            "scale_kernel": user_kernels.function_text(KERNEL),
            "doubled": user_kernels.function_text(HELPER),
        },
    }
    return user_kernels.module_text(**{**parts, **changes})


def kernel(text: str | None = None, **changes: Any) -> wire.KernelSource:
    base = wire.KernelSource(
        "scale_kernel",
        source() if text is None else text,
        [wire.KernelConfig([("BLOCK", 64)], 4, 3, 1, None)],
    )
    return msgspec.structs.replace(base, **changes)


def test_the_form_has_neither_comments_nor_docstrings_nor_empty_lines() -> None:
    assert source() == (
        "import triton\n"
        "import triton.language as tl\n"
        "FACTOR = tl.constexpr(1.5)\n"
        "@triton.jit\n"
        "def doubled(x):\n"
        "    return 2 * x\n"
        "@triton.jit\n"
        "def scale_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr = 128):\n"
        "    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
        "    x = tl.load(x_ptr + offsets, mask=offsets < n)\n"
        "    tl.store(out_ptr + offsets, doubled(x) * FACTOR, mask=offsets < n)\n"
    )
    user_kernels.check(kernel())


@pytest.mark.parametrize(
    "other",
    [
        KERNEL.replace("  # bounds", ""),
        KERNEL.replace("\n\n", "\n\n    # more\n\n\n"),
        KERNEL.replace('    """Doubles x."""\n', ""),
        KERNEL.replace('"""Doubles x."""', '"""Doubles x.\n\n    At length.\n    """'),
        KERNEL.replace("n)\n", "n)   \n") + "\n\n# the end\n",
    ],
)
def test_comments_and_layout_are_not_the_kernel(other: str) -> None:
    assert other != KERNEL
    assert user_kernels.function_text(other) == user_kernels.function_text(KERNEL)


@pytest.mark.parametrize(
    "body",
    [
        'x = "# no comment  "\n',
        "x = '''a  \n\n  # text\nb'''  # comment\n",
        'x = f"{n}  # text"\n',
        'x = f"""{n}  \n\n# text {n}\n"""\n',
        "x = (  # one\n\n        2\n        # two\n    )\n",
    ],
)
def test_texts_stay_as_they_are(body: str) -> None:
    text = user_kernels.function_text(f"def f(n):\n    {body}    return x\n")
    found: list[Any] = []
    for each in (f"def f(n):\n    {body}    return x\n", text):
        namespace: dict[str, Any] = {}
        exec(each, namespace)
        found.append(namespace["f"](7))
    assert found[0] == found[1]
    assert user_kernels.function_text(text) == text
    assert "one" not in text and "comment  " not in text.replace('"# no comment  "', "")


def request_key(*kernels: wire.KernelSource) -> str:
    request = wire.GraphRequest(
        schema=wire.SCHEMA,
        graph=wire.Graph(nodes=[]),
        inputs=[],
        symbols=[],
        relations=[],
        constants=[],
        ambient=wire.Ambient(True, False, [], "float32", "highest", False, False, True, 1, []),
        mode="default",
        options=[],
        aot_options=[],
        toolchain=wire.Toolchain("cp311", "2.13.0", "3.6.0", "12.8", "linux-x86_64"),
        target=wire.Target("cuda", "NVIDIA H100", "9.0", 132, []),
        kernels=list(kernels),
    )
    return key.key_of(request)


def test_what_a_kernel_is_made_of_changes_the_key() -> None:
    functions = {
        "scale_kernel": user_kernels.function_text(KERNEL),
        "doubled": user_kernels.function_text(HELPER),
    }
    constant = user_kernels.constant_text("FACTOR", 2.5, constexpr=True)
    config = kernel().configs[0]
    made = [
        kernel(),
        kernel(source(constants=[constant])),
        kernel(source(functions={**functions, "doubled": functions["doubled"].replace("2", "3")})),
        kernel(source(functions={**functions, "scale_kernel": functions["scale_kernel"].replace("<", "<=")})),
        kernel(configs=[]),
        kernel(configs=[config, config]),
        *(kernel(configs=[msgspec.structs.replace(config, **change)]) for change in CHANGES),
    ]
    keys = [request_key(), *(request_key(each) for each in made)]
    assert len(set(keys)) == len(keys)


CHANGES: list[dict[str, Any]] = [
    {"kwargs": [("BLOCK", 128)]},
    {"num_warps": 8},
    {"num_stages": 2},
    {"num_ctas": 2},
    {"maxnreg": 64},
]


def test_a_request_without_kernels_has_the_bytes_it_had_before_there_were_any() -> None:
    names = decoding.from_msgpack(wire.encode_request(wire.unpack_request(wire.pack_request(PLAIN))))
    later = ("kernels", "tuning_lock", "meshes")
    assert list(names) == [field for field in wire.GraphRequest.__struct_fields__ if field not in later]
    assert not wire.holds_source(wire.encode_request(PLAIN))
    held = msgspec.structs.replace(PLAIN, kernels=[kernel()])
    assert wire.holds_source(wire.encode_request(held))
    assert wire.unpack_request(wire.pack_request(held)) == held


PLAIN = wire.GraphRequest(
    schema=wire.SCHEMA,
    graph=wire.Graph(nodes=[wire.Node("output", "", [None])]),
    inputs=[],
    symbols=[],
    relations=[],
    constants=[],
    ambient=wire.Ambient(True, False, [], "float32", "highest", False, False, True, 1, []),
    mode="default",
    options=[],
    aot_options=[],
    toolchain=wire.Toolchain("cp311", "2.13.0", "3.6.0", "12.8", "linux-x86_64"),
    target=wire.Target("cuda", "NVIDIA H100", "9.0", 132, []),
)


# --- the closed form -------------------------------------------------------------------------------------


def module(body: str, *, head: str = "", signature: str = "x_ptr, n", decorator: str = "@triton.jit") -> str:
    """A module whose kernel has one line."""
    return (
        f"import triton\nimport triton.language as tl\n{head}{decorator}\ndef k({signature}):\n    {body}\n"
    )


def test_these_modules_have_the_form() -> None:
    for text in (
        module("pass"),
        module("tl.store(x_ptr, tl.math.exp(n) if FAST else tl.sum(n))", head="FAST = tl.constexpr(True)\n"),
        module("return [max(i, n) for i in range(3)]"),
        module("x = tl.zeros((8,), dtype=KIND)", head="KIND = tl.float16\n"),
        module("x = LIMIT", head="LIMIT = tl.constexpr(float('-inf'))\n"),
        module("x = store(x_ptr)", head="from triton.language.core import store as store\n"),
        module("x = libdevice.exp(n)", head="import triton.language.extra.libdevice as libdevice\n"),
        module("tl.static_assert(n == 1, f'{n} is no 1')"),
        module(
            "while n > 0:\n        n -= 1", signature="x_ptr: tl.tensor, n: 'i32', MODE: tl.constexpr = 'a'"
        ),
        module("x = tl.float32.primitive_bitwidth + tl.cdiv(n, -3)"),
    ):
        user_kernels.check(wire.KernelSource("k", text, []))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (module("pass", head="import os\n"), "imports 'os'"),
        (module("pass", head="import triton as t\n"), "imports 'triton'"),
        (module("pass", head="import triton.runtime as t\n"), "imports 'triton.runtime'"),
        (module("pass", head="from os import system as system\n"), "imports 'system'"),
        (module("pass", head="from triton.runtime import driver as driver\n"), "imports 'driver'"),
        (module("pass", head="from triton import knobs as knobs\n"), "imports 'knobs'"),
        (module("pass", head="from triton.language import *\n"), "imports"),
        (module("pass", head="print('here')\n"), "Expr is neither"),
        (module("pass", head="class C:\n    pass\n"), "ClassDef is neither"),
        (module("pass", head="for i in range(3):\n    pass\n"), "For is neither"),
        (module("pass", head="A = B = 1\n"), "Assign is neither"),
        (module("pass", head="A = open('/etc/passwd')\n"), "A is no constant"),
        (module("pass", head="A = tl.constexpr(print(1))\n"), "A is no constant"),
        (module("pass", head="A = [1, 2]\n"), "A is no constant"),
        (module("pass", head="A = 1\nA = 2\n"), "defined twice"),
        (module("pass", head="__builtins__ = 1\n"), "Python's or Triton's own"),
        (module("pass", head="tl = 1\n"), "defined twice"),
        (module("pass", decorator="@triton.jit(repr=print)"), "not decorated with triton.jit alone"),
        (module("pass", decorator="@print\n@triton.jit"), "not decorated with triton.jit alone"),
        (module("pass", decorator="@triton.constexpr_function"), "not decorated with triton.jit alone"),
        (module("pass", signature="n=print(1)"), "default or an annotation"),
        (module("pass", signature="n: print(1)"), "default or an annotation"),
        (module("pass", signature="n=(lambda: 1)"), "default or an annotation"),
        (module("open(n)"), "uses 'open'"),
        (module("eval(n)"), "uses 'eval'"),
        (module("getattr(n, 'x')"), "uses 'getattr'"),
        (module("other(n)"), "uses 'other'"),
        (module("__import__('os')"), "uses '__import__'"),
        (module("x = n.__class__"), "attribute '__class__'"),
        (module("x = n._x"), "attribute '_x'"),
        (module("import os"), "has a Import"),
        (module("global n"), "has a Global"),
        (module("x = lambda: 1"), "has a Lambda"),
        (module("x = {1: 2}"), "has a Dict"),
        (module("x = (y := 1)"), "has a NamedExpr"),
        (module("x = b'1'"), "constant of type bytes"),
        (module("def f():\n        pass"), "has a FunctionDef"),
        (module("try:\n        pass\n    finally:\n        pass"), "has a Try"),
        (module("triton.runtime.driver(n)"), "uses triton.runtime.driver"),
        (module("tl.core.inspect.os.system(n)"), "uses tl.core.inspect.os.system"),
        (module("pass").replace("pass", "pass  # why"), "not in canonical form"),
        (module("pass") + "\n", "not in canonical form"),
        (module("pass").replace("import triton\n", "import triton\n\n"), "not in canonical form"),
        (module("pass").replace("def k", "def other"), "does not define the kernel"),
        ("def k(:", "cannot be parsed: SyntaxError"),
        ("x = \0", "cannot be parsed"),
        ("(" * 5000 + ")" * 5000, "cannot be parsed"),
        (module("pass", head=f"{'a' * 65} = 1\n"), "not one of up to 64"),
        (module("pass", decorator=f"@a{'.a' * 5000}"), ""),
        (module(f"n{'.a' * 200_000}"), ""),
        (module(f"x = {'-' * 5000}n"), ""),
        (module(f"x = {'-' * 200}n"), "nested deeper than 200"),
        (module(f"x = n{'.a' * 200}"), "nested deeper than 200"),
    ],
)
def test_everything_else_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(BadKernel) as caught:
        user_kernels.check(wire.KernelSource("k", text, []))
    assert reason in str(caught.value)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_module_raises_nothing_but_what_it_says(data: st.DataObject) -> None:
    text = source()
    for _ in range(data.draw(st.integers(1, 3))):
        at, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 12))
        piece = data.draw(st.one_of(st.text(max_size=4), st.sampled_from(PIECES)))
        text = text[:at] + piece + text[at + length :]
    try:
        user_kernels.check(kernel(text))
    except BadKernel:
        pass


PIECES = [
    "\n",
    "    ",
    "@",
    "tl.",
    "__",
    "import os\n",
    "(",
    "'",
    '"""',
    "#",
    "\\",
    ":",
    "\0",
    "\x0c",
    "\r",
    "f'{",
]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_request_with_kernels_raises_nothing_but_relay_errors(data: st.DataObject) -> None:
    call = wire.Node(
        "call_function",
        names.TRITON_CALL,
        [],
        [
            ("constant_args", wire.DictArg([("BLOCK", 64), ("KIND", wire.TritonDType("float16"))])),
            ("grid", wire.ListArg([wire.TupleArg([1, wire.Sym("s0"), 1])])),
            ("kernel", wire.UserKernel(0)),
            ("kwargs", wire.DictArg([("x_ptr", wire.Ref(0))])),
        ],
    )
    whole = msgspec.structs.replace(
        PLAIN,
        graph=wire.Graph([wire.Node("placeholder", "", []), call, wire.Node("output", "", [wire.Ref(0)])]),
        inputs=[wire.TensorInput(["s0"], [1], "float32", "cuda", requires_grad=False)],
        symbols=[wire.Symbol("s0", 8, 2, None)],
        kernels=[kernel()],
    )
    check(whole, wire.Limits())
    plain = decoding.from_msgpack(wire.encode_request(whole))
    for _ in range(data.draw(st.integers(1, 3))):
        plain = data.draw(strategies.damaged(plain))
    try:
        check(wire.unpack_request(wire.compress(msgspec.msgpack.encode(plain))), wire.Limits())
    except RelayError:
        pass


def test_a_refused_module_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    probe = types.ModuleType("torchrelay_test_probe")
    probe.hit = lambda: ran.append(1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchrelay_test_probe", probe)
    text = module("pass", head="import torchrelay_test_probe as p\np.hit()\n")
    with pytest.raises(MalformedRequest, match="imports 'torchrelay_test_probe'"):
        user_kernels.build(wire.KernelSource("k", text, []))
    assert ran == []
