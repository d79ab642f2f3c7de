"""User-written Triton kernels as text: one canonical form, and what has none."""

from __future__ import annotations

import sys
import types
from typing import Any

import msgspec
import pytest
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st
from request_parts import GPU, GPU_TOOLCHAIN, request_of
from torchrelay.compiler import decoding
from torchrelay.compiler.errors import LimitExceeded, MalformedRequest, RelayError
from torchrelay.compiler.graph import triton_kernels
from torchrelay.compiler.request import allowed_names, codec, key, schema, triton_source
from torchrelay.compiler.request.triton_source import BadKernelSource
from torchrelay.compiler.request.validate import check_request

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
        "constants": [triton_source.constant_text("FACTOR", 1.5, constexpr=True)],
        "functions": {
            "scale_kernel": triton_source.function_text(KERNEL),
            "doubled": triton_source.function_text(HELPER),
        },
    }
    return triton_source.module_text(**{**parts, **changes})


def kernel(text: str | None = None, **changes: Any) -> schema.KernelSource:
    base = schema.KernelSource(
        "scale_kernel",
        source() if text is None else text,
        [schema.KernelConfig([("BLOCK", 64)], 4, 3, 1, None)],
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
    triton_source.check(kernel())


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
    assert triton_source.function_text(other) == triton_source.function_text(KERNEL)


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
    text = triton_source.function_text(f"def f(n):\n    {body}    return x\n")
    found: list[Any] = []
    for each in (f"def f(n):\n    {body}    return x\n", text):
        namespace: dict[str, Any] = {}
        exec(each, namespace)
        found.append(namespace["f"](7))
    assert found[0] == found[1]
    assert triton_source.function_text(text) == text
    assert "one" not in text and "comment  " not in text.replace('"# no comment  "', "")


def request_key(*kernels: schema.KernelSource) -> str:
    return key.key_of(request_of(toolchain=GPU_TOOLCHAIN, target=GPU, kernels=list(kernels)))


def test_what_a_kernel_is_made_of_changes_the_key() -> None:
    functions = {
        "scale_kernel": triton_source.function_text(KERNEL),
        "doubled": triton_source.function_text(HELPER),
    }
    constant = triton_source.constant_text("FACTOR", 2.5, constexpr=True)
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
    names = decoding.from_msgpack(codec.encode_request(codec.unpack_request(codec.pack_request(PLAIN))))
    later = (
        "kernels",
        "eager",
        "tuning_lock",
        "meshes",
        "exact_sizes",
        "libraries",
        "bases",
        "levels",
        "unbacked",
    )
    assert list(names) == [field for field in schema.GraphRequest.__struct_fields__ if field not in later]
    held = msgspec.structs.replace(PLAIN, kernels=[kernel()])
    assert codec.unpack_request(codec.pack_request(held)) == held


PLAIN = request_of([schema.Node("output", "", [None])], toolchain=GPU_TOOLCHAIN, target=GPU)


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
        triton_source.check(schema.KernelSource("k", text, []))


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
    with pytest.raises(BadKernelSource) as caught:
        triton_source.check(schema.KernelSource("k", text, []))
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
        triton_source.check(kernel(text))
    except BadKernelSource:
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
    call = schema.Node(
        "call_function",
        allowed_names.TRITON_CALL,
        [],
        [
            ("constant_args", schema.DictArg([("BLOCK", 64), ("KIND", schema.TritonDType("float16"))])),
            ("grid", schema.ListArg([schema.TupleArg([1, schema.Sym("s0"), 1])])),
            ("kernel", schema.UserKernel(0)),
            ("kwargs", schema.DictArg([("x_ptr", schema.Ref(0))])),
        ],
    )
    whole = msgspec.structs.replace(
        PLAIN,
        graph=schema.Graph(
            [schema.Node("placeholder", "", []), call, schema.Node("output", "", [schema.Ref(0)])]
        ),
        inputs=[schema.TensorInput(["s0"], [1], "float32", "cuda", requires_grad=False)],
        symbols=[schema.Symbol("s0", 8, 2, None)],
        kernels=[kernel()],
    )
    check_request(whole, codec.Limits())
    plain = decoding.from_msgpack(codec.encode_request(whole))
    for _ in range(data.draw(st.integers(1, 3))):
        plain = data.draw(strategies.damaged(plain))
    try:
        check_request(codec.unpack_request(codec.compress(msgspec.msgpack.encode(plain))), codec.Limits())
    except RelayError:
        pass


def test_too_many_kernels_and_too_much_source_are_refused() -> None:
    held = msgspec.structs.replace(PLAIN, kernels=[kernel()])
    for limits, reason in (
        (codec.Limits(kernels=0), "1 user-written kernels, 0 allowed"),
        (codec.Limits(source_bytes=100), "source of more than 100 bytes"),
    ):
        with pytest.raises(LimitExceeded, match=reason):
            check_request(held, limits)


def test_a_refused_module_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    probe = types.ModuleType("torchrelay_test_probe")
    probe.hit = lambda: ran.append(1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchrelay_test_probe", probe)
    text = module("pass", head="import torchrelay_test_probe as p\np.hit()\n")
    with pytest.raises(MalformedRequest, match="imports 'torchrelay_test_probe'"):
        triton_kernels.build(schema.KernelSource("k", text, []))
    assert ran == []
