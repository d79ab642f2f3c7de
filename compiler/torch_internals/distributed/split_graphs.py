"""Dynamo's DDPOptimizer: a graph inside DistributedDataParallel becomes several, so that gradients of the last one are
reduced while those of the others are computed."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ...artifact.programs.records import NotPortable, SplitGraph, SplitStep


def backend_inside(compiler: Any) -> tuple[Any, str]:
    """The back end that a DDPOptimizer gives its graphs to, and all that it splits by, besides the graph; `compiler`
    itself and '' if it is no DDPOptimizer's."""
    module = sys.modules.get("torch._dynamo.backends.distributed")
    optimizer = getattr(compiler, "__self__", None)
    if module is None or not isinstance(optimizer, module.DDPOptimizer):
        return compiler, ""
    ddp: Any = DistributedDataParallel
    active = ddp._get_active_ddp_module()
    ignored = sorted(active.parameters_to_ignore) if active is not None else []
    return optimizer.backend_compile_fn, repr(
        (optimizer.first_bucket_cap, optimizer.bucket_bytes_cap, ignored)
    )


def split_graph(answer: Any) -> torch.fx.GraphModule | None:
    """What DDPOptimizer answered with, if it was several graphs. answer: the module, or its forward method."""
    answer = getattr(answer, "__self__", answer)
    return answer if isinstance(answer, torch.fx.GraphModule) and _parts(answer) else None


def write(name: str, split: torch.fx.GraphModule, named: Callable[[Any], str]) -> SplitGraph:
    """The record of a graph with that name. named: the name of a compiled part. Raises NotPortable."""
    parts = _parts(split)
    values: dict[torch.fx.Node, int] = {}
    steps: list[SplitStep] = []
    inputs = 0
    for node in split.graph.nodes:
        arguments = [values.get(each, -1) if isinstance(each, torch.fx.Node) else -1 for each in node.args]
        match node.op:
            case "placeholder" if not steps:
                inputs += 1
            case "call_module" if not node.kwargs and -1 not in arguments and str(node.target) in parts:
                part = parts[str(node.target)]
                steps.append(SplitStep(arguments, named(part.submod), single=part.unwrap_singleton_tuple))
            case "call_function" if node.target is operator.getitem and isinstance(node.args[1], int):
                steps.append(SplitStep(arguments[:1], item=node.args[1]))
            case "output" if isinstance(node.args[0], tuple | list):
                outputs = [values.get(each) for each in node.args[0]]
                if None not in outputs:
                    return SplitGraph(name, inputs, steps, [each for each in outputs if each is not None])
                break
            case _:
                break
        values[node] = len(values)
    raise NotPortable("a graph that DDP splits into something else than calls of graphs")


def build(record: SplitGraph, graphs: Mapping[str, Callable[..., Any]]) -> torch.fx.GraphModule:
    """What DDPOptimizer would answer with. graphs: its parts, by name. Raises IndexError, KeyError for a record that is
    not what `write` makes."""
    graph = torch.fx.Graph()
    modules: dict[str, torch.nn.Module] = {}
    values = [graph.placeholder(f"input_{position}") for position in range(record.inputs)]
    for position, step in enumerate(record.steps):
        arguments = tuple(values[each] for each in step.arguments)
        if step.graph:
            modules[f"part_{position}"] = _Part(graphs[step.graph], single=step.single)
            values.append(graph.call_module(f"part_{position}", arguments))
        else:
            values.append(graph.call_function(operator.getitem, (*arguments, step.item)))
    graph.output(tuple(values[each] for each in record.outputs))
    return torch.fx.GraphModule(modules, graph)


class _Part(torch.nn.Module):
    """WrapperModule in torch._dynamo.backends.distributed."""

    def __init__(self, graph: Callable[..., Any], *, single: bool) -> None:
        super().__init__()
        self.graph, self.single = graph, single

    def forward(self, *args: Any) -> Any:
        found = self.graph(*args)
        return found[0] if self.single and isinstance(found, tuple | list) else found


def _parts(split: torch.fx.GraphModule) -> dict[str, Any]:
    """The compiled graphs, by the names of their modules."""
    return {
        name: part
        for name, part in split.named_children()
        if hasattr(part, "submod") and hasattr(part, "unwrap_singleton_tuple")
    }
