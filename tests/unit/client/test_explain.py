"""Misses in words: what of two requests differs, and how far they are apart."""

from __future__ import annotations

import json
import re
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
import strategies
from hypothesis import given, settings
from msgspec.structs import replace
from request_parts import AMBIENT, request_of
from torchrelay.compiler.request import key, key_diff, schema
from torchrelay.compiler.tuning import records


def tensor(*shape: schema.Size, **more: Any) -> schema.TensorInput:
    strides: list[schema.Size] = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size if isinstance(size, int) else f"({size})")
    fields = {"shape": list(shape), "stride": strides, "dtype": "float32", "device": "cpu"}
    return schema.TensorInput(**{**fields, "requires_grad": False, **more})


def node(target: str, *args: schema.Arg) -> schema.Node:
    return schema.Node("call_function", target, list(args))


NODES = [
    schema.Node("placeholder", "", []),
    node("torch.add", schema.Ref(0), 1),
    node("torch.relu", schema.Ref(1)),
    schema.Node("call_method", "view", [schema.Ref(2), 8]),
    schema.Node("output", "", [schema.TupleArg([schema.Ref(3)])]),
]

REQUEST = request_of(
    NODES,
    [
        tensor(8, 1024),
        tensor(1024, 1024, is_parameter=True),
        schema.SymIntInput("s0"),
        tensor(8, 1024),
    ],
    symbols=[schema.Symbol("s0", 8, 2, None)],
    relations=["Eq(Mod(s0, 2), 0)"],
    constants=[schema.Constant("float32", [1], "cpu", b"\0\0\0\0")],
    ambient=msgspec.structs.replace(AMBIENT, threads=2, flags=[("sdp.math", True)]),
    toolchain=schema.Toolchain(python="cp311", torch="2.12.1", triton="", cuda="", platform="linux-x86_64"),
    target=schema.Target(kind="cpu", name="", capability="", units=0, cpu=["avx2", "fma"]),
)


def with_inputs(*changes: tuple[int, schema.Input]) -> dict[str, Any]:
    inputs = list(REQUEST.inputs)
    for index, item in changes:
        inputs[index] = item
    return {"inputs": inputs}


def with_nodes(*changes: tuple[int, schema.Node]) -> dict[str, Any]:
    nodes = list(NODES)
    for index, item in changes:
        nodes[index] = item
    return {"graph": schema.Graph(nodes)}


def words(change: schema.GraphRequest) -> list[str]:
    compared = key_diff.compare(key.components(REQUEST), key.components(change))
    return [difference.text for difference in compared.differences]


@pytest.mark.parametrize(
    ("changes", "dimensions"),
    [
        (with_inputs((3, tensor(16, 1024))), "dimension 0 of input 3"),
        (with_inputs((3, tensor(16, 64))), "dimensions 0 of input 3, 1 of input 3"),
        (with_inputs((3, tensor(8, 1024, 1))), ""),  # another rank
        (with_inputs((1, tensor(1024, 512, is_parameter=True))), ""),
        (with_inputs((3, tensor(16, 1024, dtype="float64"))), ""),
        (with_inputs(*((index, tensor(3, 5)) for index in range(len(REQUEST.inputs)))), ""),
        (
            with_inputs((3, tensor(16, 1024))) | {"toolchain": replace(REQUEST.toolchain, torch="2.13.0")},
            "",
        ),
        ({}, ""),
    ],
)
def test_where_sizes_alone_differ_it_says_which_could_be_symbols(
    changes: dict[str, Any], dimensions: str
) -> None:
    compared = key_diff.compare(key.components(REQUEST), key.components(replace(REQUEST, **changes)))
    assert compared.advice.partition(":")[0] == (f"only sizes differ, in {dimensions}" if dimensions else "")


