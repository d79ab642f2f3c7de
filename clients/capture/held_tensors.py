"""Before stage 1: a Dynamo graph that holds tensors in; the same graph, which takes them as further inputs, out.

Dynamo leaves a tensor as the graph's own attribute where Python code that it does not trace made it
(torch._dynamo.assume_constant_result). As inputs they need not travel, whatever their size, and what the graph
changes in place is the very tensor that the program holds.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from msgspec import Struct


class HoistedGraph(Struct, frozen=True):
    """inputs: the example inputs, then `held`: the tensors that the graph held."""

    gm: torch.fx.GraphModule
    inputs: list[Any]
    held: list[torch.Tensor]

    def bind(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A callable of the original inputs alone."""
        if not self.held:
            return compiled

        @functools.wraps(compiled)
        def call(*args: Any) -> Any:
            return compiled(*args, *self.held)

        return call


def hoist_tensors(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> HoistedGraph:
    """Turn the top graph's tensor attributes into placeholders after the others; `gm` stays as it is."""
    held: dict[str, torch.Tensor] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value = functools.reduce(getattr, str(node.target).split("."), gm)
            if isinstance(value, torch.Tensor):
                held[str(node.target)] = value
    if not held:
        return HoistedGraph(gm, list(example_inputs), [])
    graph = copy.deepcopy(gm.graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    first = next(iter(graph.nodes))
    at = graph.inserting_after(placeholders[-1]) if placeholders else graph.inserting_before(first)
    with at:
        lifted = {name: graph.placeholder(f"held_{position}") for position, name in enumerate(held)}
    for node in list(graph.nodes):
        if node.op == "get_attr" and str(node.target) in lifted:
            node.replace_all_uses_with(lifted[str(node.target)])
            graph.erase_node(node)
    tensors = list(held.values())
    return HoistedGraph(torch.fx.GraphModule(gm, graph), [*example_inputs, *tensors], tensors)
