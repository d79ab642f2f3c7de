"""Before stage 1: tells which of a graph's inputs stand for Python floats that Dynamo left symbolic.

Dynamo passes such a float as a 0-d float64 tensor, of which the graph takes the `.item()`. PyTorch gives a symbolic
number to each 0-d int64 and float64 tensor on the CPU, whether the graph reads it or not. What is only computed with is
a tensor like any other; an integer that the graph reads depends on data, as AOTAutograd sees it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch

from ....compiler.torch_internals.dynamo import backend_interface, symbolic_shapes
from ....compiler.torch_internals.dynamo.tensors import fake_tensors

_READ = "item"
"""Dynamo's method call for `.item()`, `.tolist()` and `float()` of a tensor."""


def symbolic_floats(gm: torch.fx.GraphModule) -> dict[int, torch.SymFloat]:
    """Input position -> the symbolic float that the tensor there stands for."""
    found = dict(_numbers(gm))
    if not found:
        return {}
    graphs = [module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]
    reads = [node for graph in graphs for node in graph.nodes if node.target == _READ]
    read = {symbolic_shapes.symfloat_name(node.meta.get("example_value")) for node in reads}
    return {position: number for position, number in found.items() if _name(number) in read}


def with_constants(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph with numbers in place of the floats that Dynamo was asked to make constants and still passes, because
    the graph uses the tensors too: a copy, and a guard of Dynamo's on each; `gm` itself if there is none."""
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    constants = {
        nodes[position].name: number
        for position, number in _numbers(gm)
        if backend_interface.is_specialized(_name(number))
        and any(user.target == _READ for user in nodes[position].users)
    }
    if not constants:
        return gm
    graph = copy.deepcopy(gm.graph)
    for node in list(graph.nodes):
        if node.target == _READ and node.args[0].name in constants:
            node.replace_all_uses_with(float(constants[node.args[0].name]))
            graph.erase_node(node)
    return torch.fx.GraphModule(gm, graph)


def _numbers(gm: torch.fx.GraphModule) -> Iterator[tuple[int, torch.SymFloat]]:
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for position, node in enumerate(placeholders):
        number = fake_tensors.item_memo(node.meta.get("example_value"))
        if isinstance(number, torch.SymFloat) and symbolic_shapes.is_backed(number) and _name(number):
            yield position, number


def _name(number: torch.SymFloat) -> str:
    return symbolic_shapes.symfloat_name(number) or ""
