"""The contexts in which Dynamo calls a back end, and what it attaches to the graph that it passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch


@contextlib.contextmanager
def tracing_context(fake_mode: Any) -> Iterator[Any]:
    """torch._guards: a TracingContext and a CompileContext, as Dynamo has them around a back end."""
    from torch._guards import CompileContext, CompileId, TracingContext, compile_context
    from torch._guards import tracing as upstream

    context = TracingContext(fake_mode)
    compile_id = CompileId(frame_id=0, frame_compile_id=0)
    with compile_context(CompileContext(compile_id)), upstream(context):
        yield context


def python_dispatcher() -> contextlib.AbstractContextManager[Any]:
    """torch._dispatch.python.enable_python_dispatcher, under which Dynamo runs nodes on fake tensors: operators whose
    C++ takes no symbolic sizes are decomposed in Python."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


def attach_dynamo_metadata(
    gm: torch.fx.GraphModule, placeholders: Sequence[tuple[torch.fx.Node, Any, str]]
) -> None:
    """Attach what Dynamo attaches to a graph and AOTAutograd looks for: a source for each placeholder
    (node, example value, static-address mark), a compile id, and names of parameters (none)."""
    from torch._dynamo.source import LocalSource
    from torch._guards import CompileId

    for position, (node, value, static_address) in enumerate(placeholders):
        node._dynamo_source = LocalSource(f"input_{position}")
        node.meta["example_value"] = value
        if static_address:
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": static_address}
    gm.meta["dynamo_compile_id"] = CompileId(frame_id=0, frame_compile_id=0)
    gm._param_name_to_source = {}  # type: ignore[assignment]


def static_input_type(node: torch.fx.Node) -> str:
    """Dynamo's mark on a placeholder whose address does not change: '', 'guarded' or 'unguarded'."""
    return str(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type", "") or "")
