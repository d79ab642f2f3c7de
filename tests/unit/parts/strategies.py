"""Hypothesis strategies: random requests that `compiler.check` must accept, and random damage to them."""

from __future__ import annotations

import importlib.metadata
import math
import string
from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis import HealthCheck, settings
from torchrelay.compiler.request import allowed_names, schema, tuning_pins
from torchrelay.compiler.request.operator_table import table
from torchrelay.compiler.tuning import records

TORCH = importlib.metadata.version("torch")
"""The installed one: what is made here is also decoded to its functions."""
OPS = table.load(TORCH)
RANDOM = settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
"""For what is as large as a request."""

# FX writes these as signs with two operands, so they get two.
OPERATORS = ["_operator.add", "_operator.mul", "_operator.getitem", "_operator.lt"]
FUNCTIONS = sorted(
    name
    for name in OPS.functions
    if not name.startswith("_operator") and name not in allowed_names.TEXT_ARGUMENTS
)
METHODS = sorted(OPS.methods)

identifiers = st.sampled_from(["dim", "keepdim", "dtype", "alpha", "out_dtype", "p", "training", "eps"])
texts = st.text("".join(set(string.printable) - set(string.whitespace + '"\\')) + " é", max_size=20).filter(
    lambda text: not allowed_names.DEVICE_TEXT.fullmatch(text)
)
expressions = st.sampled_from(
    ["s0", "s1", "(s0 * s1)", "(1 + s0)", "Max(2, s1)", "FloorDiv(s0, 2)", "Mod(s1, 3)"]
)
relations = st.sampled_from(["Eq(Mod(s0, 2), 0)", "s0 < s1", "Ne(s0, 1)", "Or(Lt(s0, 4), Not(Eq(s1, 3)))"])

words = st.sampled_from(["AUTO", "'ieee'", "subgraph_0", "BLOCK_M"])
leaves: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.floats(allow_nan=False),
    texts,
    st.builds(schema.EllipsisArg),
    st.builds(schema.DTypeArg, st.sampled_from(sorted(allowed_names.DTYPE_BYTES))),
    st.builds(schema.DeviceArg, st.sampled_from(["cpu", "meta"])),
    st.builds(schema.MemoryFormatArg, st.sampled_from(sorted(allowed_names.MEMORY_FORMATS))),
    st.builds(schema.LayoutArg, st.sampled_from(sorted(allowed_names.LAYOUTS))),
    st.builds(schema.Complex, st.floats(allow_nan=False), st.floats(allow_nan=False)),
    st.builds(schema.BigInt, st.integers(1 << 63, 1 << 90).map(str)),
)


def values(position: int) -> st.SearchStrategy[Any]:
    """Arguments of the node at `position`: leaves, references to earlier nodes, containers of both."""
    base = leaves if not position else st.one_of(leaves, st.builds(schema.Ref, st.integers(0, position - 1)))
    return st.recursive(
        base,
        lambda inner: st.one_of(
            st.builds(schema.ListArg, st.lists(inner, max_size=3)),
            st.builds(schema.TupleArg, st.lists(inner, max_size=3)),
            st.builds(schema.SliceArg, inner, inner, inner),
            st.builds(
                schema.DictArg,
                st.lists(st.tuples(texts, inner), max_size=2, unique_by=lambda pair: pair[0]),
            ),
        ),
        max_leaves=4,
    )


