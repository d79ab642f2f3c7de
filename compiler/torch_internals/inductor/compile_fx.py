"""Compile a graph with Inductor (compile_fx), forward and backward; serialize the result, intercept its calls."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..dynamo.kernel_side_table import empty_kernel_side_table
from ..patching import patched
from .dry_run import DryRunControl, DryRunFinished, stop_after_lowering


def compile_graph(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    *,
    on_lowering: Callable[[bool], None] | None = None,
    kept: dict[int, torch.fx.GraphModule] | None = None,
    control: DryRunControl | None = None,
) -> Callable[..., Any]:
    """torch._inductor.compile_fx.compile_fx: AOTAutograd, lowering and code generation.

    on_lowering(is_backward) is called as each half leaves AOTAutograd and enters Inductor. kept: receives a copy of
    each half as it was then, by the id of its compiled form (see `intercepting_calls`). Raises
    DryRunFinished in place of an answer if `control` is in its dry run.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    if on_lowering is None:
        compiled = compile_fx(gm, list(inputs), config_patches=dict(patches))
        assert callable(compiled)
        return compiled
    with contextlib.ExitStack() as stack:
        lower: Callable[..., Any] = compile_fx_inner
        if control is not None:
            lower = stack.enter_context(stop_after_lowering(lower, control))

        @functools.wraps(compile_fx_inner)
        def inner(*args: Any, **kwargs: Any) -> Any:
            on_lowering(bool(kwargs.get("is_backward")))
            before = None if kept is None else copy_graph(args[0])
            lowered = lower(*args, **kwargs)
            if kept is not None and before is not None:
                before.meta[_GENERATED_CODE] = getattr(lowered, "source_code", "")
                kept[id(lowered)] = before
            return lowered

        compiled = compile_fx(gm, list(inputs), inner_compile=inner, config_patches=dict(patches))
    if control is not None and control.in_dry_run:
        raise DryRunFinished
    assert callable(compiled)
    return compiled


def serialize(compiled: Any) -> bytes:
    """Pickle of a compiled callable (BundledAOTAutogradSerializableCallable); TypeError if it cannot be."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Serializable

    if getattr(compiled, "serialize", None) is None:
        raise TypeError("the compiled graph has no serialized form")
    with empty_kernel_side_table():
        return Serializable.serialize_compile_artifacts(Serializable(compiled))


# --- the graphs that were compiled ---------------------------------------------------------------------------

_GENERATED_CODE = "torchrelay_generated"


def generated_code(gm: torch.fx.GraphModule) -> str:
    """What Inductor generated for a graph that `compile_graph` kept
    (CompiledFxGraph.source_code)."""
    code: str = gm.meta.get(_GENERATED_CODE, "")
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
