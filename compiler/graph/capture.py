"""Stage 1: what Dynamo hands to a back end (graph, inputs, surroundings) in; a canonical GraphRequest out.

Everything that can change the compiled result goes in, nothing else: symbols are renamed in order of first
use, devices lose their index, parameters lose their names, and the ambient state is read from torch itself.
What the wire cannot carry raises Unsupported with the input or node at fault; nothing has been sent then.

The graph that is sent has plain tensors as its only inputs. Dynamo leaves a tensor as an attribute of the graph if
Python code that it does not trace made it (torch._dynamo.assume_constant_result). Such tensors become inputs: they need
not be sent, whatever their size, and the graph changes the program's own tensor in place.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from ..errors import BindingMismatch, Unsupported
from ..request import schema
from ..request.operator_table.table import libraries_of
from ..torch_internals.dynamo.tensors import aliasing, fake_tensors
from . import dtensors, encode
from .ambient import dtype_name, read_ambient
from .captured_graph import CapturedGraph
from .configuration import Mode, read_configuration
from .inputs import describe_inputs, float_name, with_constants
from .toolchain import local_library, local_target, local_toolchain


def capture(
    original: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: Mode,
    options: Mapping[str, Any],
    target: str = "",
) -> CapturedGraph:
    """Describe a Dynamo graph and leave it unchanged. target: of graphs on the CPU, by name; '': this machine's own.
    Raises Unsupported, BadOption, LimitExceeded, BindingMismatch."""
    gm, hoisted = _hoist_tensors(with_constants(original), example_inputs)
    inputs, edges = [*example_inputs, *hoisted.values()], None
    if torch.distributed.is_available() and torch.distributed.is_initialized():  # else there is no mesh
        gm, edges = dtensors.to_local_tensors(gm, inputs)
        inputs = inputs if edges is None else edges.plain(inputs)
    names = _placeholders(original)
    shards = set() if edges is None else edges.shards(names)
    described = describe_inputs(gm, inputs, shards=shards)
    symbols = described.symbols
    encoded = encode.encode_graph(gm, symbols=symbols.names, original=original)
    index = _device_index(described.values, encoded.gpus)
    kind: Literal["cpu", "cuda"] = "cpu" if index is None else "cuda"
    if encoded.kernels and kind == "cpu":
        raise Unsupported("a user-written Triton kernel in a graph on the CPU")
    inductor_options, aot_options, cudagraphs = read_configuration(mode, options)
    request = schema.GraphRequest(
        schema=schema.SCHEMA,
        graph=encoded.graph,
        inputs=described.inputs,
        symbols=symbols.described(),
        relations=symbols.relations(),
        constants=encoded.constants,
        ambient=read_ambient(kind, described.values, gm),
        mode=mode,
        options=inductor_options,
        aot_options=aot_options,
        toolchain=local_toolchain(),
        target=local_target(kind, index, target),
        kernels=encoded.kernels,
        eager=encoded.eager,
        meshes=[] if edges is None else edges.meshes,
        libraries=[local_library(name) for name in libraries_of(encoded.graph)],
        exact_sizes=symbols.are_exact(),
        bases=described.bases,
        unbacked=encoded.unbacked,
    )
    captured = CapturedGraph(
        request,
        symbols.symints(),
        index,
        cudagraphs,
        floats={position: float_name(number) for position, number in described.floats.items()},
        gm=gm,
        inputs=inputs,
        hoisted=hoisted,
        edges=edges,
    )
    check_binding(captured, names)
    _guard_memory(original, captured)
    return captured


def _device_index(values: Sequence[Any], named: set[int | None]) -> int | None:
    """The one GPU that inputs, constants and device arguments name; None for a graph on the CPU. Raises Unsupported for
    a graph over several GPUs."""
    found = named | {
        v.device.index for v in values if isinstance(v, torch.Tensor) and v.device.type == "cuda"
    }
    indices = {torch.cuda.current_device() if index is None else index for index in found}
    if len(indices) > 1:
        raise Unsupported(f"the graph spans {len(indices)} GPUs")
    return indices.pop() if indices else None


def _placeholders(gm: torch.fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.find_nodes(op="placeholder")]


# --- tensors that the graph has as attributes ------------------------------------------------------------


def _hoist_tensors(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[torch.fx.GraphModule, dict[str, torch.Tensor]]:
    """Turn the top graph's tensor attributes into placeholders after the others; the tensor for each, in the graph's
    order. `gm` is not changed. Raises Unsupported."""
    tensors: dict[str, torch.Tensor] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        value = functools.reduce(getattr, str(node.target).split("."), gm)
        if isinstance(value, torch.Tensor):
            tensors[str(node.target)] = value
    if not tensors:
        return gm, {}
    _refuse_shared_memory(tensors.values(), example_inputs)
    graph = copy.deepcopy(gm.graph)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        hoisted = {name: graph.placeholder(f"held_{position}") for position, name in enumerate(tensors)}
    for node in graph.find_nodes(op="get_attr"):
        if str(node.target) in hoisted:
            node.replace_all_uses_with(hoisted[str(node.target)])
            graph.erase_node(node)
    names = {node: name for name, node in hoisted.items()}
    held = {node.name: tensors[names[node]] for node in graph.find_nodes(op="placeholder") if node in names}
    return torch.fx.GraphModule(gm, graph), held


def _refuse_shared_memory(tensors: Iterable[torch.Tensor], inputs: Sequence[Any]) -> None:
    """Dynamo has no guards on the memory of held tensors, which a change of an input may change in one call, and not
    in another one."""
    positions = {
        fake_tensors.storage_id(value): position
        for position, value in enumerate(inputs)
        if _has_storage(value)
    }
    for value in filter(_has_storage, tensors):
        if (position := positions.get(fake_tensors.storage_id(value))) is not None:
            raise Unsupported(f"the graph holds a tensor that shares memory with input {position}")


def _has_storage(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


# --- what is bound, and what it shares ---------------------------------------------------------------------


def check_binding(captured: CapturedGraph, names: Sequence[str]) -> None:
    """Whether `bind` gives each value to the placeholder that was made for it. names: of the original graph's
    placeholders. Raises BindingMismatch."""
    edges, described = captured.edges, captured.request.inputs
    assert captured.gm is not None
    bound = [
        name for position, name in enumerate(names) if edges is None or position not in edges.mesh_inputs
    ]
    bound += captured.hoisted
    taken = _placeholders(captured.gm)
    if bound != taken:
        differing = next((pair for pair in zip(bound, taken, strict=False) if pair[0] != pair[1]), None)
        raise BindingMismatch(
            f"placeholder {differing[1]!r} would get the value of {differing[0]!r}"
            if differing
            else f"{len(bound)} values for {len(taken)} placeholders"
        )
    if len(described) != len(captured.inputs):
        raise BindingMismatch(f"{len(captured.inputs)} values for {len(described)} described inputs")
    shards = set() if edges is None else edges.shards(names)
    for position, (spec, value) in enumerate(zip(described, captured.inputs, strict=True)):
        # A local tensor requires gradients only where they are recorded when it is taken from its DTensor.
        differs = _difference(spec, value, gradients=taken[position] not in shards)
        if differs:
            raise BindingMismatch(f"input {position} ({taken[position]!r}): {differs}")


def _guard_memory(original: torch.fx.GraphModule, captured: CapturedGraph) -> None:
    """Have Dynamo trace again when inputs overlap in another way than in the request. Raises Unsupported for DTensors
    that do: AOTAutograd compiles no change in place of them, and of their local tensors it would not know the bases."""
    assert captured.gm is not None
    nodes = {node.name: node for node in original.graph.find_nodes(op="placeholder")}
    shards = set() if captured.edges is None else captured.edges.shards([*nodes])
    sharing: dict[int, list[tuple[torch.fx.Node, torch.Tensor]]] = {}
    placeholders = captured.gm.graph.find_nodes(op="placeholder")
    for node, spec, value in zip(placeholders, captured.request.inputs, captured.inputs, strict=True):
        if isinstance(spec, schema.TensorInput) and spec.storage >= 0 and node.name in nodes:
            pair = nodes[node.name], node.meta.get("example_value", value)
            sharing.setdefault(spec.storage, []).append(pair)
    for inputs in sharing.values():
        names = [node.name for node, _ in inputs]
        if not shards.isdisjoint(names):
            found, _ = aliasing.overlapping([tensor for _, tensor in inputs])
            if any(names[position] in shards for position in found):
                raise Unsupported(f"a DTensor shares memory with another input ({', '.join(names)})")
        plain = [pair for pair, name in zip(inputs, names, strict=True) if name not in shards]
        if len(plain) > 1:
            aliasing.guard_overlap(plain)


def _difference(spec: schema.Input, value: Any, *, gradients: bool) -> str:
    """How a value is unlike what the request says of it; '' if it is not. Sizes that are symbolic on either side are
    not compared: Dynamo has guards on them."""
    if not isinstance(spec, schema.TensorInput):
        return "" if not isinstance(value, torch.Tensor) else "a tensor where the request has a number"
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} where the request has a tensor"
    pairs: dict[str, tuple[Any, Any]] = {
        "shape": (spec.shape, list(value.shape)),
        "stride": (spec.stride, list(value.stride())),
        "dtype": (spec.dtype, dtype_name(value.dtype)),
        "device": (spec.device, value.device.type),
    }
    if gradients:
        pairs["requires_grad"] = spec.requires_grad, value.requires_grad
    for name, (said, found) in pairs.items():
        if isinstance(said, list) and isinstance(found, list):
            numbers = zip(said, found, strict=False)
            same = len(said) == len(found) and all(
                one == other for one, other in numbers if type(one) is int and type(other) is int
            )
        else:
            same = said == found
        if not same:
            return f"its {name} is {found}, in the request {said}"
    return ""