@st.composite
def constants(draw: st.DrawFn) -> schema.Constant:
    dtype = draw(st.sampled_from(sorted(allowed_names.DTYPE_BYTES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape)
    # Every byte pattern is a value, but a bool's byte is 0 or 1.
    limit = 1 if dtype == "bool" else 255
    size = count * allowed_names.DTYPE_BYTES[dtype]
    data = bytes(draw(st.lists(st.integers(0, limit), min_size=size, max_size=size)))
    grad = draw(st.booleans()) and dtype in ("float32", "bfloat16", "complex64")
    return schema.Constant(dtype=dtype, shape=shape, device="cpu", data=data, requires_grad=grad)


@st.composite
def graphs(draw: st.DrawFn, held: list[schema.Constant], inputs: int, depth: int = 2) -> schema.Graph:
    """A graph of `inputs` placeholders; its constants are appended to `held` in order of use."""
    nodes = [schema.Node(op="placeholder", target="", args=[]) for _ in range(inputs)]
    subgraphs: list[schema.Graph] = []
    modules: set[int] = set()

    def usable(value: Any) -> bool:
        return not any(isinstance(item, schema.Ref) and item.index in modules for item in walk(value))

    for _ in range(draw(st.integers(0, 6))):
        position = len(nodes)
        args = st.lists(values(position).filter(usable), max_size=3)
        match draw(st.sampled_from(["function", "operator", "method", "constant", "higher"])):
            case "function":
                kwargs = draw(st.dictionaries(identifiers, values(position).filter(usable), max_size=2))
                nodes.append(
                    schema.Node(
                        op="call_function",
                        target=draw(st.sampled_from(FUNCTIONS)),
                        args=draw(args),
                        kwargs=sorted(kwargs.items()),
                    )
                )
            case "operator" if position:
                pair = draw(st.lists(values(position).filter(usable), min_size=2, max_size=2))
                nodes.append(
                    schema.Node(op="call_function", target=draw(st.sampled_from(OPERATORS)), args=pair)
                )
            case "method" if set(range(position)) - modules:
                first = draw(st.sampled_from(sorted(set(range(position)) - modules)))
                method = draw(st.sampled_from(METHODS))
                # to(3) and cuda(3) name a device's index; encoding makes those a Device.
                rest = [item for item in draw(args) if type(item) is not int]
                nodes.append(schema.Node(op="call_method", target=method, args=[schema.Ref(first), *rest]))
            case "constant":
                held.append(draw(constants()))
                nodes.append(schema.Node(op="get_attr", target="", args=[schema.Const(len(held) - 1)]))
            case "higher" if depth:
                subgraphs.append(draw(graphs(held, draw(st.integers(0, 2)), depth - 1)))
                nodes.append(
                    schema.Node(op="get_attr", target="", args=[schema.Subgraph(len(subgraphs) - 1)])
                )
                modules.add(position)
                hop = draw(st.sampled_from(sorted(OPS.hops)))
                callee = schema.Callee("torch.ops.aten.add.Tensor")
                rest = draw(st.lists(st.one_of(words, st.integers(0, 9), st.none()), max_size=2))
                nodes.append(
                    schema.Node(op="call_function", target=hop, args=[callee, schema.Ref(position), *rest])
                )
    nodes.append(schema.Node(op="output", target="", args=[draw(values(len(nodes)).filter(usable))]))
    return schema.Graph(nodes=nodes, subgraphs=subgraphs)


def walk(value: Any) -> list[Any]:
    """`value` and everything inside it."""
    found, todo = [], [value]
    while todo:
        item = todo.pop()
        found.append(item)
        if isinstance(item, msgspec.Struct):
            todo += [getattr(item, field) for field in item.__struct_fields__]
        elif isinstance(item, list | tuple):
            todo += item
    return found


sizes = st.one_of(st.integers(0, 1 << 20), expressions)


@st.composite
def tensor_inputs(draw: st.DrawFn) -> schema.TensorInput:
    rank = draw(st.integers(0, 4))
    dtype = draw(st.sampled_from(sorted(allowed_names.DTYPE_BYTES)))
    return schema.TensorInput(
        shape=draw(st.lists(sizes, min_size=rank, max_size=rank)),
        stride=draw(st.lists(sizes, min_size=rank, max_size=rank)),
        dtype=dtype,
        device=draw(st.sampled_from(["cpu", "meta"])),
        requires_grad=draw(st.booleans()) and dtype in allowed_names.DIFFERENTIABLE,
        offset=draw(sizes),
        is_leaf=draw(st.booleans()),
        is_parameter=draw(st.booleans()),
        static_address=draw(st.sampled_from(["", "guarded", "unguarded"])),
        storage_bytes=draw(sizes),
    )


inputs = st.one_of(
    tensor_inputs(),
    st.builds(schema.SymIntInput, expressions),
    st.builds(
        schema.ScalarInput,
        st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False)),
    ),
)


def option_values(option: table.ConfigOption) -> st.SearchStrategy[Any]:
    plain: st.SearchStrategy[Any] = {
        "bool": st.booleans(),
        "int": st.integers(-1000, 1000),
        "float": st.floats(-1e6, 1e6),
        "str": st.sampled_from(option.values or ("",)),
    }[option.type]
    return st.one_of(st.none(), plain) if option.optional else plain


@st.composite
def options(draw: st.DrawFn, known: dict[str, table.ConfigOption]) -> list[tuple[str, Any]]:
    chosen = sorted(draw(st.sets(st.sampled_from(sorted(known)), max_size=3)))
    return [(name, draw(option_values(known[name]))) for name in chosen]


