"""Before stage 1: turns the tensors that a Dynamo graph has as attributes into inputs.

Dynamo leaves a tensor as an attribute of the graph if Python code that it does not trace made it
(torch._dynamo.assume_constant_result). As inputs they need not be sent, whatever their size, and the graph changes the
program's own tensor in place.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from msgspec import Struct


class HoistedGraph(Struct, frozen=True):
    """inputs: the example inputs, then `attributes`: the tensors that the graph had as attributes."""

    gm: torch.fx.GraphModule
    inputs: list[Any]
    attributes: list[torch.Tensor]

    def bind(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A callable of the original inputs alone."""
        if not self.attributes:
            return compiled

        @functools.wraps(compiled)
        def call(*args: Any) -> Any:
            return compiled(*args, *self.attributes)

        return call


def hoist_tensors(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> HoistedGraph:
    """Turn the top graph's tensor attributes into placeholders after the others; `gm` is not changed."""
    found: dict[str, torch.Tensor] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value = functools.reduce(getattr, str(node.target).split("."), gm)
            if isinstance(value, torch.Tensor):
                found[str(node.target)] = value
    if not found:
        return HoistedGraph(gm, list(example_inputs), [])
    graph = copy.deepcopy(gm.graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    first = next(iter(graph.nodes))
    insertion = graph.inserting_after(placeholders[-1]) if placeholders else graph.inserting_before(first)
    with insertion:
        hoisted = {name: graph.placeholder(f"held_{position}") for position, name in enumerate(found)}
    for node in list(graph.nodes):
        if node.op == "get_attr" and str(node.target) in hoisted:
            node.replace_all_uses_with(hoisted[str(node.target)])
            graph.erase_node(node)
    tensors = list(found.values())
    return HoistedGraph(torch.fx.GraphModule(gm, graph), [*example_inputs, *tensors], tensors)
