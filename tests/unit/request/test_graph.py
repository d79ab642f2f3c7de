"""FX graphs on the wire: what travels, what does not and why, and that the way back is the way there."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import strategies
import torch
from hypothesis import given
from torchrelay.compiler.errors import LimitExceeded, MalformedRequest, Unsupported
from torchrelay.compiler.graph import decode, encode
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.request import allowed_names, schema


@given(strategies.requests())
@strategies.RANDOM
def test_encoding_a_decoded_graph_gives_it_back(request: schema.GraphRequest) -> None:
    decoded = decode.decode_graph(request.graph, request.constants, device_index={}, symbols={})
    assert encode.encode_graph(decoded)[:2] == (request.graph, request.constants)


def module(
    target: Any, *args: Any, held: dict[str, Any] | None = None, **kwargs: Any
) -> torch.fx.GraphModule:
    """A graph of one call with `args`; a string '$name' among them reads the attribute."""
    made = torch.fx.Graph()
    made.placeholder("x")

    def value(item: Any) -> Any:
        return made.get_attr(item[1:]) if isinstance(item, str) and item.startswith("$") else item

    call = made.create_node(
        "call_function", target, tuple(value(item) for item in args), {k: value(v) for k, v in kwargs.items()}
    )
    made.output((call,))
    return torch.fx.GraphModule(held or {}, made)


def first_call(gm: torch.fx.GraphModule) -> schema.Node:
    encoded, *_ = encode.encode_graph(gm)
    return next(node for node in encoded.nodes if node.op == "call_function")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.Size([2, 3]), schema.TupleArg([2, 3])),
        ([1, (2.5, None)], schema.ListArg([1, schema.TupleArg([2.5, None])])),
        (slice(1, None, 2), schema.SliceArg(1, None, 2)),
        (..., schema.EllipsisArg()),
        (1 << 70, schema.BigInt(str(1 << 70))),
        (-(1 << 63), -(1 << 63)),
        (1 + 2j, schema.Complex(1.0, 2.0)),
        (float("-inf"), float("-inf")),
        ({"b": 1, "a": 2}, schema.DictArg([("b", 1), ("a", 2)])),
        (torch.bfloat16, schema.DTypeArg("bfloat16")),
        (torch.device("cuda", 3), schema.DeviceArg("cuda")),
        (torch.device("cuda"), schema.DeviceArg("cuda")),
        ("cuda:2", schema.DeviceArg("cuda")),
        ("cuda", "cuda"),
        (torch.channels_last, schema.MemoryFormatArg("channels_last")),
        (torch.strided, schema.LayoutArg("strided")),
        (torch.ops.aten.mm.default, schema.Callee("torch.ops.aten.mm.default")),
    ],
)
def test_a_value_has_its_form(value: Any, expected: schema.Arg) -> None:
    assert first_call(module(torch.add, value)).args == [expected]


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, torch.Generator(), range(3), b"bytes", torch.float32.__class__, torch.sparse_coo],
)
def test_another_value_is_unsupported_and_its_node_named(value: Any) -> None:
    made = torch.fx.Graph()
    node = made.create_node("call_function", torch.add, (), {}, name="my_add")
    made.output(node)
    gm = torch.fx.GraphModule({}, made)
    node.args = (value,)
    with pytest.raises(Unsupported, match="my_add"):
        encode.encode_graph(gm)


@pytest.mark.parametrize("text", ['say "x"', "a\\b", "two\nlines", "x" * 2000])
def test_a_text_that_could_end_a_literal_is_unsupported(text: str) -> None:
    with pytest.raises(Unsupported, match="text"):
        encode.encode_graph(module(torch.einsum, text, 1))


@pytest.mark.parametrize("dtype", sorted(allowed_names.DTYPE_BYTES))
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_a_constant_comes_back_bit_for_bit(dtype: str, shape: tuple[int, ...]) -> None:
    kind = getattr(torch, dtype)
    tensor = (torch.arange(6).reshape(2, 3) % 2).to(kind)
    tensor = tensor if shape == (2, 3) else torch.zeros(shape, dtype=torch.uint8).to(kind)
    back = decode.decode_constant(encode.encode_constant(tensor), {})
    assert back.dtype == tensor.dtype and back.shape == tensor.shape
    assert bytes(back.reshape(-1).view(torch.uint8).tolist()) == bytes(
        tensor.reshape(-1).view(torch.uint8).tolist()
    )


def test_a_strided_or_conjugated_constant_is_made_plain() -> None:
    tensor = torch.randn(3, 4, dtype=torch.complex64).t().conj()
    assert torch.equal(decode.decode_constant(encode.encode_constant(tensor), {}), tensor)


def test_a_parameter_constant_keeps_requires_grad() -> None:
    for flag in (True, False):
        made = module(torch.add, "$w", 1, held={"w": torch.nn.Parameter(torch.ones(2), requires_grad=flag)})
        encoded, constants, *_ = encode.encode_graph(made)
        assert constants[0].requires_grad is flag
        decoded = decode.decode_graph(encoded, constants, device_index={}, symbols={})
        assert decoded.constant_0.requires_grad is flag


def test_one_tensor_read_twice_is_sent_once() -> None:
    tensor = torch.ones(2)
    encoded, constants, *_ = encode.encode_graph(
        module(torch.add, "$a", "$b", held={"a": tensor, "b": tensor})
    )
    assert len(constants) == 1
    assert [node.args for node in encoded.nodes if node.op == "get_attr"] == [[schema.Const(0)]] * 2


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
        torch.ones(2, requires_grad=True) * 2,
    ],
)
def test_a_constant_that_is_not_a_plain_tensor_is_unsupported(tensor: torch.Tensor) -> None:
    with pytest.raises(Unsupported):
        encode.encode_graph(module(torch.add, "$w", held={"w": tensor}))


def test_fake_tensors_and_subclasses_are_unsupported() -> None:
    class Tagged(torch.Tensor):
        pass

    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(2)
    for tensor in (fake, torch.ones(2).as_subclass(Tagged)):
        with pytest.raises(Unsupported, match=type(tensor).__name__):
            encode.encode_constant(tensor)


def test_constants_past_the_limit_are_refused() -> None:
    with pytest.raises(LimitExceeded):
        encode.encode_graph(module(torch.add, "$w", held={"w": torch.ones(5 << 20)}))


def test_a_graph_on_two_gpus_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="spans 2 GPUs"):
        capture(
            module(torch.zeros, 2, device=torch.device("cuda", 0), out="cuda:1"),
            [torch.ones(1)],
            mode="default",
            options={},
        )


def test_a_device_index_comes_from_the_reader() -> None:
    encoded, constants, *_ = encode.encode_graph(module(torch.zeros, 2, device=torch.device("cuda", 5)))
    for index, expected in (({"cuda": 1}, torch.device("cuda", 1)), ({}, torch.device("cuda"))):
        decoded = decode.decode_graph(encoded, constants, device_index=index, symbols={})
        node = next(node for node in decoded.graph.nodes if node.op == "call_function")
        assert node.kwargs["device"] == expected


def test_an_integer_for_a_device_is_a_device() -> None:
    assert first_call(module(torch.zeros, 2, device=1)).kwargs == [("device", schema.DeviceArg("cuda"))]


def test_shared_subgraphs_are_sent_once_in_order_of_first_use() -> None:
    def leaf(function: Any) -> torch.fx.GraphModule:
        made = torch.fx.Graph()
        x = made.placeholder("x")
        made.output(made.call_function(function, (x,)))
        return torch.fx.GraphModule({}, made)

    sine, cosine = leaf(torch.sin), leaf(torch.cos)
    held = {"c": cosine, "s": sine, "c2": cosine}
    encoded, constants, *_ = encode.encode_graph(
        module(torch.ops.higher_order.cond, True, "$s", "$c", "$c2", held=held)
    )
    assert [child.nodes[1].target for child in encoded.subgraphs] == ["torch.sin", "torch.cos"]
    decoded: Any = decode.decode_graph(encoded, constants, device_index={}, symbols={})
    assert torch.equal(decoded.subgraph_0(torch.ones(1)), torch.ones(1).sin())


def test_a_module_call_is_unsupported() -> None:
    made = torch.fx.Graph()
    made.output(made.call_module("inner", (made.placeholder("x"),)))
    with pytest.raises(Unsupported, match="call_module"):
        encode.encode_graph(torch.fx.GraphModule({"inner": torch.nn.Linear(2, 2)}, made))


def test_a_custom_operator_is_unsupported_by_name() -> None:
    @torch.library.custom_op("torchrelay_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.raises(Unsupported, match=r"torchrelay_test\.twice"):
        encode.encode_graph(module(torch.ops.torchrelay_test.twice.default, 1))


def test_usage_counters_are_left_behind() -> None:
    made = torch.fx.Graph()
    x = made.placeholder("x")
    made.call_function(torch._C._log_api_usage_once, ("python.nn_module",))
    made.output(x)
    encoded, *_ = encode.encode_graph(torch.fx.GraphModule({}, made))
    assert [node.op for node in encoded.nodes] == ["placeholder", "output"]


def test_symbolic_arguments_follow_the_callers_names() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    size = ShapeEnv().create_unbacked_symint()
    gm = module(torch.zeros, size + 1)
    symbol = next(iter(size.node.expr.free_symbols))
    encoded, constants, *_ = encode.encode_graph(gm, symbols={symbol: "s0"})
    assert encoded.nodes[1].args == [schema.Sym("(1 + s0)")]
    decoded = decode.decode_graph(encoded, constants, device_index={}, symbols={"s0": 6})
    assert next(node for node in decoded.graph.nodes if node.op == "call_function").args == (7,)
    with pytest.raises(Unsupported, match="symbol"):
        encode.encode_graph(gm)


def test_an_operator_with_too_few_operands_is_malformed() -> None:
    bad = schema.Graph(
        nodes=[
            schema.Node(op="call_function", target="_operator.add", args=[1]),
            schema.Node(op="output", target="", args=[schema.Ref(0)]),
        ]
    )
    with pytest.raises(MalformedRequest):
        decode.decode_graph(bad, [], device_index={}, symbols={})


def test_a_decoded_graph_computes_what_the_original_did() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.nn.functional.gelu(x[:, 1:] @ torch.arange(6.0).reshape(2, 3).to(x.dtype).T[:, :1].T)
        return operator.add(y, 1), y.sum(dim=-1, keepdim=True)

    traced = torch.fx.symbolic_trace(program)
    x = torch.randn(4, 2)
    encoded, constants, *_ = encode.encode_graph(traced)
    decoded = decode.decode_graph(encoded, constants, device_index={}, symbols={})
    for expected, actual in zip(traced(x), decoded(x), strict=True):
        assert torch.equal(expected, actual)


def test_a_graph_that_no_node_names_is_left_out_with_all_that_it_has() -> None:
    """Dynamo leaves one behind where it inlines a region that is called once."""
    inner = module(torch.sin, 1.0)
    inner.meta["anything"] = True
    gm = module(torch.cos, 2.0)
    gm.add_module("subgraph_0", inner)
    assert encode.encode_graph(gm) == encode.encode_graph(module(torch.cos, 2.0))


@pytest.mark.parametrize("name", ["saved_tensors_hooks_pack_0", "saved_tensors_hooks_unpack_0"])
def test_hooks_for_saved_tensors_are_refused_although_no_node_names_them(name: str) -> None:
    gm = module(torch.cos, 2.0)
    gm.add_module(name, module(torch.sin, 1.0))
    with pytest.raises(Unsupported, match="hooks for saved tensors"):
        encode.encode_graph(gm)


def test_what_a_graph_inside_a_named_graph_has_is_refused() -> None:
    inner = module(torch.sin, 1.0)
    inner.meta["anything"] = True
    with pytest.raises(Unsupported, match="subgraph_0 has the annotation 'anything'"):
        encode.encode_graph(module(torch.cos, "$subgraph_0", held={"subgraph_0": inner}))


@pytest.mark.parametrize("target", [torch._assert_async, torch.ops.aten._assert_async.msg, torch._assert])
def test_an_assertions_message_has_no_quotes_on_the_wire(target: Any) -> None:
    text = 'it\'s "\\n" or\nnot' + "." * 2000
    _, sent = first_call(module(target, True, text)).args
    assert isinstance(sent, str)
    assert sent.startswith("it's '/n' or not...")
    assert allowed_names.TEXT.fullmatch(sent) and len(sent) == allowed_names.MAX_TEXT
