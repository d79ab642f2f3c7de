"""Keys: what changes them, what does not, and that a request survives its trip over the wire."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import strategies
import torch
from hypothesis import given, settings
from torchrelay.compiler.graph import encode
from torchrelay.compiler.request import codec, key, key_diff, schema
from torchrelay.compiler.tuning import records


@given(strategies.pinned_requests())
@strategies.RANDOM
def test_a_request_survives_the_wire(request: schema.GraphRequest) -> None:
    arrived = codec.unpack_request(codec.pack_request(request))
    assert arrived == request
    assert key.key_of(arrived) == key.key_of(request)
    assert key.components(arrived) == key.components(request)


@given(strategies.requests())
@settings(strategies.RANDOM, max_examples=12)
def test_each_single_change_changes_the_key(request: schema.GraphRequest) -> None:
    request = msgspec.structs.replace(request, exact_sizes=bool(request.symbols))
    original = key.key_of(request)
    explained = key.components(request)
    for change in changes(request):
        assert key.key_of(change) != original, change
        # Tables are explained by entry; one whose entries only change places is refused by the gate anyway.
        if entries(change) != entries(request) or tables(change) == tables(request):
            assert key.components(change) != explained, change


def tables(request: schema.GraphRequest) -> list[Any]:
    return [request.options, request.aot_options, request.ambient.flags]


def entries(request: schema.GraphRequest) -> list[list[str]]:
    return [sorted({repr(entry) for entry in entries}) for entries in tables(request)]


def changes(value: Any) -> Iterator[Any]:
    """Every value that differs from `value` in one place."""
    match value:
        case msgspec.Struct():
            for field in value.__struct_fields__:
                held = getattr(value, field)
                for changed in [LOCK] if field == "tuning_lock" and held is None else changes(held):
                    yield msgspec.structs.replace(value, **{field: changed})
        case list():
            if value:
                yield [*value, value[-1]]
            for index, item in enumerate(value):
                yield value[:index] + value[index + 1 :]
                for changed in changes(item):
                    yield [*value[:index], changed, *value[index + 1 :]]
            for index in range(len(value) - 1):
                if value[index] != value[index + 1]:
                    yield [*value[:index], value[index + 1], value[index], *value[index + 2 :]]
        case tuple():
            for changed in changes(list(value)):
                if len(changed) == len(value):
                    yield tuple(changed)
        case bool():
            yield not value
        case int():
            yield value + 1 if value < 1 << 62 else value - 1
        case float():
            yield 0.5 if value != 0.5 else 1.5
        case str():
            yield value + "x"
        case bytes():
            yield value + b"x"
        case None:
            yield 0


def test_the_key_covers_every_field() -> None:
    """The random test walks struct fields, so it needs a request where each list holds something."""
    request = full_request()
    assert request.tuning_lock is not None
    [entry] = request.tuning_lock.entries
    seen = {key.key_of(change) for change in changes(request)}
    assert key.key_of(request) not in seen
    for struct in (
        request,
        request.ambient,
        request.toolchain,
        request.target,
        *request.inputs,
        *request.constants,
        *request.kernels,
        *request.kernels[0].configs,
        *request.meshes,
        *request.libraries,
        *request.bases,
        *request.unbacked,
        request.tuning_lock,
        entry,
        entry.problem,
        entry.place,
        entry.winner,
    ):
        for field in struct.__struct_fields__:
            assert any(True for _ in changes(getattr(struct, field))), f"{type(struct).__name__}.{field}"


def test_the_key_is_the_digest_of_the_canonical_bytes_and_of_nothing_else() -> None:
    request = full_request()
    domain = f"torchrelay request v{schema.PIPELINE}\0".encode()
    expected = hashlib.sha256(domain + codec.encode_request(request)).hexdigest()
    assert key.key_of(request) == expected


def test_a_raised_revision_of_the_pipeline_changes_every_key_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = full_request()
    monkeypatch.setattr(schema, "PIPELINE", schema.PIPELINE + 1)
    spec = importlib.util.find_spec(key.__name__)
    assert spec is not None and spec.loader is not None
    raised = importlib.util.module_from_spec(spec)  # the module as the next release has it
    spec.loader.exec_module(raised)
    assert raised.key_of(request) != key.key_of(request)
    told = raised.components(request)
    monkeypatch.undo()
    (difference,) = key_diff.compare(told, key.components(request)).differences
    assert difference.text.startswith(f"revision of the pipeline {schema.PIPELINE + 1} against ")


def full_request() -> schema.GraphRequest:
    return schema.GraphRequest(
        schema=schema.SCHEMA,
        graph=schema.Graph(
            nodes=[
                schema.Node(op="placeholder", target="", args=[]),
                schema.Node(op="get_attr", target="", args=[schema.Const(0)]),
                schema.Node(
                    op="call_function",
                    target="torch.add",
                    args=[schema.Ref(0), schema.Ref(1)],
                    kwargs=[("alpha", schema.Sym("s0"))],
                ),
                schema.Node(op="output", target="", args=[schema.TupleArg([schema.Ref(2)])]),
            ]
        ),
        inputs=[
            schema.TensorInput(
                shape=["s0", 4], stride=[4, 1], dtype="float32", device="cpu", requires_grad=True
            ),
            schema.SymIntInput("s0"),
            schema.ScalarInput(2.5),
        ],
        symbols=[schema.Symbol(name="s0", hint=8, lower=2, upper=None)],
        relations=["Eq(Mod(s0, 2), 0)"],
        constants=[schema.Constant(dtype="float32", shape=[1], device="cpu", data=b"\0\0\0\0")],
        ambient=schema.Ambient(
            grad=True,
            inference=False,
            autocast=[schema.Autocast("cpu", "bfloat16", True)],
            default_dtype="float32",
            matmul_precision="highest",
            deterministic=False,
            deterministic_warn_only=False,
            fill_uninitialized=True,
            threads=2,
            flags=[("sdp.math", True)],
        ),
        mode="default",
        options=[("max_autotune", True)],
        aot_options=[("donated_buffer", True)],
        toolchain=schema.Toolchain(
            python="cp311", torch="2.13.0", triton="", cuda="", platform="linux-x86_64"
        ),
        target=schema.Target(kind="cpu", name="", capability="", units=0, cpu=["avx2"]),
        kernels=[
            schema.KernelSource("k", "import triton\n", [schema.KernelConfig([("B", 8)], 4, 3, 1, None)])
        ],
        tuning_lock=LOCK,
        eager=[[2]],
        meshes=[schema.Mesh(shape=[2, 4], coordinate=[1, 3])],
        libraries=[schema.Library("transformers", "5.0.0", "0" * 64)],
        levels=["prims"],
        bases=[schema.Base(tensor=BASE, views=[0, 1])],
        unbacked=[schema.Unbacked(node=1, path="[0]", lower=0, upper=9, size_like=True)],
    )


BASE = schema.TensorInput(shape=[8], stride=[1], dtype="float32", device="cpu", requires_grad=False)


MATRIX = records.Operand("float32", (4, 4), (4, 1))
LOCK = schema.TuningLock(
    strict=True,
    entries=[
        records.TuningEntry(
            problem=records.Problem("mm", (MATRIX, MATRIX), MATRIX, (("precision", "highest"),)),
            place=records.DeviceEnvironment(
                device="a CPU", capability="avx2", driver="", torch="2.13.0", triton="", cuda="", threads=2
            ),
            winner=records.Timing("aten mm", 0.5, 0.4, 2.0, 9),
            candidates=2,
        )
    ],
)


def test_a_request_without_a_tuning_lock_keeps_the_key_it_had() -> None:
    bare = msgspec.structs.replace(full_request(), tuning_lock=None)
    assert b"tuning_lock" not in codec.encode_request(bare)
    assert "tuning_lock" not in key.components(bare)


# --- what the key leaves out -------------------------------------------------------------------------------


def test_example_sizes_reach_the_key_only_if_they_are_exact_or_measured() -> None:
    def with_hint(hint: int, **changes: Any) -> schema.GraphRequest:
        symbols = [schema.Symbol(name="s0", hint=hint, lower=2, upper=None)]
        return msgspec.structs.replace(full_request(), symbols=symbols, **changes)

    plain: dict[str, Any] = {"options": [], "tuning_lock": None}
    assert key.key_of(with_hint(8, **plain)) == key.key_of(with_hint(12, **plain))
    assert key.components(with_hint(8, **plain)) == key.components(with_hint(12, **plain))
    others = [{**plain, "exact_sizes": True}, {**plain, "mode": "max-autotune"}, {}]
    found = [with_hint(hint, **changes) for changes in others for hint in (8, 12)]
    assert len({key.key_of(request) for request in found}) == 6
    assert b"exact_sizes" not in codec.encode_request(with_hint(8, **plain))
    for request in (with_hint(8, **plain), *found):
        assert key.key_of(request, codec.encode_request(request)) == key.key_of(request)


def attention(prefix: str, index: int, *, swap: bool) -> torch.fx.GraphModule:
    """One computation with names, a device index and an order of keywords that do not matter to it."""
    made = torch.fx.Graph()
    x = made.placeholder(f"{prefix}_x")
    table = made.create_node("get_attr", f"{prefix}_table", name=f"{prefix}_t")
    keywords: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cuda", index)}
    if swap:
        keywords = dict(reversed(keywords.items()))
    zeros = made.create_node("call_function", torch.zeros, (4,), keywords, name=f"{prefix}_zeros")
    moved = made.create_node("call_method", "to", (x, f"cuda:{index}"), {}, name=f"{prefix}_moved")
    total = made.create_node("call_function", torch.add, (zeros, moved), {}, name=f"{prefix}_sum")
    made.output((made.create_node("call_function", torch.mul, (total, table), {}),))
    return torch.fx.GraphModule({f"{prefix}_table": torch.arange(4.0)}, made)


def test_names_device_indices_and_keyword_order_do_not_reach_the_graph() -> None:
    first = encode.encode_graph(attention("a", 0, swap=False))
    second = encode.encode_graph(attention("layer_17_self", 3, swap=True))
    assert first[:2] == second[:2]


def test_the_order_of_an_arguments_dict_is_the_programs() -> None:
    def made(pairs: dict[str, int]) -> schema.Graph:
        graph_ = torch.fx.Graph()
        graph_.output(pairs)
        return encode.encode_graph(torch.fx.GraphModule({}, graph_))[0]

    assert made({"a": 1, "b": 2}) != made({"b": 2, "a": 1})
