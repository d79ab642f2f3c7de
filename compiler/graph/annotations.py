"""Stage 2: what PyTorch hangs on a graph besides nodes and arguments; what may change its code is refused.

A request carries nodes, arguments and inputs. Annotations (`node.meta`, `gm.meta`) and submodules that no node names
stay behind. Those listed here say where code came from or what the worker computes again; any other may steer lowering
(an activation memory budget, a region's own options, hooks for saved tensors), so the graph is not sent.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

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
        # read by the encoder of inputs, or computed again on the worker from the inputs' specifications
        "example_value",
        "fake_result",
        "tensor_dict",
        "tensor_meta",
        "type",
        "unbacked_bindings",
        "val",
    }
)
"""Keys of `node.meta` that do not reach code."""

INERT_GRAPH_META = frozenset(
    {
        "backend_id",
        "dynamo_compile_id",
        "dynamo_flat_name_to_original_fqn",
        "locals_to_steal",
    }
)
"""Keys of `gm.meta` that do not reach code."""

EAGER = {"fallback_to_eager": True}
"""The one annotation of a user's (`node.meta["custom"]`) that is sent: Inductor lowers such a node to a call of the
operator itself. flex_attention's create_block_mask sets it."""

_REASONS = {
    "_checkpoint_context_fn": "selective activation checkpointing (context_fn) runs Python code while compiling",
}


def refuse_annotations(gm: torch.fx.GraphModule) -> None:
    """Raises Unsupported with the name of what `gm`, or a graph inside it, has and a request cannot carry."""
    for name, module in gm.named_modules():
        if isinstance(module, torch.fx.GraphModule):
            _refuse(name or "the graph", module)


def _refuse(name: str, gm: torch.fx.GraphModule) -> None:
    for key, value in gm.meta.items():
        if key not in INERT_GRAPH_META and _is_set(value):
            raise Unsupported(_REASONS.get(key, f"{name} has the annotation {key!r}, which cannot be sent"))
    named = set()
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            named.add(str(node.target).split(".")[0])
        for key, value in node.meta.items():
            if key not in INERT_NODE_META and _is_set(value) and (key, value) != ("custom", EAGER):
                raise Unsupported(f"node '{node.name}' has the annotation {key!r}, which cannot be sent")
    for child, module in gm.named_children():
        if isinstance(module, torch.fx.GraphModule) and child not in named:
            raise Unsupported(
                f"{name} has the graph {child!r} that no node calls, such as hooks for saved tensors"
            )


def eager_nodes(gm: torch.fx.GraphModule) -> list[list[int]]:
    """The nodes with EAGER, sorted: positions of the subgraphs that lead to one, then its own (as encode.py counts)."""
    found: list[list[int]] = []
    subgraphs: dict[int, int] = {}
    position = 0
    for node in gm.graph.nodes:
        if operators.is_left_out(node):
            continue
        if node.meta.get("custom") == EAGER:
            found.append([position])
        if node.op == "get_attr":
            inner = functools.reduce(getattr, str(node.target).split("."), gm)
            if isinstance(inner, torch.fx.GraphModule) and id(inner) not in subgraphs:
                subgraphs[id(inner)] = len(subgraphs)
                found += [[subgraphs[id(inner)], *path] for path in eager_nodes(inner)]
        position += 1
    return sorted(found)


def mark_eager(gm: torch.fx.GraphModule, paths: Sequence[Sequence[int]]) -> None:
    """Annotate the nodes of a decoded graph that `eager_nodes` named."""
    for *subgraphs, position in paths:
        module = functools.reduce(lambda outer, index: getattr(outer, f"subgraph_{index}"), subgraphs, gm)
        list(module.graph.nodes)[position].meta["custom"] = dict(EAGER)


def _is_set(value: object) -> bool:
    return value is not None and value is not False and value != {} and value != []
