"""Lower one operator, or one graph, only to learn its candidates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...tuning import records
from ..dynamo.tracing import tracing_context
from ..inductor.compile_fx import DryRunFinished, compile_graph
from .operator_candidates import OperatorCandidates
from .selector_cache import choosing_algorithms

OperatorCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""The operator, its arguments by position and those by name."""


def mm_plus_mm(a: Any, b: Any, c: Any, d: Any) -> Any:
    """The sum of two products as one operator: of what is lowered, torch._inductor.kernel.mm_plus_mm's."""
    if isinstance(a, torch.Tensor):
        return torch.mm(a, b) + torch.mm(c, d)
    from torch._inductor.kernel.mm_plus_mm import tuned_mm_plus_mm

    lower: Any = tuned_mm_plus_mm
    return lower(a, b, c, d)


mm_plus_mm._inductor_lowering_function = True  # type: ignore[attr-defined]


def candidates_of_operator(
    call: Callable[[list[Any]], OperatorCall],
    operands: Sequence[records.Operand],
    offsets: Sequence[int],
    constants: Collection[int],
    device: torch.device,
    *,
    channels_last: bool | None,
) -> list[OperatorCandidates]:
    """What Inductor chooses from when it lowers a graph of one operator (torch._inductor.graph.GraphLowering).

    call(operands): the operator and its arguments. offsets: where each operand begins in its storage, in elements.
    constants: operands that are constants of the graph. channels_last: as in a graph where Inductor prefers it; None:
    Inductor decides.
    """
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode = FakeTensorMode(allow_non_fake_inputs=True)  # constants
    graph, root = torch.fx.Graph(), torch.nn.Module()
    nodes: list[Any] = []
    inputs: list[Any] = []
    for i, (operand, offset) in enumerate(zip(operands, offsets, strict=True)):
        dtype = getattr(torch, operand.dtype)
        if i in constants:
            held = torch.empty_strided(operand.size, operand.stride, dtype=dtype, device=device)
            root.register_buffer(f"constant_{i}", held.zero_())
            nodes.append(graph.get_attr(f"constant_{i}"))
            continue
        with mode:
            if offset:
                steps = zip(operand.size, operand.stride, strict=True)
                length = offset + 1 + sum((size - 1) * stride for size, stride in steps)
                inputs.append(torch.empty(length, dtype=dtype, device=device))
            else:
                inputs.append(torch.empty_strided(operand.size, operand.stride, dtype=dtype, device=device))
        node = graph.placeholder(f"operand_{i}")
        if offset:
            view = (node, list(operand.size), list(operand.stride), offset)
            node = graph.call_function(torch.ops.aten.as_strided.default, view)
        nodes.append(node)
    graph.output((graph.call_function(*call(nodes)),))
    gm = torch.fx.GraphModule(root, graph)
    FakeTensorProp(gm, mode).propagate(*inputs)
    with tracing_context(mode), V.set_fake_mode(mode), _recording_candidates() as found:
        lowering = GraphLowering(gm, example_inputs=inputs, is_inference=True, layout_opt=channels_last)
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
    return found


@contextlib.contextmanager
def _recording_candidates() -> Iterator[list[OperatorCandidates]]:
    """What Inductor would choose from inside the block; it takes PyTorch's own kernels."""
    found: list[OperatorCandidates] = []

    def record(selection: OperatorCandidates) -> int:
        found.append(selection)
        return selection.aten[0] if selection.aten else 0

    with choosing_algorithms(record, least=1), torch.no_grad():
        yield found


class _AlwaysDryRun:
    """A compile that is a dry run from its beginning."""

    in_dry_run = True

    def report_problems(self) -> None: ...


def candidates_of_graph(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[OperatorCandidates]:
    """What Inductor chooses from when it lowers a graph that Dynamo has traced; nothing is compiled."""
    with _recording_candidates() as found, contextlib.suppress(DryRunFinished):
        compile_graph(gm, inputs, {}, on_lowering=lambda backward: None, control=_AlwaysDryRun())
    return found
