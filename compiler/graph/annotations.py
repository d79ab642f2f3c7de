"""Stage 2: refuses graphs with annotations that could change their code.

A request has a graph's nodes, arguments and inputs, but not its annotations (`node.meta`, `gm.meta`). The annotations
listed here only say where code came from, or the worker computes them again. Any other could change the lowering (an
activation memory budget, a region's own options), so a graph that has one is not sent.

A graph inside it that no node names is left out: Dynamo leaves one behind where it inlines a nested_compile_region.
AOTAutograd reads such graphs for hooks for saved tensors alone, by their names, and a graph with those is not sent.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from ..errors import Unsupported
from ..torch_internals.dynamo import operators

INERT_NODE_META = frozenset(
    {
        # where the node came from
        "creation_timestamp",
        "desc",
        "from_node",
        "fwd_nn_module_stack",
        "fwd_source_fn_stack",
        "grapharg",
        "nn_module_stack",
        "original_aten",
        "seq_nr",
        "source_fn_stack",
        "stack_trace",
        "torch_fn",
        # keeps Dynamo's own pass from removing an assertion that it added; AOTAutograd traces the graph anew
        "_fx_runtime_assert_preserve",
        # read when inputs are encoded, or computed again on the worker from the inputs' specifications
        "example_value",
        "fake_result",
        "tensor_dict",
        "tensor_meta",
        "type",
        "unbacked_bindings",
        "val",
    }
)
"""Keys of `node.meta` that do not change code."""

INERT_GRAPH_META = frozenset(
    {
        "backend_id",
        "dynamo_compile_id",
        "dynamo_flat_name_to_original_fqn",
        "locals_to_steal",
    }
)
"""Keys of `gm.meta` that do not change code."""

EAGER = {"fallback_to_eager": True}
"""The only user annotation (`node.meta["custom"]`) that is sent: Inductor lowers such a node to a call of the eager
operator. flex_attention's create_block_mask sets it."""

SAVED_TENSORS_HOOKS = "saved_tensors_hooks_"
"""Names of graphs that AOTAutograd runs on the tensors that it saves for the backward pass begin with it."""

_REASONS = {
    "_checkpoint_context_fn": "selective activation checkpointing (context_fn) runs Python code while compiling",
}


def refuse_annotations(gm: torch.fx.GraphModule) -> None:
    """Raises Unsupported, with a name, if `gm` or a graph inside it has what a request cannot carry."""
    _refuse("the graph", gm)


def _refuse(name: str, gm: torch.fx.GraphModule) -> None:
    for key, value in gm.meta.items():
        if key not in INERT_GRAPH_META and _is_set(value):
            raise Unsupported(_REASONS.get(key, f"{name} has the annotation {key!r}, which cannot be sent"))
    for child, _ in gm.named_children():
        if child.startswith(SAVED_TENSORS_HOOKS):
            raise Unsupported(f"{name} has hooks for saved tensors")
    inside: dict[str, torch.fx.GraphModule] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(gm)
            if isinstance(value, torch.fx.GraphModule):
                inside[str(node.target)] = value
        for key, value in node.meta.items():
            if key not in INERT_NODE_META and _is_set(value) and (key, value) != ("custom", EAGER):
                refused = Unsupported(f"node '{node.name}' has the annotation {key!r}, which cannot be sent")
                refused.line = user_line(node)
                raise refused
    for child, graph in inside.items():
        _refuse(child, graph)


def eager_nodes(gm: torch.fx.GraphModule) -> list[list[int]]:
    """The paths of the nodes that have EAGER, sorted: the positions of the enclosing subgraphs, then the node's own.

    Positions are those in the encoded graph (encode.py).
    """
    found: list[list[int]] = []
    subgraphs: dict[int, int] = {}
    position = 0
    for node in gm.graph.nodes:
        if operators.is_left_out(node):
            continue
        if node.meta.get("custom") == EAGER:
            found.append([position])
        if node.op == "get_attr":
            inner = operator.attrgetter(str(node.target))(gm)
            if isinstance(inner, torch.fx.GraphModule) and id(inner) not in subgraphs:
                subgraphs[id(inner)] = len(subgraphs)
                found += [[subgraphs[id(inner)], *path] for path in eager_nodes(inner)]
        position += 1
    return sorted(found)


def mark_eager(gm: torch.fx.GraphModule, paths: Sequence[Sequence[int]]) -> None:
    """Set EAGER on the nodes of a decoded graph; `paths` as `eager_nodes` gives them."""
    for *subgraphs, position in paths:
        module = functools.reduce(lambda outer, index: getattr(outer, f"subgraph_{index}"), subgraphs, gm)
        list(module.graph.nodes)[position].meta["custom"] = dict(EAGER)


_CALL = re.compile(r'File "(.+)", line (\d+), in ')
_PYTORCH = f"{Path(torch.__file__).parent}/"


def user_line(node: torch.fx.Node) -> str:
    """`FILE:LINE` from which a node comes: of the innermost call that is not PyTorch's own; '' if Dynamo left none."""
    calls = _CALL.findall(node.meta.get("stack_trace") or "")
    outside = [call for call in calls if not call[0].startswith(_PYTORCH)]
    return ":".join((outside or calls)[-1]) if calls else ""


def _is_set(value: object) -> bool:
    return value is not None and value is not False and value != {} and value != []
