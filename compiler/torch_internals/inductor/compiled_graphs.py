"""The graphs that Inductor compiled: their code, a copy to interpret, and a hook on each call of one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..patching import patched

GENERATED_CODE = "torchrelay_generated"


def generated_code(gm: torch.fx.GraphModule) -> str:
    """What Inductor generated for a graph that `compile_graph` kept
    (CompiledFxGraph.source_code)."""
    code: str = gm.meta.get(GENERATED_CODE, "")
    return code


def copy_graph(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy to be interpreted: _LazyGraphModule makes no Python of it unless asked."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    copied = torch.fx.Graph()
    copied.output(copied.graph_copy(gm.graph, {}))
    return _LazyGraphModule(gm, copied)


@contextlib.contextmanager
def intercepting_calls(
    kept: Mapping[int, torch.fx.GraphModule],
    replay: Callable[[torch.fx.GraphModule, list[Any], Callable[[list[Any]], Any]], Any],
) -> Iterator[None]:
    """Inside the block, run each compiled graph of `kept` through replay(graph, inputs, run).

    Wraps torch._inductor.output_code.CompiledFxGraph.__call__.
    """
    from torch._inductor.output_code import CompiledFxGraph
    from torch.utils._python_dispatch import _disable_current_modes

    original = CompiledFxGraph.__call__

    def call(self: Any, inputs: Any) -> Any:
        gm = kept.get(id(self))
        if gm is None:
            return original(self, inputs)
        with _disable_current_modes():  # AOTAutograd's watch on custom operators costs the reference a fifth
            return replay(gm, inputs, lambda values: original(self, values))

    with patched(CompiledFxGraph, "__call__", call):
        yield
