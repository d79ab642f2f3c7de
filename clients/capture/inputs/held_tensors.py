"""Before stage 1: turns the tensors that a Dynamo graph has as attributes into inputs.

Dynamo leaves a tensor as an attribute of the graph if Python code that it does not trace made it
(torch._dynamo.assume_constant_result). As inputs they need not be sent, whatever their size, and the graph changes the
program's own tensor in place.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from msgspec import Struct

from ....compiler.errors import Unsupported
from ....compiler.torch_internals.dynamo.tensors import fake_tensors


class HoistedGraph(Struct, frozen=True):
    """inputs: the example inputs, then the values of `held`: the tensors that the graph had as attributes, by the name
    of the placeholder that stands for each, in the graph's own order of placeholders."""

    gm: torch.fx.GraphModule
    inputs: list[Any]
    held: dict[str, torch.Tensor]

    def bind(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A callable of the original inputs alone."""
        if not self.held:
            return compiled
        tensors = tuple(self.held.values())

        @functools.wraps(compiled)
        def call(*args: Any) -> Any:
            return compiled(*args, *tensors)

        return call


def hoist_tensors(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> HoistedGraph:
    """Turn the top graph's tensor attributes into placeholders after the others; `gm` is not changed. Raises
    Unsupported."""
    found: dict[str, torch.Tensor] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value = functools.reduce(getattr, str(node.target).split("."), gm)
            if isinstance(value, torch.Tensor):
                found[str(node.target)] = value
    if not found:
        return HoistedGraph(gm, list(example_inputs), {})
    _refuse_shared_memory(found.values(), example_inputs)
    graph = copy.deepcopy(gm.graph)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        stands_for = {graph.placeholder(f"held_{position}"): name for position, name in enumerate(found)}
    hoisted = {name: node for node, name in stands_for.items()}
    for node in list(graph.nodes):
        if node.op == "get_attr" and str(node.target) in hoisted:
            node.replace_all_uses_with(hoisted[str(node.target)])
            graph.erase_node(node)
    placeholders = (node for node in graph.nodes if node.op == "placeholder")
    held = {node.name: found[stands_for[node]] for node in placeholders if node in stands_for}
    return HoistedGraph(torch.fx.GraphModule(gm, graph), [*example_inputs, *held.values()], held)


def _refuse_shared_memory(held: Iterable[torch.Tensor], inputs: Sequence[Any]) -> None:
    """Dynamo has no guards on the memory of held tensors, which a change of an input may change in one call, and not
    in another one."""
    positions = {
        fake_tensors.storage_id(value): position
        for position, value in enumerate(inputs)
        if _has_storage(value)
    }
    for value in filter(_has_storage, held):
        if (position := positions.get(fake_tensors.storage_id(value))) is not None:
            raise Unsupported(f"the graph holds a tensor that shares memory with input {position}")


def _has_storage(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided
