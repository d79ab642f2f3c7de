"""The contexts in which a back end and its code are called, and what Dynamo attaches to the graph that it passes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .tensors.fake_tensors import new_fake_mode


@contextlib.contextmanager
def tracing_context(fake_mode: Any) -> Iterator[Any]:
    """torch._guards: a TracingContext and a CompileContext, as Dynamo has them around a back end."""
    from torch._guards import CompileContext, CompileId, TracingContext, compile_context
    from torch._guards import tracing as upstream

    context = TracingContext(fake_mode)
    compile_id = CompileId(frame_id=0, frame_compile_id=0)
    with compile_context(CompileContext(compile_id)), upstream(context):
        yield context


@contextlib.contextmanager
def outside_dynamo(values: Sequence[Any] = ()) -> Iterator[list[Any]]:
    """Covers what a back end does in a call of compiled code, when Dynamo is not tracing: contexts of its own, and
    `values` as fake tensors whose sizes are constants."""
    mode = new_fake_mode(ShapeEnv())
    with tracing_context(mode):
        yield [
            mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value
            for value in values
        ]


def saves_through_hooks() -> bool:
    """Whether a forward now saves its tensors through hooks (torch.autograd.graph.saved_tensors_hooks), as inside
    torch.utils.checkpoint: torch._C._autograd._top_saved_tensors_default_hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


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


def trace_seconds() -> float:
    """Seconds since Dynamo began on the frame whose graph this thread compiles; 0 outside (get_metrics_context)."""
    from torch._dynamo.utils import get_metrics_context

    context = get_metrics_context()
    return (time.time_ns() - context._start_time_ns) / 1e9 if context.in_progress() else 0.0