def distance(one: schema.GraphRequest, other: schema.GraphRequest) -> float:
    return key_diff.compare(key.components(one), key.components(other)).distance


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"toolchain": replace(REQUEST.toolchain, torch="2.13.0")}, ["torch 2.12.1 against 2.13.0"]),
        ({"toolchain": replace(REQUEST.toolchain, cuda="13.0")}, ["CUDA none against 13.0"]),
        (with_inputs((3, tensor(16, 1024))), ["input 3: shape (8, 1024) against (16, 1024)"]),
        (  # which measures kernels for these sizes
            {"options": [("max_autotune", True)]},
            ["option max_autotune: the default against True", "symbol s0: hint none against 8"],
        ),
        (
            {"mode": "max-autotune"},
            ["mode default against max-autotune", "symbol s0: hint none against 8"],
        ),
        (
            with_inputs((0, tensor(8, 1024, dtype="bfloat16")), (3, tensor(8, 1024, dtype="bfloat16"))),
            ["inputs 0, 3: dtype float32 against bfloat16"],
        ),
        (
            with_inputs((0, tensor(8, 1024, stride=[1, 8]))),
            ["input 0: stride (1024, 1) against (1, 8)"],
        ),
        (
            with_inputs((1, tensor(1024, 1024, requires_grad=True))),
            ["input 1: requires grad False against True; is parameter True against False"],
        ),
        (with_inputs((2, tensor(4))), ["input 2: type symint against tensor"]),
        ({"inputs": REQUEST.inputs[:2]}, ["inputs: 4 against 2"]),
        (
            with_nodes((2, node("torch.sin", schema.Ref(1)))),
            [
                "node 2 is torch.relu against torch.sin",
                "operator torch.relu: 1 against none",
                "operator torch.sin: none against 1",
            ],
        ),
        (
            with_nodes((1, node("torch.add", schema.Ref(0), 2))),
            ["node 1 (torch.add) has other arguments"],
        ),
        (
            {"target": replace(REQUEST.target, cpu=["avx512f", "fma"])},
            ["CPU instruction sets: avx2 more; avx512f less"],
        ),
        ({"ambient": replace(REQUEST.ambient, grad=False)}, ["grad mode True against False"]),
        ({"ambient": replace(REQUEST.ambient, flags=[])}, ["sdp.math True against unset"]),
        (
            {"ambient": replace(REQUEST.ambient, autocast=[schema.Autocast("cpu", "bfloat16", True)])},
            ["autocast () against (cpu bfloat16 True,)"],
        ),
        ({"symbols": [schema.Symbol("s0", 8, 2, 64)]}, ["symbol s0: upper none against 64"]),
        ({"meshes": [schema.Mesh([2], [1])]}, ["mesh unset against 2 at 1"]),
        ({"relations": []}, ["relation 0: Eq(Mod(s0, 2), 0) against none"]),
        (
            {"constants": [schema.Constant("float32", [1], "cpu", b"\0\0\0\1")]},
            ["constant 0: values 165ac1895974c0ef against 1c9c08ce2d05902f"],
        ),
    ],
)
def test_a_difference_in_words(changes: dict[str, Any], told: list[str]) -> None:
    assert words(replace(REQUEST, **changes)) == told


def test_kernels_differ_in_source_or_configurations_without_showing_either() -> None:
    config = schema.KernelConfig([("BLOCK", 64)], 4, 3, 1, None)
    one = schema.KernelSource("scale", "secret = 1\n", [config])
    other = replace(one, source="secret = 2\n")
    tuned = replace(one, configs=[config, config])

    def told(asked: list[schema.KernelSource], found: list[schema.KernelSource]) -> list[str]:
        sides = (key.components(replace(REQUEST, kernels=kernels)) for kernels in (asked, found))
        return [difference.text for difference in key_diff.compare(*sides).differences]

    assert told([one], [one]) == []
    (words,) = told([one], [other])
    assert words.startswith("kernel scale: source ") and "secret" not in words
    (words,) = told([one], [tuned])
    assert words.startswith("kernel scale: configurations ")
    assert told([one, other], [one]) == ["kernel scale (1): present against none"]
    assert told([one], []) == ["kernels: another one"]


def test_locks_differ_by_problem() -> None:
    operand = records.Operand("float32", (4, 4), (4, 1))
    place = records.DeviceEnvironment(
        device="a CPU", capability="avx2", driver="", torch="2.12.1", triton="", cuda=""
    )

    def entry(op: str, winner: str, milliseconds: float = 1.0) -> records.TuningEntry:
        timing = records.Timing(winner, milliseconds, milliseconds, milliseconds, 9)
        return records.TuningEntry(
            problem=records.Problem(op, (operand,), operand), place=place, winner=timing, candidates=2
        )

    def told(asked: schema.TuningLock | None, found: schema.TuningLock | None) -> list[str]:
        sides = (key.components(replace(REQUEST, tuning_lock=lock)) for lock in (asked, found))
        texts = [difference.text for difference in key_diff.compare(*sides).differences]
        return [re.sub("[0-9a-f]{16}", "ENTRY", text) for text in texts]

    lock = schema.TuningLock(True, [entry("bmm", "aten"), entry("mm", "aten")])
    assert told(lock, lock) == []
    assert told(lock, None) == ["tuning lock strict against unset", "tuning lock entries: 2 against unset"]
    assert told(None, replace(lock, strict=False)) == [
        "tuning lock unset against loose",
        "tuning lock entries: unset against 2",
    ]
    assert told(lock, replace(lock, strict=False)) == ["tuning lock strict against loose"]
    other = schema.TuningLock(
        True, [entry("addmm", "aten"), entry("bmm", "aten", 2.0), entry("mm", "cpp_gemm")]
    )
    assert told(lock, other) == [
        "tuning lock entries: 2 against 3",
        "pinned problem bmm(f32[4,4]) -> f32[4,4]: entry ENTRY against ENTRY",
        "pinned problem mm(f32[4,4]) -> f32[4,4]: winner aten against cpp_gemm",
        "pinned problem addmm(f32[4,4]) -> f32[4,4]: none against present",
    ]
    wide = schema.TuningLock(True, [entry(f"op{n:04}", "aten") for n in range(1000)])
    assert told(wide, replace(wide, entries=[*wide.entries[:-1], entry("zz", "aten")])) == [
        "tuning lock: another one"
    ]
    assert len(told(lock, wide)) == 3


