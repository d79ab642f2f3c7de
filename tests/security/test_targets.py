"""Names of functions outside the closed table: refused by the gateway with 422, and no worker is started."""

from __future__ import annotations

import string

import httpx2
import msgspec
import pytest
import strategies
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from service_parts import TOOLCHAIN, Running, compiled, graph, post
from torchrelay.compiler.request import codec, schema

FORBIDDEN = [
    "os.system",
    "os.popen",
    "os.execv",
    "subprocess.Popen",
    "torch.hub.load",
    "torch.load",
    "torch.from_file",
    "torch.ops.aten.from_file.default",
    "torch._C._jit_set_profiling_mode",
    "torch._C._jit_set_profiling_executor",
    "torch._C._load_for_lite_interpreter",
    "torch.ops.load_library",
    "torch.ops.aten.load_library.default",
    "torch.classes.load_library",
    "torch.jit.load",
    "torch.package.PackageImporter",
    "torch.utils.cpp_extension.load_inline",
    "torch.serialization.add_safe_globals",
    "torch._inductor.codecache.CppCodeCache.load",
    "torch.distributed.rpc.rpc_sync",
    "torch.multiprocessing.spawn",
    "numpy.load",
    "pickle.loads",
    "importlib.import_module",
    "builtins.eval",
    "builtins.exec",
    "builtins.compile",
    "builtins.open",
    "builtins.__import__",
    "_operator.attrgetter",
    "_operator.methodcaller",
    "torch.os.system",
    "torch.nn.functional.torch.hub.load",
    "torch.add.__globals__",
    "torch.ops.aten.add.Tensor.__class__.__init__",
]

QUICK = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

PREFIXES = [*sorted({name.rpartition(".")[0] for name in strategies.OPS.functions}), "torch._C", "os", ""]
WORDS = sorted({part for name in (*strategies.OPS.functions, *FORBIDDEN) for part in name.split(".")})

dotted = st.one_of(
    # A place where allowed functions live, and any word known to PyTorch or to an attacker.
    st.builds("{}.{}".format, st.sampled_from(PREFIXES), st.sampled_from(WORDS)),
    # Allowed names, changed a little: longer, another case, look-alikes, spaces, NULs.
    st.builds(
        "{}{}{}".format,
        st.sampled_from(["", " ", ".", "\0", "\u202e"]),
        st.sampled_from(sorted(strategies.OPS.functions)),
        st.sampled_from([".__call__", ".__globals__", " ", "\0", "\n", ".", "\u0430"]),
    ),
    st.sampled_from(sorted(strategies.OPS.functions)).map(str.upper),
    st.lists(st.text(string.ascii_letters + "_0123456789", min_size=1, max_size=12), max_size=6).map(
        ".".join
    ),
    st.text(max_size=60),
)


def refusal(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def methods_called(*names: str) -> bytes:
    request = codec.unpack_request(graph())
    nodes = [schema.Node("placeholder", "", [])]
    nodes += [schema.Node("call_method", name, [schema.Ref(0)]) for name in names]
    nodes.append(schema.Node("output", "", [schema.Ref(0)]))
    return codec.pack_request(_with(request, schema.Graph(nodes)))


def passed_as_value(name: str) -> bytes:
    request = codec.unpack_request(graph())
    nodes = [
        schema.Node("placeholder", "", []),
        schema.Node(
            "call_function", "torch.ops.higher_order.foreach_map", [schema.Callee(name), schema.Ref(0)]
        ),
        schema.Node("output", "", [schema.Ref(0)]),
    ]
    return codec.pack_request(_with(request, schema.Graph(nodes)))


def inside_a_subgraph(name: str) -> bytes:
    request = codec.unpack_request(graph())
    inner = schema.Graph(
        [
            schema.Node("placeholder", "", []),
            schema.Node("call_function", name, [schema.Ref(0)]),
            schema.Node("output", "", [schema.Ref(1)]),
        ]
    )
    nodes = [
        schema.Node("placeholder", "", []),
        schema.Node("get_attr", "", [schema.Subgraph(0)]),
        schema.Node("call_function", "torch.ops.higher_order.wrap", [schema.Ref(1), schema.Ref(0)]),
        schema.Node("output", "", [schema.Ref(2)]),
    ]
    return codec.pack_request(_with(request, schema.Graph(nodes, [inner])))


def _with(request: schema.GraphRequest, body: schema.Graph) -> schema.GraphRequest:
    return msgspec.structs.replace(request, graph=body)


@pytest.mark.parametrize(
    "place", [None, passed_as_value, inside_a_subgraph], ids=["called", "value", "inner"]
)
def test_a_forbidden_function_is_refused_wherever_it_stands(
    place: object, gateway: Running, http: httpx2.Client
) -> None:
    for name in FORBIDDEN:
        body = place(name) if callable(place) else graph(target=name)
        assert refusal(post(http, body)) == (422, "forbidden_target"), name
    assert gateway.pool.calls == []
    compiled(http, graph())
    assert len(gateway.pool.calls) == 1


def test_the_bodies_that_carry_them_pass_with_an_allowed_function(http: httpx2.Client) -> None:
    """So that what is refused above is the function's name."""
    for body in (inside_a_subgraph("torch.sin"), passed_as_value("torch.ops.aten.add.Tensor")):
        assert post(http, body).status_code == 202


@given(name=dotted)
@example(name="torch.add\0")
@QUICK
def test_any_name_outside_the_table_is_refused(name: str, gateway: Running, http: httpx2.Client) -> None:
    answer = post(http, graph(target=name))
    if name in strategies.OPS.functions or name in strategies.OPS.hops:
        assert answer.status_code in (202, 422), name
        return
    before = len(gateway.pool.calls)
    assert refusal(answer) == (422, "forbidden_target"), name
    assert len(gateway.pool.calls) == before


@given(name=st.one_of(dotted, st.sampled_from(dir(object) + dir(str)), st.text(max_size=30)))
@QUICK
def test_any_method_outside_the_table_is_refused(name: str, gateway: Running, http: httpx2.Client) -> None:
    if name in strategies.OPS.methods:
        return
    assert refusal(post(http, methods_called(name))) == (422, "forbidden_target"), name
    assert gateway.pool.calls == []


def test_the_table_of_this_torch_holds_none_of_them() -> None:
    assert TOOLCHAIN.torch == strategies.TORCH
    assert not set(FORBIDDEN) & (strategies.OPS.functions | strategies.OPS.hops)
