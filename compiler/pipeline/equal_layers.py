"""Stage 7: finds equal layers in the rebuilt graph, and makes calls of one subgraph of them.

A model of 24 equal blocks is a graph that repeats itself. AOTAutograd and Inductor trace, partition, lower and schedule
each copy anew. Here the copies become calls of one subgraph (torch.ops.higher_order.invoke_subgraph), which they treat
once (docs/decisions/0052-equal-layers-are-lowered-once.md).

Blocks are equal if they have the same operators with the same constants, wired in the same way, on tensors of the same
sizes, strides, dtypes and devices; which tensors these are, parameters mostly, may differ. A block that changes a
tensor or calls what is no operator of PyTorch's own is left as it is. A block with dropout gets its seeds, so that each
draws what it would have drawn.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ..request import schema
from ..torch_internals.dynamo import operators, symbolic_shapes
from ..torch_internals.dynamo.tensors.fake_tensors import storage_id
from ..torch_internals.inductor import subgraphs
from .rebuilt_graph import CHANGES_ARGUMENTS, RebuiltGraph
from .verification import outcomes

LEAST_LAYERS = 4
"""Fewer equal blocks than these are left alone: each seam costs a call, and the first block is lowered anyway."""
LEAST_NODES = 8
"""Shorter blocks are left alone: what Inductor would fuse across their seams counts for more."""
_MOST_SUBGRAPHS = 4
_MOST_RUNS = 8
_MOST_PERIODS = 32
_MOST_CUTS = 4


class Layers(NamedTuple):
    """Equal consecutive blocks. nodes: those of each block, in the graph's order. operands: what each block reads from
    outside of it, tensors and sizes, in the order of their first use. outputs: positions of the nodes that are read
    outside of a block."""

    nodes: list[list[torch.fx.Node]]
    operands: list[list[torch.fx.Node]]
    outputs: list[int]


def outline(rebuilt: RebuiltGraph, request: schema.GraphRequest) -> int:
    """Make calls of subgraphs of a graph's equal layers, in place; how many, 0 if the graph was left alone."""
    if (
        request.mode != "default"
        or request.options
        or request.aot_options
        or rebuilt.numbers
        or request.unbacked
        or request.meshes
        or request.kernels
        or not all(map(_is_numbered, operators.all_nodes(rebuilt.gm)))
    ):
        return 0
    if any(map(_may_draw, rebuilt.gm.graph.nodes)) and any(
        isinstance(each, torch.fx.GraphModule) for each in rebuilt.gm.children()
    ):
        return 0  # an operand of such a graph may look like seeds (subgraphs.numbering_seeds)
    symbols = _symbols(rebuilt.gm)
    if len(symbols) < len(rebuilt.symbols):
        return 0
    calls = 0
    for number in range(_MOST_SUBGRAPHS):
        layers = find_layers(rebuilt.gm)
        if layers is None:
            break
        _call_subgraph(rebuilt.gm, layers, f"equal_layer_{number}", symbols)
        calls += len(layers.nodes)
    return calls


def find_layers(gm: torch.fx.GraphModule) -> Layers | None:
    """The longest equal consecutive blocks of a graph whose nodes have `example_value`; None if there are none."""
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    numbers: dict[Hashable, int] = {}
    kinds = [numbers.setdefault(_kind(node) or node, len(numbers)) for node in nodes]
    best: Layers | None = None
    for first, period, length in sorted(_repeats(kinds), key=lambda run: (-run[2], run[1]))[:_MOST_RUNS]:
        layers = _cut(nodes, first, period, length)
        if layers is not None and (best is None or _size(layers) > _size(best)):
            best = layers
    return best


def _size(layers: Layers) -> int:
    """How many nodes calls would replace. Of blocks of one and of two layers, the small ones leave less to compile."""
    return sum(map(len, layers.nodes[1:]))


# --- random numbers ------------------------------------------------------------------------------------------


def _is_numbered(node: torch.fx.Node) -> bool:
    """Whether it is known how many of the graph's seeds a node takes: none, or one."""
    return not _may_draw(node) or _draws_once(node)


