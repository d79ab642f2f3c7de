"""The gate: valid requests pass, everything else is a typed error, and the work stays bounded."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import msgspec
import pytest
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st
from request_parts import TARGET, TOOLCHAIN, request_of
from torchrelay.compiler import decoding
from torchrelay.compiler.errors import (
    BadExpression,
    BadOption,
    ForbiddenTarget,
    LimitExceeded,
    MalformedRequest,
    RelayError,
    SchemaMismatch,
    Unsupported,
)
from torchrelay.compiler.request import allowed_names, codec, schema
from torchrelay.compiler.request.validate import check_request
from torchrelay.compiler.tuning import records

LIMITS = codec.Limits()


@given(strategies.pinned_requests())
@strategies.RANDOM
def test_a_valid_request_passes(request: schema.GraphRequest) -> None:
    check_request(request, LIMITS)


@given(strategies.pinned_requests(), st.data())
@settings(strategies.RANDOM, max_examples=100)
def test_a_damaged_request_raises_nothing_but_relay_errors(
    request: schema.GraphRequest, data: st.DataObject
) -> None:
    plain = decoding.from_msgpack(codec.encode_request(request))
    for _ in range(data.draw(st.integers(1, 3))):
        plain = data.draw(strategies.damaged(plain))
    try:
        check_request(codec.unpack_request(codec.compress(msgspec.msgpack.encode(plain))), LIMITS)
    except RelayError:
        pass


# --- one damage each ---------------------------------------------------------------------------------------


def placeholder() -> schema.Node:
    return schema.Node(op="placeholder", target="", args=[])


def call(target: str, *args: Any, **kwargs: Any) -> schema.Node:
    return schema.Node(op="call_function", target=target, args=list(args), kwargs=sorted(kwargs.items()))


def method(target: str, *args: Any) -> schema.Node:
    return schema.Node(op="call_method", target=target, args=list(args))


def held(value: Any) -> schema.Node:
    return schema.Node(op="get_attr", target="", args=[value])


def output(value: Any = None) -> schema.Node:
    return schema.Node(op="output", target="", args=[value])


def request(
    *nodes: schema.Node, subgraphs: tuple[schema.Graph, ...] = (), **changes: Any
) -> schema.GraphRequest:
    """A request whose graph is one placeholder, `nodes` and an output."""
    tensor = schema.TensorInput(shape=["s0"], stride=[1], dtype="float32", device="cpu", requires_grad=True)
    fields = {
        "graph": schema.Graph(nodes=[placeholder(), *nodes, output()], subgraphs=list(subgraphs)),
        "symbols": [schema.Symbol(name="s0", hint=8, lower=2, upper=None)],
        "toolchain": msgspec.structs.replace(TOOLCHAIN, torch=strategies.TORCH),
        "target": msgspec.structs.replace(TARGET, cpu=["avx2"]),
        **changes,
    }
    return request_of([], [tensor], **fields)


IDENTITY = schema.Graph(nodes=[placeholder(), output(schema.Ref(0))])
X = schema.Ref(0)


def test_the_base_request_passes() -> None:
    check_request(request(call("torch.add", X, X)), LIMITS)
    check_request(
        request(
            held(schema.Subgraph(0)),
            call("torch.ops.higher_order.wrap", schema.Ref(1), X),
            subgraphs=(IDENTITY,),
        ),
        LIMITS,
    )


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "torch.from_file",
        "torch.load",
        "torch.save",
        "torch.ops.aten.from_file",
        "torch.ops.aten.from_file.default",
        "torch.ops.aten.set_.source_Storage",
        "torch.ops.load_library",
        "torch.ops.higher_order.call_torchbind",
        "torch.ops.higher_order.print",
        "torch.ops.higher_order.triton_kernel_wrapper_mutation",
        "torch.ops.higher_order.inductor_compiled_code",
        "torch.manual_seed",
        "torch.set_num_threads",
        "torch._C._jit_set_profiling_mode",
        "torch.frombuffer",
        "torch.from_numpy",
        "builtins.eval",
        "builtins.setattr",
        "builtins.__import__",
        "torch.nn.functional.F",
        "torch.add.__call__",
        "",
    ],
)
def test_a_function_outside_the_table_is_forbidden(target: str) -> None:
    with pytest.raises(ForbiddenTarget):
        check_request(request(call(target, X)), LIMITS)


@pytest.mark.parametrize(
    "name",
    [
        "numpy",
        "tolist",
        "data_ptr",
        "share_memory_",
        "storage",
        "untyped_storage",
        "register_hook",
        "apply_",
        "map_",
        "backward",
        "set_",
        "resize_",
        "__reduce__",
        "__reduce_ex__",
        "__setattr__",
        "__getattribute__",
        "__class__",
        "__init__",
        "_view_func",
        "module_load",
        "pin_memory",
        "record_stream",
        "as_subclass",
        "__array__",
        "__dlpack__",
    ],
)
def test_a_method_outside_the_table_is_forbidden(name: str) -> None:
    with pytest.raises(ForbiddenTarget):
        check_request(request(method(name, X)), LIMITS)


@pytest.mark.parametrize(
    "name", ["__class__", "__globals__", "grad_fn", "storage", "data_ptr", "_cdata", 3, None]
)
def test_getattr_reads_a_closed_set_of_attributes(name: Any) -> None:
    check_request(request(call("builtins.getattr", X, "mT")), LIMITS)
    with pytest.raises(ForbiddenTarget):
        check_request(request(call("builtins.getattr", X, name)), LIMITS)


@pytest.mark.parametrize(
    "node",
    [
        call("builtins.getattr", "text", "mT"),
        call("builtins.getattr", X, "mT", None),
        call("builtins.getattr", X, name="mT"),
        call("torch.add", schema.Ref(1)),
        call("torch.add", schema.Ref(-1)),
        call("torch.add", schema.Ref(99)),
        call("torch.add", schema.ListArg([schema.TupleArg([schema.Ref(5)])])),
        call("torch.add", schema.Const(0)),
        call("torch.add", schema.Subgraph(0)),
        call("torch.add", schema.DTypeArg("float33")),
        call("torch.add", schema.DeviceArg("cuda")),
        call("torch.add", schema.DeviceArg("xpu")),
        call("torch.add", "cuda:1"),
        call("torch.add", schema.MemoryFormatArg("rows")),
        call("torch.add", schema.LayoutArg("sparse_coo")),
        call("torch.add", schema.BigInt("12")),
        call("torch.add", schema.BigInt("9" * 500)),
        call("torch.add", schema.DictArg([("a", 1), ("a", 2)])),
        call("torch.add", schema.DictArg([(schema.Ref(0), 1)])),
        schema.Node(op="call_function", target="torch.add", args=[], kwargs=[("b", 1), ("a", 1)]),
        schema.Node(op="call_function", target="torch.add", args=[], kwargs=[("a b", 1)]),
        schema.Node(op="call_function", target="torch.add", args=[], kwargs=[("class", 1)]),
        method("sum"),
        method("sum", 3),
        schema.Node(op="placeholder", target="x", args=[]),
        placeholder(),
        held(schema.Const(0)),
        held(schema.Subgraph(0)),
        held(3),
        output(),
    ],
)
def test_a_malformed_node_is_refused(node: schema.Node) -> None:
    with pytest.raises(MalformedRequest):
        check_request(request(node), LIMITS)


def test_a_subgraph_is_for_higher_order_operators_alone() -> None:
    with pytest.raises(MalformedRequest, match="higher-order"):
        check_request(
            request(held(schema.Subgraph(0)), call("torch.add", schema.Ref(1)), subgraphs=(IDENTITY,)), LIMITS
        )
    with pytest.raises(MalformedRequest, match="not used"):
        check_request(request(subgraphs=(IDENTITY,)), LIMITS)


def test_a_function_as_a_value_is_for_higher_order_operators_alone() -> None:
    with pytest.raises(ForbiddenTarget):
        check_request(request(call("torch.add", schema.Callee("torch.mul"))), LIMITS)
    with pytest.raises(ForbiddenTarget):
        check_request(request(call("torch.ops.higher_order.foreach_map", schema.Callee("os.system"))), LIMITS)


@pytest.mark.parametrize("text", ['"), system("id', "back\\slash", "two\nlines", "nul\0"])
def test_a_text_cannot_end_the_literal_it_is_written_into(text: str) -> None:
    """Inductor puts the message of _assert_async into C++ source as it is."""
    for value in (text, schema.ListArg([text]), schema.DictArg([(text, 1)])):
        with pytest.raises(MalformedRequest):
            check_request(request(call("torch._assert_async", X, value)), LIMITS)


@pytest.mark.parametrize(
    ("name", "value"), [("BLOCK_M", "__import__('os')"), ("X = 1; Y", 1), ("A\nB", 1), ("if", "a b(c)")]
)
def test_kernel_options_are_words(name: str, value: Any) -> None:
    """Inductor writes flex_attention's kernel options into the kernel's source as `name = value`."""
    good = schema.DictArg([("BACKEND", "AUTO"), ("FLOAT32_PRECISION", "'ieee'"), ("BLOCK_M", 64)])
    check_request(request(call("torch.ops.higher_order.flex_attention", X, good)), LIMITS)
    with pytest.raises(MalformedRequest):
        bad = schema.DictArg([(name, value)])
        check_request(request(call("torch.ops.higher_order.flex_attention", X, bad)), LIMITS)


def _sharing(storage: int = 0, **more: Any) -> schema.TensorInput:
    return schema.TensorInput(
        shape=[2],
        stride=[1],
        dtype="float32",
        device="cpu",
        requires_grad=False,
        storage=storage,
        storage_bytes=16 if storage >= 0 else 0,
        **more,
    )


def test_views_of_an_input_and_of_another_tensor_pass() -> None:
    for base in (schema.Base(tensor=0, views=[1, 2]), schema.Base(tensor=_sharing(), views=[0, 1, 2])):
        given = request(placeholder(), placeholder(), inputs=[_sharing()] * 3, bases=[base])
        check_request(given, LIMITS)


@pytest.mark.parametrize(
    ("bases", "said"),
    [
        ([schema.Base(tensor=0, views=[])], "no views"),
        ([schema.Base(tensor=0, views=[2, 1])], "not sorted"),
        ([schema.Base(tensor=0, views=[9])], "not there"),
        ([schema.Base(tensor=-1, views=[1])], "not there"),
        ([schema.Base(tensor=1, views=[1])], "twice"),
        ([schema.Base(tensor=0, views=[1]), schema.Base(tensor=2, views=[1])], "twice"),
        ([schema.Base(tensor=0, views=[1]), schema.Base(tensor=1, views=[2])], "a view itself"),
        ([schema.Base(tensor=_sharing(1), views=[0])], "one memory"),
        ([schema.Base(tensor=0, views=[3])], "one memory"),
        ([schema.Base(tensor=_sharing(is_parameter=True), views=[4])], "parameter"),
    ],
)
def test_a_base_that_cannot_be_is_refused(bases: list[schema.Base], said: str) -> None:
    inputs = [_sharing(), _sharing(), _sharing(), _sharing(-1), _sharing(is_parameter=True)]
    with pytest.raises(MalformedRequest, match=said):
        check_request(request(inputs=inputs, bases=bases), LIMITS)


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ({"node": 2}, "not there"),
        ({"node": -1}, "not there"),
        ({"path": ".__class__"}, "no size is at"),
        ({"path": "[0].size()[0].real"}, "no size is at"),
        ({"lower": 3, "upper": 2}, "empty range"),
    ],
)
def test_a_size_that_depends_on_data_and_cannot_be_is_refused(size: dict[str, Any], said: str) -> None:
    known: dict[str, Any] = {"node": 0, "path": ".size()[0]", "lower": 0, "upper": None, "size_like": False}
    check_request(request(unbacked=[schema.Unbacked(**known)]), LIMITS)
    with pytest.raises(MalformedRequest, match=said):
        check_request(request(unbacked=[schema.Unbacked(**(known | size))]), LIMITS)


@pytest.mark.parametrize("text", ["s1", "s0.real", "__import__('os')", "s0 ** 99"])
def test_a_bad_expression_is_named(text: str) -> None:
    for bad in (
        request(call("torch.add", schema.Sym(text))),
        request(relations=[text]),
        request(inputs=[schema.SymIntInput(text)]),
        request(
            inputs=[
                schema.TensorInput(shape=[text], stride=[1], dtype="int8", device="cpu", requires_grad=False)
            ]
        ),
    ):
        with pytest.raises(BadExpression):
            check_request(bad, LIMITS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cpp.cxx", "/bin/sh"),
        ("trace.enabled", True),
        ("cuda.cutlass_dir", "/tmp"),
        ("max_autotune", 1),
        ("max_autotune", "yes"),
        ("max_autotune_gemm_backends", "/bin/sh"),
        ("joint_custom_pre_pass", None),
        ("padding_alignment_bytes", float("nan")),
        ("max_fusion_size", 1 << 60),
        ("max_autotune", [True]),
        ("nothing", 1),
    ],
)
def test_an_option_outside_the_table_is_refused(name: str, value: Any) -> None:
    with pytest.raises(BadOption):
        check_request(request(options=[(name, value)]), LIMITS)
    with pytest.raises(BadOption):
        check_request(request(aot_options=[(name, value)]), LIMITS)


@pytest.mark.parametrize(
    "changes",
    [
        {"constants": [schema.Constant(dtype="float32", shape=[2], device="cpu", data=b"\0" * 8)]},
        {"options": [("max_autotune", True), ("max_autotune", False)]},
        {"options": [("shape_padding", True), ("max_autotune", True)]},
        {"inputs": []},
        {"symbols": [schema.Symbol(name="s1", hint=8, lower=2, upper=None)]},
        {"symbols": [schema.Symbol(name="s0", hint=1, lower=2, upper=None)]},
        {"target": schema.Target(kind="cpu", name="", capability="9.0", units=0, cpu=[])},
        {"target": schema.Target(kind="cpu", name="x;y", capability="", units=0, cpu=[])},
        {"target": schema.Target(kind="cpu", name="", capability="", units=0, cpu=["b", "a"])},
        {"target": schema.Target(kind="cuda", name="NVIDIA H200", capability="", units=132, cpu=[])},
        {"toolchain": schema.Toolchain(python="../x", torch="2.13.0", triton="", cuda="", platform="")},
    ],
)
def test_a_malformed_table_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(MalformedRequest):
        check_request(request(**changes), LIMITS)


MATRIX = records.Operand("float32", (4, 4), (4, 1))
PLACE = records.DeviceEnvironment(
    device="a CPU", capability="", driver="", torch=strategies.TORCH, triton="", cuda="", threads=1
)


def entry(op: str, **changes: Any) -> records.TuningEntry:
    return records.TuningEntry(
        problem=records.Problem(op, (MATRIX, MATRIX), MATRIX),
        place=msgspec.structs.replace(PLACE, **changes),
        winner=records.Timing("aten", 1.0, 1.0, 1.0, 9),
        candidates=2,
    )


def locked(
    *entries: records.TuningEntry, strict: bool = True, mode: str = "max-autotune"
) -> schema.GraphRequest:
    return request(mode=mode, tuning_lock=schema.TuningLock(strict, list(entries)))


def test_a_lock_that_may_apply_passes() -> None:
    for good in (
        locked(),
        locked(entry("bmm"), entry("mm"), strict=False),
        locked(entry("mm"), entry("mm", device="another CPU")),
        request(options=[("max_autotune_gemm", True)], tuning_lock=schema.TuningLock(True, [])),
    ):
        check_request(good, LIMITS)


@pytest.mark.parametrize(
    "bad",
    [
        locked(entry("mm"), mode="default"),
        locked(strict=False),
        locked(entry("mm"), entry("bmm")),
        locked(entry("mm"), entry("mm")),
        locked(entry("mm", torch="2.1.0")),
        locked(entry("mm", triton="3.0")),
        locked(entry("mm", cuda="13.0")),
        locked(entry("mm", threads=64)),
        locked(entry("mm", capability="avx2")),
    ],
)
def test_what_cannot_change_the_artifact_does_not_change_the_key(bad: schema.GraphRequest) -> None:
    with pytest.raises(MalformedRequest, match="lock"):
        check_request(bad, LIMITS)


def test_a_lock_of_too_many_entries_is_refused() -> None:
    many = [entry(f"op{number:05}") for number in range(10_001)]
    check_request(locked(*many[:-1]), LIMITS)
    with pytest.raises(LimitExceeded, match="10001 entries"):
        check_request(locked(*many), LIMITS)


@pytest.mark.parametrize(
    "constant",
    [
        schema.Constant(dtype="float32", shape=[3], device="cpu", data=b"\0" * 8),
        schema.Constant(dtype="float32", shape=[-1], device="cpu", data=b""),
        schema.Constant(dtype="float32", shape=[1 << 39, 1 << 39, 0], device="cuda", data=b""),
        schema.Constant(dtype="int64", shape=[], device="cpu", data=b"\0" * 8, requires_grad=True),
        schema.Constant(dtype="object", shape=[], device="cpu", data=b"\0" * 8),
    ],
)
def test_a_constant_has_the_bytes_its_shape_needs(constant: schema.Constant) -> None:
    with pytest.raises(MalformedRequest):
        check_request(request(held(schema.Const(0)), constants=[constant]), LIMITS)


def test_another_schema_or_torch_is_named() -> None:
    with pytest.raises(SchemaMismatch):
        check_request(request(schema=schema.SCHEMA + 1), LIMITS)
    toolchain = schema.Toolchain(python="cp311", torch="1.9.0", triton="", cuda="", platform="")
    with pytest.raises(Unsupported):
        check_request(request(toolchain=toolchain), LIMITS)


# --- limits ------------------------------------------------------------------------------------------------


def nested(depth: int) -> schema.Arg:
    value: schema.Arg = 1
    for _ in range(depth):
        value = schema.ListArg([value])
    return value


def nested_graphs(depth: int) -> schema.Graph:
    graph = IDENTITY
    for _ in range(depth):
        graph = schema.Graph(nodes=[held(schema.Subgraph(0)), output()], subgraphs=[graph])
    return graph


def test_limits_are_limits() -> None:
    tight = codec.Limits(nodes=4, depth=3, constant_bytes=4, inputs=2)
    check_request(request(call("torch.add", nested(2))), tight)
    for over in (
        request(*[call("torch.add", X)] * 3),
        request(call("torch.add", nested(3))),
        request(held(schema.Subgraph(0)), subgraphs=(nested_graphs(3),)),
        request(
            held(schema.Const(0)),
            constants=[schema.Constant(dtype="int8", shape=[5], device="cpu", data=b"\0" * 5)],
        ),
        request(inputs=[schema.ScalarInput(1)] * 3),
        request(call("torch.add", "x" * (allowed_names.MAX_TEXT + 1))),
    ):
        with pytest.raises(LimitExceeded):
            check_request(over, tight)


def test_the_largest_graph_is_checked_in_seconds() -> None:
    nodes = [
        call("torch.add", schema.Ref(index), schema.Ref(index), alpha=schema.Sym("s0"))
        for index in range(99_000)
    ]
    started = time.process_time()
    check_request(request(*nodes), LIMITS)
    assert time.process_time() - started < 10


def test_many_long_expressions_are_refused_before_they_cost_much() -> None:
    relations = [f"s0 + {index}" + " + s0" * 600 for index in range(2_000)]
    started = time.process_time()
    with pytest.raises((LimitExceeded, BadExpression)):
        check_request(request(relations=relations), LIMITS)
    assert time.process_time() - started < 5


def test_the_gate_needs_no_torch() -> None:
    code = (
        "import sys; from torchrelay.compiler.request import key, schema, size_expr, validate; "
        "from torchrelay.compiler.request.operator_table import table; table.load('2.13.0'); "
        "sys.exit('torch' in sys.modules or 'sympy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