@st.composite
def requests(draw: st.DrawFn) -> schema.GraphRequest:
    described = draw(st.lists(inputs, max_size=4))
    held: list[schema.Constant] = []
    graph = draw(graphs(held, len(described)))
    flags = draw(
        st.dictionaries(st.sampled_from(sorted(allowed_names.AMBIENT_FLAGS)), st.booleans(), max_size=3)
    )
    return schema.GraphRequest(
        schema=schema.SCHEMA,
        graph=graph,
        inputs=described,
        symbols=[
            schema.Symbol(name="s0", hint=8, lower=2, upper=None),
            schema.Symbol(name="s1", hint=3, lower=0, upper=64),
        ],
        relations=draw(st.lists(relations, max_size=3)),
        constants=held,
        ambient=schema.Ambient(
            grad=draw(st.booleans()),
            inference=draw(st.booleans()),
            autocast=draw(
                st.lists(
                    st.builds(schema.Autocast, st.just("cpu"), st.just("bfloat16"), st.booleans()), max_size=1
                )
            ),
            default_dtype=draw(st.sampled_from(["float32", "float64", "bfloat16"])),
            matmul_precision=draw(st.sampled_from(sorted(allowed_names.MATMUL_PRECISIONS))),
            deterministic=draw(st.booleans()),
            deterministic_warn_only=draw(st.booleans()),
            fill_uninitialized=draw(st.booleans()),
            threads=draw(st.integers(1, 256)),
            flags=sorted(flags.items()),
        ),
        mode=draw(
            st.sampled_from(["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
        ),
        options=draw(options(OPS.options)),
        aot_options=draw(options(OPS.aot_options)),
        toolchain=schema.Toolchain(python="cp311", torch=TORCH, triton="", cuda="", platform="linux-x86_64"),
        target=schema.Target(kind="cpu", name="", capability="", units=0, cpu=["avx2", "fma"]),
    )


# --- tuning winners ---------------------------------------------------------------------------------------

any_texts = st.text(max_size=30)
tuning_names = st.from_regex(r"[A-Za-z0-9_.:+-]{1,12}", fullmatch=True)
lengths = st.integers(0, 1 << 53)
milliseconds = st.floats(0, 1e9, exclude_min=True, exclude_max=True)
shares = st.floats(0, 1e9, exclude_max=True)
counts = st.integers(1, 1 << 31)


@st.composite
def operands(draw: st.DrawFn) -> records.Operand:
    dtype = draw(
        st.one_of(st.sampled_from(["float32", "bfloat16", "float8_e5m2", "complex64"]), tuning_names)
    )
    size = tuple(draw(st.lists(st.one_of(st.integers(0, 9), lengths), max_size=4)))
    plain = records.contiguous(size)
    fits = st.just(plain) if all(stride <= 1 << 53 for stride in plain) else st.nothing()
    stride = draw(st.one_of(fits, st.lists(lengths, max_size=4).map(tuple)))
    return records.Operand(records.LONG.get(dtype, dtype), size, stride)


tuning_problems = st.builds(
    records.Problem,
    tuning_names,
    st.lists(operands(), max_size=3).map(tuple),
    operands(),
    st.dictionaries(tuning_names, any_texts, max_size=3).map(lambda found: tuple(sorted(found.items()))),
)
intervals = st.tuples(milliseconds, milliseconds, milliseconds).map(sorted)
timings = st.builds(
    lambda candidate, times, samples: records.Timing(candidate, times[1], times[0], times[2], samples),
    any_texts,
    intervals,
    counts,
)
tuning_places = st.builds(
    records.DeviceEnvironment,
    any_texts,
    any_texts,
    any_texts,
    any_texts,
    any_texts,
    any_texts,
    st.integers(0, 256),
)
tuning_entries = st.builds(
    records.TuningEntry,
    problem=tuning_problems,
    place=tuning_places,
    winner=timings,
    runner_up=st.none() | timings,
    aten=st.none() | timings,
    default=st.none() | timings,
    candidates=counts,
    failed=counts,
    error=st.none() | shares,
    clock=any_texts,
    seconds=shares,
)


@st.composite
def pinned_requests(draw: st.DrawFn) -> schema.GraphRequest:
    """Some of them tune and have a lock."""
    request = draw(requests())
    place = records.DeviceEnvironment(
        device="any model",
        capability="",
        driver="",
        torch=TORCH,
        triton="",
        cuda="",
        threads=request.ambient.threads,
    )
    chosen = draw(st.lists(tuning_entries, max_size=2))
    moved = {entry.problem: msgspec.structs.replace(entry, place=place) for entry in chosen}
    return tuning_pins.pin(request, moved.values(), strict=draw(st.booleans()))


# --- damage ----------------------------------------------------------------------------------------------

junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(),
    st.text(max_size=12),
    st.binary(max_size=8),
    st.sampled_from(
        ["os.system", "torch.from_file", "s9", "__class__", "cuda:1", "(" * 90, "s0" + " ** 9" * 9]
    ),
    st.lists(st.integers(-3, 3), max_size=3),
    st.sampled_from(
        [["n", -1], ["n", 10**6], ["g", 0], ["k", 0], ["f", "os.system"], ["sy", "s7"], ["bi", "x"]]
    ),
)


@st.composite
def damaged(draw: st.DrawFn, value: Any) -> Any:
    """`value` (plain lists and dicts) with one place inside it replaced, removed or repeated."""
    if isinstance(value, dict) and value and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: draw(damaged(value[key]))}
    if isinstance(value, list) and value and draw(st.integers(0, 9)):
        index = draw(st.integers(0, len(value) - 1))
        match draw(st.sampled_from(["into", "into", "into", "drop", "repeat"])):
            case "drop":
                return value[:index] + value[index + 1 :]
            case "repeat":
                return [*value, value[index]]
        return [*value[:index], draw(damaged(value[index])), *value[index + 1 :]]
    return draw(junk)
