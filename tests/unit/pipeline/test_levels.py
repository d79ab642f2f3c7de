"""What PyTorch decomposes to prims, and how captured nodes are marked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._decomp import decomposition_table
from torchrelay.compiler.torch_internals.dynamo.types import OpOverload
from torchrelay.compiler.torch_internals.inductor import levels

PAGE = Path(__file__).parents[3] / "docs" / "levels.md"


def core_operators() -> Iterator[OpOverload]:
    for declared in torch._C._jit_get_all_schemas():  # dir(torch.ops.aten) has only what was used before
        library, _, name = declared.name.partition("::")
        packet = getattr(torch.ops.aten, name, None) if library == "aten" else None
        operator = getattr(packet, declared.overload_name or "default", None)
        if isinstance(operator, OpOverload) and not levels.is_not_core(operator):
            yield operator


def test_each_core_operator_is_decomposed_to_prims_or_listed() -> None:
    page = PAGE.read_text()
    listed = set(re.findall(r"\w+", page[page.index("There are 126 prims") : page.index("## A back end")]))
    operators = list(core_operators())
    left = {
        operator._schema.name.removeprefix("aten::")
        for operator in operators
        if operator not in decomposition_table
    }
    assert len(operators) > 150 and len(left) > 20
    assert left - listed == set()


def test_a_slice_is_no_as_strided_among_prims() -> None:
    traced: dict[str, torch.fx.GraphModule] = {}

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        levels.mark_nodes(gm)
        levels.trace_core_aten(gm, inputs, lambda name, part: traced.update({name: levels.trace_prims(part)}))
        return gm.forward

    torch.compiler.reset()
    torch.compile(lambda x: torch.softmax(x[:, 1:3], -1) * 2, backend=backend)(torch.ones(4, 5))
    operators, left = levels.operators_of(traced["forward"], levels.is_no_prim)
    assert left == {"aten.slice.Tensor": 1} or left == {"aten.slice.Tensor": 2}
    assert operators["prims.exp.default"] == operators["prims.amax.default"] == 1
    sources = {levels.label_of(node) for node in traced["forward"].graph.nodes if node.op == "call_function"}
    assert sources == {"1", "2", "3"}


def test_nodes_of_subgraphs_have_labels_of_their_own() -> None:
    inner = torch.fx.symbolic_trace(lambda x: x.sin())
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    body = graph.get_attr("body")
    graph.output(graph.call_function(torch.add, (x, body)))
    gm = torch.fx.GraphModule({"body": inner}, graph)
    assert [label for label, _ in levels.labels(gm)] == ["0", "1", "0.0", "0.1", "0.2", "2", "3"]
    levels.mark_nodes(gm)
    assert [levels.label_of(node) for node in inner.graph.nodes] == ["0.0", "0.1", "0.2"]
