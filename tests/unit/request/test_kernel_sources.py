"""Triton kernels of real modules: gathered with all that they refer to, and the same again when they are rebuilt."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton, not a GPU")

from torchrelay.compiler.errors import MalformedRequest, Unsupported  # noqa: E402
from torchrelay.compiler.graph import decode, encode, triton_kernels  # noqa: E402
from torchrelay.compiler.graph.triton_kernels import describe  # noqa: E402
from torchrelay.compiler.request import schema, triton_source  # noqa: E402
from torchrelay.compiler.torch_internals.dynamo import kernel_side_table  # noqa: E402

MODULE = """\
import math
import os
import triton
import triton.language as tl
from triton.language import cdiv
from triton.language.extra import libdevice

FACTOR = tl.constexpr(1.5)
LIMIT = tl.constexpr(float("-inf"))
KIND = tl.float32
PLAIN = 7
TABLE = [1, 2]
UNUSED = object()

@triton.jit
def doubled(x):
    return 2 * x * FACTOR

@triton.jit
def _both(x):
    return doubled(x) + libdevice.exp(x)

@triton.jit
def kernel(x_ptr, n, BLOCK: tl.constexpr, MODE: tl.constexpr = "a"):
    # where
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for i in range(PLAIN):
        x = tl.load(x_ptr + offsets, mask=offsets < n, other=LIMIT).to(KIND)
    tl.store(x_ptr + offsets, _both(x) + cdiv(n, 2), mask=offsets < n)