def _may_draw(node: torch.fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and outcomes.draws(node)


def _draws_once(node: torch.fx.Node) -> bool:
    """Whether a node is dropout, or attention with dropout, that Inductor makes one random number for each element of.
    On a GPU attention's kernel draws by itself."""
    value = node.meta.get("example_value")  # of a node in a graph inside the graph there is none
    if node.target in _DROPOUT:
        probability = outcomes.argument(node, 1, "p", 0.5)
    elif node.target is torch.nn.functional.scaled_dot_product_attention:
        probability = outcomes.argument(node, 4, "dropout_p", 0.0)
    else:
        return False
    return (
        bool(node.users)
        and isinstance(value, torch.Tensor)
        and (node.target in _DROPOUT or value.device.type == "cpu")
        and isinstance(probability, float)
        and 0 < probability < 1
    )


_DROPOUT = (torch.nn.functional.dropout, torch.dropout)


# --- repeats of a sequence -----------------------------------------------------------------------------------


def _repeats(kinds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs (first, period, length) in which each element equals that one period later, long enough for LEAST_LAYERS.

    A period is a distance between equal elements, so only these are tried, the most frequent first.
    """
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for position, kind in enumerate(kinds):
        if kind in last:
            distances[position - last[kind]] += 1
        last[kind] = position
    # The rarest operator of a block stands in it once, so its distances are the period.
    periods = [d for d, count in distances.most_common() if d >= LEAST_NODES and count >= LEAST_LAYERS - 1]
    for period in periods[:_MOST_PERIODS]:
        first = 0
        for position in range(len(kinds) - period + 1):
            if position < len(kinds) - period and kinds[position] == kinds[position + period]:
                continue
            length = position - first + period
            if length >= LEAST_LAYERS * period:
                yield first, period, length
            first = position + 1


def _cut(nodes: Sequence[torch.fx.Node], first: int, period: int, length: int) -> Layers | None:
    """Blocks of a run, cut where the fewest tensors go from a block to the next; then as many blocks as possible."""
    position = {node: index for index, node in enumerate(nodes)}
    until = [max((position.get(user, len(nodes)) for user in node.users), default=0) for node in nodes]

    def crossing(cut: int) -> int:
        return sum(until[index] >= cut for index in range(first, cut))

    middle = first + (length // period // 2) * period
    offsets = sorted(range(period), key=lambda offset: (crossing(middle + offset), offset))
    for offset in offsets[:_MOST_CUTS]:
        count = (length - offset) // period
        starts = [first + offset + block * period for block in range(count)]
        layers = _equal([list(nodes[start : start + period]) for start in starts])
        if layers is not None:
            return layers
    return None


def _equal(blocks: Sequence[list[torch.fx.Node]]) -> Layers | None:
    """The longest run of blocks that are equal in their wiring and operands too, and may be a subgraph."""
    described = [_describe(block) for block in blocks]
    start, best = 0, (0, 0)
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or described[end][0] != described[start][0]:
            if end - start > best[1] - best[0]:
                best = (start, end)
            start = end
    begin, end = best
    wiring, outputs, _ = described[begin]
    if (
        end - begin < LEAST_LAYERS
        or wiring is None
        or not _independent(blocks[begin], outputs, described[begin][2])
    ):
        return None
    return Layers(list(blocks[begin:end]), [operands for _, _, operands in described[begin:end]], outputs)


def _describe(block: list[torch.fx.Node]) -> tuple[Hashable, list[int], list[torch.fx.Node]]:
    """A block's wiring, outputs and operands. Wiring: what each node reads, what the operands are, and what is read
    outside; None if it reads what is neither a tensor nor a size."""
    inside = {node: index for index, node in enumerate(block)}
    operands: dict[torch.fx.Node, int] = {}
    wiring: list[Hashable] = []
    for node in block:
        reads: list[Hashable] = []
        for argument in _nodes_of(node):
            if argument in inside:
                reads.append(("inside", inside[argument]))
            else:
                reads.append(("operand", operands.setdefault(argument, len(operands))))
        wiring.append(tuple(reads))
    outputs = [index for index, node in enumerate(block) if any(user not in inside for user in node.users)]
    values = [operand.meta.get("example_value") for operand in operands]
    kinds = [_parts(value) if isinstance(value, torch.SymInt) else _tensor(value) for value in values]
    if None in kinds or not outputs:
        return None, outputs, list(operands)
    return (tuple(wiring), tuple(kinds), tuple(outputs)), outputs, list(operands)


def _independent(
    block: Sequence[torch.fx.Node], outputs: Sequence[int], operands: Sequence[torch.fx.Node]
) -> bool:
    """Whether the outputs of a block are tensors that share no memory with each other or an operand, and either all
    or none of them have gradients."""
    values = [block[index].meta["example_value"] for index in outputs]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return False
    memory = {storage_id(value) for value in values}
    given = (operand.meta["example_value"] for operand in operands)
    read = {storage_id(value) for value in given if isinstance(value, torch.Tensor)}
    differentiable = {value.requires_grad for value in values}
    return len(memory) == len(values) and not memory & read and len(differentiable) == 1


# --- equality of nodes ---------------------------------------------------------------------------------------


def _kind(node: torch.fx.Node) -> Hashable:
    """What a node does, without what it reads: target, constants, and the tensors that it makes. None if it must stay
    where it is."""
    if node.meta.get("custom") or node.meta.get(CHANGES_ARGUMENTS) or not operators.is_stateless(node):
        return None
    result = node.meta.get("example_value")
    made = None if result is None else _parts(result)
    called = _parts([node.args, node.kwargs])
    return None if made is None or called is None else (node.op, node.target, called, made)


def _parts(value: object) -> Hashable:
    """A value that nodes, tensors and constants are in, to compare with another; None if something else is in it, or
    nothing. 1, 1.0 and True are equal, so constants are with their types."""
    if isinstance(value, torch.fx.Node):
        return "node"
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, torch.SymInt):
        return "size", symbolic_shapes.sym_expr(value)
    if isinstance(value, slice):
        return _several("slice", [value.start, value.stop, value.step])
    if isinstance(value, (list, tuple)):
        return _several(type(value).__name__, value)
    if isinstance(value, Mapping):
        return _several(f"names {', '.join(map(str, value))}", list(value.values()))
    if value is None or value is Ellipsis or type(value) in (bool, int, float, complex, str):
        return type(value), repr(value)
    if isinstance(value, (torch.dtype, torch.device, torch.memory_format, torch.layout)):
        return type(value), str(value)
    return None


def _several(kind: str, values: Sequence[object]) -> Hashable:
    parts = tuple(map(_parts, values))
    return None if None in parts else (kind, *parts)


def _tensor(value: object) -> Hashable:
    """A tensor without its contents; None for anything else."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    return "tensor", value.dtype, value.device, value.dim(), _parts(sizes), value.requires_grad


def _nodes_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    found: list[torch.fx.Node] = []
    torch.fx.map_arg((node.args, node.kwargs), found.append)
    return found


# --- the graph with calls ------------------------------------------------------------------------------------


def _symbols(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The graph's inputs that are symbols of sizes."""
    inputs = gm.graph.find_nodes(op="placeholder")
    return [node for node in inputs if symbolic_shapes.sym_symbol(node.meta.get("example_value")) is not None]


def _call_subgraph(
    gm: torch.fx.GraphModule, layers: Layers, name: str, symbols: Sequence[torch.fx.Node]
) -> None:
    """A call has the seeds of its random numbers, the symbols of sizes, and its operands."""
    sizes = [node for node in symbols if node not in layers.operands[0]]
    gm.add_module(name, _subgraph(layers, sizes))
    results: dict[torch.fx.Node, torch.fx.Node] = {}
    for block, operands in zip(layers.nodes, layers.operands, strict=True):
        arguments = [*sizes, *(results.get(operand, operand) for operand in operands)]
        drawing = list(filter(_may_draw, block))
        with gm.graph.inserting_before(block[-1].next):
            if drawing:
                device = drawing[0].meta["example_value"].device
                arguments.insert(0, subgraphs.draw_seeds(gm.graph, len(drawing), device))
            layer = gm.graph.get_attr(name)
            call = gm.graph.call_function(subgraphs.invoke_subgraph, (layer, name, *arguments))
            for number, index in enumerate(layers.outputs):
                results[block[index]] = gm.graph.call_function(operator.getitem, (call, number))
        values = [block[index].meta["example_value"] for index in layers.outputs]
        call.meta["example_value"] = tuple(values)
        for index, value in zip(layers.outputs, values, strict=True):
            results[block[index]].meta["example_value"] = value
    for block in reversed(layers.nodes):
        for node in reversed(block):
            if node in results:
                node.replace_all_uses_with(results[node])
            gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()


def _subgraph(layers: Layers, sizes: Sequence[torch.fx.Node]) -> torch.fx.GraphModule:
    """The first block as a graph of its own, from what a call has to a tuple of outputs."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    if any(map(_may_draw, layers.nodes[0])):
        graph.placeholder("seeds")
    for number, size in enumerate(sizes):
        graph.placeholder(f"size_{number}").meta["example_value"] = size.meta["example_value"]
    for number, operand in enumerate(layers.operands[0]):
        copies[operand] = graph.placeholder(f"operand_{number}")
        copies[operand].meta["example_value"] = operand.meta["example_value"]
    block = layers.nodes[0]
    for node in block:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[block[index]] for index in layers.outputs))
    return torch.fx.GraphModule(torch.nn.Module(), graph)