def test_an_inserted_node_is_found_where_it_stands() -> None:
    longer = schema.Graph([*NODES[:2], node("torch.sin", schema.Ref(1)), *NODES[2:]])
    assert words(replace(REQUEST, graph=longer)) == [
        "node 2 is torch.relu against torch.sin",
        "operator torch.sin: none against 1",
    ]


def test_the_same_program_on_another_batch_is_nearer_than_another_program() -> None:
    batch = replace(REQUEST, **with_inputs((0, tensor(16, 1024)), (3, tensor(16, 1024))))
    release = replace(REQUEST, toolchain=replace(REQUEST.toolchain, torch="2.13.0"))
    option = replace(REQUEST, options=[("max_autotune", True)])
    edited = replace(REQUEST, **with_nodes((1, node("torch.add", schema.Ref(0), 2))))
    other = replace(
        REQUEST, graph=schema.Graph([NODES[0], *[node("torch.sin", schema.Ref(0))] * 9, NODES[-1]])
    )
    ranked = [distance(REQUEST, each) for each in (REQUEST, option, batch, release, edited, other)]
    assert ranked == sorted(ranked)
    assert ranked[0] == 0 < ranked[1]
    assert ranked[-2] < ranked[-1]


@given(strategies.pinned_requests(), strategies.pinned_requests())
@strategies.RANDOM
def test_requests_of_unlike_components_differ_in_words_and_the_same_distance_both_ways(
    one: schema.GraphRequest, other: schema.GraphRequest
) -> None:
    first, second = key.components(one), key.components(other)
    there, back = key_diff.compare(first, second), key_diff.compare(second, first)
    assert (there.distance == 0) == (first == second) == (not there.differences)
    assert there.distance == back.distance
    assert len(there.differences) == len(back.differences)
    assert key_diff.compare(first, first).distance == 0


NAMES = [
    *key.components(replace(REQUEST, tuning_lock=schema.TuningLock(True, []))),
    "options.max_autotune",
    "later.version",
]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("tensor"),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "shape", "stride", "name", "lower", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
foreign = st.dictionaries(
    st.sampled_from(NAMES),
    st.text(max_size=9)
    | values.map(json.dumps)
    | st.sampled_from(["[" * 5000, "9" * 9000, "[1e999]", "0:ab 1:cd", "9999999999:x", "²:x", '[["a", -5]]']),
)


@given(foreign, foreign)
@settings(strategies.RANDOM, max_examples=400)
def test_components_that_nobody_wrote_are_compared_all_the_same(
    one: dict[str, str], other: dict[str, str]
) -> None:
    there, back = key_diff.compare(one, other), key_diff.compare(other, one)
    assert (one == other) == (there.distance == 0) == (not there.differences)
    assert there.distance == back.distance
    assert all(each.text.isprintable() and len(each.text) < 4000 for each in there.differences)


def test_a_list_of_unlike_things_is_told_as_it_is() -> None:
    (difference,) = key_diff.compare({}, {"schema": "[{}, true]"}).differences
    assert difference.text == "wire schema unset against (, True)"


def test_the_words_of_a_large_model_are_few() -> None:
    wide = replace(REQUEST, inputs=[tensor(n % 40 + 2, 7) for n in range(300)])
    wider = replace(REQUEST, inputs=[tensor(n % 40 + 2, 9) for n in range(300)])
    compared = key_diff.compare(key.components(wide), key.components(wider))
    assert len(compared.differences) == 9
    assert (
        compared.differences[0].text
        == "inputs 0, 40, 80, 120, 160, 200 and 2 more: shape (2, 7) against (2, 9)"
    )
    assert compared.differences[-1].text == "and 32 more differences"


def test_components_are_bounded_however_large_the_request() -> None:
    huge = replace(
        REQUEST,
        graph=schema.Graph(
            [*NODES[:1], *(node(f"torch.{n}" + "x" * 90, schema.Ref(0)) for n in range(20_000))]
        ),
        inputs=[tensor(n + 2, 3) for n in range(20_000)],
        symbols=[schema.Symbol(f"s{n}", 2, 2, None) for n in range(5000)],
        relations=["Or(" + "Eq(s0, 2), " * 100 + "Eq(s0, 3))"] * 500,
        constants=REQUEST.constants * 5000,
    )
    size = len(msgspec.json.encode(key.components(huge)))
    assert size < 200_000
    assert len(words(huge)) < 60