CONFIGS = [triton.Config({"BLOCK": b}, num_warps=w) for b, w in ((128, 4), (256, 4), (512, 8))]
tuned = triton.autotune(configs=CONFIGS, key=["n"])(kernel)
"""

Load = Callable[..., types.ModuleType]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """A module from its text, each time from another file under another name."""
    made = 0

    def from_text(text: str = MODULE) -> types.ModuleType:
        nonlocal made
        made += 1
        path = tmp_path / f"checkout{made}" / f"kernels{made}.py"
        path.parent.mkdir()
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(f"kernels_of_a_test_{made}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return from_text


def test_a_kernel_is_gathered_with_all_that_it_refers_to(load: Load) -> None:
    found = describe(load().tuned)
    assert found.name == "kernel"
    assert found.source.splitlines()[:12] == [
        "import triton",
        "import triton.language as tl",
        "from triton.language.standard import cdiv as cdiv",
        "import triton.language.extra.libdevice as libdevice",
        "FACTOR = tl.constexpr(1.5)",
        "KIND = tl.float32",
        "LIMIT = tl.constexpr(float('-inf'))",
        "PLAIN = 7",
        "@triton.jit",
        "def _both(x):",
        "    return doubled(x) + libdevice.exp(x)",
        "@triton.jit",
    ]
    assert [config.kwargs for config in found.configs] == [[("BLOCK", n)] for n in (128, 256, 512)]
    assert [config.num_warps for config in found.configs] == [4, 4, 8]


def test_another_checkout_gives_the_same_bytes(load: Load) -> None:
    elsewhere = "# Copyright\n\n\n" + MODULE.replace("    # where\n", "\n    # somewhere else\n\n").replace(
        "UNUSED = object()", "UNUSED = 3\n\n\ndef other():\n    pass\n"
    )
    assert describe(load().tuned) == describe(load(elsewhere).tuned)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("offsets < n)", "offsets <= n)"),
        ("FACTOR = tl.constexpr(1.5)", "FACTOR = tl.constexpr(2.5)"),
        ("return 2 * x", "return 3 * x"),
        ("KIND = tl.float32", "KIND = tl.float16"),
        ("PLAIN = 7", "PLAIN = 8"),
        ("(512, 8)", "(512, 16)"),
        ("(512, 8)", "(1024, 8)"),
        ('= "a"', '= "b"'),
    ],
)
def test_what_reaches_the_code_reaches_the_bytes(old: str, new: str, load: Load) -> None:
    assert old in MODULE
    assert describe(load().tuned) != describe(load(MODULE.replace(old, new)).tuned)


def test_a_rebuilt_kernel_is_the_same_kernel(load: Load) -> None:
    for name in ("kernel", "tuned"):
        found = describe(getattr(load(), name))
        built = triton_kernels.build(found)
        assert describe(built) == found
        assert triton_kernels.build(found) is built
        function = built.fn if found.configs else built
        assert function.arg_names == ["x_ptr", "n", "BLOCK", "MODE"]
        assert [p.is_constexpr for p in function.params] == [False, False, True, True]
        assert function.params[3].default == "a"
        assert len(function.cache_key) == 64  # Triton reads the source, and what it refers to


def test_a_reference_runs_in_the_first_configuration_that_fits(load: Load) -> None:
    built = triton_kernels.build(describe(load().tuned))
    ran: list[int] = []

    def bench(size: int, *, fits: bool) -> float:
        def run() -> None:
            ran.append(size)
            if not fits:
                raise MemoryError

        try:
            return float(built.do_bench(run, quantiles=(0.5, 0.2, 0.8))[0])
        except MemoryError:
            return float("inf")

    sizes = (128, 256, 512)
    for _ in range(2):
        ran.clear()
        times = {size: bench(size, fits=size != 128) for size in sizes}
        assert min(times, key=lambda size: times[size]) == 256
        assert ran == [128, 256]


def test_inductor_reads_the_source_of_a_rebuilt_kernel(load: Load) -> None:
    import inspect

    from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code

    source = MODULE.replace(".to(KIND)", "")  # Inductor itself cannot write a dtype down
    source = source.replace("import cdiv", "import store").replace("cdiv(n, 2)", "n")
    original = load(source).kernel
    built = triton_kernels.build(describe(original))
    written = user_defined_triton_kernel_transitive_closure_source_code(built)
    assert "def doubled(x):" in written and "FACTOR = tl.constexpr(1.5)" in written
    assert inspect.getsourcelines(built.fn)[1] > 0
    assert "/" not in str(inspect.getsourcefile(built.fn))


REFUSED = {
    "a helper of another name": ("doubled(x) + libdevice", "twice(x) + libdevice", "\ntwice = doubled\n"),
    "a list": ("_both(x) +", "TABLE[0] + _both(x) +", ""),
    "a module that is not Triton's": ("_both(x) +", "math.pi + _both(x) +", ""),
    "a plain function": ("_both(x) +", "plain(x) + _both(x) +", "\ndef plain(x):\n    return x\n"),
    "nothing": ("_both(x) +", "nowhere(x) + _both(x) +", ""),
    "a closed name of Python": ("_both(x) +", "getattr(x, 'y') + _both(x) +", ""),
    "a constant that is too large": ("PLAIN = 7", f"PLAIN = {1 << 70}", ""),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_form_is_unsupported_and_named(what: str, load: Load) -> None:
    old, new, more = REFUSED[what]
    with pytest.raises(Unsupported, match="user-written Triton kernel kernel: "):
        describe(load(MODULE.replace(old, new) + more).kernel)


TUNERS = {
    "restore_value": 'restore_value=["x_ptr"]',
    "reset_to_zero": 'reset_to_zero=["x_ptr"]',
    "prune_configs_by": 'prune_configs_by={"early_config_prune": lambda configs, args, **kwargs: configs}',
    "pre_hook": "pre_hook=lambda kwargs, reset_only=False: None",
    "post_hook": "post_hook=lambda kwargs, exception: None",
}


@pytest.mark.parametrize("what", TUNERS)
def test_what_a_tuner_runs_is_unsupported(what: str, load: Load) -> None:
    with pytest.raises(Unsupported, match=what):
        describe(load(MODULE.replace('key=["n"]', f'key=["n"], {TUNERS[what]}')).tuned)


def test_heuristics_and_hooks_of_a_configuration_are_unsupported(load: Load) -> None:
    heuristics = '\nwith_heuristics = triton.heuristics({"BLOCK": lambda args: 128})(kernel)\n'
    module = load(MODULE + heuristics)
    with pytest.raises(Unsupported, match="a Heuristics cannot be sent"):
        describe(module.with_heuristics)
    with pytest.raises(Unsupported, match=r"pre_hook of triton\.Config"):
        describe(load(MODULE.replace("num_warps=w", "num_warps=w, pre_hook=print")).tuned)


def test_a_variable_of_the_function_around_a_kernel_is_unsupported(load: Load) -> None:
    text = "import triton\nimport triton.language as tl\ndef make(size):\n    @triton.jit\n    def inner(x_ptr):\n"
    text += "        tl.store(x_ptr, size)\n    return inner\n"
    with pytest.raises(Unsupported, match="uses size of the function around it"):
        describe(load(text).make(tl_constexpr(3)))


def tl_constexpr(value: int) -> Any:
    import triton.language

    return triton.language.constexpr(value)


def test_two_things_of_one_name_are_unsupported(load: Load) -> None:
    other = load(MODULE.replace("tl.constexpr(1.5)", "tl.constexpr(9.5)"))
    sys.modules["kernels_of_elsewhere"] = other
    try:
        text = MODULE.replace(
            "import math\n", "import math\nfrom kernels_of_elsewhere import doubled as doubled\n"
        )
        start, end = text.index("@triton.jit\ndef doubled"), text.index("@triton.jit\ndef _both")
        text = text[:start] + text[end:]
        text = text.replace("doubled(x) + libdevice", "doubled(x) + FACTOR + libdevice")
        with pytest.raises(Unsupported, match="two different things are called FACTOR"):
            describe(load(text).kernel)
    finally:
        del sys.modules["kernels_of_elsewhere"]


# --- in a graph ------------------------------------------------------------------------------------------


def graph_of(kernel: Any, *, grid: list[Any], constants: dict[str, Any]) -> torch.fx.GraphModule:
    """As Dynamo writes a call of a kernel down."""
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

    made = torch.fx.Graph()
    x, n = made.placeholder("x"), made.placeholder("n")
    size = made.call_function(torch.ops.aten.add.Tensor, (n, 1))
    call: dict[str, Any] = {
        "kernel_idx": kernel_side_table.register_user_kernel(kernel),
        "constant_args_idx": kernel_side_table.register_user_kernel_constants(constants),
        "grid": [tuple(size if part is None else part for part in triple) for triple in grid],
        "tma_descriptor_metadata": {},
        "kwargs": {"x_ptr": x, "n": n},
    }
    for _ in range(2):
        made.call_function(triton_kernel_wrapper_mutation, (), call)
    made.output((x,))
    return torch.fx.GraphModule({}, made)


def test_a_graph_comes_back_with_its_kernels(load: Load) -> None:
    import triton.language

    module = load()
    for kernel, grid in (
        (module.kernel, [(4, 1, 1)]),
        (module.tuned, [(None, 1, 1), (2, 1, 1), (1, None, 3)]),
    ):
        gm = graph_of(kernel, grid=grid, constants={"MODE": "b", "KIND": triton.language.bfloat16, "m": None})
        encoded = encode.encode_graph(gm)
        (source,) = encoded.kernels
        back = decode.decode_graph(
            encoded.graph, encoded.constants, device_index={}, symbols={}, kernels=[source]
        )
        assert encode.encode_graph(back) == encoded
        call = next(node for node in back.graph.nodes if "triton" in str(node.target))
        assert kernel_side_table.user_kernel(call.kwargs["kernel_idx"]) is triton_kernels.build(source)
        constants = kernel_side_table.user_kernel_constants(call.kwargs["constant_args_idx"])
        assert constants == {"MODE": "b", "KIND": triton.language.bfloat16, "m": None}


@pytest.mark.parametrize("value", ["a\nb", [1], 1 << 70, object()])
def test_an_argument_that_is_no_constant_is_unsupported(value: Any, load: Load) -> None:
    gm = graph_of(load().kernel, grid=[(1, 1, 1)], constants={"MODE": value})
    with pytest.raises(Unsupported, match="node 'triton_kernel_wrapper_mutation'"):
        encode.encode_graph(gm)


def test_a_kernel_that_cannot_be_defined_is_a_typed_error() -> None:
    source = triton_source.module_text([], [], {"k": "def k(x: tl.nothing):\n    pass\n"})
    with pytest.raises(MalformedRequest, match="cannot be defined: AttributeError"):
        triton_kernels.build(schema.KernelSource("k", source, []))
